"""What makes programs of plans and runs them, one package for each framework, and the emitter, for all."""
