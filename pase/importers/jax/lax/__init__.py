"""JAX's primitives in the vocabulary of the intermediate form, and the walk through a program made of them."""

from pase.importers.jax.lax.programs import Program, read_program

__all__ = ["Program", "read_program"]
