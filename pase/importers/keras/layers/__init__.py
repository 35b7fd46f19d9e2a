"""Keras' layers and operations in the vocabulary of the intermediate form; one module for each family."""

from pase.importers.keras.layers.attention import ATTENTION
from pase.importers.keras.layers.call import Applies, Call, Translation, UntranslatableError, Writer
from pase.importers.keras.layers.convolutions import CONVOLUTIONS
from pase.importers.keras.layers.merges import MERGES
from pase.importers.keras.layers.normalisations import NORMALISATIONS
from pase.importers.keras.layers.operations import OPERATIONS
from pase.importers.keras.layers.points import POINTS
from pase.importers.keras.layers.pooling import POOLING
from pase.importers.keras.layers.products import PRODUCTS
from pase.importers.keras.layers.recurrent import RECURRENT
from pase.importers.keras.layers.shapes import SHAPES

LAYERS: dict[str, Translation] = (
    ATTENTION | CONVOLUTIONS | MERGES | NORMALISATIONS | POINTS | POOLING | PRODUCTS | RECURRENT | SHAPES
)
"""Translations of layers, by the class's name. What is not here is looked into, or treated generically."""

__all__ = ["LAYERS", "OPERATIONS", "Applies", "Call", "Translation", "UntranslatableError", "Writer"]
