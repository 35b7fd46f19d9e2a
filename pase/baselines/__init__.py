"""Strategies to compare with: other people's choices, completed and costed in the same space."""

from pase.baselines.partial import complete, restrict

__all__ = ["complete", "restrict"]
