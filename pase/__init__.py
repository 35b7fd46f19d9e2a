"""PaSE: the best way to parallelise the training of a neural network, with a proof.

>>> import pase
>>> graph = pase.load("alexnet", batch=128)
>>> plan = pase.search(graph, devices=32, machine="1080ti")
>>> plan["fc1"].splits
{'b': 1, 'n': 4, 'c': 8}
"""

from pase._version import __version__
from pase.emitter import emit
from pase.errors import PaseError
from pase.graph import Builder, Graph
from pase.importers import load
from pase.machine import Machine, load_machine
from pase.plan import LayerPlan, Plan
from pase.search import SearchOptions, search

__all__ = [
    "Builder",
    "Graph",
    "LayerPlan",
    "Machine",
    "PaseError",
    "Plan",
    "SearchOptions",
    "__version__",
    "emit",
    "load",
    "load_machine",
    "search",
]
