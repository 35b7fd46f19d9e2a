"""A plan as one page to look at: a file that shows it, or what this machine serves and plans again."""
