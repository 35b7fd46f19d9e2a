"""Plans as people look at them: drawings, exports, reports."""
