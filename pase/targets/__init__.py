"""Execution of plans: one package for each framework that runs them or programs of them, and the common emitter."""
