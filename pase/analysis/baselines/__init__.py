"""Strategies to compare with: other people's choices, completed and costed in the same space."""
