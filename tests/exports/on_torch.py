"""Networks with exported DTensor placements, on ranks: what each of them holds of every tensor.

Keys are "layer|group|tensor", groups "inputs", "parameters", "gradients" and "outputs", and "loss".
"""

import runpy
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from pase.graph import Access, Graph, Operator, Role

Tensors = dict[str, torch.Tensor]

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
}


class Alone:
    """How tensors lie in a single process: as they are."""

    def laid(self, name: str, group: str, which: int | str, x: torch.Tensor) -> torch.Tensor:
        return x

    def einsum(self, operator: Operator, equation: str, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, *tensors)

    def attention(self, operator: Operator, *tensors: torch.Tensor) -> torch.Tensor:
        return attended(*tensors)


class Laid:
    """How tensors lie on the mesh of an exported module."""

    def __init__(self, text: str) -> None:
        module: dict[str, Any] = {}
        exec(compile(text, "<exported>", "exec"), module)
        self._placements = module["PLACEMENTS"]
        self._mesh = module["device_mesh"]("cpu")

    def laid(self, name: str, group: str, which: int | str, x: torch.Tensor) -> torch.Tensor:
        placements = self._placements[name][group][which]
        if isinstance(x, DTensor):
            return x.redistribute(self._mesh, placements)
        return distribute_tensor(x, self._mesh, placements)

    def einsum(self, operator: Operator, equation: str, *tensors: torch.Tensor) -> torch.Tensor:
        if all(tensor.ndim == 2 for tensor in tensors):
            y = tensors[0] @ tensors[1]
            # What PyTorch makes of the product of tensors that lie so is what the plan expects.
            assert list(y.placements) == self._computed(operator), (operator.name, y.placements)
            return y
        return self._local(operator, lambda *parts: torch.einsum(equation, *parts), *tensors)

    def attention(self, operator: Operator, *tensors: torch.Tensor) -> torch.Tensor:
        return self._local(operator, attended, *tensors)

    def _computed(self, operator: Operator) -> list[Any]:
        entry = self._placements[operator.name]
        return list(entry.get("partial_outputs", entry["outputs"])[0])

    def _local(self, operator: Operator, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """Compute a layer on each process's own parts, of which PyTorch is told how those of the result lie."""
        computed = self._computed(operator)
        lie = [list(tensor.placements) for tensor in tensors]
        # Where a layer splits what a tensor does not have, each part has its own share of the gradient.
        shares = [
            [
                Partial() if own == Replicate() and any(other != Replicate() for other in (*others, result)) else own
                for own, result, *others in zip(placements, computed, *lie, strict=True)
            ]
            for placements in lie
        ]
        mapped = local_map(
            function,
            out_placements=computed,
            in_placements=tuple(lie),
            in_grad_placements=tuple(shares),
            device_mesh=self._mesh,
        )
        return mapped(*tensors)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention of q to k and v, all [b, s or t, h, k]."""
    scores = torch.einsum("bshk,bthk->bhst", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhst,bthk->bshk", torch.softmax(scores, -1), v)


def run(graph: Graph, weights: Tensors, data: Tensors, where: Alone | Laid) -> tuple[torch.Tensor, Tensors]:
    """Return the loss and what each layer had: its inputs, parameters and outputs by "layer|group|tensor"."""
    values: Tensors = {}
    had: Tensors = {}
    for operator in graph.operators:
        inputs, parameters = [], {}
        for position, read in enumerate(operator.reads):
            key = f"{operator.name}|{read.tensor}"
            if read.role is Role.PARAMETER:
                parameters[read.tensor] = had[f"{operator.name}|parameters|{read.tensor}"] = weights[key]
                continue
            edge = graph.incoming.get((operator.name, position))
            x = data[key] if edge is None else values[edge.producer]
            inputs.append(where.laid(operator.name, "inputs", len(inputs), x))
            had[f"{operator.name}|inputs|{read.tensor}"] = inputs[-1]
        y = KINDS[operator.kind](operator, inputs, parameters, where)
        values[operator.name] = had[f"{operator.name}|outputs|y"] = y
    last = graph.operators[-1]
    labels = had[f"{last.name}|inputs|labels"]
    chosen = torch.nn.functional.one_hot(whole(labels), last.writes[0].shape[-1]).to(torch.float64)
    return -(whole(values[last.name]) * chosen).sum() / prod(labels.shape), had


def whole(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its parts."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def _dense(operator: Operator, inputs: list[Any], parameters: Tensors, where: Alone | Laid) -> torch.Tensor:
    x, w, *_ = operator.reads
    equation = f"{_letters(operator, x)},{_letters(operator, w)}->{_letters(operator, operator.writes[0])}"
    y = where.laid(operator.name, "outputs", 0, where.einsum(operator, equation, inputs[0], parameters["w"]))
    if "bias" in parameters:
        y = y + parameters["bias"]
    return where.laid(operator.name, "outputs", 0, ACTIVATIONS[operator.attribute("activation", "")](y))


def _letters(operator: Operator, access: Access) -> str:
    names = list(operator.extents)
    return "".join(chr(ord("a") + names.index(axis)) for axis in access.index_map if isinstance(axis, str))


def _add(operator: Operator, inputs: list[Any], parameters: Tensors, where: Alone | Laid) -> torch.Tensor:
    return where.laid(operator.name, "outputs", 0, inputs[0] + inputs[1])


def _layer_norm(operator: Operator, inputs: list[Any], parameters: Tensors, where: Alone | Laid) -> torch.Tensor:
    x, scale, shift = inputs[0], parameters["scale"], parameters["shift"]
    centred = x - x.mean(-1, keepdim=True)
    y = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5) * scale + shift
    return where.laid(operator.name, "outputs", 0, y)


def _attention(operator: Operator, inputs: list[Any], parameters: Tensors, where: Alone | Laid) -> torch.Tensor:
    return where.laid(operator.name, "outputs", 0, where.attention(operator, *inputs))


def _softmax_loss(operator: Operator, inputs: list[Any], parameters: Tensors, where: Alone | Laid) -> torch.Tensor:
    # PyTorch brings the classes together for this, wherever they lie.
    return where.laid(operator.name, "outputs", 0, torch.log_softmax(inputs[0], -1))


KINDS: Mapping[str, Callable[[Operator, list[Any], Tensors, Alone | Laid], torch.Tensor]] = {
    "fan_out": lambda _, inputs, __, ___: inputs[0],
    "dense": _dense,
    "elementwise": _add,
    "layer_norm": _layer_norm,
    "attention": _attention,
    "softmax_loss": _softmax_loss,
}


def numbers(graph: Graph) -> tuple[Tensors, Tensors]:
    """Return weights and data by "layer|tensor", the same in every process."""
    random = torch.Generator().manual_seed(0)
    weights, data = {}, {}
    for operator in graph.operators:
        for position, read in enumerate(operator.reads):
            key = f"{operator.name}|{read.tensor}"
            if read.role is Role.INDEX:
                data[key] = torch.randint(0, operator.writes[0].shape[-1], read.shape, generator=random)
            elif read.role is Role.PARAMETER:
                weights[key] = torch.randn(read.shape, generator=random, dtype=torch.float64) / 4
            elif (operator.name, position) not in graph.incoming:
                data[key] = torch.randn(read.shape, generator=random, dtype=torch.float64)
    return weights, data


def held(graph: Graph, where: Alone | Laid) -> dict[str, Any]:
    """Return what one process had in a step: every tensor of every layer, gradients of parameters, the loss."""
    weights, data = numbers(graph)
    for key, weight in weights.items():
        name, tensor = key.split("|")
        weights[key] = where.laid(name, "parameters", tensor, weight).detach().requires_grad_()
    loss, had = run(graph, weights, data, where)
    loss.backward()  # type: ignore[no-untyped-call]
    for key, weight in weights.items():
        name, tensor = key.split("|")
        assert weight.grad is not None
        had[f"{name}|gradients|{tensor}"] = where.laid(name, "parameters", tensor, weight.grad)
    local = {key: x.to_local() if isinstance(x, DTensor) else x for key, x in {**had, "loss": loss}.items()}
    return {key: x.detach().numpy() for key, x in local.items()}


def held_by_rank(_rank: int, _world: int, graph: Graph, text: str) -> dict[str, Any]:
    """Return what a rank had, which learns of the plan what the text of an exported module says alone."""
    return held(graph, Laid(text))


def example(_rank: int, _world: int, folder: Path) -> None:
    """Run the program of the documentation: its loss and gradients are those of this process alone."""
    random = torch.Generator().manual_seed(0)
    shapes = {"fc1": (784, 1024), "fc2": (1024, 1024), "fc3": (1024, 10)}
    weights = {
        name: {
            "w": torch.randn(shape, dtype=torch.float64, generator=random) / 32,
            "bias": torch.randn(shape[1], dtype=torch.float64, generator=random),
        }
        for name, shape in shapes.items()
    }
    x = torch.randn(32, 784, dtype=torch.float64, generator=random)
    labels = torch.randint(0, 10, (32,), generator=random)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        # The ranks are a group already.
        patch.setattr(dist, "init_process_group", {"gloo": None}.__getitem__)
        program = runpy.run_path(str(folder / "with_torch.py"))
    laid = program["lay"](weights)
    found = program["loss"](laid, x, labels)
    found.backward()
    leaves = {(layer, name): own.requires_grad_() for layer, of in weights.items() for name, own in of.items()}
    for layer in weights:
        x = torch.relu(x) if layer != "fc1" else x
        x = x @ leaves[layer, "w"] + leaves[layer, "bias"]
    expected = torch.nn.functional.cross_entropy(x, labels)
    expected.backward()  # type: ignore[no-untyped-call]
    assert abs(found - expected) < 1e-12
    for (layer, name), leaf in leaves.items():
        assert (laid[layer][name].grad.full_tensor() - leaf.grad).abs().max() < 1e-12, (layer, name)
