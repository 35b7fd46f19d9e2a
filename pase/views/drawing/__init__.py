"""Graph drawing: placement of boxes and edges, repeated blocks, and colours; independent of frameworks and files."""
