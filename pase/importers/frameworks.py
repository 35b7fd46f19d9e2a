"""`import_model`: a model of a framework, by the first front end that takes it, with what every pass left of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isclose
from os import PathLike, fspath
from pathlib import PurePath

from pase.errors import ModelError
from pase.graph import Graph, Scalar
from pase.importers.front_end import FrontEnd, call_factory, is_factory
from pase.importers.ir import ops
from pase.importers.ir.trace import Trace, live_parameters, product_flop
from pase.importers.jax.function import JaxFrontEnd
from pase.importers.keras.model import KerasFrontEnd
from pase.importers.lower import Lowered, lower
from pase.importers.onnx.file import OnnxFrontEnd
from pase.importers.passes import PASSES, run_passes
from pase.importers.torch.export import TorchFrontEnd


@dataclass(frozen=True, kw_only=True)
class ImportedModel:
    """traces: as the source has it, then after each pass. lowered: the graph and where its weights come from."""

    traces: tuple[Trace, ...]
    lowered: Lowered

    @property
    def graph(self) -> Graph:
        """The graph that is searched; its operators say how they are computed."""
        return self.lowered.graph

    @cached_property
    def num_operators(self) -> dict[str, int]:
        """Operators of the source and after each pass, by the pass's name; at last the vertices."""
        counts = {"source": self.traces[0].num_source_operators or len(self.traces[0].nodes)}
        counts |= {name: len(trace.nodes) for name, trace in zip(PASSES, self.traces[1:], strict=True)}
        return counts | {"vertices": len(self.graph.operators)}

    @property
    def generic(self) -> Iterator[tuple[str, str]]:
        """(vertex, operator of the source) of everything that had to be treated generically."""
        names = {node: layer for layer, node in self.lowered.nodes.items()}
        for node in self.traces[-1].nodes:
            if isinstance(node.op, ops.Generic):
                yield names[node.name], node.origin.operator

    @cached_property
    def differences(self) -> tuple[str, ...]:
        """What the graph does not count as its source does, in words: nothing, or there is a defect."""
        # Before this pass there are also constants, of which the graph holds nothing.
        source = self.traces[1 + list(PASSES).index("drop constants and indices")]
        graph = self.lowered.graph
        pairs = (
            ("FLOP of products", product_flop(source), graph.forward_flop(contractions_only=True)),
            ("parameters", live_parameters(source), graph.num_parameters),
        )
        return tuple(
            f"the graph has {found:,.0f} {what}, the model {expected:,.0f}"
            for what, expected, found in pairs
            if not isclose(expected, found, rel_tol=1e-9)
        )


def imported(
    trace: Trace, *, arguments: Mapping[str, Scalar], is_strict: bool = False, framework: str = ""
) -> ImportedModel:
    """Return a trace's model; ModelError where it is no graph, or, if strict, where an operator is not known."""
    traces = run_passes(trace)
    model = ImportedModel(traces=traces, lowered=lower(traces[-1], arguments=arguments, framework=framework))
    unknown = sorted({operator for _, operator in model.generic})
    if is_strict and unknown:
        raise ModelError(
            f"model {trace.name!r} has operators that nothing is known of: {', '.join(unknown)}; without --strict they "
            "are split along the dims that pass through them alone"
        )
    if is_strict and model.differences:
        raise ModelError(
            f"model {trace.name!r} is not imported as it is: {'; '.join(model.differences)}; this is a defect of the "
            "importer, without --strict it is a warning"
        )
    return model


# -- front ends


FRONT_ENDS: tuple[FrontEnd, ...] = (KerasFrontEnd(), TorchFrontEnd(), OnnxFrontEnd(), JaxFrontEnd())
"""By what they take: the first one wins."""


def import_model(
    source: object,
    *,
    batch: int | None = None,
    arguments: Mapping[str, Scalar] | None = None,
    is_strict: bool = False,
) -> ImportedModel:
    """Return a model of a framework with its graph and what every pass left of it.

    is_strict: refuse operators that nothing is known of. Raises ModelError as `load` does, MissingExtraError where the
    framework is not installed.
    """
    given = dict(arguments or {})
    source = fspath(source) if isinstance(source, PathLike) else source
    recorded: dict[str, Scalar] = {} if batch is None else {"batch": batch}
    recorded |= given
    if isinstance(source, str) and is_factory(source):
        made, took_batch = call_factory(source, batch=batch, arguments=given, front_ends=FRONT_ENDS)
        source, given, batch = made, {}, None if took_batch else batch
        if isinstance(source, str | PathLike):
            raise ModelError(f"the factory returned {source!r}; expected a model of a framework")
        if isinstance(source, Graph):
            raise ModelError(
                f"the factory returned the Graph {source.name!r}; graphs made with Builder are searched from Python: "
                "pase.search(graph, devices=8)"
            )
    for front_end in FRONT_ENDS:
        if front_end.takes(source):
            trace = front_end.trace(source, batch=batch, arguments=given)
            return imported(trace, arguments=recorded, is_strict=is_strict, framework=front_end.package)
    raise ModelError(_refused(source))


def _refused(source: object) -> str:
    if not isinstance(source, str):
        return (
            f"a model of type {type(source).__name__} cannot be imported; give the name of a built-in network, a "
            "Graph, a torch module with example inputs, a Keras model or a JAX function with abstract arguments"
        )
    suffix = PurePath(source).suffix.lower()
    if suffix in _PICKLES:
        return (
            f"{source!r} is a pickle, and reading one runs the code in it: it is refused; write a function that makes "
            "the module and returns it with example inputs and name that, package.module:function, or export it to ONNX"
        )
    return (
        f"{source!r} looks like a file of a kind that PaSE does not read; it reads .onnx and .keras files, built-in "
        "networks ('pase models') and functions given as package.module:function"
    )


_PICKLES = frozenset({".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib"})
