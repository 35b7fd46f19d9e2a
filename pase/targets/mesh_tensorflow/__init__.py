"""Mesh-TensorFlow programs: what writes them, and the library that they run on."""
