"""`import_model`: from a source to a graph, with what every pass left of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isclose

from pase.errors import ModelError
from pase.graph import Graph, Scalar
from pase.importers.execution import Execution, with_bodies
from pase.importers.ir import Generic, Trace
from pase.importers.ir.count import live_parameters, product_flop
from pase.importers.lower import Lowered, lower
from pase.importers.passes import PASSES, run_passes


@dataclass(frozen=True, kw_only=True)
class ImportedModel:
    """traces: as the source has it, then after each pass. lowered: the graph and where its weights come from."""

    traces: tuple[Trace, ...]
    lowered: Lowered

    @property
    def graph(self) -> Graph:
        """The graph that is searched; its operators say how they are computed."""
        return self.execution.graph

    @cached_property
    def execution(self) -> Execution:
        """How the forward pass is computed."""
        return with_bodies(self.traces, self.lowered)

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
            if isinstance(node.op, Generic):
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


def imported(trace: Trace, *, arguments: Mapping[str, Scalar], is_strict: bool = False) -> ImportedModel:
    """Return a trace's model; ModelError where it is no graph, or, if strict, where an operator is not known."""
    traces = run_passes(trace)
    model = ImportedModel(traces=traces, lowered=lower(traces[-1], arguments=arguments))
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
