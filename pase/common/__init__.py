"""Utilities that every package uses: validated documents and arrays, immutable containers, quantities as text."""
