"""PaSE: the best way to parallelise the training of a neural network, with a proof.

>>> import pase
>>> graph = pase.load("alexnet", batch=128)
>>> plan = pase.search(graph, devices=32, machine="1080ti")
>>> plan["fc1"].splits
{'b': 1, 'n': 4, 'c': 8}
"""

from typing import TYPE_CHECKING

from pase._loading import names_on_demand
from pase._version import __version__
from pase.errors import PaseError

if TYPE_CHECKING:
    from pase.emitter import emit
    from pase.graph import Builder, Graph
    from pase.importers import load
    from pase.machine import Machine, load_machine
    from pase.plan import LayerPlan, Plan
    from pase.planning import SearchOptions, search
else:
    # Loaded when they are first asked for: they need NumPy, which takes longer to load than `pase --help` to run.
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "pase.emitter": ("emit",),
            "pase.graph": ("Builder", "Graph"),
            "pase.importers": ("load",),
            "pase.machine": ("Machine", "load_machine"),
            "pase.plan": ("LayerPlan", "Plan"),
            "pase.planning": ("SearchOptions", "search"),
        },
    )

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
