"""`FirstStep`: before the first training step, compare the trace of a module with the module itself.

Rank 0 runs both unsharded, with the initial values and the step's own inputs, and compares losses, outputs, gradients
and buffers (`comparison.py`); the others wait for its result. Differences above rounding are an error: in the module's
types first, and confirmed in float64.

A module that is too large for one device is compared with repeated blocks reduced to two and with few examples, or not
at all; a note says so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pase.errors import PaseError, ProgramError
from pase.graph import rounding
from pase.graph.precision import FLOAT32
from pase.importers.front_end import first_line
from pase.importers.torch.export import unwrapped
from pase.importers.torch.live import LiveModel, trace_live
from pase.importers.torch.training import held_instead, restored
from pase.planning.plan import Plan, on_one_device
from pase.planning.planner import search
from pase.targets.torch.aten import AtenLayers
from pase.targets.torch.collectives import Groups
from pase.targets.torch.comparison import (
    Computed,
    Named,
    compared,
    places_of,
    repeatable,
    step,
    tensors_held,
    whole,
    with_loss,
)
from pase.targets.torch.messages import told_by
from pase.targets.torch.module import Parallel
from pase.targets.torch.parameters import install, state_of
from pase.targets.torch.values import from_tensors

_MOST_FLOP = {"cpu": 1e12, "cuda": 1e15}
"""Maximum FLOP of the compared forward pass, by device type: half a minute for both with backward passes."""

_MOST_MEMORY = 0.5
"""Share of the memory that is free."""

_FEW_EXAMPLES = 4
_FEW_BLOCKS = 2


class FirstStep:
    """Compares a module with its trace, once.

    Args:
        module: The unmodified module; it is restored afterwards.
        loss: Separate loss function, if any.
        live: The trace.
        plan: Plan of the parallel module.
    """

    def __init__(self, module: nn.Module, loss: Any, live: LiveModel, plan: Plan) -> None:
        self._module, self._loss, self._live, self._plan = unwrapped(torch, module), loss, live, plan

    def run(
        self,
        parallel: Parallel,
        inputs: Mapping[str, Any],
        call: Callable[[Mapping[str, Any]], Any],
        device: torch.device,
    ) -> list[str]:
        """Compare, and return notes; all ranks call it.

        Args:
            parallel: The module under the plan, before its first step.
            inputs: Inputs by name, of a step or micro-batch, or this rank's part of them.
            call: Returns the positional and keyword arguments of a call with other inputs.
            device: Device to compare on.

        Raises:
            ProgramError: The module's results differ.
        """
        values = _whole_values(parallel)
        found: tuple[str, str] = "", ""
        if not dist.is_initialized() or dist.get_rank() == 0:
            shapes = dict(zip(self._live.call.names, self._live.call.shapes, strict=True))
            found = self._found(values, {name: _filled(x, shapes[name]) for name, x in inputs.items()}, call, device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            found = told_by(0, list(found))
        problem, note = found
        if problem:
            raise ProgramError(problem)
        return [note] if note else []

    def _found(
        self, values: Named, inputs: Mapping[str, Any], call: Callable[[Mapping[str, Any]], Any], device: torch.device
    ) -> tuple[str, str]:
        """Return the differences, and a note of what was not compared; "" for none."""
        # In the types of the values, ignoring the plan's.
        alone = on_one_device(replace(self._plan, graph=self._plan.graph.in_precision(FLOAT32)))
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
                if reason := _too_large(alone, values, device):
                    return self._found_in_part(values, inputs, call, device, reason)
                return self._compared(self._live, alone, values, call(inputs), device), ""
        # The module's own code may raise anything when it runs on actual values.
        except Exception as error:  # noqa: BLE001
            return "", f"the first step was not compared with the module itself: {first_line(error)}"

    def _found_in_part(
        self,
        values: Named,
        inputs: Mapping[str, Any],
        call: Callable[[Mapping[str, Any]], Any],
        device: torch.device,
        reason: str,
    ) -> tuple[str, str]:
        """Compare the module with its repeated blocks cut to two, with few examples."""
        said = f"the first step was not compared with the module itself, which {reason}"
        names = {id(tensor): name for name, tensor in tensors_held(self._module).items()}
        count = min((x.shape[0] for x in inputs.values() if x.dim()), default=1)
        few = min(count, _FEW_EXAMPLES)
        with _cut(self._module) as num_left_out:
            positional, keywords = call({name: x[:few] if x.dim() else x for name, x in inputs.items()})
            try:
                source = (self._module, positional, keywords, *([self._loss] if self._loss else []))
                live = trace_live(source)
                alone = search(live.model.graph, 1)
            except PaseError as error:
                return "", f"{said}, nor with its blocks cut to {_FEW_BLOCKS}: {error}"
            own = {name: values[names[id(tensor)]] for name, tensor in tensors_held(self._module).items()}
            if _too_large(alone, own, device):
                return "", f"{said}, with its blocks cut to {_FEW_BLOCKS} and {few} examples, too"
            problem = self._compared(live, alone, own, (positional, keywords), device)
        return (
            problem,
            f"the module {reason}: it was compared without {num_left_out} repeated blocks, of {few} examples",
        )

    def _compared(self, live: LiveModel, plan: Plan, values: Named, given: Any, device: torch.device) -> str:
        """Return the differences above rounding, "" for none."""
        low = any(x.dtype in (torch.bfloat16, torch.float16) for x in values.values())
        first = torch.float32 if low else None
        problem = self._compared_in(first, live, plan, values, given, device)
        if not problem or torch.float64 in {x.dtype for x in values.values()}:
            return problem
        try:
            return self._compared_in(torch.float64, live, plan, values, given, device)
        # A module may require a type: the result in its own type is then final.
        except (RuntimeError, TypeError, ValueError):
            return problem

    def _compared_in(
        self, dtype: torch.dtype | None, live: LiveModel, plan: Plan, values: Named, given: Any, device: torch.device
    ) -> str:
        def converted(x: torch.Tensor) -> torch.Tensor:
            x = x.to(device, copy=True)
            return x.to(dtype) if dtype is not None and x.is_floating_point() else x

        own = {name: converted(x) for name, x in values.items()}
        positional, keywords = torch.utils._pytree.tree_map_only(torch.Tensor, converted, given)
        with restored(torch, self._module), held_instead(torch, self._module, lambda name, _: own[name]) as held:
            if not self._module.training:
                self._module.train()
            call = with_loss(self._module, self._loss)
            with repeatable():
                expected = step(lambda: call(*positional, **keywords), held, lambda: tensors_held(self._module))
            with repeatable():
                alone = _Alone(self._module, live, plan, values={n: converted(x) for n, x in values.items()})
                try:
                    found = step(lambda: alone(*positional, **keywords), alone.tensors(), alone.tensors)
                finally:
                    alone.release()
        return _difference(found, expected, live, len(plan.layers))


# -- the module's counterpart


class _Alone(Parallel):
    """The trace of a module, on one device, in the types of its values; without dropout."""

    _drops_nothing = True

    def __init__(self, module: nn.Module, live: LiveModel, plan: Plan, *, values: Named) -> None:
        nn.Module.__init__(self)
        self._aten = AtenLayers(live, plan)
        self._prepare(module, live, plan, rank=0, seed=0)
        self._groups = Groups(0, 1)
        self._sum_groups = self._groups.separate("sums")
        self._state = state_of(module)
        self._boxes = self._read(0)
        self._mode(True)
        install(self, self._state, self._stored, None, from_tensors(values), device=self._device)
        self.train()

    def _output(self, value: Any, shape: tuple[int, ...], _placed: Any) -> Any:
        return value.reshape(shape)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by all of their names."""
        return {name: self._tensor(name) for name in self._state.order}

    def release(self) -> None:
        """Break reference cycles, so that its memory is freed immediately."""
        self.__dict__.clear()


def _difference(found: Computed, expected: Computed, live: LiveModel, num_layers: int) -> str:
    """Describe the largest difference that rounding does not explain; "" where there is none."""
    # In float64, too, a module may compute parts of itself in float32.
    explained = rounding("float32", "float32", num_layers)
    differences, _, _ = compared(found, expected, explained, places_of(live))
    if not differences:
        return ""
    largest = max(differences, key=lambda difference: difference.relative)
    return (
        f"the plan's program computes something else than the module: {largest.text}; train without a plan, or leave "
        'out what is not followed (verify="off" trains all the same; pase.check shows all that differs)'
    )


# -- values, inputs and sizes


def _whole_values(parallel: Parallel) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers, on rank 0; all ranks call it."""
    found, persistent = parallel.full_state_dict(), {*parallel.state_dict(keep_vars=True)}
    for name, buffer in parallel.named_buffers(remove_duplicate=False):
        if name not in persistent:
            found[name] = whole(buffer.detach()).to("cpu", copy=True)
    return found


def _filled(x: Any, shape: tuple[int, ...]) -> Any:
    """Return a whole input, of which a rank may have only its own examples, by repeating these."""
    if tuple(x.shape) == shape:
        return x
    return x[torch.arange(shape[0], device=x.device) % x.shape[0]]


def _too_large(plan: Plan, values: Named, device: torch.device) -> str:
    """Return why a module does not run on one device, "" if it does."""
    flop = plan.graph.forward_flop()
    if flop > _MOST_FLOP.get(device.type, 0.0):
        return f"is too much work for one device ({flop:.1e} FLOP a forward pass)"
    held = sum(x.numel() * x.element_size() for x in values.values())
    # Weights and gradients of both, and tensors saved for backward.
    needed = plan.peak.bytes + 3 * held
    free = _free_bytes(device)
    if needed > _MOST_MEMORY * free:
        return f"is too large for one device ({needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free)"
    return ""


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


@contextmanager
def _cut(module: nn.Module) -> Iterator[int]:
    """Reduce runs of equal blocks to two, and yield how many are omitted."""
    left_out = 0
    with ExitStack() as stack:
        for part in list(module.modules()):
            if not isinstance(part, nn.ModuleList | nn.Sequential) or len(part) <= _FEW_BLOCKS:
                continue
            kept = [
                block for i, block in enumerate(part) if not _is_repeated(list(part)[max(0, i - _FEW_BLOCKS) : i + 1])
            ]
            if len(kept) < len(part):
                left_out += len(part) - len(kept)
                stack.callback(setattr, part, "_modules", part._modules)
                part._modules = {str(i): block for i, block in enumerate(kept)}
        yield left_out


def _is_repeated(blocks: Sequence[nn.Module]) -> bool:
    """Return whether there are more equal blocks than are kept."""
    kinds = [
        (type(block), [(name, x.shape, x.dtype) for name, x in block.state_dict(keep_vars=True).items()])
        for block in blocks
    ]
    return len(blocks) > _FEW_BLOCKS and all(kind == kinds[0] for kind in kinds)
