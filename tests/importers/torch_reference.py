"""Bodies computed in plain PyTorch on one device, by the definitions of their steps: what a module's graph computes.

A tensor is an array and the names of its dims. Nothing here knows of shards, of a target, or of how a module is traced.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from pase.graph import Access, Operator, Role, SliceOf, Window
from pase.graph.body import Body, Step, elementary
from pase.importers.torch.live import LiveModel

F = torch.nn.functional
Named = tuple[Any, tuple[str, ...]]


def computed(live: LiveModel, module: Any, inputs: Mapping[str, Any], *, trains: bool = False) -> Any:
    """Return what a module's graph computes of inputs, in the structure of what the module returns.

    The module's own parameters take part, so that gradients are theirs.
    """
    state = {**dict(module.named_buffers()), **dict(module.named_parameters(remove_duplicate=False))}
    names = {item.use.value for item in live.inputs.values()} | {item.use.value for item in live.constants.values()}
    values = live.part(names)(inputs, state)
    written: dict[str, list[Any]] = {}
    graph = live.model.graph
    for operator in graph.operators:
        assert operator.body is not None, operator.name
        body = elementary(operator.body, trains=trains, kernels=("cast", "grouped", "routed", "source", "whole"))
        assert not body.problem, f"{operator.name}: {body.problem}"
        tensors = {}
        for i, access in enumerate(operator.reads):
            edge = graph.incoming.get((operator.name, i))
            if access.role is Role.PARAMETER:
                weight = live.weights[operator.name, access.tensor]
                found = dict(module.named_parameters())[weight.parameter]
                if weight.row is not None:
                    found = found[weight.row : weight.row + weight.shape[0]]
                found = cut(found, weight.use.piece)
            elif edge is not None:
                found = written[edge.producer][edge.output]
            else:
                use = live.inputs[operator.name, i].use
                found = cut(values[use.value], use.piece)
            tensors[access.tensor] = found.reshape(access.shape)
        for constant in body.constants:
            use = live.constants[operator.name, constant.name].use
            tensors[constant.name] = viewed(cut(values[use.value], use.piece), use.view)
        tensors |= {item.name: written[item.layer][item.output] for item in body.borrowed}
        written[operator.name] = interpreted(operator, body, tensors)
    found = []
    for output in live.outputs:
        assert not output.problem, output.problem
        if not output.layer:
            found.append(live.part([output.name])(inputs, state)[output.name])
            continue
        operator = graph[output.layer]
        own = named(operator, operator.writes[0], written[output.layer][0], {})
        assert output.output is not None
        found.append(arranged(own, output.output.dims, operator.extents).reshape(output.shape))
    return live.returned(found)


def cut(x: Any, piece: Any) -> Any:
    return x if piece is None else x.narrow(piece.dim, piece.start, piece.size)


def viewed(x: Any, view: Any) -> Any:
    if view is None:
        return x
    factors = [factor for dim in view.dims for factor in dim]
    x = x.reshape(view.factors).permute([factor.base for factor in factors if factor.base is not None])
    x = x.reshape([1 if factor.base is None else factor.extent for factor in factors])
    return x.expand([factor.extent for factor in factors]).reshape(view.shape)


# -- one layer


def interpreted(operator: Operator, body: Body, tensors: Mapping[str, Any]) -> list[Any]:
    """Return what a layer writes, in the shapes of its writes."""
    extents = {**operator.extents, **{dim.name: dim.extent for dim in body.inner}}
    known: dict[str, Named] = {}
    for access in operator.reads:
        inner = {dim.axis: dim.name for dim in body.inner if dim.tensor == access.tensor}
        known[access.tensor] = named(operator, access, tensors[access.tensor], inner)
    for constant in body.constants:
        shape = [extents[dim] for dim in constant.dims]
        known[constant.name] = tensors[constant.name].reshape(shape), constant.dims
    for item in body.borrowed:
        inner = {dim.axis: dim.name for dim in body.inner if dim.tensor == item.name}
        array = tensors[item.name]
        known[item.name] = (
            array.reshape([extent for i, extent in enumerate(array.shape) if i in inner]),
            tuple(inner[i] for i in sorted(inner)),
        )
    for step in body.steps:
        if step.function == "keep":
            continue
        operands = [known[operand] if isinstance(operand, str) else operand for operand in step.operands]
        made = STEPS[step.function](_Layer(operator, extents, known, tensors), step, operands)
        known[step.result] = made
        array, dims = made
        expected = [extents.get(dim, array.shape[i]) for i, dim in enumerate(dims)]
        assert step.function == "piece" or list(array.shape) == expected, (operator.name, step)
    last = body.steps[-1].result
    results = [last, *(body.others or (f"{last}.hidden", f"{last}.kept"))]
    found: list[Any] = []
    for i, write in enumerate(operator.writes):
        if i in operator.wholes:
            index = [slice(None)] * len(write.shape)
            for place, axis in enumerate(write.index_map):
                if isinstance(axis, SliceOf):
                    index[place] = slice(axis.offset, axis.offset + axis.extent)
            found.append(found[operator.wholes[i]][tuple(index)])
            continue
        number = sum(j not in operator.wholes for j in range(i))
        if number >= len(results) or results[number] not in known:
            found.append(torch.zeros(write.shape))
            continue
        order = tuple(name for axis in write.index_map for name in _names_of(axis))
        if results[number].endswith((".hidden", ".kept")):
            found.append(known[results[number]][0].reshape(write.shape))
            continue
        whole = {name: axis.extent for axis in write.index_map if isinstance(axis, SliceOf) for name in (axis.dim,)}
        is_told = all(axis is not None or e == 1 for axis, e in zip(write.index_map, write.shape, strict=True))
        if not set(known[results[number]][1]) <= set(order) or not is_told:
            # Its last step lays it out as it is written.
            found.append(known[results[number]][0].reshape(write.shape))
            continue
        found.append(arranged(known[results[number]], order, {**extents, **whole}).reshape(write.shape))
    return found


def _names_of(axis: Any) -> tuple[str, ...]:
    match axis:
        case None:
            return ()
        case SliceOf():
            return (axis.dim,)
        case Window():
            return (axis.out,)
        case str():
            return (axis,)
        case _:
            return tuple(axis)


def named(operator: Operator, access: Access, x: Any, inner: Mapping[int, str]) -> Named:
    """Return a tensor with one dim for each iteration dim or inner dim."""
    shape: list[int] = []
    dims: list[str] = []
    for i, (axis, extent) in enumerate(zip(access.index_map, access.shape, strict=True)):
        names = (inner[i],) if i in inner else _names_of(axis)
        dims += names
        shape += [operator.extents[name] for name in names] if len(names) > 1 else [extent] * len(names)
        if not names and extent > 1:
            # Whole, and told by nothing: steps that name its dims take it as it is.
            dims.append(f"{access.tensor}:{i}")
            shape.append(extent)
    return x.reshape(shape), tuple(dims)


def arranged(x: Named, dims: Sequence[str], extents: Mapping[str, int]) -> Any:
    """Return a tensor with these dims, repeated along those that it lacks."""
    array, own = x
    assert set(own) <= set(dims) or all(array.shape[i] == 1 for i, d in enumerate(own) if d not in dims), (own, dims)
    array = spread(x, dims)
    return array.expand([array.shape[i] if dim in own else extents[dim] for i, dim in enumerate(dims)])


def spread(x: Named, dims: Sequence[str]) -> Any:
    """Return a tensor with its dims in the order of others, of one element along those that it lacks."""
    array, own = x
    kept = [dim for dim in dims if dim in own]
    rest = [i for i, dim in enumerate(own) if dim not in dims]
    array = array.permute([*rest, *(own.index(dim) for dim in kept)])
    shape = dict(zip(kept, array.shape[len(rest) :], strict=True))
    return array.reshape([shape.get(dim, 1) for dim in dims])


class _Layer:
    def __init__(
        self,
        operator: Operator,
        extents: Mapping[str, int],
        known: dict[str, Named],
        tensors: Mapping[str, Any],
    ) -> None:
        self.operator, self.extents, self.known, self.tensors = operator, extents, known, tensors

    @property
    def written(self) -> tuple[str, ...]:
        return tuple(name for axis in self.operator.writes[0].index_map for name in _names_of(axis))

    @property
    def windowed(self) -> Access:
        return next(a for a in self.operator.reads if any(isinstance(axis, Window) for axis in a.index_map))


# -- steps


def _points(function: Callable[..., Any]) -> Callable[..., Named]:
    def step(_: _Layer, __: Step, operands: Sequence[Any]) -> Named:
        dims = tuple(dict.fromkeys(dim for x in operands if isinstance(x, tuple) for dim in x[1]))
        arrays = [spread(x, dims) if isinstance(x, tuple) else x for x in operands]
        whole = torch.broadcast_shapes(*(x.shape for x in arrays if isinstance(x, torch.Tensor)))
        return function(*arrays).expand(whole), dims

    return step


def _chain(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def all_of_them(first: Any, *others: Any) -> Any:
        for other in others:
            first = function(first, other)
        return first

    return all_of_them


def _limit(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: function(x, y if isinstance(y, torch.Tensor) else torch.tensor(y, dtype=x.dtype))


def _where(test: Any, x: Any, y: Any) -> Any:
    return torch.where(test if test.dtype == torch.bool else test != 0, x, y)


_SAME = """
    abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc exp expm1 floor log log1p reciprocal relu round rsqrt
    sigmoid sign sin sinh sqrt square tan tanh
"""

POINTS: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in _SAME.split()},
    "add": _chain(lambda x, y: x + y),
    "average": lambda *xs: sum(xs) / len(xs),
    "celu": lambda x, a: F.celu(x, a),
    "clip": lambda x, low, high: torch.clamp(x, low, high),
    "divide": lambda x, y: x / y,
    "elu": lambda x, a: F.elu(x, a),
    "equal": lambda x, y: x == y,
    "floor_divide": lambda x, y: torch.floor(x / y),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "greater": lambda x, y: x > y,
    "greater_equal": lambda x, y: x >= y,
    "hard_sigmoid": lambda x, slope, offset: torch.clamp(x * slope + offset, 0, 1),
    "hard_swish": F.hardswish,
    "identity": lambda x: x,
    "leaky_relu": lambda x, slope: F.leaky_relu(x, slope),
    "less": lambda x, y: x < y,
    "less_equal": lambda x, y: x <= y,
    "log_sigmoid": F.logsigmoid,
    "maximum": _chain(_limit(torch.maximum)),
    "minimum": _chain(_limit(torch.minimum)),
    "mish": F.mish,
    "multiply": _chain(lambda x, y: x * y),
    "negate": lambda x: -x,
    "not_equal": lambda x, y: x != y,
    "power": lambda x, y: x**y,
    "prelu": lambda x, slope: torch.where(x >= 0, x, slope * x),
    "quick_gelu": lambda x, a: x * torch.sigmoid(a * x),
    "relu6": F.relu6,
    "selu": F.selu,
    "silu": F.silu,
    "softplus": lambda x, beta=1.0: F.softplus(x, beta),
    "softsign": F.softsign,
    "subtract": lambda x, y: x - y,
    "tanh_shrink": F.tanhshrink,
    "thresholded_relu": lambda x, a: torch.where(x > a, x, 0.0),
    "where": _where,
}


def _over(function: Callable[..., Any], *, keeps: bool = False) -> Callable[..., Named]:
    def step(_: _Layer, step: Step, operands: Sequence[Any]) -> Named:
        x, dims = operands[0]
        places = [i for i, dim in enumerate(dims) if dim in step.dims]
        if not keeps:
            rest = tuple(dim for dim in dims if dim not in step.dims)
            return (function(x, places) if places else x), rest
        order = [*(i for i in range(len(dims)) if i not in places), *places]
        turned = x.permute(order)
        lead = turned.shape[: len(dims) - len(places)]
        made = function(turned.reshape(*lead, -1), -1).reshape(turned.shape)
        return made, tuple(dims[i] for i in order)

    return step


def _einsum(_: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    letters = dict(zip(dict.fromkeys(dim for _, own in operands for dim in own), count(), strict=False))
    dims = tuple(dim for dim in step.dims if dim in letters)
    told = [item for x, own in operands for item in (x, [letters[dim] for dim in own])]
    return torch.einsum(*told, [letters[dim] for dim in dims]), dims


def _causal(_: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    x, dims = operands[0]
    query, key = step.dims
    later = spread((torch.arange(x.shape[dims.index(key)]), (key,)), dims) > spread(
        (torch.arange(x.shape[dims.index(query)]), (query,)), dims
    )
    return x.masked_fill(later, -1e30), dims


def _embedding(layer: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    (table, rows), (places, dims) = operands
    frozen = int(step.option("frozen", -1))
    found = F.embedding(places.long(), table.reshape(table.shape[0], -1), padding_idx=frozen if frozen >= 0 else None)
    reads = (a for a in layer.operator.reads if a.tensor == step.operands[1])
    if any(axis is None for access in reads for axis in access.index_map):
        # Told whole: its points are those of the leading dims that are written.
        written = layer.operator.writes[0].index_map
        dims = tuple(name for axis in written for name in _names_of(axis) if name not in rows)
    extents = [layer.extents[dim] for dim in dims]
    return found.reshape(*extents, *table.shape[1:]), (*dims, *rows[1:])


def _pick(_: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    x, (places, dims) = operands
    rows = spread(x, (*dims, *step.dims)).expand(*places.shape, -1)
    # Places beyond are those of targets that do not count.
    return rows.gather(-1, places.long().clamp(0, rows.shape[-1] - 1).unsqueeze(-1)).squeeze(-1), dims


def _windows(layer: _Layer, x: Named, fill: float) -> tuple[Named, tuple[str, ...]]:
    """Return a tensor with a dim for the positions and one for the points of each window."""
    array, dims = x
    kernels = []
    for axis in layer.windowed.index_map:
        if not isinstance(axis, Window):
            continue
        place = dims.index(axis.out)
        outs, points = layer.extents[axis.out], layer.extents[axis.kernel]
        index = torch.arange(outs)[:, None] * axis.stride + torch.arange(points) * axis.dilation - axis.pad
        inside = (index >= 0) & (index < array.shape[place])
        found = array.index_select(place, index.clamp(0, array.shape[place] - 1).flatten())
        found = found.reshape(*array.shape[:place], outs, points, *array.shape[place + 1 :])
        mask = inside.reshape(*(1,) * place, outs, points, *(1,) * (array.dim() - place - 1))
        array = torch.where(mask, found, torch.tensor(fill, dtype=array.dtype))
        dims = (*dims[: place + 1], axis.kernel, *dims[place + 1 :])
        kernels.append(axis.kernel)
    return (array, dims), tuple(kernels)


def _convolve(layer: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    x, _ = _windows(layer, operands[0], 0.0)
    return _einsum(layer, replace(step, dims=layer.written), [x, operands[1]])


def _convolve_transposed(layer: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    (x, own), (filters, names) = operands
    rank = len(step.dims) // 3
    arrays = [(x, own), (filters, names)]
    for i in range(rank):
        read, out, kernel = (step.dims[i + rank * j] for j in range(3))
        stride, dilation, pad = (step.option(name, ())[i] for name in ("strides", "dilations", "pads"))
        points = torch.arange(layer.extents[kernel])
        points = points.flip(0) if step.option("backwards", False) else points
        place = torch.arange(layer.extents[read])[:, None, None] * stride + points * dilation - pad
        hit = (place == torch.arange(layer.extents[out])[None, :, None]).to(x.dtype)
        arrays.append((hit, (read, out, kernel)))
    return _einsum(layer, replace(step, dims=layer.written), arrays)


def _pool(layer: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    is_max = step.option("reduction", "max") == "max"
    (x, dims), kernels = _windows(layer, operands[0], -torch.inf if is_max else 0.0)
    places = [dims.index(kernel) for kernel in kernels]
    rest = tuple(dim for dim in dims if dim not in kernels)
    if is_max:
        return x.amax(places), rest
    ones, _ = _windows(layer, (torch.ones_like(operands[0][0]), operands[0][1]), 0.0)
    if step.option("count_padding", False):
        return x.mean(places), rest
    return x.sum(places) / ones[0].sum(places), rest


def _concat(layer: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    along = step.option("along", "")
    order = layer.written
    parts = []
    for x, own in operands:
        extents = {**layer.extents}
        parts.append(arranged((x, own), order, extents) if along in own else spread((x, own), order))
    return torch.cat(parts, dim=order.index(along)), order


def _moved(layer: _Layer, _: Step, operands: Sequence[Any]) -> Named:
    """A copy, perhaps a box of what is read, or a box within zeros."""
    read, write = layer.operator.reads[0], layer.operator.writes[0]
    x = operands[0][0].reshape([e for e in read.shape if e > 1] or [1])
    if layer.operator.body is not None and layer.operator.body.steps[-1].function == "padded":
        x = x.reshape(read.shape)
        pads = []
        for axis, old, new in zip(read.index_map, read.shape, write.shape, strict=True):
            first = axis.offset if isinstance(axis, SliceOf) else 0
            pads = [first, new - old - first, *pads]
        return F.pad(x, pads).reshape([layer.extents[dim] for dim in layer.written]), layer.written
    array, dims = operands[0]
    cuts = {axis.dim: axis for axis in write.index_map if isinstance(axis, SliceOf)}
    for dim, axis in cuts.items():
        array = array.narrow(dims.index(dim), axis.offset, axis.extent)
    if not any(axis is None and extent > 1 for axis, extent in zip(read.index_map, read.shape, strict=True)):
        return array, dims
    assert array.numel() == torch.Size(write.shape).numel(), "a box that is not told"
    return array.reshape([layer.extents[dim] for dim in layer.written]), layer.written


def _cut(layer: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    x, dims = operands[0]
    old, new = step.dims
    place, start, by = dims.index(old), step.option("start", 0), step.option("step", 1)
    index = torch.arange(layer.extents[new]) * by + start
    return x.index_select(place, index), (*dims[:place], new, *dims[place + 1 :])


def _join(layer: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    *own, whole = step.dims
    rest = tuple(dict.fromkeys(dim for _, dims in operands for dim in dims if dim not in own))
    parts = []
    for x, dim in zip(operands, own, strict=True):
        order = (*rest, dim)
        extents = {**layer.extents}
        parts.append(arranged(x, order, extents))
    return torch.cat(parts, dim=-1), (*rest, whole)


def _view(layer: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    x, dims = operands[0]
    number = step.option("replaced", 1)
    old, new = step.dims[:number], step.dims[number:]
    rest = tuple(dim for dim in dims if dim not in old)
    array = arranged((x, dims), (*rest, *old), layer.extents)
    lead = array.shape[: len(rest)]
    return array.reshape(*lead, *(layer.extents[dim] for dim in new)), (*rest, *new)


def _rows(_: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    (table, names), (places, dims) = operands
    rest = tuple(name for name in names if name not in step.dims)
    rows = spread((table, names), (*step.dims, *rest))
    return rows[places.long()], (*dims, *rest)


def _repeat(layer: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    return arranged(operands[0], step.dims, layer.extents), step.dims


def _recurrent(layer: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    """Layers of one cell over a sequence, by PyTorch's own modules' equations, step by step."""
    batch, steps, directions, gate, unit = step.dims
    cell, num_layers = step.option("cell", "lstm"), step.option("layers", 1)
    given = [name for name in ("hidden", "kept") if step.option(name, False)]
    weights = operands[1 : len(operands) - len(given)]
    x, dims = operands[0]
    width = [dim for dim in dims if dim not in (batch, steps)]
    x = spread(operands[0], (batch, steps, *width)).flatten(2)
    num_directions = layer.extents.get(directions, 1)
    per = len(weights) // (num_layers * num_directions)
    units, gates = layer.extents[unit], layer.extents.get(gate, 1)
    states: list[tuple[Any, Any]] = []
    for number in range(num_layers):
        outs = []
        for direction in range(num_directions):
            own = weights[(number * num_directions + direction) * per :][:per]
            w, u, *biases = (array.reshape(gates * units, -1) for array, _ in own)
            h = c = torch.zeros(x.shape[0], units, dtype=x.dtype)
            found = []
            times = range(x.shape[1]) if direction == 0 else reversed(range(x.shape[1]))
            for time in times:
                a, b = x[:, time] @ w.T, h @ u.T
                if biases:
                    a, b = a + biases[0].flatten(), b + biases[1].flatten()
                if cell == "lstm":
                    i, f, g, o = (a + b).chunk(4, dim=-1)
                    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                    h = o.sigmoid() * c.tanh()
                elif cell == "gru":
                    (r, z, n), (s, y, m) = a.chunk(3, dim=-1), b.chunk(3, dim=-1)
                    update = (z + y).sigmoid()
                    h = (1 - update) * (n + (r + s).sigmoid() * m).tanh() + update * h
                else:
                    h = (a + b).tanh() if cell == "rnn_tanh" else (a + b).relu()
                found.append(h)
            outs.append(torch.stack(found if direction == 0 else found[::-1], dim=1))
            states.append((h, c))
        x = torch.cat(outs, dim=-1)
    assert not given, "first states that are given are not tested here"
    layer.known[f"{step.result}.hidden"] = torch.stack([h for h, _ in states]), ("states", batch, unit)
    layer.known[f"{step.result}.kept"] = torch.stack([c for _, c in states]), ("states", batch, unit)
    return x.reshape(*x.shape[:2], num_directions, units), (batch, steps, directions, unit)


def _cast(_: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    x, dims = operands[0]
    return x.to(getattr(torch, step.option("to", ""))), dims


def _grouped(layer: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    """Each row times the matrix of the group that it lies in, one row after the other."""
    group, row, column, feature = step.dims
    x = spread(operands[0], (group, row, feature))
    w = spread(operands[1], (group, column, feature))
    ends = operands[2][0].flatten()
    rows = []
    for i, own in enumerate(x.flatten(0, 1)):
        places = torch.nonzero(ends > i)
        rows.append(w[places[0, 0]] @ own if len(places) else own.sum() * torch.zeros(w.shape[1], dtype=x.dtype))
    return torch.stack(rows).reshape(*x.shape[:2], -1), (group, row, column)


def _routed(layer: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    """Each place's row, one after the other."""
    places, rows = step.dims[: step.option("rows", 1)], step.dims[step.option("rows", 1) :]
    dims = operands[0][1]
    rest = [dim for dim in dims if dim not in rows]
    table = spread(operands[0], (*rows, *rest)).flatten(0, len(rows) - 1)
    found = torch.stack([table[int(i)] for i in operands[1][0].flatten()])
    return found.reshape(*(layer.extents[dim] for dim in places), *table.shape[1:]), (*places, *rest)


def _whole(layer: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    number = step.option("replaced", 0)
    if not number:
        x = layer.tensors[str(step.operands[0])]
        return x.reshape([layer.extents[dim] for dim in step.dims]), step.dims
    x, dims = operands[0]
    told = dict(zip(step.dims[:number], step.dims[number:], strict=True))
    return x, tuple(told.get(dim, dim) for dim in dims)


def _source(layer: _Layer, step: Step, operands: Sequence[Any]) -> Named:
    layouts = json.loads(step.option("layouts", ""))
    arrays = []
    for x, layout in zip(operands, layouts[:-1], strict=True):
        order = [dim for axis in layout for dim in axis]
        array = arranged(x, order, layer.extents)
        arrays.append(array.reshape([torch.Size([layer.extents[dim] for dim in axis]).numel() for axis in layout]))

    def told(item: Any) -> Any:
        if isinstance(item, list):
            return [told(one) for one in item]
        if isinstance(item, dict):
            ((kind, value),) = item.items()
            if kind == "operand":
                return arrays[value]
            return getattr(torch, value) if kind == "dtype" else float(value) if kind == "number" else None
        return item

    positional, keywords = json.loads(step.option("arguments", ""))
    _, name, overload = step.option("operator", "").split(".")
    operator = getattr(getattr(torch.ops.aten, name), overload)
    found = operator(*map(told, positional), **{key: told(item) for key, item in keywords.items()})
    found = found[step.option("number", 0)] if isinstance(found, list | tuple) else found
    dims = [dim for axis in layouts[-1] for dim in axis]
    return found.reshape([layer.extents[dim] for dim in dims]), tuple(dims)


STEPS: dict[str, Callable[..., Named]] = {
    **{name: _points(function) for name, function in POINTS.items()},
    "cast": _cast,
    "causal": _causal,
    "concat": _concat,
    "convolve": _convolve,
    "convolve_transposed": _convolve_transposed,
    "copy": _moved,
    "cut": _cut,
    "einsum": _einsum,
    "embedding": _embedding,
    "fan_out": lambda _, __, operands: operands[0],
    "grouped": _grouped,
    "join": _join,
    "log_softmax": _over(torch.log_softmax, keeps=True),
    "max": _over(torch.amax),
    "mean": _over(torch.mean),
    "min": _over(torch.amin),
    "padded": _moved,
    "pick": _pick,
    "piece": _moved,
    "pool": _pool,
    "recurrent": _recurrent,
    "repeat": _repeat,
    "routed": _routed,
    "rows": _rows,
    "softmax": _over(torch.softmax, keeps=True),
    "source": _source,
    "sum": _over(torch.sum),
    "view": _view,
    "whole": _whole,
}
