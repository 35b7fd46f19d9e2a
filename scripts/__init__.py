"""Programs for working on PaSE."""
