"""Sums of products of two tensors, in the notation of einsum."""

from collections.abc import Iterable, Mapping, Sequence
from string import ascii_letters

from pase.importers.torch.sharding_rules.rule import (
    Call,
    Factor,
    Labels,
    Rule,
    ShardingRule,
    positions,
    relate,
    unknown,
)


def contract(
    call: Call,
    operands: Mapping[str, Labels] | Sequence[Labels],
    result: Labels,
    *,
    added: Iterable[str] = (),
    whole: Iterable[Factor] = (),
) -> ShardingRule:
    """Relate a sum of products: it is over the names that the result does not have.

    Args:
        call: The call.
        operands: Names of the dims of each operand.
        result: Those of the result.
        added: Arguments that are added to the products.
        whole: Names of dims that are not split.
    """
    labels = operands.values() if isinstance(operands, Mapping) else operands
    names = {f for dims in labels for f in dims if isinstance(f, str)}
    added = list(added)
    factors: list[str | int] = list(operands) if isinstance(operands, Mapping) else list(range(len(operands)))
    linear = [name for name in factors if name not in added]
    return relate(
        call,
        operands,
        [result],
        sums=names - {f for f in result if isinstance(f, str)},
        whole=whole,
        linear=linear,
        added=added,
    )


def product(operands: Mapping[str, str], result: str, *, added: str = "") -> Rule:
    """Return the rule of a product whose operands always have the same dims; added: one that is broadcast to it."""

    def rule(call: Call) -> ShardingRule:
        labels: dict[str, Labels] = dict(operands)
        if added:
            labels[added] = result[len(result) - call.rank(added) :]
        return contract(call, labels, result, added=[added] if added else [])

    return rule


def linear(call: Call) -> ShardingRule:
    """Relate x, w, bias and x · wᵀ + bias."""
    lead = positions(call.rank("input") - 1, "b")
    out = ["n"] if call.rank("weight") > 1 else []
    labels: dict[str, Labels] = {"input": [*lead, "k"], "weight": [*out, "k"], "bias": out[: call.rank("bias")]}
    return contract(call, labels, [*lead, *out], added=["bias"])


def matmul(call: Call) -> ShardingRule:
    """Relate a product as NumPy's matmul has it: vectors and matrices, with dims before them that are broadcast."""
    (a, b) = (len(shape) for shape in call.operands)
    first = [*positions(max(0, a - 2), "b"), *(["m", "k"] if a > 1 else ["k"])]
    second = [*positions(max(0, b - 2), "b"), *(["k", "n"] if b > 1 else ["k"])]
    lead = positions(max(a, b, 2) - 2, "b")
    return contract(call, [first, second], [*lead, *["m"][: a - 1], *["n"][: b - 1]])


def einsum(call: Call) -> ShardingRule:
    """Relate a sum of products that is written down; dots are dims that are broadcast."""
    equation = str(call.get("equation")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    dots = [len(shape) - len(term.replace("...", "")) for term, shape in zip(terms, call.operands, strict=True)]
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        right = "..." + "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    operands = [_dims(term, count) for term, count in zip(terms, dots, strict=True)]
    result = _dims(right, max((count for term, count in zip(terms, dots, strict=True) if "..." in term), default=0))
    return contract(call, operands, result)


def _dims(term: str, dots: int) -> list[Factor | None]:
    before, found, after = term.partition("...")
    return [*before, *(positions(dots, "dots") if found else []), *after]


def tensordot(call: Call) -> ShardingRule:
    """Relate a sum over dims that are listed for both operands."""
    first, second = (positions(len(shape), prefix) for shape, prefix in zip(call.operands, "ab", strict=True))
    pairs = list(zip(_listed(call, "dims_self", 0), _listed(call, "dims_other", 1), strict=True))
    for a, b in pairs:
        second[b] = first[a]
    summed = {first[a] for a, _ in pairs}
    return contract(call, [first, second], [f for f in (*first, *second) if f not in summed])


def _listed(call: Call, name: str, number: int) -> list[int]:
    return [dim % len(call.operands[number]) for dim in call.get(name, [])]


def inner(call: Call) -> ShardingRule:
    """Relate a sum over the last dims of both operands; a number multiplies."""
    a, b = (positions(len(shape), prefix) for shape, prefix in zip(call.operands, "ab", strict=True))
    if not a or not b:
        return contract(call, [a, b], [*a, *b])
    return contract(call, [[*a[:-1], "k"], [*b[:-1], "k"]], [*a[:-1], *b[:-1]])


def kron(call: Call) -> ShardingRule:
    """Relate matrices and their Kronecker product, each dim of which is one of both."""
    rank = len(call.results[0])
    labels: list[list[list[Factor]]] = []
    extents: dict[Factor, int] = {}
    for shape, prefix in zip(call.operands, "ab", strict=True):
        names = [f"{prefix}{rank - len(shape) + i}" for i in range(len(shape))]
        extents.update(zip(names, shape, strict=True))
        labels.append([[]] * (rank - len(shape)) + [[name] for name in names])
    outputs = [[*a, *b] for a, b in zip(*labels, strict=True)]
    inputs = [dims[rank - len(shape) :] for dims, shape in zip(labels, call.operands, strict=True)]
    return relate(call, inputs, [outputs], extents=extents, linear=[0, 1])


def bilinear(call: Call) -> ShardingRule:
    """Relate x₁ · w · x₂ + bias."""
    lead = positions(call.rank("input1") - 1, "b")
    labels: dict[str, Labels] = {
        "input1": [*lead, "x"],
        "input2": [*lead, "y"],
        "weight": ["n", "x", "y"],
        "bias": ["n"],
    }
    return contract(call, labels, [*lead, "n"], added=["bias"])


def trilinear(call: Call) -> ShardingRule:
    """Relate three tensors that are expanded, multiplied and summed over some dims."""
    rank = len(call.operands[0]) + len(call.get("expand1", []))
    labels = []
    for i in (1, 2, 3):
        expanded = set(call.get(f"expand{i}", []))
        labels.append([f"d{dim}" for dim in range(rank) if dim not in expanded])
    summed = set(call.get("sumdim", []))
    return contract(call, labels, [f"d{dim}" for dim in range(rank) if dim not in summed])


def chain(call: Call) -> ShardingRule:
    """Relate a chain of matrix products, of which the first and the last may be vectors."""
    labels: list[Labels] = []
    for i, shape in enumerate(call.operands):
        is_last = i == len(call.operands) - 1
        names = [ascii_letters[i], ascii_letters[i + 1]]
        labels.append(names if len(shape) == 2 else names[:1] if is_last else names[1:])
    first = labels[0][:1] if len(call.operands[0]) == 2 else []
    last = labels[-1][1:] if len(call.operands[-1]) == 2 else []
    return contract(call, labels, [*first, *last])


def distances(call: Call) -> ShardingRule:
    """Relate rows of two tensors and the distances of all pairs."""
    lead = positions(len(call.results[0]) - 2, "b")
    x1, x2 = call.operands[:2]
    first = [*lead[len(lead) - len(x1) + 2 :], "m", "k"]
    second = [*lead[len(lead) - len(x2) + 2 :], "n", "k"]
    return relate(call, [first, second], [[*lead, "m", "n"]], whole={"k"})


def similarity(call: Call) -> ShardingRule:
    """Relate vectors of two tensors, which are broadcast, and a number of each pair."""
    rank = max(len(shape) for shape in call.operands)
    names = positions(rank)
    if call.name == "cosine_similarity":
        at = int(call.get("dim", 1)) % rank
    elif call.name == "linalg_vecdot":
        at = int(call.get("dim", -1)) % rank
    else:
        at = rank - 1
    result = [*names[:at], *names[at + 1 :]]
    if call.name == "linalg_vecdot":
        return contract(call, [names[rank - len(shape) :] for shape in call.operands], result)
    result = [*names[:at], None, *names[at + 1 :]] if call.get("keepdim", False) else result
    return relate(call, [names[rank - len(s) :] for s in call.operands], [result], whole=[f for f in [names[at]] if f])


def activated(call: Call) -> ShardingRule:
    """Relate an activation of input + mat1 · mat2, which no part of the sum gives."""
    labels: dict[str, Labels] = {"mat1": "mk", "mat2": "kn", "self": "mn"[2 - call.rank("self") :]}
    return relate(call, labels, ["mn"], whole={"k"})


def grouped(call: Call) -> ShardingRule:
    """Relate rows, each multiplied by the matrix of its group; groups end at given row numbers."""
    if len(call.operands[0]) != 2 or len(call.operands[1]) != 3:
        return unknown(call)
    return relate(call, ["mk", "gkn", None], ["mn"], sums={"k"}, whole={"m", "g"}, linear=[0, 1])


RULES: dict[str, Rule] = {
    "mm": product({"self": "mk", "mat2": "kn"}, "mn"),
    "bmm": product({"self": "bmk", "mat2": "bkn"}, "bmn"),
    "mv": product({"self": "mk", "vec": "k"}, "m"),
    "dot": product({"self": "k", "tensor": "k"}, ""),
    "vdot": product({"self": "k", "other": "k"}, ""),
    "linalg_vecdot": similarity,
    "outer": product({"self": "m", "vec2": "n"}, "mn"),
    "ger": product({"self": "m", "vec2": "n"}, "mn"),
    "addmm": product({"mat1": "mk", "mat2": "kn"}, "mn", added="self"),
    "addmv": product({"mat": "mk", "vec": "k"}, "m", added="self"),
    "addr": product({"vec1": "m", "vec2": "n"}, "mn", added="self"),
    "baddbmm": product({"batch1": "bmk", "batch2": "bkn"}, "bmn", added="self"),
    "addbmm": product({"batch1": "bmk", "batch2": "bkn"}, "mn", added="self"),
    "linear": linear,
    "matmul": matmul,
    "linalg_matmul": matmul,
    "einsum": einsum,
    "tensordot": tensordot,
    "inner": inner,
    "kron": kron,
    "bilinear": bilinear,
    "_trilinear": trilinear,
    "chain_matmul": chain,
    "linalg_multi_dot": chain,
    "cdist": distances,
    "_cdist_forward": distances,
    "_euclidean_dist": distances,
    "cosine_similarity": similarity,
    "pairwise_distance": similarity,
    "_addmm_activation": activated,
    "_grouped_mm": grouped,
}
