"""A plan as one page to look at: what is said of it, and the file that shows it."""
