"""Results of a step, of a module and of one that should be equivalent, and their differences.

Here random numbers depend only on their shape during a step, and dropout keeps every point, with its usual scale, so
that both compute with the same ones.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from pase.importers.torch.export import tensors_of
from pase.importers.torch.live import LiveModel
from pase.targets.differences import Difference

_FLOOR = 1e-3
"""Gradients that are smaller than this share of the greatest one are compared as if they were as large: rounding leaves
something where gradients cancel."""

_OF_CHANGES = 1e-5
"""Changes are compared as if they were so large that the rounding of weights is this share of them."""

Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Computed:
    """Results of a step.

    Attributes:
        loss: None where it has none.
        outputs: The other float tensors that the module returned, as "output 0" by their position among them.
        gradients: Gradients of parameters, by name.
        held: Parameters and buffers after the forward pass, by name.
        changes: Changes of parameters by an update, by name.
    """

    loss: torch.Tensor | None
    outputs: Named
    gradients: Named
    held: Named
    changes: Named = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tensor is computed or first read.

    Attributes:
        number: Number of the layer, in the order of the graph.
        line: Line of the user's source, "" where it is unknown.
    """

    number: int
    line: str


NOWHERE = Place(number=0, line="")


def step(call: Callable[[], Any], held: Named, after: Callable[[], Named]) -> Computed:
    """Execute a step and return its results; gradients remain in the parameters.

    Args:
        call: Calls the module.
        held: Parameters and buffers by name, before the forward pass.
        after: Returns them after it.
    """
    for x in held.values():
        x.grad = None
    outputs = outputs_of(call())
    trained = [x for x in outputs.values() if x.requires_grad]
    numbers = [name for name, x in outputs.items() if x.requires_grad and x.numel() == 1]
    loss = outputs.pop(numbers[0]).reshape(()) if len(numbers) == 1 else None
    if loss is not None:
        loss.backward()
    elif trained:
        torch.autograd.backward(trained, [_weights(x) for x in trained])
    return Computed(
        loss=None if loss is None else loss.detach(),
        outputs={name: x.detach() for name, x in outputs.items()},
        gradients=gradients_of(held),
        held={name: whole(x.detach()) for name, x in after().items()},
    )


def gradients_of(held: Named) -> dict[str, torch.Tensor]:
    """Return the full gradients of parameters that have one; all ranks call it."""
    return {name: whole(x.grad.detach()) for name, x in held.items() if x.grad is not None}


def outputs_of(returned: Any) -> dict[str, torch.Tensor]:
    """Return the float tensors in a module's result, full, each once; all ranks call it."""
    tensors = {id(x): x for x in tensors_of(torch, returned)}.values()
    return {f"output {number}": whole(x) for number, x in enumerate(tensors) if x.is_floating_point()}


def whole(x: Any) -> Any:
    """Return the full tensor of one that ranks may shard; all ranks call it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def tensors_held(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module by all of their names."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return dict(named)


def with_loss(module: Any, loss: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a module that is called with its inputs followed by the targets of its loss."""
    if loss is None:
        called: Callable[..., Any] = module
        return called

    def called_with_targets(*given: Any, **named: Any) -> Any:
        if not named:
            return loss(module(*given[:-1]), given[-1])
        last = "targets" if "targets" in named else list(named)[-1]
        targets = named.pop(last)
        return loss(module(*given, **named), targets)

    return called_with_targets


def _weights(x: torch.Tensor) -> torch.Tensor:
    """Return pseudo-random weights of an output's elements, for a scalar where the module has no loss."""
    numbers = torch.arange(1, x.numel() + 1, device=x.device, dtype=torch.float64)
    return (torch.sin(numbers * 12.9898) / x.numel() ** 0.5).reshape(x.shape).to(x.dtype)


# -- what differs


@dataclass(frozen=True, kw_only=True)
class _Item:
    """One tensor of a step.

    Attributes:
        what: What messages call it.
        order: When a step computes it, as numbers to compare.
        line: Of the user's source.
        floor: The least size that its differences are compared with.
    """

    what: str
    order: tuple[int, int]
    line: str
    tensor: torch.Tensor
    floor: float = 0.0


def places_of(live: LiveModel) -> dict[str, Place]:
    """Return where parameters and buffers are first read and outputs are made, by their names and by "output 0"."""
    layers = layer_places(live)
    read = [(weight.parameter, layer) for (layer, _), weight in live.weights.items()]
    read += [(constant.buffer, layer) for (layer, _), constant in live.constants.items() if constant.buffer]
    found = {f"output {number}": layers[output.layer] for number, output in enumerate(live.outputs) if output.layer}
    losses = [output.layer for output in live.outputs if output.layer and not output.shape]
    if len(losses) == 1:
        found["loss"] = layers[losses[0]]
    for name, layer in sorted(read, key=lambda item: layers[item[1]].number):
        found.setdefault(name, layers[layer])
    return found


def layer_places(live: LiveModel) -> dict[str, Place]:
    """Return where each layer is computed, by its name."""
    lowered = live.model.lowered
    nodes = {node.name: node for node in live.model.traces[-1].nodes}
    found = {}
    for number, operator in enumerate(live.model.graph.operators):
        node = nodes.get(lowered.nodes.get(operator.name, ""))
        found[operator.name] = Place(number=number, line="" if node is None else node.origin.line)
    return found


def _items(computed: Computed, likewise: Computed, places: Mapping[str, Place]) -> dict[str, _Item]:
    """Return the tensors of a step in the order in which it computes them.

    Args:
        computed: The step.
        likewise: Another one, of which gradients that this one lacks are zeros here.
        places: Where tensors come from.
    """
    found: list[_Item] = []

    def add(what: str, name: str, order: tuple[int, int], tensor: torch.Tensor, floor: float = 0.0) -> None:
        found.append(_Item(what=what, order=order, line=places.get(name, NOWHERE).line, tensor=tensor, floor=floor))

    def number(name: str) -> int:
        return places.get(name, NOWHERE).number

    for name, x in computed.outputs.items():
        add(name, name, (0, number(name)), x)
    if computed.loss is not None:
        add("the loss", "loss", (1, 0), computed.loss)
    greatest = _greatest(computed.gradients)
    for name in {**computed.gradients, **likewise.gradients}:
        x = computed.gradients.get(name)
        x = torch.zeros_like(likewise.gradients[name]) if x is None else x
        # From the loss on.
        add(f"the gradient of {name!r}", name, (2, -number(name)), x, _FLOOR * greatest)
    for name, x in computed.held.items():
        add(f"{name!r} after it", name, (3, number(name)), x)
    greatest = _greatest(computed.changes)
    for name, x in computed.changes.items():
        # A change is the difference of two numbers that are rounded.
        rounded = float(computed.held[name].abs().max()) * torch.finfo(x.dtype).eps if x.numel() else 0.0
        add(f"the update of {name!r}", name, (4, number(name)), x, max(_FLOOR * greatest, rounded / _OF_CHANGES))
    found.sort(key=lambda item: item.order)
    return {item.what: item for item in found}


def _greatest(tensors: Named) -> float:
    return max((float(x.abs().max()) for x in tensors.values() if x.numel()), default=0.0)


def compared(
    found: Computed,
    expected: Computed,
    explained: float,
    places: Mapping[str, Place],
    exact: Computed | None = None,
    share: float = 0.0,
) -> tuple[list[Difference], int, list[str]]:
    """Return differences that rounding does not explain, in order; number of compared tensors; missing tensors.

    Args:
        found: Results under a plan.
        expected: Results of the module itself.
        explained: Relative difference that rounding explains in any module.
        places: Origins of tensors (`places_of`).
        exact: Results of the module itself with less rounding: its distance from these is rounding, too.
        share: Factor on that distance.
    """
    ours, theirs = _items(found, expected, places), _items(expected, found, places)
    exact_items = {} if exact is None else _items(exact, expected, places)
    differences, count, missing = list[Difference](), 0, list[str]()
    for what, item in theirs.items():
        other = ours.get(what)
        if other is None:
            missing.append(what)
        if other is None or not item.tensor.numel():
            continue
        count += 1
        limit = explained
        if what in exact_items and exact_items[what].tensor.shape == item.tensor.shape:
            limit = max(limit, share * distance(item.tensor, exact_items[what].tensor, item.floor)[0])
        relative, at = distance(other.tensor, item.tensor, item.floor)
        if relative > limit:
            shown = [float("nan"), float("nan")]
            if at is not None:
                shown = [float(numbers_of(x.tensor).flatten()[at]) for x in (other, item)]
            differences.append(
                Difference(
                    what=what,
                    line=item.line,
                    order=item.order,
                    found=shown[0],
                    expected=shown[1],
                    relative=relative,
                    explained=limit,
                )
            )
    return differences, count, missing


def distance(ours: torch.Tensor, theirs: torch.Tensor, floor: float) -> tuple[float, int | None]:
    """Return the greatest difference of two tensors, of the size of the second, and at which element."""
    if ours.shape != theirs.shape:
        return torch.inf, None
    ours, theirs = numbers_of(ours), numbers_of(theirs)
    alike = (ours == theirs) | (ours.isnan() & theirs.isnan())
    distance = torch.where(alike, 0.0, (ours - theirs).abs()).nan_to_num(torch.inf)
    size = max(float(theirs.abs().nan_to_num(0.0, 0.0).max()), floor, 1e-30)
    return float(distance.max()) / size, int(distance.argmax())


def numbers_of(x: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor in float64, of complex ones both parts."""
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).to(torch.float64)


# -- the same random numbers


class Repeatable(TorchDispatchMode):
    """Makes random numbers depend only on their shape; dropout masks keep all points.

    Attributes:
        narrow: Float types other than float64 in the computation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.narrow: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = self._made(function, args, kwargs or {})
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64:
                self.narrow.add(x.dtype)
        return made

    def _made(self, function: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **given)
        name = function._schema.name
        if name == "aten::native_dropout":
            x, rate = args[:2]
            return x / (1 - rate) if rate < 1 else torch.zeros_like(x), torch.ones_like(x, dtype=torch.bool)
        if name == "aten::bernoulli_":
            return args[0].fill_(1)
        if name == "aten::bernoulli":
            return torch.ones_like(args[0])
        torch.manual_seed(0)
        return function(*args, **given)


@contextmanager
def repeatable() -> Iterator[Repeatable]:
    """Compute in the types of the tensors, with random numbers that are the same each time."""
    mode = Repeatable()
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        # A fused kernel draws its own dropout mask.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(mode)
        yield mode
