"""The operator-level form that every front end makes of a model, and that the passes work on."""
