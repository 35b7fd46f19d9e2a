"""The JAX target: a function with the shardings of a plan at every layer."""
