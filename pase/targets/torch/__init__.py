"""The PyTorch target: local ranks, and the module that computes a plan on each of them."""
