"""JAX functions."""
