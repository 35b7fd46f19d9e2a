"""Drawings of graphs: where everything stands, which parts repeat, and what colours say. No framework, no files."""
