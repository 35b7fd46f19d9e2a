"""Cost tables, which are all that the solver sees, and files of them."""
