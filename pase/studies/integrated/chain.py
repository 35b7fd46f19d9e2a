"""What the papers' text leaves open, each as an option with a default: how sizes are read, and what the sums hold."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import ceil, prod
from typing import Any

from pase.errors import IntegratedError, unknown_name
from pase.graph import Access, Graph, Operator, Role, Window


def _convention(text: str, *, default: bool) -> Any:
    return field(default=default, metadata={"text": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Readings of Gholami et al. 2018, Eqs. 2 to 9; `CONVENTIONS` says what each one means.

    itemsize: of an element of every tensor.
    """

    output_before_pooling: bool = _convention(
        "d_i is a layer's own output; no: what the next layer reads of it, after pooling", default=True
    )
    input_after_pooling: bool = _convention(
        "d_(i-1) is a layer's real input; no: the output of the layer before, before pooling", default=True
    )
    real_extents: bool = _convention(
        "Y_H, Y_W are those of the model, floor((X+2p-k)/s)+1; no: ceil(X/s), as in Eq. 2", default=True
    )
    grouped: bool = _convention("a grouped convolution holds its groups' weights; no: all X_C·Y_C", default=True)
    biases: bool = _convention("biases are weights too; no: they are left out", default=False)
    rounded_log: bool = _convention("a tree has ceil(log2 P) levels; no: log2 P", default=True)
    terms_from_zero: bool = _convention(
        "a sum printed from i = 0 has a term for it, of latency alone (in version 1 with d_0); no: it starts at 1",
        default=False,
    )
    input_gradient: bool = _convention(
        "Eqs. 3, 8 and 9 hold the all-reduce of ΔX; no: outputs are gathered, and that is all", default=True
    )
    first_gradient: bool = _convention(
        "Eq. 9's sum of input gradients holds a layer that reads the data; no: it starts at 2, as in Eq. 8",
        default=False,
    )
    crossover_per_group: bool = _convention("X_C of Eq. 5 is that of one group; no: of the whole input", default=True)
    strict_crossover: bool = _convention(
        "at Eq. 5's batch itself, model parallelism does not win; no: it does", default=True
    )
    first_dense_gradient: bool = _convention(
        "model parallelism in the dense layers alone all-reduces the first one's input gradient; no: it does not",
        default=True,
    )
    redistribution: bool = _convention(
        "changing to the dense layers' grid costs Eq. 6 for what the first one reads; no: it is free", default=False
    )
    halo_at_one: bool = _convention("Eq. 9 has its halo terms at Pr = 1 too; no: there is no neighbour", default=True)
    pointwise_halo: bool = _convention(
        "a 1x1 convolution sends halos of no words, α each, as Eq. 7 is printed; no: none, as the text says",
        default=False,
    )
    next_input_is_output: bool = _convention(
        "X^(i+1) of Eq. 9 is the layer's output Y^i; no: what the next layer reads, after pooling", default=True
    )
    rows_bound_domain: bool = _convention(
        "a convolution's rows are shared by as many processes as it has rows at most; no: by any number", default=True
    )
    whole_iterations: bool = _convention("an epoch has ceil(N/B) steps; no: N/B", default=False)
    itemsize: int = 4


CONVENTIONS: Mapping[str, str] = {f.name: f.metadata["text"] for f in fields(Options) if "text" in f.metadata}
"""What each convention means, and what its opposite does, by name."""


def with_conventions(values: Mapping[str, bool], options: Options | None = None) -> Options:
    """Return options in which some conventions are changed; IntegratedError for one that does not exist."""
    for name in values:
        if name not in CONVENTIONS:
            raise IntegratedError(unknown_name("convention", name, CONVENTIONS))
    return replace(options or Options(), **dict(values))


DENSE = "dense"
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
EMBEDDING = "embedding"
LSTM = "lstm"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedLayer:
    """A convolution, a dense or recurrent layer, an embedding; sizes are words of one sample, as the options read them.

    input_words: d_(i-1). output_words: d_i. num_weights: |W_i|. source: the weighted layer before it, "" for one that
    reads the data. Of a convolution: num_groups; kernel and stride, for each spatial dim; input_shape and output_shape,
    its [channels, spatial dims]; input_row_words: X_W·X_C, and output_row_words: Y_W·Y_C, what a row of the first
    spatial dim holds. Of a dense layer: its shapes without the batch, no kernel. Of a recurrent layer: num_steps, one
    after the other, each of which sends; inner_words: of its own state, which it reads besides the input, in all steps.
    """

    name: str
    is_convolution: bool
    input_words: int
    output_words: int
    num_weights: int
    source: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    num_groups: int = 1
    input_row_words: int = 0
    output_row_words: int = 0
    num_steps: int = 1
    inner_words: int = 0

    @property
    def work_per_sample(self) -> float:
        """FLOP of one sample in the forward pass: two for each weight at each position of the output, or step."""
        return 2.0 * self.num_weights * (prod(self.output_shape[1:]) if self.is_convolution else self.num_positions)

    @property
    def num_positions(self) -> int:
        """At how many positions of a sequence a layer multiplies by its weights."""
        return prod(self.output_shape[:-1])

    @property
    def num_rows(self) -> int:
        """Processes that can share one image at most: its rows, of the input or the output, whichever has fewer."""
        return min(self.input_shape[1], self.output_shape[1]) if self.is_convolution else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The weighted layers of a network, in order.

    batch: samples that the network was built with. num_unweighed: parameters that are not counted, such as biases.
    """

    model: str
    batch: int
    layers: tuple[WeightedLayer, ...]
    num_unweighed: int = 0

    @property
    def num_weights(self) -> int:
        return sum(layer.num_weights for layer in self.layers)


def chain_of(graph: Graph, options: Options | None = None) -> Chain:
    """Return the weighted layers of a graph: those with a parameter of two dims or more.

    Vectors are biases and the scales of normalisations. Each layer of an LSTM counts as a dense layer of what it reads
    and its own state, step by step; an embedding as one whose input are data. Raises IntegratedError where there is no
    such layer, and for one of another kind.
    """
    options = options or Options()
    weighted = [operator for operator in graph.operators if _matrices(operator)]
    if not weighted:
        raise IntegratedError(
            f"model {graph.name!r} has no layer with weights; expected convolutions or dense layers, as in alexnet"
        )
    for operator in weighted:
        if operator.kind not in (DENSE, EMBEDDING, LSTM, *CONVOLUTIONS):
            raise IntegratedError(
                f"layer {operator.name!r} holds weights and is of kind {operator.kind}; the integrated model knows "
                "convolutions, dense layers, embeddings and LSTMs alone: use a network of these, such as alexnet"
            )
    # The layers of an LSTM are numbered: what follows reads the last one.
    last = {o.name: f"{o.name}/{o.extents['l']}" if o.kind == LSTM else o.name for o in weighted}
    sources = _sources(graph, last)
    every = (layer for o in weighted for layer in _layers(graph, o, sources[o.name], options))
    real = {layer.name: layer for layer in every}
    layers = tuple(_resized(layer, real, graph, options) for layer in real.values())
    # A weight that several layers share counts in each of them here, and once in the graph.
    matrices = {a.shared or (o.name, a.tensor): a.size for o in weighted for a in _matrices(o)}
    return Chain(
        model=graph.name,
        batch=weighted[0].extents["b"],
        layers=layers,
        num_unweighed=0 if options.biases else graph.num_parameters - sum(matrices.values()),
    )


def _matrices(operator: Operator) -> list[Access]:
    # The biases of an LSTM's layers are one tensor of several dims.
    return [a for a in operator.parameters if len(a.shape) > 1 and (operator.kind, a.tensor) != (LSTM, "bias")]


def _sources(graph: Graph, weighted: Mapping[str, str]) -> dict[str, str]:
    """Return, for each operator, the nearest weighted layer before it, "" where it reads the data alone.

    weighted: by operator, its last layer.
    """
    found: dict[str, str] = {}
    for operator in graph.operators:
        producers = [
            edge.producer for i in range(len(operator.reads)) if (edge := graph.incoming.get((operator.name, i)))
        ]
        nearest = (weighted.get(name) or found[name] for name in producers)
        found[operator.name] = next((name for name in nearest if name), "")
    return found


def _layers(graph: Graph, operator: Operator, source: str, options: Options) -> Iterator[WeightedLayer]:
    """Yield the layers of an operator: one, or those of a stack."""
    match operator.kind:
        case "lstm":
            yield from _stack(operator, source, options)
        case "embedding":
            yield _embedding(graph, operator)
        case _:
            yield _layer(graph, operator, source, options)


def _stack(operator: Operator, source: str, options: Options) -> Iterator[WeightedLayer]:
    """Yield the layers of an LSTM: each reads its input and its own state of the step before, and writes its state."""
    num_layers, steps, units = (operator.extents[dim] for dim in "lse")
    parameters = _matrices(operator) if not options.biases else operator.parameters
    for number in range(1, num_layers + 1):
        yield WeightedLayer(
            name=f"{operator.name}/{number}",
            is_convolution=False,
            input_words=steps * operator.extents["d"],
            output_words=steps * units,
            num_weights=sum(access.size for access in parameters) // num_layers,
            source=source,
            input_shape=(steps, operator.extents["d"]),
            output_shape=(steps, units),
            num_steps=steps,
            inner_words=steps * units,
        )
        source = f"{operator.name}/{number}"


def _embedding(graph: Graph, operator: Operator) -> WeightedLayer:
    (table,), write = _matrices(operator), operator.writes[0]
    is_owned = graph.owners.get(table.shared, operator.name) == operator.name
    return WeightedLayer(
        name=operator.name,
        is_convolution=False,
        input_words=_per_sample(operator, write) // write.shape[-1],
        output_words=_per_sample(operator, write),
        num_weights=table.size if is_owned else 0,
        source="",
        input_shape=operator.reads[0].shape[1:],
        output_shape=write.shape[1:],
    )


def _layer(graph: Graph, operator: Operator, source: str, options: Options) -> WeightedLayer:
    read, write = _input(operator), operator.writes[0]
    groups = 1 if operator.kind == DENSE else operator.extents.get("g", 1)
    owned = [a for a in _matrices(operator) if graph.owners.get(a.shared, operator.name) == operator.name]
    weights = sum(access.size for access in owned) * (1 if options.grouped else groups)
    if options.biases:
        weights += sum(access.size for access in operator.parameters if len(access.shape) == 1)
    layer = WeightedLayer(
        name=operator.name,
        is_convolution=operator.kind != DENSE,
        input_words=_per_sample(operator, read),
        output_words=_per_sample(operator, write),
        num_weights=weights,
        source=source,
        input_shape=read.shape[1:],
        output_shape=write.shape[1:],
        num_groups=groups,
    )
    return _with_windows(layer, operator, read, options) if layer.is_convolution else layer


def _with_windows(layer: WeightedLayer, operator: Operator, read: Access, options: Options) -> WeightedLayer:
    windows = [axis for axis in read.index_map if isinstance(axis, Window)]
    stride = tuple(window.stride for window in windows)
    output = layer.output_shape
    if not options.real_extents:
        output = (output[0], *(ceil(x / s) for x, s in zip(layer.input_shape[1:], stride, strict=True)))
    return replace(
        layer,
        kernel=tuple(operator.extents[window.kernel] for window in windows),
        stride=stride,
        output_shape=output,
        output_words=prod(output),
        input_row_words=layer.input_words // layer.input_shape[1],
        output_row_words=prod(output) // output[1],
    )


def _input(operator: Operator) -> Access:
    """Return what a layer multiplies by its weights: what a convolution's windows slide over, else the first input."""
    inputs = [access for access in operator.reads if access.role is Role.ACTIVATION]
    return next((access for access in inputs if any(isinstance(axis, Window) for axis in access.index_map)), inputs[0])


def _per_sample(operator: Operator, access: Access) -> int:
    batch = operator.extents.get("b", 0)
    if not batch or access.size % batch:
        raise IntegratedError(
            f"layer {operator.name!r} has no batch dim that its {access.tensor!r} of shape {access.shape} divides by; "
            "the integrated model needs a batch in every weighted layer: import the model with its batch as first dim"
        )
    return access.size // batch


def _image_row_words(graph: Graph, reader: Operator) -> int:
    """Return what a row of the image holds that a layer reads as a vector; an image of one point is a row."""
    size, name = _per_sample(reader, _input(reader)), reader.name
    while edge := next((e for e in graph.edges if e.consumer == name), None):
        producer = graph[edge.producer]
        shape = producer.writes[edge.output].shape
        if prod(shape[1:]) != size:
            break
        if len(shape) > 2:
            return size // shape[2]
        name = producer.name
    return size


def _resized(layer: WeightedLayer, real: Mapping[str, WeightedLayer], graph: Graph, options: Options) -> WeightedLayer:
    """Return a layer with the sizes that the options put in place of its own."""
    after = next((other for other in real.values() if other.source == layer.name), None)
    input_words, output_words, row_words = layer.input_words, layer.output_words, layer.output_row_words
    if not options.input_after_pooling and layer.source:
        input_words = real[layer.source].output_words
    if not options.output_before_pooling and after:
        output_words = after.input_words
    if not options.next_input_is_output and layer.is_convolution and after:
        row_words = after.input_row_words or _image_row_words(graph, graph[after.name.partition("/")[0]])
    return replace(layer, input_words=input_words, output_words=output_words, output_row_words=row_words)
