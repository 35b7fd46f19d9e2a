"""The JAX target: runs a function with the shardings of a plan at every layer."""
