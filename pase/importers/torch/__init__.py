"""PyTorch modules."""
