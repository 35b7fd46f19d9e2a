"""What makes programs of plans, one package for each framework."""
