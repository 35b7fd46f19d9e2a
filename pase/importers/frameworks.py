"""`import_model`: import a framework's model with the first front end that accepts it, and keep every pass's result.

`difference` compares such a model with the one that a plan was made for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from math import isclose, isnan
from os import PathLike, fspath
from pathlib import PurePath

from pase.common.words import short
from pase.errors import ModelError
from pase.graph import Access, AllToAll, Graph, Operator, Role, Scalar
from pase.graph.body import Body, Step, without_casts
from pase.graph.operators.products import ring_attention
from pase.graph.parts import with_cuts
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
    """An imported model.

    Attributes:
        traces: The trace of the source, then the trace after each pass.
        lowered: The graph and the sources of its weights.
    """

    traces: tuple[Trace, ...]
    lowered: Lowered

    @property
    def graph(self) -> Graph:
        """The graph to search; its operators have bodies that describe their computation."""
        return self.lowered.graph

    @cached_property
    def num_operators(self) -> dict[str, int]:
        """Operators of the source and after each pass, by the pass's name; at last the vertices."""
        counts = {"source": self.traces[0].num_source_operators or len(self.traces[0].nodes)}
        counts |= {name: len(trace.nodes) for name, trace in zip(PASSES, self.traces[1:], strict=True)}
        return counts | {"vertices": len(self.graph.operators)}

    @property
    def generic(self) -> Iterator[tuple[str, str]]:
        """(vertex, operator of the source) of each operator that is treated generically."""
        names = {node: layer for layer, node in self.lowered.nodes.items()}
        for node in self.traces[-1].nodes:
            if isinstance(node.op, ops.Generic):
                yield names[node.name], node.origin.operator

    @cached_property
    def differences(self) -> tuple[str, ...]:
        """Descriptions of counts in which the graph differs from its source; any indicates a defect."""
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
    """Return a trace's model; ModelError where it is not a valid graph, or, if strict, has unknown operators."""
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
"""Front ends; the first that accepts a source is used."""


def import_model(
    source: object,
    *,
    batch: int | None = None,
    arguments: Mapping[str, Scalar] | None = None,
    is_strict: bool = False,
) -> ImportedModel:
    """Return a framework's model with its graph and the trace after every pass.

    Raises ModelError as `load` does, and MissingExtraError where the framework is not installed. With is_strict,
    unknown operators are rejected.
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


# -- whether a plan is of a model


def difference(expected: Graph, found: Graph) -> str:
    """Describe how an imported model differs from that of a plan; "" where the plan fits it.

    Compared is everything that a plan depends on: layers, their dims, reads, writes and computation. Names of models,
    arguments and number types are ignored: a plan of a model in float32 fits it in bfloat16.

    Args:
        expected: The plan's graph.
        found: The model's graph; fan-outs, which a search adds, may be missing in either.

    Returns:
        The first difference: the layer, what was expected and what was found.
    """
    expected, found = with_cuts(expected), with_cuts(found)
    names, own = [op.name for op in expected.operators], [op.name for op in found.operators]
    if names != own:
        return _of_names(names, own)
    for one, other in zip(expected.operators, found.operators, strict=True):
        # The plan chooses how keys and values reach all devices.
        text = next(_of_operators(one, other if one.ring is None else ring_attention(other)), "")
        if text:
            return f"layer {short(one.name)!r} {text}"
    ends, others = (
        {(edge.consumer, edge.input): (edge.producer, edge.output) for edge in graph.edges}
        for graph in (expected, found)
    )
    for (layer, read), end in ends.items():
        other_end = others.get((layer, read))
        if other_end != end:
            said = "nothing" if other_end is None else repr(short(other_end[0]))
            return f"layer {short(layer)!r} reads {said} as input {read}; expected {short(end[0])!r}"
    fed = next((key for key in others if key not in ends), None)
    return "" if fed is None else f"layer {short(fed[0])!r} reads {short(others[fed][0])!r} in addition to its inputs"


def _of_names(expected: Sequence[str], found: Sequence[str]) -> str:
    missing = [name for name in expected if name not in set(found)]
    more = [name for name in found if name not in set(expected)]
    counts = f"the plan has {len(expected):,} layers, the model {len(found):,}"
    if missing:
        return f"{counts}; layer {short(missing[0])!r} of the plan is not in the model"
    if more:
        return f"{counts}; layer {short(more[0])!r} of the model is not in the plan"
    first, other = next(pair for pair in zip_longest(expected, found) if pair[0] != pair[1])
    return f"layer {short(str(other))!r} comes where the plan has {short(str(first))!r}"


def _of_operators(expected: Operator, found: Operator) -> Iterator[str]:
    """Yield what one layer has otherwise than another."""
    if expected.kind != found.kind:
        yield f"is a {found.kind!r}; expected a {expected.kind!r}"
    if expected.extents != found.extents:
        yield f"has dims {_told(found.extents)}; expected {_told(expected.extents)}"
    for word, own, others in (("reads", expected.reads, found.reads), ("writes", expected.writes, found.writes)):
        if len(own) != len(others):
            yield f"{word} {len(others)} tensors; expected {len(own)}"
        for one, other in zip(own, others, strict=False):
            yield from _of_accesses(word, one, other)
    if _compared(expected) != _compared(found):
        yield "is split otherwise than the plan's, or counts other work"
    if expected.body is not None and found.body is not None:
        yield from _of_bodies(expected.body, found.body)
        if expected.body.own is not None and found.body.own is not None:
            yield from _of_bodies(expected.body.own, found.body.own)


def _compared(operator: Operator) -> tuple[object, ...]:
    # The imbalance of routing is not a property of the model.
    exchanges = (replace(x, excess=0.0) if isinstance(x, AllToAll) and x.excess else x for x in operator.exchanges)
    return operator.unsplittable, tuple(exchanges), operator.pipeline


def _of_accesses(word: str, expected: Access, found: Access) -> Iterator[str]:
    called = f"weight {short(found.tensor)!r}" if found.role is Role.PARAMETER else f"tensor {short(found.tensor)!r}"
    if expected.shape != found.shape:
        yield f"{word} {called} of shape {list(found.shape)}; expected {list(expected.shape)}"
    if (expected.role, expected.shared) != (found.role, found.shared):
        tied = f", shared as {short(found.shared)!r}" if found.shared else ""
        held = f", shared as {short(expected.shared)!r}" if expected.shared else ""
        yield f"{word} {called} as {found.role}{tied}; expected {expected.role}{held}"
    if expected.index_map != found.index_map:
        yield f"{word} {called} along other dims than the plan's"


def _of_bodies(expected: Body, found: Body) -> Iterator[str]:
    own, other = without_casts(expected), without_casts(found)
    for one, step in zip_longest(own.steps, other.steps):
        if one is None or step is None or one.function != step.function:
            functions = [repr(each.function) if each else "nothing" for each in (step, one)]
            yield f"computes {functions[0]} where the plan has {functions[1]}"
        else:
            yield from (f"computes {step.function!r} {text}" for text in _of_steps(one, step))
    for word, these, those in (("inputs", own.inputs, other.inputs), ("outputs", own.outputs, other.outputs)):
        if these != those:
            yield f"has {word} {[item.name for item in those]}; expected {[item.name for item in these]}"
    if own.constants != other.constants:
        yield "computes with other constants than the plan's"


def _of_steps(expected: Step, found: Step) -> Iterator[str]:
    """Yield the differences of two steps of one function; numbers are compared up to the precision of floats."""
    if len(expected.operands) != len(found.operands):
        yield f"of {len(found.operands)} operands; expected {len(expected.operands)}"
    for one, other in zip(expected.operands, found.operands, strict=False):
        if not _is_same(one, other):
            yield f"of {_shown(other)} where the plan has {_shown(one)}"
    options, others = dict(expected.options), dict(found.options)
    for name in dict.fromkeys([*options, *others]):
        if not _is_same(options.get(name), others.get(name)):
            yield f"with {name} {_shown(others.get(name))} where the plan has {_shown(options.get(name))}"
    if (expected.result, expected.dims) != (found.result, found.dims):
        yield "of other dims, or as another tensor, than the plan's"


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _is_same(expected: object, found: object) -> bool:
    if isinstance(expected, float) and isinstance(found, float):
        return isclose(expected, found, rel_tol=_LEAST_EXACT) or (isnan(expected) and isnan(found))
    return expected == found


_LEAST_EXACT = 2.0**-8
"""Largest relative rounding error of a number in bfloat16."""


def _told(extents: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={extent}" for name, extent in extents.items())
