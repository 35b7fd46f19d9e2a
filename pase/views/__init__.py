"""Views of plans: drawings, exports to other formats, and reports."""
