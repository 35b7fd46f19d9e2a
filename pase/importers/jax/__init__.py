"""Front end for JAX functions."""
