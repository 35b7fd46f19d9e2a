"""The intermediate representation of models: operators that every front end produces and the passes transform."""
