"""Data to train on, in the formats in which they are published: `load_dataset` reads what a user names."""

from pase.datasets.dataset import Dataset, Moments, Part, Source, fit_to, moments, normalised
from pase.datasets.registry import SOURCES, has_parts, load_dataset

__all__ = [
    "SOURCES",
    "Dataset",
    "Moments",
    "Part",
    "Source",
    "fit_to",
    "has_parts",
    "load_dataset",
    "moments",
    "normalised",
]
