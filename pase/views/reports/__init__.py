"""A plan as one page: a static file, or a local server that searches again as controls are moved."""
