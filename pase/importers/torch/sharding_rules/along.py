"""Reductions, functions along dims, look-ups, and functions of matrices."""

from collections.abc import Sequence
from math import prod

from pase.importers.ir.call import table
from pase.importers.torch.sharding_rules.points import pointwise
from pase.importers.torch.sharding_rules.rule import (
    Call,
    Factor,
    Labels,
    Rule,
    Shape,
    ShardingRule,
    positions,
    relate,
    unknown,
)

# -- reductions


def summed(call: Call) -> ShardingRule:
    """Relate a tensor and its sum or mean over some dims: parts add up."""
    inputs = positions(len(call.operands[0]))
    dims = call.dims()
    names = [str(inputs[dim]) for dim in dims]
    linear = [0] if call.name in ("sum", "mean") else []
    return relate(
        call, [inputs], [_without(inputs, dims, call)], sums=names, is_mean=call.name == "mean", linear=linear
    )


def reduce(call: Call) -> ShardingRule:
    """Relate a tensor and a reduction over some dims, or points of two tensors."""
    if "other" in call.numbers:
        return pointwise(call)
    inputs = positions(len(call.operands[0]))
    dims = call.dims("axis") if "axis" in call.arguments else call.dims()
    outputs = _without(inputs, dims, call)
    return relate(call, [inputs], [outputs] * len(call.results), whole=[str(inputs[dim]) for dim in dims])


def _without(labels: Sequence[Factor | None], dims: Sequence[int], call: Call) -> list[Factor | None]:
    """Return the dims of a result without those that were reduced, or with 1 in their place."""
    if labels and len(call.results[0]) == len(labels):
        return [None if i in dims else label for i, label in enumerate(labels)]
    return [label for i, label in enumerate(labels) if i not in dims]


def quantile(call: Call) -> ShardingRule:
    """Relate a tensor and its quantiles along a dim, or of all points; of several, their number comes first."""
    dims = call.dims()
    names = [None if i in dims else name for i, name in enumerate(positions(call.rank("self")))]
    number = [None] * call.rank("q")
    kept = [name for i, name in enumerate(names) if i not in dims]
    keeps_dims = len(call.results[0]) > len(number) + len(kept)
    return relate(call, {"self": names}, [[*number, *(names if keeps_dims else kept)]])


# -- functions along dims


def along_one(call: Call) -> ShardingRule:
    """Relate tensors of the same dims, of which one is mixed; a number has one point of it."""
    return _mixing(call, [call.dim()])


def along_last(call: Call) -> ShardingRule:
    """Relate tensors of the same dims, of which the last is mixed unless another one is named."""
    rank = len(call.operands[0])
    return _mixing(call, [call.get("dim", -1) % rank if rank else 0])


def along_first(call: Call) -> ShardingRule:
    """Relate tensors of the same dims, of which the first is mixed."""
    return _mixing(call, [0])


def transformed(call: Call) -> ShardingRule:
    """Relate a tensor and its Fourier transform over some dims; where none are named, over as many as have extents."""
    rank = len(call.operands[0])
    sizes = call.get("s")
    if call.get("dim") is None and sizes is not None:
        return _mixing(call, range(rank - len(sizes), rank), is_linear=True)
    return _mixing(call, call.dims(), is_linear=True)


def gradients(call: Call) -> ShardingRule:
    """Relate a tensor and its differences along dims."""
    rank = len(call.operands[0])
    dims = call.dims()
    labels = [None if i in dims else name for i, name in enumerate(positions(rank))]
    return relate(call, {"self": labels}, [labels] * len(call.results), linear=["self"])


def cumulative_sum(call: Call) -> ShardingRule:
    """Relate a tensor and its sums so far along a dim."""
    return _mixing(call, [call.dim()], is_linear=True)


def _mixing(call: Call, dims: Sequence[int], *, is_linear: bool = False) -> ShardingRule:
    """Relate tensors of equal dims, some of which are unsplit; a result may have other dims instead of these, or none.

    If all tensors have equally many points in a mixed dim, it has one factor.
    """
    rank = max(len(shape) for shape in call.operands)
    tensors = [shape for shape in (*call.operands, *call.results) if len(shape) == rank]
    names = positions(rank)
    for dim in dims:
        if rank and len({shape[dim] for shape in tensors}) > 1:
            names[dim] = None
    rest = [label for i, label in enumerate(names) if i not in dims]

    inputs = [names if len(shape) == rank else None for shape in call.operands]
    outputs = [names if len(shape) == rank else rest for shape in call.results]
    whole = [str(names[dim]) for dim in dims] if rank else []
    linear = [0] if is_linear else []
    return relate(call, inputs, outputs, whole=whole, linear=linear)


def cross(call: Call) -> ShardingRule:
    """Relate vectors of three along a dim, which is the first of that extent where none is named."""
    rank = len(call.results[0])
    if call.get("dim") is None and call.name == "cross":
        return relate(call)
    dim = call.get("dim", -1) % rank
    names = positions(rank)
    inputs = [names[rank - len(shape) :] for shape in call.operands]
    return relate(call, inputs, [names], whole=[str(names[dim])], linear=[0, 1])


def renorm(call: Call) -> ShardingRule:
    """Relate a tensor and itself with every slice along a dim scaled by its norm."""
    return _mixing(call, [i for i in range(len(call.operands[0])) if i != call.dim()])


def weight_norm(call: Call) -> ShardingRule:
    """Relate directions, lengths and the weights of both: along the dim that lengths have, each is made by itself."""
    dim = call.dim()
    v = positions(call.rank("v"))
    g: list[Factor | None] = [label if i == dim else None for i, label in enumerate(v)]
    whole = [str(label) for i, label in enumerate(v) if i != dim]
    return relate(call, {"v": v, "g": g}, [v, g][: len(call.results)], whole=whole)


def matrices(trailing: Sequence[int] = (2,)) -> Rule:
    """Return the rule of a function of matrices: the dims before them are broadcast.

    Args:
        trailing: For each operand the number of its last dims that are unsplit, the last number for all further ones.
    """

    def rule(call: Call) -> ShardingRule:
        leads = [
            max(0, len(shape) - trailing[min(i, len(trailing) - 1)]) if shape else 0
            for i, shape in enumerate(call.operands)
        ]
        rank = max(leads)
        names = positions(rank, "b")
        inputs = [
            [*names[rank - lead :], *[None] * (len(shape) - lead)]
            for lead, shape in zip(leads, call.operands, strict=True)
        ]
        outputs = [[*names, *[None] * (len(shape) - rank)] if len(shape) >= rank else None for shape in call.results]
        return relate(call, inputs, outputs)

    return rule


def solve(call: Call) -> ShardingRule:
    """Relate matrices, right-hand sides and solutions; a right-hand side may be vectors."""
    a, b = call.operands[:2]
    is_vector = len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1])
    if len(b) == len(a) - 1 and not is_vector:
        # A shard of a might have as many matrices as b has rows, and b be taken for vectors.
        return relate(call)
    return matrices((2, 1 if is_vector else 2))(call)


def vandermonde(call: Call) -> ShardingRule:
    """Relate points and their powers, which come last: by default as many as there are points."""
    *names, last = positions(len(call.operands[0]))
    labels = [*names, None if call.get("N") is None else last]
    return relate(call, [labels], [[*labels, None]])


def differences(call: Call) -> ShardingRule:
    """Relate tensors that are concatenated along a dim, and differences of neighbours."""
    rank = len(call.operands[0])
    labels = [None if i == call.get("dim", -1) % rank else name for i, name in enumerate(positions(rank))]
    return relate(call, [labels] * len(call.operands), [labels])


def trapezoid(call: Call) -> ShardingRule:
    """Relate values along a dim and their integral; places may be given along it."""
    rank = call.rank("y")
    dim = call.get("dim", -1) % rank
    names = [None if i == dim else name for i, name in enumerate(positions(rank))]
    operands: dict[str, Labels] = {"y": names}
    if call.rank("x") == rank > 1:
        operands["x"] = names
    outputs = names if len(call.results[0]) == rank else [name for i, name in enumerate(names) if i != dim]
    return relate(call, operands, [outputs])


# -- look-ups


def gather(call: Call) -> ShardingRule:
    """Relate a tensor and points of it along a dim; in other dims, an index may have fewer points."""
    x, index = call.operands[0], call.shape("index") or ()
    if len(x) != len(index):
        return relate(call)
    dim = call.dim()
    names = _shared(x, index, dim)
    points = ["i" if i == dim else name for i, name in enumerate(names)]
    return relate(call, {"self": names, "index": points}, [points], linear=["self"])


def _shared(x: Shape, index: Shape, dim: int) -> list[Factor | None]:
    """Return names of the dims in which a tensor and an index have equally many points, except the one indexed."""
    names = positions(len(x))
    return [name if i != dim and x[i] == index[i] else None for i, name in enumerate(names)]


def gather_broadcast(call: Call) -> ShardingRule:
    """Relate a tensor and points of it along a dim; both are broadcast in the others."""
    if call.get("dim") is None:
        return relate(call)
    dim = call.dim()
    names = [None if i == dim else name for i, name in enumerate(positions(len(call.operands[0])))]
    points = ["i" if i == dim else name for i, name in enumerate(names)]
    return relate(call, {"self": names, "indices": points}, [points], linear=["self"])


def scatter(call: Call) -> ShardingRule:
    """Relate a tensor and points that replace others of it along a dim, or are added to them."""
    x, index, dim = call.operands[0], call.shape("index") or (), call.dim()
    if len(x) != len(index):
        return relate(call)
    source = "src" if "src" in call.numbers else "value"
    names = _shared(x, index, dim)
    labels: dict[str, Labels] = {"self": names, "index": names}
    if call.rank(source):
        src = call.shape(source) or ()
        names = [name if src[i] == index[i] else None for i, name in enumerate(names)]
        labels = {"self": names, "index": names, source: names}
    linear: list[str] = ["self", source] if source in call.numbers else []
    sums: list[Factor] = []
    adds = call.name == "scatter_add" or (call.get("reduce") == "sum" and call.get("include_self", True))
    if adds and (call.shape(source) or ())[dim : dim + 1] == index[dim : dim + 1]:
        points = [*names[:dim], "i", *names[dim + 1 :]]
        labels |= {"index": points, source: points}
        sums = ["i"]
    if not adds and call.get("reduce") is not None:
        linear = []
    return relate(call, labels, [names], sums=sums, linear=linear, added=linear)


def rows(call: Call) -> ShardingRule:
    """Relate a tensor and slices of it along a dim, at places that are listed."""
    rank, dim = call.rank("self"), call.dim()
    names = positions(rank)
    inputs = [None if i == dim else name for i, name in enumerate(names)]
    index: list[Factor | None] = ["i"] if call.rank("index") else [None]
    outputs = [*inputs[:dim], *index, *inputs[dim + 1 :]]
    return relate(
        call, {"self": inputs, "index": index[: call.rank("index")]}, [outputs if rank else None], linear=["self"]
    )


def replaced_rows(call: Call) -> ShardingRule:
    """Relate a tensor, slices that replace others of it along a dim, or are added to them, and the result."""
    rank, dim = call.rank("self"), call.dim()
    source = "source" if "source" in call.numbers else "value"
    inputs = [None if i == dim else name for i, name in enumerate(positions(rank))]
    every = ["self", source] if source in call.numbers and call.name != "index_reduce" else []
    labels: dict[str, Labels] = {"self": inputs}
    sums: list[Factor] = []
    if rank and call.rank(source) == rank:
        labels[source] = inputs
        if call.name == "index_add" and call.rank("index") == 1:
            labels |= {source: [*inputs[:dim], "i", *inputs[dim + 1 :]], "index": ["i"]}
            sums = ["i"]
    return relate(call, labels, [inputs], sums=sums, linear=every, added=every)


def embedding(call: Call) -> ShardingRule:
    """Relate a table and rows of it."""
    indices = positions(call.rank("indices"), "i")
    whole = [str(f) for f in indices] if call.get("scale_grad_by_freq") else []
    return relate(call, {"weight": [None, "f"], "indices": indices}, [[*indices, "f"]], whole=whole, linear=["weight"])


def embedding_bag(call: Call) -> ShardingRule:
    """Relate a table and sums or means of rows of it, of which features pass."""
    return relate(call, {"weight": [None, "f"]}, [[None, "f"]])


def indexed(call: Call) -> ShardingRule:
    """Relate a tensor and its elements at lists of indices in some dims, read or written.

    The dims of the indices come first, or in place of the indexed dims if these are adjacent.
    """
    x = call.shape("self") or ()
    places = list(call.get("indices", []))
    if [str(place.dtype) for place in places if place is not None] == ["torch.bool"] and "values" in call.numbers:
        return _filled(call, places.index(next(place for place in places if place is not None)))
    if any(place is not None and str(place.dtype) in ("torch.bool", "torch.uint8") for place in places):
        return unknown(call)
    read = [dim for dim, place in enumerate(places) if place is not None]
    inputs: list[Factor | None] = [None if i in read else name for i, name in enumerate(positions(len(x)))]
    if not read:
        return relate(call, {"self": inputs}, [inputs], linear=["self"])
    shapes = [tuple(places[dim].shape) for dim in read]
    index = positions(max(len(shape) for shape in shapes), "i")
    at = read[0] if read == list(range(read[0], read[-1] + 1)) else 0
    kept = [name for i, name in enumerate(inputs) if i not in read]
    outputs = [*kept[:at], *index, *kept[at:]]
    operands: list[Labels | None] = [None] * len(call.operands)
    operands[call.numbers["self"][0]] = inputs
    for number, shape in zip(call.numbers["indices"], shapes, strict=True):
        operands[number] = index[len(index) - len(shape) :]
    if "mask" in call.numbers:
        operands[call.numbers["mask"][0]] = index[len(index) - call.rank("mask") :]
    if "values" not in call.arguments:
        return relate(call, operands, [outputs], linear=["self"])
    values = outputs[len(outputs) - call.rank("values") :]
    operands[call.numbers["values"][0]] = values
    names = [str(name) for name in index]
    if not call.get("accumulate", False):
        every = ["self", "values"]
        return relate(call, operands, [inputs], whole=names, linear=every, added=every)
    # Values that are broadcast along the indices are added by each part, and cannot be passed to one part only.
    extents = dict(zip(reversed(values), reversed(call.shape("values") or ()), strict=True))
    is_broadcast = any(extents.get(name, 1) == 1 for name in index)
    every = ["self"] if is_broadcast else ["self", "values"]
    return relate(call, operands, [inputs], sums=names, linear=["values"] if is_broadcast else every, added=every)


def _filled(call: Call, at: int) -> ShardingRule:
    """Relate a tensor, a mask of its dims from one on, and one value that is written or added where it is set."""
    if call.shape("values") not in ((), (1,)):
        return unknown(call)
    names = positions(call.rank("self"))
    mask = names[at : at + call.rank("indices")]
    every = ["self", "values"]
    return relate(call, {"self": names, "indices": mask}, [names], linear=every, added=every)


def taken(call: Call) -> ShardingRule:
    """Relate a tensor and points of it by their numbers in it."""
    index = positions(call.rank("index"))
    return relate(call, {"index": index}, [index], linear=["self"])


def one_hot(call: Call) -> ShardingRule:
    """Relate classes and vectors that are 1 at the class."""
    inputs = positions(len(call.operands[0]))
    return relate(call, [inputs], [[*inputs, None]]) if call.get("num_classes", -1) > 0 else relate(call)


def among(call: Call) -> ShardingRule:
    """Relate points and the results of searching another tensor for each, which is read completely."""
    by_name = {"bucketize": "self", "isin": "elements", "searchsorted": "self"}
    name = by_name[call.name]
    labels = positions(call.rank(name))
    operands: dict[str, Labels] = {name: labels}
    if call.name == "searchsorted" and call.rank("sorted_sequence") > 1:
        operands["sorted_sequence"] = [*labels[:-1], None]
        operands["sorter"] = [*labels[:-1], None]
    return relate(call, operands, [labels] if prod(call.results[0]) else [])


RULES: dict[str, Rule] = table(
    (summed, "sum mean nansum count_nonzero"),
    (reduce, "max min amax amin aminmax var std var_mean std_mean prod any all argmax argmin logsumexp norm"),
    (reduce, "linalg_vector_norm linalg_norm linalg_matrix_norm median nanmedian mode nanmean kthvalue native_norm"),
    (reduce, "special_logsumexp frobenius_norm nuclear_norm _aminmax"),
    (quantile, "quantile nanquantile"),
    (along_one, "softmax _softmax _log_softmax log_softmax _safe_softmax special_softmax special_log_softmax"),
    (along_one, "cumprod cummax cummin logcumsumexp _softmax_backward_data _log_softmax_backward_data"),
    (cumulative_sum, "cumsum"),
    (along_last, "sort argsort topk glu"),
    (along_first, "msort"),
    (transformed, "_fft_c2c _fft_r2c _fft_c2r fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft"),
    (transformed, "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2"),
    (transformed, "fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn fft_fftshift fft_ifftshift"),
    (gradients, "gradient"),
    (cross, "cross linalg_cross"),
    (renorm, "renorm norm_except_dim"),
    (weight_norm, "_weight_norm _weight_norm_interface"),
    (differences, "diff"),
    (trapezoid, "trapezoid trapz cumulative_trapezoid"),
    (gather, "gather"),
    (gather_broadcast, "take_along_dim"),
    (scatter, "scatter scatter_add scatter_reduce"),
    (rows, "index_select"),
    (replaced_rows, "index_add index_copy index_fill index_reduce"),
    (embedding, "embedding"),
    (embedding_bag, "embedding_bag _embedding_bag _embedding_bag_forward_only"),
    (indexed, "index _unsafe_index _unsafe_masked_index index_put _unsafe_index_put _index_put_impl"),
    (taken, "take"),
    (one_hot, "one_hot"),
    (among, "bucketize isin searchsorted"),
    (matrices(), "cholesky linalg_cholesky linalg_cholesky_ex cholesky_inverse cholesky_solve linalg_det _linalg_det"),
    (matrices(), "det logdet slogdet linalg_slogdet _linalg_slogdet inverse linalg_inv linalg_inv_ex pinverse"),
    (matrices((2, 0)), "linalg_pinv linalg_matrix_rank"),
    (matrices(), "linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh _linalg_eigh _linalg_eigvals"),
    (
        matrices(),
        "linalg_svd linalg_svdvals _linalg_svd svd linalg_qr qr geqrf linalg_lu linalg_lu_factor",
    ),
    (matrices(), "_lu_with_info linalg_lu_factor_ex linalg_matrix_exp matrix_exp linalg_matrix_power matrix_power"),
    (matrices(), "triangular_solve linalg_solve_triangular"),
    (matrices(), "linalg_ldl_factor linalg_ldl_factor_ex linalg_lstsq"),
    (matrices((2, 1)), "linalg_householder_product orgqr"),
    (matrices((2, 1, 2)), "linalg_lu_solve linalg_ldl_solve ormqr"),
    (matrices((2, 2, 1)), "lu_solve"),
    (matrices((2, 1)), "lu_unpack"),
    (matrices(), "linalg_cond"),
    (matrices((1,)), "stft"),
    (matrices((2, 1)), "istft"),
    (solve, "linalg_solve linalg_solve_ex _linalg_solve_ex"),
    (vandermonde, "linalg_vander"),
)
