"""PaSE: the best way to parallelise the training of a neural network, with a proof.

>>> import pase
>>> plan = pase.search("alexnet", devices=32, machine="1080ti")
>>> plan["fc1"].splits
{'b': 1, 'n': 4, 'c': 8}
>>> graph = pase.load("alexnet", batch=256)
>>> pase.search(graph, devices=8, cost_model="alpha_beta").exact
True
"""

from types import MappingProxyType
from typing import TYPE_CHECKING

from pase._loading import names_on_demand
from pase._version import __version__
from pase.errors import PaseError

if TYPE_CHECKING:
    from pase.analysis.baselines.compare import compare
    from pase.analysis.evaluation import evaluate
    from pase.analysis.explanation import explain
    from pase.analysis.simulation.simulation import simulate
    from pase.graph import Builder, Graph
    from pase.importers import load
    from pase.machine import Machine, load_machine, machines
    from pase.planning.plan import LayerPlan, Plan
    from pase.planning.plan_file import load_plan
    from pase.planning.planner import SearchOptions, search
    from pase.planning.session import Session
    from pase.targets.check import check
    from pase.targets.parallelize import parallelize
    from pase.targets.programs import emit
    from pase.views.exports import export
    from pase.views.reports.document import report
else:
    # Loaded when they are first asked for: they need NumPy, which takes longer to load than `pase --help` to run.
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "pase.analysis.baselines.compare": ("compare",),
            "pase.targets.programs": ("emit",),
            "pase.targets.check": ("check",),
            "pase.targets.parallelize": ("parallelize",),
            "pase.analysis.evaluation": ("evaluate",),
            "pase.analysis.explanation": ("explain",),
            "pase.views.exports": ("export",),
            "pase.graph": ("Builder", "Graph"),
            "pase.importers": ("load",),
            "pase.machine": ("Machine", "load_machine", "machines"),
            "pase.planning.plan": ("LayerPlan", "Plan"),
            "pase.planning.plan_file": ("load_plan",),
            "pase.planning.planner": ("SearchOptions", "search"),
            "pase.planning.session": ("Session",),
            "pase.views.reports.document": ("report",),
            "pase.analysis.simulation.simulation": ("simulate",),
        },
    )

METHODS_OF_PLANS = MappingProxyType(
    {
        "_repr_html_": ("pase.views.exports.tables", "html"),
        "peak": ("pase.planning.steps", "peak_of"),
        "placed_cost": ("pase.planning.steps", "placed_cost_of"),
        "plot": ("pase.views.exports.tables", "picture"),
        "replace": ("pase.analysis.evaluation", "replaced"),
        "save": ("pase.planning.plan_file", "write_plan"),
        "to_dataframe": ("pase.views.exports.tables", "data_frame"),
        "to_networkx": ("pase.views.exports.tables", "network"),
    }
)
"""Where the functions are that methods of `Plan` are: modules that stand above it."""

__all__ = [
    "Builder",
    "Graph",
    "LayerPlan",
    "Machine",
    "PaseError",
    "Plan",
    "SearchOptions",
    "Session",
    "__version__",
    "check",
    "compare",
    "emit",
    "evaluate",
    "explain",
    "export",
    "load",
    "load_machine",
    "load_plan",
    "machines",
    "parallelize",
    "report",
    "search",
    "simulate",
]
