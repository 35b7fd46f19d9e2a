"""Readers of PyTorch's side: checkpoints, those of 0.10, files of weights, and calls of PyTorch's own operators."""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from pase.graph.body import Body, Step, verify_body
from pase.graph.sources import SOURCE_OPERATORS
from tests.fuzz.harness import Reader, Target
from tests.fuzz.mutations import NUMBERS, change_bytes, change_document, word

_OLD = Path(__file__).parents[1] / "targets" / "torch" / "checkpoint_0_10"


def _trained() -> tuple[Any, Any]:
    import torch

    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(5, 6)).square().sum().backward()
    optimizer.step()
    return module, optimizer


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _replaced(folder: Path, files: Mapping[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _load(folder: Path, trained: tuple[Any, Any]) -> dict[str, Any]:
    import copy

    from pase.targets.torch.checkpoints import load_checkpoint

    # What a reader that fails has half changed is of no use to the next one.
    module, optimizer = copy.deepcopy(trained)
    assert load_checkpoint(folder, module, optimizer) is not None
    return {name: value.detach().numpy() for name, value in module.state_dict().items()}


def _checkpoints() -> Reader:
    trained = _trained()
    files: dict[str, bytes] = {}
    names: list[str] = []

    def read(rng: Random, folder: Path) -> None:
        from pase.targets.torch.checkpoints import _record_text, save_checkpoint

        if not files:
            path = save_checkpoint(folder / "first", *trained, step=2)
            files.update(_files(path))
            names.append(path.name)
        changed = dict(files)
        says_otherwise = rng.random() < 0.6
        if says_otherwise:
            record = json.loads(changed["training.json"])
            record = change_document(record, rng, rng.choice((1, 1, 2)))
            # What it says may be wrong though its checksum is right.
            if isinstance(record, dict) and rng.random() < 0.85:
                record.pop("sha256", None)
                with suppress(ValueError, TypeError, RecursionError):
                    changed["training.json"] = _record_text(record).encode("utf-8", "surrogatepass")
            else:
                changed["training.json"] = json.dumps(record).encode()
        if not says_otherwise or rng.random() < 0.2:
            name = rng.choice([*changed])
            if rng.random() < 0.1:
                del changed[name]
            else:
                changed[name] = change_bytes(changed[name], rng)
        _replaced(folder / names[0], changed)
        found = _load(folder / names[0], trained)
        if not says_otherwise:
            for name, value in trained[0].state_dict().items():
                assert np.array_equal(found[name], value.detach().numpy()), name

    return read


def _old_checkpoints() -> Reader:
    (saved,) = _OLD.glob("step-*")
    trained, files = _trained(), _files(saved)

    def read(rng: Random, folder: Path) -> None:
        changed = dict(files)
        for name in rng.sample(sorted(changed), rng.choice((1, 1, 2))):
            changed[name] = change_bytes(changed[name], rng)
        _replaced(folder / saved.name, changed)
        _load(folder / saved.name, trained)

    return read


def _weights() -> Reader:
    import torch
    from safetensors.torch import save

    from pase.targets.torch.values import from_file

    tensors = {"a.weight": torch.ones(3, 2), "a.bias": torch.zeros(3)}
    packed = save(tensors)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "one.safetensors")}
    pickled: list[bytes] = []

    def read(rng: Random, folder: Path) -> None:
        if not pickled:
            torch.save({"state_dict": tensors}, folder / "first.pt")
            pickled.append((folder / "first.pt").read_bytes())
        kind = rng.random()
        if kind < 0.4:
            path, data = folder / "one.safetensors", change_bytes(packed, rng)
            if rng.random() < 0.7:
                length = int.from_bytes(packed[:8], "little")
                text = json.dumps(change_document(json.loads(packed[8 : 8 + length]), rng, 1)).encode()
                data = len(text).to_bytes(8, "little") + text + packed[8 + length :]
        elif kind < 0.6:
            (folder / "one.safetensors").write_bytes(packed)
            path = folder / "model.safetensors.index.json"
            data = json.dumps(change_document(json.loads(json.dumps(index)), rng, 1)).encode()
            data = change_bytes(data, rng) if rng.random() < 0.2 else data
        else:
            path, data = folder / "model.pt", change_bytes(pickled[0], rng)
        path.write_bytes(data)
        source = from_file(path)
        for name, tensor in tensors.items():
            held = tuple(((0, extent),) for extent in tensor.shape)
            assert source([name], tuple(tensor.shape), held).shape == tensor.shape

    return read


_POINTWISE = ("abs", "exp", "log", "neg", "relu", "sigmoid", "silu", "tanh")


def _calls() -> Reader:
    """Calls of operators as plans hold them: what is accepted where a plan is read may be refused before it runs."""
    from pase.targets.torch.layers.sources import source
    from pase.targets.torch.program import Program
    from pase.targets.torch.tensor import Dim, reshard

    names = sorted(SOURCE_OPERATORS)
    others = ("_reshape_alias", "as_strided", "from_file", "empty_like", "max_pool2d_with_indices_backward", "set_")
    extents = {"b": 4, "n": 3, "i": 12, "one": 1}

    def argument(rng: Random) -> Any:
        kind = rng.random()
        if kind < 0.45:
            return {"operand": rng.randrange(3 if kind < 0.05 else 2)}
        if kind < 0.75:
            return rng.choice(NUMBERS[:24])
        if kind < 0.85:
            return [argument(rng) for _ in range(rng.randrange(4))]
        return rng.choice((None, True, False, 0.5, {"dtype": "int64"}, {"number": "inf"}, {"device": ""}, word(rng)))

    def read(rng: Random, _folder: Path) -> None:
        import torch

        name = rng.choice(names) if rng.random() < 0.95 else rng.choice(others)
        packet = getattr(torch.ops.aten, name, None)
        overloads = packet.overloads() if packet is not None else ["default"]
        operator = f"aten.{name}.{rng.choice(overloads)}"
        arguments = [{"operand": 0}, *(argument(rng) for _ in range(rng.choice((0, 0, 1, 1, 2, 3, 5))))]
        text = json.dumps([arguments, {word(rng): argument(rng)} if rng.random() < 0.1 else {}])
        made = [["b"], ["n"]] if rng.random() < 0.5 else [[d] for d in rng.sample(sorted(extents), rng.randrange(4))]
        layouts = [[["b"], ["n"]], [["b"], ["n"]], made]
        is_index = rng.random() < 0.5
        if rng.random() < 0.3:
            # One that is right, or nearly so.
            operator, is_index = f"aten.{rng.choice(_POINTWISE)}.default", False
            layouts[2] = [["b"], ["n"]]
            given = [{"operand": 0}, *(argument(rng) for _ in range(rng.random() < 0.3))]
            text = json.dumps([given, {}])
        dims = tuple(d for axis in layouts[2] for d in axis)
        options = (("operator", operator), ("arguments", text), ("layouts", json.dumps(layouts)))
        step = Step(result="t", function="source", operands=("x", "y"), dims=dims, options=options)
        verify_body(Body(steps=(step,)), layer="l", reads=["x", "y"], dims=tuple(extents))
        program = Program(rank=0, num_devices=1)
        mesh = program.mesh("layer", [])
        known = {d: Dim(d, extent) for d, extent in extents.items()}
        rows = [known["b"], known["n"]]
        x = reshard(program.floats("x", (4, 3)), mesh, rows)
        y = reshard(program.indices("y", (4, 3), below=3), mesh, rows)
        own = [[[known[d] for d in axis] for axis in layout] for layout in layouts]
        source(operator, [x, y], text, own, is_index=is_index)

    return read


def _quiet(prepare: Any) -> Any:
    def prepared() -> Reader:
        import warnings

        reader = prepare()

        def read(rng: Random, folder: Path) -> None:
            # PyTorch warns of arguments that it takes all the same.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reader(rng, folder)

        return read

    return prepared


TARGETS = (
    Target(name="torch_checkpoint", prepare=_checkpoints, share=2),
    Target(name="old_torch_checkpoint", prepare=_old_checkpoints, share=2),
    Target(name="torch_weights", prepare=_quiet(_weights), share=2),
    Target(name="torch_calls", prepare=_quiet(_calls), share=2),
)
