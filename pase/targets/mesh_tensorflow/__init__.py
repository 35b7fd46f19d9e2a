"""The library that Mesh-TensorFlow programs run on, and what runs them."""
