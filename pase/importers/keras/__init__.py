"""Front end for Keras models and their files."""
