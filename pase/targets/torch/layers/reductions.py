"""Functions that reduce dims, which may be split: products, look-ups, sums, maxima, softmax and its loss."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from string import ascii_letters
from typing import Any

import torch
from torch.nn import functional

from pase.errors import ProgramError
from pase.sharding.layouts import named
from pase.sharding.traffic import Phase
from pase.targets.torch.layers.points import apply, arrange
from pase.targets.torch.tensor import Differentiated, Dim, Tensor, in_float32, local, one_mesh, resolved, shaped


def product(*operands: Any) -> Tensor:
    """Return the sum of products of tensors over the dims that the last operand, those of the result, lacks."""
    *tensors, out = operands
    names = {dim.name for dim in out}
    summed = {name for x in tensors for name in x.names} - names
    own: set[str] = set().union(*(x.names for x in tensors))
    known = [dim for dim in out if dim.name in own]
    return replace(arrange(_product(tensors, known, summed), out), is_product=True)


def _product(tensors: Sequence[Tensor], out: Sequence[Dim], summed: set[str]) -> Tensor:
    if len(tensors) == 2:
        found = _linear(tensors[0], tensors[1], out, summed)
        if found is not None:
            return found
    letters = {name: ascii_letters[i] for i, name in enumerate(dict.fromkeys(n for x in tensors for n in x.names))}
    terms = ["".join(letters[name] for name in x.names) for x in tensors]
    equation = f"{','.join(terms)}->{''.join(letters[dim.name] for dim in out)}"
    return local(lambda *shards: torch.einsum(equation, *shards), tensors, out, partial_over=summed)


def _linear(x: Tensor, weights: Tensor, out: Sequence[Dim], summed: set[str]) -> Tensor | None:
    """Return the product as PyTorch's linear function, where it has its form: batch dims, reduced dims, output dims.

    x has adjacent batch and reduced dims, the weights adjacent reduced and output dims.
    """
    batch = [dim for dim in x.dims if dim.name not in summed]
    inner = [dim for dim in weights.dims if dim.name in summed]
    outer = [dim for dim in weights.dims if dim.name not in summed]
    is_alike = {*x.dims} == {*batch, *inner} and list(out) == [*batch, *outer] and bool(batch and inner and outer)
    if not is_alike or any(dim in batch for dim in outer):
        return None
    is_turned = weights.dims == (*inner, *outer)
    if not is_turned and weights.dims != (*outer, *inner):
        return None
    x = arrange(x, [*batch, *inner])
    part = x.mesh.part
    shapes = [tuple(map(part, dims)) for dims in (batch, inner, outer)]
    num_inner, num_outer = map(prod, shapes[1:])

    def compute(x: Any, matrix: Any) -> Any:
        x = shaped(x, (*shapes[0], *shapes[1]), (*shapes[0], num_inner))
        if is_turned:
            matrix = shaped(matrix, weights.shard, (num_inner, num_outer)).t()
        else:
            matrix = shaped(matrix, weights.shard, (num_outer, num_inner))
        y = functional.linear(x, matrix)
        y.node.meta["biased"] = [dim.name for dim in outer]
        return shaped(y, (*shapes[0], num_outer), (*shapes[0], *shapes[2]))

    return local(compute, [x, weights], out, partial_over=summed)


def lookup(table: Tensor, indices: Tensor, rows: Dim, *columns: Dim, frozen: int = -1) -> Tensor:
    """Return rows of a table by index: dims of the indices, then the columns'; frozen: a row that gets no gradient.

    A rank looks up the indices that fall in its rows and leaves zeros for the others; a split of the rows leaves
    partial sums.
    """
    table = arrange(table, [rows, *columns])
    mesh = one_mesh([table, indices])
    begin, num_rows = mesh.begin(rows), mesh.part(rows)
    row, found_in = tuple(map(mesh.part, columns)), indices.shard

    def looked_up(table: Any, indices: Any) -> Any:
        table = shaped(table, (num_rows, *row), (num_rows, prod(row)))
        if num_rows == rows.size:
            found = functional.embedding(indices.long(), table, padding_idx=frozen if frozen >= 0 else None)
        else:
            places = indices.long() - begin
            is_inside = (places >= 0) & (places < num_rows)
            is_own = 0 <= frozen - begin < num_rows
            found = functional.embedding(
                torch.where(is_inside, places, 0), table, padding_idx=frozen - begin if frozen >= 0 and is_own else None
            )
            found = found * is_inside.unsqueeze(-1).type_as(found)
        return shaped(found, (*found_in, prod(row)), (*found_in, *row))

    return local(looked_up, [table, indices], (*indices.dims, *columns), partial_over=[rows.name])


def pick(x: Tensor, places: Tensor, along: Dim) -> Tensor:
    """Return elements of x along a dim, at an index for each point of the other dims; places: dims [b, …].

    Where the indices have a dim that x lacks, several elements are taken for each point of the others. A rank takes
    those in its part of the dim and leaves zeros for the others; a split of it leaves partial sums.
    """
    lacking = [dim for dim in x.dims if dim not in places.dims and dim != along]
    if any(dim.size > 1 for dim in lacking):
        raise ProgramError(f"layer {x.mesh.layer!r} picks points of a tensor whose dims the places lack")
    x = arrange(x, [*places.dims, along])
    begin, size = x.mesh.begin(along), x.mesh.part(along)

    def picked(x: Any, places: Any) -> Any:
        own = places.long() - begin
        is_inside = (own >= 0) & (own < size)
        found = x.gather(-1, torch.where(is_inside, own, 0).unsqueeze(-1)).squeeze(-1)
        return torch.where(is_inside, found, 0)

    return local(picked, [x, places], places.dims, partial_over=[along.name])


def total(x: Tensor, over: Sequence[Dim]) -> Tensor:
    """Return the sum of a tensor over some of its dims."""
    return _total(in_float32(x), over)


def _total(x: Tensor, over: Sequence[Dim]) -> Tensor:
    if not over:
        # PyTorch would take none for all.
        return x
    kept, places = _reduced(x, over)
    return local(lambda shard: shard.sum(places), [x], kept, partial_over=[dim.name for dim in over], is_linear=True)


def mean(x: Tensor, over: Sequence[Dim]) -> Tensor:
    """Return the mean of a tensor over some of its dims."""
    if not over:
        return x
    if not x.mesh.split(dim.name for dim in over) and not x.partial:
        kept, places = _reduced(x, over)
        return local(lambda shard: shard.mean(places), [x], kept)
    return apply("multiply", _total(x, over), 1 / prod(dim.size for dim in over))


def greatest(x: Tensor, over: Sequence[Dim]) -> Tensor:
    """Return the maximum of a tensor over some of its dims; its gradient goes to all points that attain it."""
    if not over:
        return x
    kept, places = _reduced(x, over)
    if not x.mesh.split(dim.name for dim in over):
        return local(lambda shard: torch.amax(shard, places), [x], kept)
    module = Differentiated(_Maximum, places=places, over=x.mesh.program.adder(x.mesh, [dim.name for dim in over]))
    return Tensor(value=x.mesh.program.run(module, resolved(x).value, "maximum"), mesh=x.mesh, dims=tuple(kept))


class _Maximum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, module: Differentiated) -> Any:
        top = module.over.greatest(x.amax(module.places, keepdim=True), Phase.FORWARD)
        ctx.module = module
        ctx.save_for_backward(x, top)
        return top.squeeze(module.places)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, top = ctx.saved_tensors
        module = ctx.module
        is_greatest = x == top
        # Exchanges within a layer's computation count as forward, in either pass.
        count = module.over.summed(is_greatest.sum(module.places, keepdim=True).type_as(dy), Phase.FORWARD)
        return is_greatest * (dy.reshape(count.shape) / count), None


def least(x: Tensor, over: Sequence[Dim]) -> Tensor:
    """Return the minimum of a tensor over some of its dims."""
    return apply("negate", greatest(apply("negate", x), over))


def softmax(x: Tensor, over: Sequence[Dim]) -> Tensor:
    """Return exponentials divided by their sum over some dims."""
    return _normalised(in_float32(x), over, torch.softmax, is_log=False)


def log_softmax(x: Tensor, over: Sequence[Dim]) -> Tensor:
    """Return the logarithm of the softmax over some dims."""
    return _normalised(in_float32(x), over, torch.log_softmax, is_log=True)


def _normalised(x: Tensor, over: Sequence[Dim], kernel: Any, *, is_log: bool) -> Tensor:
    _, places = _reduced(x, over)
    if len(places) == 1 and not x.mesh.split(dim.name for dim in over):
        return local(lambda shard: kernel(shard, dim=places[0]), [x], x.dims)
    adder = x.mesh.program.adder(x.mesh, [dim.name for dim in over])
    module = Differentiated(_Softmax, places=places, over=adder, is_log=is_log)
    return Tensor(value=x.mesh.program.run(module, resolved(x).value, "softmax"), mesh=x.mesh, dims=x.dims)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, module: Differentiated) -> Any:
        top = module.over.greatest(x.amax(module.places, keepdim=True), Phase.FORWARD)
        lower = x - top
        powers = lower.exp()
        sums = module.over.summed(powers.sum(module.places, keepdim=True), Phase.FORWARD)
        y = lower.sub_(sums.log()) if module.is_log else powers.div_(sums)
        ctx.module = module
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        """Return ``dy - softmax · Σ dy`` of a logarithm, else ``softmax · (dy - Σ dy · softmax)``."""
        (y,) = ctx.saved_tensors
        module = ctx.module
        # Exchanges within a layer's computation count as forward, in either pass.
        if module.is_log:
            sums = module.over.summed(dy.sum(module.places, keepdim=True), Phase.FORWARD)
            return y.exp().mul_(-sums).add_(dy), None
        weighted = dy * y
        sums = module.over.summed(weighted.sum(module.places, keepdim=True), Phase.FORWARD)
        return weighted.addcmul_(y, sums, value=-1), None


def without_later_keys(scores: Tensor, query: Dim, key: Dim) -> Tensor:
    """Return scores with -inf for keys later than the query, by their positions in the whole sequence."""
    names = scores.names
    places = [names.index(dim.name) - len(names) for dim in (query, key)]
    (first_query, queries), (first_key, keys) = (
        (scores.mesh.begin(dim), scores.mesh.part(dim)) for dim in (query, key)
    )

    def compute(shard: Any) -> Any:
        device = shard.device
        is_later = torch.arange(first_key, first_key + keys, device=device) > torch.arange(
            first_query, first_query + queries, device=device
        ).unsqueeze(-1)
        shape = [1] * len(names)
        shape[places[0]], shape[places[1]] = queries, keys
        is_later = is_later if places[0] < places[1] else is_later.t()
        return shard.masked_fill(is_later.reshape(shape), float("-inf"))

    return local(compute, [scores], scores.dims)


def _reduced(x: Tensor, over: Sequence[Dim]) -> tuple[list[Dim], list[int]]:
    names = {dim.name for dim in over}
    if not names <= set(x.names):
        raise ProgramError(
            f"layer {x.mesh.layer!r} reduces {list(x.names)} over {', '.join(sorted(names))}, which it has not"
        )
    kept = [dim for dim in x.dims if dim.name not in names]
    return kept, [i for i, dim in enumerate(x.dims) if dim.name in names]


# -- a loss


def softmax_loss(logits: Tensor, labels: Tensor, classes: Dim) -> Tensor:
    """Return the mean over all points of ``log Σ_n exp(x_n) - x_label``; dims [b, …, classes], of labels [b, …]."""
    mesh, logits = one_mesh([logits, labels]), in_float32(logits)
    if logits.dims != (*labels.dims, classes):
        raise ProgramError(
            f"layer {mesh.layer!r}: the logits have dims {named(logits.dims)}; expected "
            f"{named((*labels.dims, classes))}, those of the labels and then the classes"
        )
    if mesh.split((classes.name,)):
        over = mesh.program.adder(mesh, [classes.name])
        module = Differentiated(_SoftmaxLoss, begin=mesh.begin(classes), num_points=labels.size, over=over)
        found = mesh.program.run(module, resolved(logits).value, "softmax_loss", labels.value)
        loss = Tensor(value=found[0], mesh=mesh, dims=(), partial=mesh.split(labels.names))
        mesh.program.count_correct(loss, labels, lambda: found[1])
        return loss
    shape = (prod(labels.shard), classes.size)

    read: list[Any] = []

    def compute(x: Any, places: Any) -> Any:
        points = shaped(places, labels.shard, shape[:1]).long()
        x = shaped(x, logits.shard, shape)
        read[:] = x, points
        return functional.cross_entropy(x, points, reduction="sum") / labels.size

    def correct() -> Any:
        # From the input of the loss: a further reader of its operands would need a further all-reduce of their
        # gradients.
        x, points = (value.detach() for value in read)
        return (x.gather(-1, points.unsqueeze(-1)) == x.amax(-1, keepdim=True)).sum()

    loss = local(compute, [logits, labels], (), partial_over=[dim.name for dim in labels.dims])
    mesh.program.count_correct(loss, labels, correct)
    return loss


class _SoftmaxLoss(torch.autograd.Function):
    """The sum over this rank's points, divided by the number on all ranks; and the number of correct predictions.

    begin: the first class of this rank. over: combines the ranks' results for the same points.
    """

    @staticmethod
    def forward(ctx: Any, logits: Any, labels: Any, module: Differentiated) -> Any:
        places = (labels.long() - module.begin).unsqueeze(-1)
        is_inside = (places >= 0) & (places < logits.shape[-1])
        places = places.clamp(0, logits.shape[-1] - 1)
        top = module.over.greatest(logits.amax(-1, keepdim=True), Phase.FORWARD)
        of_label = (logits - top).gather(-1, places) * is_inside
        # The logarithm of the sum and the label's logit, both without the greatest one.
        sums, of_label = module.over.summed(
            torch.stack([(logits - top).exp().sum(-1, keepdim=True), of_label]), Phase.FORWARD
        )
        log_sums = sums.log()
        ctx.module = module
        ctx.save_for_backward(logits, top + log_sums, places, is_inside)
        # Exact: the label's logit is the greatest one, or it is not.
        correct = (of_label == 0).sum()
        ctx.mark_non_differentiable(correct)
        return (log_sums - of_label).sum() / module.num_points, correct

    @staticmethod
    def backward(ctx: Any, dy: Any, _: Any) -> Any:
        """Return ``(softmax - one at the label) / points``, times the gradient of the loss."""
        logits, log_sums, places, is_inside = ctx.saved_tensors
        softmax = (logits - log_sums).exp()
        share = dy / ctx.module.num_points
        return (softmax * share).scatter_add_(-1, places, -(is_inside * share)), None, None
