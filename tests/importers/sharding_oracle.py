"""Proves sharding rules by running: each operator whole and on uneven parts, values and gradients compared.

Nothing here shares code with the rules. `python -m tests.importers.sharding_oracle` prints how many entries of
PyTorch's OpInfo database export, are split somewhere and are equal, and what is not split, by reason.
"""

import argparse
import importlib.util
import operator
import os
import pickle
import re
import select
import signal
import sys
import time
import traceback
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from math import prod
from types import ModuleType
from typing import Any

import torch

from pase.importers.torch.sharding_rules import ShardingRule, sharding_rule

Range = tuple[int, int]
Part = Mapping[str, Range]
"""The points of each factor that is split."""

Dims = tuple[tuple[str, ...], ...]
RuleOf = Callable[..., ShardingRule]

_UNDEFINED = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided")
"""Operators whose results have any values."""

_TOLERANCE = 1e-9
"""Of a difference, as a share of the largest number of a tensor."""


# -- one call


@dataclass(frozen=True)
class Call:
    """A call of an operator with values.

    Attributes:
        target: The operator.
        args: Its arguments.
        kwargs: Those by name.
    """

    target: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.target).removeprefix("aten.").removesuffix(".default")

    @property
    def tensors(self) -> list[Any]:
        return list(tensors_of([*self.args, *self.kwargs.values()]))

    def named_arguments(self) -> list[tuple[str, Any]]:
        """Return arguments that are given, by their names."""
        names = [argument.name for argument in self.target._schema.arguments]
        return [*zip(names, self.args, strict=False), *self.kwargs.items()]

    def __str__(self) -> str:
        options = [f"{k}={v}" for k, v in self.kwargs.items() if not list(tensors_of(v))]
        words = [list(arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in self.args]
        return " ".join([self.name, *(str(word)[:60] for word in words), *options])

    def run(self, tensors: Sequence[Any], rule: ShardingRule | None = None, part: Part | None = None) -> list[Any]:
        """Return the tensors that the operator returns for other operands, on a part with the part's extents."""
        rest = iter(tensors)
        args = [filled(arg, rest) for arg in self.args]
        kwargs = {name: filled(value, rest) for name, value in self.kwargs.items()}
        names = [argument.name for argument in self.target._schema.arguments]
        for name, value in rule.sizes if rule else ():
            at = names.index(name)
            size = _size(value, rule.extents, part or {})  # type: ignore[union-attr]
            if at < len(args):
                args[at] = size
            else:
                kwargs[name] = size
        return list(tensors_of(self.target(*args, **kwargs)))


def tensors_of(value: object) -> Iterator[Any]:
    """Yield the tensors in nested arguments."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, torch.Tensor):
        yield value


def filled(value: Any, tensors: Iterator[Any]) -> Any:
    """Return nested arguments with their tensors replaced by the next ones."""
    if isinstance(value, list | tuple):
        return [filled(item, tensors) for item in value]
    return next(tensors) if isinstance(value, torch.Tensor) else value


def _size(value: Any, extents: Mapping[str, int], part: Part) -> Any:
    if value and not isinstance(value[0], str):
        return [_size(dim, extents, part) if dim else 1 for dim in value]
    return prod(_points(factor, extents, part) for factor in value)


def _points(factor: str, extents: Mapping[str, int], part: Part) -> int:
    start, stop = part.get(factor, (0, extents[factor]))
    return stop - start


def shard_of(tensor: Any, dims: Dims, extents: Mapping[str, int], part: Part) -> Any:
    """Return the points of a tensor that have the part's points of each factor."""
    region = _region(tensor.reshape(_apart(dims, extents)), dims, part)
    return region.reshape([prod(_points(factor, extents, part) for factor in dim) for dim in dims])


def _apart(dims: Dims, extents: Mapping[str, int]) -> list[int]:
    return [extents[factor] for dim in dims for factor in dim]


def _region(apart: Any, dims: Dims, part: Part) -> Any:
    for at, factor in enumerate(factor for dim in dims for factor in dim):
        if factor in part:
            start, stop = part[factor]
            apart = apart.narrow(at, start, stop - start)
    return apart


def _add(total: Any, shard: Any, dims: Dims, extents: Mapping[str, int], part: Part) -> None:
    """Add a part's points to those of a whole tensor."""
    region = _region(total.view(_apart(dims, extents)), dims, part)
    region += shard.reshape(region.shape)


@dataclass
class Report:
    """What was found of calls.

    Attributes:
        checked: Operators that were run on parts, by number.
        whole: Operators that are known to have nothing to split.
        unknown: Operators that nothing is known of.
        wrong: What differs.
    """

    checked: Counter[str] = field(default_factory=Counter)
    whole: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        """Add what another report has."""
        self.checked += other.checked
        self.whole += other.whole
        self.unknown += other.unknown
        self.wrong += other.wrong


def check_call(call: Call, *, rule_of: RuleOf = sharding_rule, seed: int = 0) -> Report:
    """Run a call whole, and on two uneven parts along each factor that its rule allows to be split.

    Each factor is cut at two places, with other values at the second; two factors are split at once.
    """
    report = Report()
    rule = rule_of(call.target, call.args, call.kwargs)
    try:
        results = call.run([tensor.clone() for tensor in call.tensors])
    except RuntimeError:  # what depends on values, such as a matrix that is singular
        return report
    problem = _problem(rule, call.tensors, results)
    if problem:
        report.wrong.append(f"{call}: {problem}")
        return report
    if not rule.splittable:
        (report.whole if rule.is_known else report.unknown)[call.name] += 1
        return report
    generator = torch.Generator().manual_seed(seed)
    factors = list(rule.splittable)
    cuts = [[(factor, 0.0)] for factor in factors]
    cuts += [[(factor, 2 / 3)] for factor in factors]
    chosen = torch.randperm(len(factors), generator=generator).tolist()[:2]
    if len(chosen) == 2:
        cuts.append([(factors[i], 0.5) for i in chosen])
    for i, cut in enumerate(cuts):
        tensors = call.tensors if i < len(factors) else _other_values(call.tensors, generator)
        difference = _checked(_difference, call, rule, tensors, dict(cut), generator)
        report.checked[call.name] += 1
        if difference:
            report.wrong.append(f"{call}: along {'+'.join(factor for factor, _ in cut)}: {difference}")
    for number in rule.linear:
        difference = _checked(_nonlinearity, call, rule, number, generator)
        if difference:
            report.wrong.append(f"{call}: linear in operand {number}: {difference}")
    return report


def _checked(check: Callable[..., str], call: Call, *args: Any) -> str:
    """Return what a check finds, or what a kernel raises."""
    try:
        return check(call, *args)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _problem(rule: ShardingRule, operands: Sequence[Any], results: Sequence[Any]) -> str:
    """Return how a rule does not fit the tensors' shapes; "" if it does."""
    if not rule.is_known and not rule.results:
        return ""
    if len(operands) != len(rule.operands) or len(results) != len(rule.results):
        return f"{len(rule.operands)} operands, {len(rule.results)} results for {len(operands)}, {len(results)}"
    for tensor, dims in zip((*operands, *results), (*rule.operands, *rule.results), strict=True):
        if [prod(rule.extents[factor] for factor in dim) for dim in dims] != list(tensor.shape):
            return f"factors {dims} of a tensor {list(tensor.shape)}"
    if 1 in rule.extents.values():
        return "a factor of extent 1"
    return "" if rule.whole | rule.sums <= rule.extents.keys() else "names without a factor"


def _other_values(tensors: Sequence[Any], generator: torch.Generator) -> list[Any]:
    """Return numbers up to a fifth nearer to 0; where all are 0, numbers between 0 and 1."""
    changed = []
    for tensor in tensors:
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
        if not is_inexact(tensor):
            changed.append(tensor)
        elif tensor.any():
            changed.append(tensor * (1 - 0.2 * noise).to(tensor.dtype))
        else:
            changed.append(noise.to(tensor.dtype))
    return changed


def is_inexact(tensor: Any) -> bool:
    """Return whether a tensor has real or complex numbers."""
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _difference(
    call: Call, rule: ShardingRule, tensors: Sequence[Any], cut: Mapping[str, float], generator: torch.Generator
) -> str:
    """Return how parts differ from the whole call; "" if they do not.

    Args:
        call: The call.
        rule: Its rule.
        tensors: Its operands.
        cut: For each factor that is split, the share of its points in the first of two parts, which has one at least.
        generator: Of upstream gradients.
    """
    leaves, results = _with_gradients(call, tensors)
    upstream = [_random(result, generator) for result in results]
    gradients = _gradients(results, leaves, upstream)
    sums = [_zeros(result) for result in results]
    gradient_sums = [_zeros(leaf) for leaf in leaves]
    is_summed = [n in rule.summed and any(f in rule.sums for f in cut) for n in range(len(results))]
    for numbers in product((0, 1), repeat=len(cut)):
        part = {f: _range(rule.extents[f], share, n) for (f, share), n in zip(cut.items(), numbers, strict=True)}
        further = {f for f, n in zip(cut, numbers, strict=True) if n and f in rule.sums}
        is_zero = [
            n in rule.once and bool(further - {f for dim in dims for f in dim}) for n, dims in enumerate(rule.operands)
        ]
        share = prod(_points(f, rule.extents, part) / rule.extents[f] for f in cut if f in rule.sums)
        weight = share if rule.is_mean else 1
        given = []
        for n, (leaf, dims) in enumerate(zip(leaves, rule.operands, strict=True)):
            shard = shard_of(leaf.detach(), dims, rule.extents, part)
            given.append(_leaf(torch.zeros_like(shard) if is_zero[n] else shard, leaf.requires_grad))
        outputs = call.run(given, rule, part)
        above: list[Any] = []
        for n, (result, dims) in enumerate(zip(results, rule.results, strict=True)):
            expected = shard_of(result.detach(), dims, rule.extents, part)
            if outputs[n].shape != expected.shape or outputs[n].dtype != expected.dtype:
                return f"result {n} of a part: {outputs[n].dtype} {list(outputs[n].shape)} for {list(expected.shape)}"
            gradient = shard_of(upstream[n], dims, rule.extents, part)
            if is_summed[n]:
                _add(sums[n], weight * outputs[n].detach(), dims, rule.extents, part)
                gradient = weight * gradient
            elif call.target._schema.name not in _UNDEFINED and not is_close(outputs[n].detach(), expected, result):
                return f"result {n} of a part differs"
            has_factors = all(any(f in dim for dim in dims) for f, number in zip(cut, numbers, strict=True) if number)
            above.append(gradient if is_summed[n] or has_factors else None)
        for n, gradient in enumerate(_gradients(outputs, given, above)):
            if gradient is not None and not is_zero[n]:
                _add(gradient_sums[n], gradient, rule.operands[n], rule.extents, part)
    for n, result in enumerate(results):
        if is_summed[n] and not is_close(sums[n], result.detach().to(sums[n].dtype), result):
            return f"the sum of result {n} over parts differs"
    for n, (gradient, total) in enumerate(zip(gradients, gradient_sums, strict=True)):
        if not is_close(total, _zeros(leaves[n]) if gradient is None else gradient, total):
            return f"the gradient of operand {n} differs"
    return ""


def _range(extent: int, share: float, number: int) -> Range:
    at = min(extent - 1, max(1, round(extent * share)))
    return (0, at) if number == 0 else (at, extent)


def _leaf(tensor: Any, requires_grad: bool = True) -> Any:
    leaf = tensor.detach().clone(memory_format=torch.contiguous_format)
    return leaf.requires_grad_(requires_grad and is_inexact(tensor))


def _with_gradients(call: Call, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return operands that require gradients, as far as the operator has some of them, and results."""
    names = [name for name, value in call.named_arguments() for _ in tensors_of(value)]
    without: set[str] = set()
    while True:
        leaves = [_leaf(tensor, name not in without) for tensor, name in zip(tensors, names, strict=True)]
        try:
            return leaves, call.run(leaves)
        except RuntimeError as error:
            named = re.search(r"not differentiable with respect to argument '(\w+)'", str(error))
            if named is None or named[1] in without:
                raise
            without.add(named[1])


def _zeros(tensor: Any) -> Any:
    dtype = tensor.dtype if is_inexact(tensor) else torch.int64
    return torch.zeros(tensor.shape, dtype=dtype)


def _gradients(results: Sequence[Any], leaves: Sequence[Any], upstream: Sequence[Any]) -> list[Any]:
    """Return the gradient of each operand; None where there is none."""
    pairs = [(r, g) for r, g in zip(results, upstream, strict=True) if r.requires_grad and g is not None]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    try:
        found = torch.autograd.grad([r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    except RuntimeError as error:
        # Not implemented, or not defined for this upstream gradient, as for a phase of eigenvectors.
        reasons = ("is not implemented", "not supported", "specified up to")
        if not any(reason in str(error) for reason in reasons):
            raise
        return [None] * len(leaves)
    gradients = iter(g.detach() if g is not None else None for g in found)
    return [next(gradients) if leaf.requires_grad else None for leaf in leaves]


def is_close(given: Any, expected: Any, scale: Any) -> bool:
    """Return whether numbers are equal up to rounding, as a share of the largest of `scale`."""
    if not is_inexact(expected):
        return bool(torch.equal(given.to(torch.int64), expected.to(torch.int64)))
    sizes = scale.detach().abs()
    finite = sizes[sizes.isfinite()]
    rounding = 64 * torch.finfo(expected.dtype).eps
    tolerance = max(_TOLERANCE, rounding)
    bound = tolerance * max(1.0, float(finite.max())) if finite.numel() else tolerance
    relative = max(1e-7, rounding)
    return bool(torch.allclose(given.to(expected.dtype), expected, rtol=relative, atol=bound, equal_nan=True))


def _nonlinearity(call: Call, rule: ShardingRule, number: int, generator: torch.Generator) -> str:
    """Return how addends of an operand do not give addends of the results; "" if they do."""
    tensors = call.tensors
    share = torch.rand(tensors[number].shape, generator=generator, dtype=torch.float64).to(tensors[number].dtype)
    addends = [share * tensors[number], (1 - share) * tensors[number]]
    expected = call.run(tensors)
    sums = [_zeros(result) for result in expected]
    for i, addend in enumerate(addends):
        given = [torch.zeros_like(t) if i and n in rule.added else t for n, t in enumerate(tensors)]
        given[number] = addend
        for total, result in zip(sums, call.run(given), strict=True):
            total += result
    return "" if all(map(is_close, sums, expected, expected)) else "results are not addends"


# -- whole graphs


@dataclass(frozen=True)
class Split:
    """A tensor in two parts.

    Attributes:
        parts: The parts.
        dim: The dim that is split.
        outer: Extent of the factors of the dim outside of that which is split.
        extent: Extent of the factor that is split.
        at: Where it is split.
    """

    parts: tuple[Any, Any]
    dim: int
    outer: int
    extent: int
    at: int

    @property
    def shape(self) -> tuple[int, ...]:
        first, second = self.parts
        return tuple(
            a + b if i == self.dim else a for i, (a, b) in enumerate(zip(first.shape, second.shape, strict=True))
        )

    def whole(self) -> Any:
        """Return the tensor."""
        apart = [
            part.unflatten(self.dim, (self.outer, n, -1)) for part, n in zip(self.parts, self._numbers(), strict=True)
        ]
        return torch.cat(apart, self.dim + 1).flatten(self.dim, self.dim + 2)

    def _numbers(self) -> tuple[int, int]:
        return self.at, self.extent - self.at


class Carrying(torch.fx.Interpreter):
    """Runs a graph in which factors of some nodes are split, as far as rules carry them.

    Attributes:
        carried: Number of nodes that ran on parts.
    """

    def __init__(self, module: Any, seed: int) -> None:
        super().__init__(module)
        self.carried = 0
        self._generator = torch.Generator().manual_seed(seed)

    def run_node(self, n: Any) -> Any:
        """Run one node, on parts if an operand is split along a factor that passes, or if it is chosen to be."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target is operator.getitem:
            return self.call_function(n.target, args, kwargs)
        if n.op != "call_function" or not hasattr(n.target, "_schema") or not list(tensors_of(n.meta.get("val"))):
            return getattr(self, n.op)(n.target, _gathered(args), _gathered(kwargs))
        operands = list(_values_of([*args, *kwargs.values()]))
        shapes = iter([torch.empty(v.shape, dtype=_dtype(v)) for v in operands])
        meta = [_filled_values(a, shapes) for a in args], {k: _filled_values(v, shapes) for k, v in kwargs.items()}
        rule = sharding_rule(n.target, *meta, results=n.meta.get("val"))
        factor, at = self._factor(rule, operands)
        call = Call(n.target, *meta)
        if factor is None:
            outputs = call.run([_gathered(value).contiguous() for value in operands])
            return _like(n.meta.get("val"), outputs)
        self.carried += 1
        return _like(n.meta.get("val"), _on_parts(call, rule, operands, factor, at))

    def _factor(self, rule: ShardingRule, operands: Sequence[Any]) -> tuple[str | None, int]:
        for value, dims in zip(operands, rule.operands, strict=True):
            if isinstance(value, Split):
                outer = 1
                for factor in dims[value.dim]:
                    if (outer, rule.extents[factor]) == (value.outer, value.extent) and factor not in rule.whole:
                        return factor, value.at
                    outer *= rule.extents[factor]
        if not rule.splittable:
            return None, 0
        chosen = int(torch.randint(len(rule.splittable), (1,), generator=self._generator))
        factor = rule.splittable[chosen]
        return factor, 1 + int(torch.randint(rule.extents[factor] - 1, (1,), generator=self._generator))


def _on_parts(call: Call, rule: ShardingRule, operands: Sequence[Any], factor: str, at: int) -> list[Any]:
    """Return the results of a call on two parts."""
    extent = rule.extents[factor]
    outputs = []
    for number, span in enumerate(((0, at), (at, extent))):
        part = {factor: span}
        given = []
        for n, (value, dims) in enumerate(zip(operands, rule.operands, strict=True)):
            is_split_so = isinstance(value, Split) and (value.outer, value.extent, value.at) == _place(
                rule, dims, factor, at, value.dim
            )
            shard = value.parts[number] if is_split_so else shard_of(_gathered(value), dims, rule.extents, part)
            has_factor = any(factor in dim for dim in dims)
            is_added_once = factor in rule.sums and n in rule.once and not has_factor
            given.append(torch.zeros_like(shard) if is_added_once and number else shard.contiguous())
        outputs.append(call.run(given, rule, part))
    results: list[Any] = []
    for n, (first, second) in enumerate(zip(*outputs, strict=True)):
        dims = rule.results[n]
        places = [i for i, dim in enumerate(dims) if factor in dim]
        if places:
            outer, _, _ = _place(rule, dims, factor, at, places[0])
            results.append(Split((first, second), places[0], outer, extent, at))
        elif factor in rule.sums and n in rule.summed:
            a, b = (at / extent, 1 - at / extent) if rule.is_mean else (1, 1)
            results.append(a * first + b * second)
        else:
            results.append(first)
    return results


def _place(rule: ShardingRule, dims: Dims, factor: str, at: int, dim: int) -> tuple[int, int, int]:
    """Return where a dim is split along a factor: extent of the factors outside, extent, place; zeros if it is not."""
    if factor not in dims[dim]:
        return (0, 0, 0)
    before = dims[dim][: dims[dim].index(factor)]
    return prod(rule.extents[f] for f in before), rule.extents[factor], at


def _values_of(value: object) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _values_of(item)
    elif isinstance(value, torch.Tensor | Split):
        yield value


def _filled_values(value: Any, tensors: Iterator[Any]) -> Any:
    if isinstance(value, list | tuple):
        return [_filled_values(item, tensors) for item in value]
    return next(tensors) if isinstance(value, torch.Tensor | Split) else value


def _gathered(value: Any) -> Any:
    """Return nested values with whole tensors in place of split ones."""
    if isinstance(value, dict):
        return {name: _gathered(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_gathered(item) for item in value)
    return value.whole() if isinstance(value, Split) else value


def _dtype(value: Any) -> Any:
    return value.parts[0].dtype if isinstance(value, Split) else value.dtype


def _like(example: Any, outputs: list[Any]) -> Any:
    """Return tensors as an operator returns them: one, or several."""
    return outputs[0] if isinstance(example, torch.Tensor) else outputs


def check_graph(
    program: Any, groups: Sequence[Sequence[Any]], seed: int, *, has_gradients: bool = True
) -> tuple[int, dict[int, str]]:
    """Run a graph whole and with random factors split, and compare results and gradients.

    Args:
        program: An exported program that returns a list.
        groups: The tensors that it is given; the results of the list's items depend on one group each.
        seed: Of the factors that are split, and of upstream gradients.
        has_gradients: Whether gradients are compared, too.

    Returns:
        The number of nodes that ran on parts, and by the group what differs.
    """
    module = program.module(check_guards=False)
    leaves, others = ([[_leaf(t, has_gradients) for t in group] for group in groups] for _ in range(2))
    torch.manual_seed(seed)
    results = [_strided(outputs) for outputs in module(*(leaf for group in leaves for leaf in group))]
    interpreter = Carrying(module, seed)
    torch.manual_seed(seed)
    others_made = _gathered(interpreter.run(*(leaf for group in others for leaf in group)))
    generator = torch.Generator().manual_seed(seed)
    differences = {}
    for n, (expected, given) in enumerate(zip(results, map(_strided, others_made), strict=True)):
        if [t.shape for t in given] != [t.shape for t in expected]:
            differences[n] = "the graph with random factors split gives results of other shapes"
            continue
        upstream = [_random(t, generator) for t in expected]
        gradients = zip(_gradients(given, others[n], upstream), _gradients(expected, leaves[n], upstream), strict=True)
        pairs = [(a.detach(), b.detach()) for a, b in zip(given, expected, strict=True)]
        pairs += [
            (_zeros(leaf) if a is None else a, _zeros(leaf) if b is None else b)
            for (a, b), leaf in zip(gradients, leaves[n], strict=True)
        ]
        if not all(is_close(a, b, b) for a, b in pairs):
            differences[n] = "the graph with random factors split gives other results or gradients"
    return interpreter.carried, differences


def _strided(value: Any) -> list[Any]:
    return [tensor for tensor in tensors_of(_flat(value)) if tensor.layout == torch.strided]


def _random(tensor: Any, generator: torch.Generator) -> Any:
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)


def _flat(value: Any) -> list[Any]:
    return list(torch.utils._pytree.tree_leaves(value))


# -- the OpInfo database


def operators() -> list[Any]:
    """Return the entries of PyTorch's OpInfo database with float64 and autograd, in order."""
    if importlib.util.find_spec("expecttest") is None and "expecttest" not in sys.modules:
        # PyTorch's test utilities derive a class from one of this package, which no sample needs.
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [op for op in op_db if torch.float64 in op.supported_dtypes("cpu") and op.supports_autograd]


def name_of(op: Any) -> str:
    """Return the name of an entry with that of its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


class _Applied(torch.nn.Module):
    """Entries as a module of the tensors of their samples; one export of many takes a tenth of the time."""

    def __init__(self, items: Sequence["_Item"]) -> None:
        super().__init__()
        self._ops = [item.op for item in items]
        self._given = [
            torch.utils._pytree.tree_flatten((item.sample.input, item.sample.args, item.sample.kwargs))
            for item in items
        ]

    def tensors(self) -> list[list[Any]]:
        """Return the tensors of each sample."""
        return [[v.detach() for v in values if isinstance(v, torch.Tensor)] for values, _ in self._given]

    def forward(self, *tensors: Any) -> list[Any]:
        """Return what each entry gives for other tensors."""
        rest, outputs = iter(tensors), []
        for op, (values, spec) in zip(self._ops, self._given, strict=True):
            filled_values = [next(rest) if isinstance(value, torch.Tensor) else value for value in values]
            first, args, kwargs = torch.utils._pytree.tree_unflatten(filled_values, spec)
            outputs.append(op(first, *args, **kwargs))
        return outputs


class _Checking(torch.fx.Interpreter):
    """Runs a graph and checks each node's rule."""

    def __init__(self, module: Any, outcomes: Sequence["Outcome"], rule_of: RuleOf) -> None:
        super().__init__(module)
        self._rule_of = rule_of
        self._outcomes: dict[Any, Outcome] = {}
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        returned = list(torch.utils._pytree.tree_unflatten(list(output.args[0]), module._out_spec))
        for outputs, outcome in zip(returned, outcomes, strict=True):
            pending = [node for node in _flat(outputs) if isinstance(node, torch.fx.Node)]
            while pending:
                node = pending.pop()
                if node not in self._outcomes:
                    self._outcomes[node] = outcome
                    pending += node.all_input_nodes

    def run_node(self, n: Any) -> Any:
        """Check a node, and run it."""
        schema = getattr(n.target, "_schema", None)
        if n.op == "call_function" and schema and not schema.is_mutable and n in self._outcomes:
            call = Call(n.target, *self.fetch_args_kwargs_from_env(n))
            outcome = self._outcomes[n]
            if str(call) not in outcome.calls:
                outcome.calls.add(str(call))
                outcome.report.add(check_call(call, rule_of=self._rule_of, seed=len(outcome.calls)))
        return super().run_node(n)


@dataclass
class Outcome:
    """What was found of one entry.

    Attributes:
        name: Its name.
        exported: Number of samples that export.
        refused: Why others do not.
        report: Of the nodes.
        calls: Nodes that were checked.
    """

    name: str
    exported: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    report: Report = field(default_factory=Report)
    calls: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Item:
    """A sample of an entry."""

    op: Any
    sample: Any
    outcome: Outcome


def check_entries(ops: Sequence[Any], samples: int, *, rule_of: RuleOf = sharding_rule) -> list[Outcome]:
    """Check the rules of all nodes that samples of entries export to, and their graph."""
    items = []
    outcomes = [Outcome(name_of(op)) for op in ops]
    for op, outcome in zip(ops, outcomes, strict=True):
        torch.manual_seed(0)
        given = list(islice(op.sample_inputs("cpu", torch.float64, requires_grad=False), 120))
        # Those of most dims and points first: numbers and empty tensors have nothing to split.
        given.sort(key=_size_of_sample, reverse=True)
        left_out = [_left_out(op, sample) for sample in given]
        outcome.refused.update({why: 1 for why in left_out if why})
        given = [sample for sample, why in zip(given, left_out, strict=True) if not why]
        given = given[:: max(1, len(given) // samples)][:samples]
        items += [_Item(op, sample, outcome) for sample in given]
    if items:
        _check_items(items, rule_of)
    return outcomes


def _tensors_of_sample(sample: Any) -> list[Any]:
    return list(tensors_of(_flat((sample.input, sample.args, sample.kwargs))))


def _left_out(op: Any, sample: Any) -> str:
    """Return why a sample is not run, "" where it is."""
    tensors = _tensors_of_sample(sample)
    if any(tensor.layout != torch.strided for tensor in tensors):
        return "sparse operands"
    if sample.kwargs.get("sparse"):
        return "sparse gradients"
    sizes = ((x.untyped_storage().nbytes(), x.numel() * x.element_size()) for x in tensors)
    if op.name.startswith("as_strided") and any(own > needed for own, needed in sizes):
        return "reads of its operand's storage what is not its operand's"
    return ""


def _size_of_sample(sample: Any) -> tuple[int, int]:
    tensors = _tensors_of_sample(sample)
    return max((t.dim() for t in tensors if t.numel()), default=0), sum(min(64, t.numel()) for t in tensors)


def _check_items(items: Sequence[_Item], rule_of: RuleOf) -> None:
    """Check samples in one graph; where that is not possible, in two."""
    module = _Applied(items)
    groups = module.tensors()
    tensors = [tensor for group in groups for tensor in group]
    is_exported = False
    try:
        program = torch.export.export(module, tuple(tensors), strict=False).run_decompositions({})
        program.module(check_guards=False)(*tensors)
        is_exported = True
        differences = _graph_differences(program, groups) if rule_of is sharding_rule else {}
    except Exception as error:  # noqa: BLE001 - the reason is reported
        if len(items) > 1:
            _check_items(items[: len(items) // 2], rule_of)
            _check_items(items[len(items) // 2 :], rule_of)
            return
        text = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        if not is_exported:
            items[0].outcome.refused[text] += 1
            return
        differences = {0: f"graph: {text}"}
    for item in items:
        item.outcome.exported += 1
    for number, difference in differences.items():
        items[number].outcome.report.wrong.append(difference)
    _Checking(program.module(check_guards=False), [item.outcome for item in items], rule_of).run(*tensors)


def _graph_differences(program: Any, groups: Sequence[Sequence[Any]]) -> dict[int, str]:
    try:
        return check_graph(program, groups, len(groups))[1]
    except RuntimeError as error:
        has_no_gradients = "differentiable" in str(error) or "leaf Variable" in str(error)
        if not has_no_gradients or len(groups) > 1:
            raise
        return check_graph(program, groups, len(groups), has_gradients=False)[1]


def in_child(check: Callable[[], Any], seconds: float) -> Any:
    """Return what a function returns in a child process; a text if it raises or the process dies.

    Several kernels do not check extents, and write where they should not.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which other tests' JAX has
        child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reading)
            warnings.simplefilter("ignore")
            try:
                data = pickle.dumps(check())
            except Exception:  # noqa: BLE001 - the parent reports it
                data = pickle.dumps(traceback.format_exc()[-1500:])
            with os.fdopen(writing, "wb") as file:
                file.write(data)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    end, chunks = time.monotonic() + seconds, list[bytes]()
    with os.fdopen(reading, "rb") as file:
        while select.select([file], [], [], max(0.0, end - time.monotonic()))[0]:
            chunk = os.read(file.fileno(), 1 << 16)
            if not chunk:
                break
            chunks.append(chunk)
        else:
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return pickle.loads(b"".join(chunks)) if status == 0 else f"ended with {status}"


def outcomes(entries: Sequence[Any], samples: int, size: int = 12) -> Iterator[Outcome]:
    """Yield what is found of each entry; several are checked in a child process, each alone if that dies."""
    for at in range(0, len(entries), size):
        ops = entries[at : at + size]
        found = in_child(lambda ops=ops: check_entries(ops, samples), 600)  # type: ignore[misc]
        if not isinstance(found, str):
            yield from found
        elif len(ops) > 1:
            yield from outcomes(ops, samples, 1)
        else:
            yield Outcome(name_of(ops[0]), report=Report(wrong=[found]))


def main() -> None:
    """Print a table of what was found; end with status 1 if a rule is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.importers.sharding_oracle", description=__doc__)
    parser.add_argument("names", nargs="*", help="entries [all]")
    parser.add_argument("--samples", type=int, default=4, metavar="N", help="samples of each entry [4]")
    parser.add_argument("--verbose", action="store_true", help="print a line for each entry")
    options = parser.parse_args()
    torch.set_num_threads(1)
    entries = [op for op in operators() if not options.names or {op.name, name_of(op)} & set(options.names)]
    found: list[Outcome] = []
    for outcome in outcomes(entries, options.samples):
        found.append(outcome)
        for wrong in outcome.report.wrong:
            print(f"WRONG {outcome.name}: {wrong}", flush=True)
        if options.verbose:
            print(f"{outcome.name}: {outcome.exported} exported, {dict(outcome.report.checked)}", flush=True)
    print(table_of(found))
    sys.exit(any(outcome.report.wrong for outcome in found))


def table_of(found: Sequence[Outcome]) -> str:
    """Return the numbers of entries, and those that are not split, by reason."""
    exported = [outcome for outcome in found if outcome.exported]
    equal = [outcome for outcome in exported if not outcome.report.wrong]
    split = [outcome for outcome in equal if outcome.report.checked]
    reasons: dict[str, list[str]] = {}
    for outcome in found:
        if not outcome.exported:
            reason = f"does not export: {', '.join(outcome.refused) or 'no sample'}"
        elif outcome.report.wrong:
            reason = "wrong"
        elif outcome.report.checked:
            continue
        elif outcome.report.unknown:
            reason = f"nothing known of {', '.join(sorted(outcome.report.unknown))}"
        else:
            reason = f"all dims mixed by {', '.join(sorted(outcome.report.whole)) or 'no operator'}"
        reasons.setdefault(reason, []).append(outcome.name)
    checks = sum(sum(outcome.report.checked.values()) for outcome in found)
    lines = [
        f"{len(found)} entries: {len(exported)} export, {len(equal)} equal, {len(split)} split along at least one dim",
        f"{checks} comparisons of nodes on parts",
        f"{sum(len(outcome.report.wrong) for outcome in found)} wrong",
        *(f"  {reason}: {' '.join(names)}" for reason, names in sorted(reasons.items())),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
