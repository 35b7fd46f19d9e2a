"""Cost tables, the solver's only input, and their file formats."""
