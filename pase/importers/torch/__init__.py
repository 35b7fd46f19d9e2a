"""Front end for PyTorch modules."""
