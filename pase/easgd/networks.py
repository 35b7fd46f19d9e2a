"""Where a network to train comes from: a model's name, a plan, or a program that `pase emit` wrote."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pase.errors import TrainingError
from pase.graph import Scalar
from pase.importers import load
from pase.machine import DEFAULT_MACHINE, Machine
from pase.planning.plan import Plan
from pase.planning.plan_file import read_plan
from pase.planning.planner import Progress, search
from pase.targets.mesh_tensorflow.emitter import emit

_EXPECTED = "expected a file that pase emit wrote, which declares 'build' and ends in main(build, num_devices=N)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A network to make replicas of.

    build: declares its layers on a program. num_devices: of one replica. called: what messages call it.
    """

    build: Callable[[Any], Any]
    num_devices: int
    called: str


def load_build(
    source: str,
    *,
    devices: int = 1,
    batch: int | None = None,
    arguments: Mapping[str, Scalar] | None = None,
    machine: Machine | str = DEFAULT_MACHINE,
    on_progress: Progress | None = None,
) -> Loaded:
    """Return the network of a program (a path that ends in .py), a plan (.json) or a model (anything else).

    devices, batch, arguments, machine: for a model, of which the best strategy is searched; devices: of one replica.
    A program's code is executed, as `pase launch` does; that of a plan or a model is written here. Raises TrainingError
    where a file is no emitted program, and what `load`, `search` and `emit` raise.
    """
    reader = _READERS.get(Path(source).suffix)
    if reader is not None:
        return reader(Path(source))
    graph = load(source, batch=batch, arguments=dict(arguments or {}))
    return build_of_plan(search(graph, devices, machine=machine, on_progress=on_progress))


def build_of_plan(plan: Plan) -> Loaded:
    """Return the network of a plan, emitted and compiled in memory."""
    namespace = _executed(emit(plan), f"<{plan.graph.name}>")
    return Loaded(build=namespace["build"], num_devices=plan.num_devices, called=plan.graph.name)


def build_of_program(path: Path) -> Loaded:
    """Return the network of an emitted program; its code is executed, but for the call of `main`."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, str(path))
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error.strerror or error}; {_EXPECTED}") from None
    except (SyntaxError, ValueError) as error:
        raise TrainingError(f"{path} is no Python program: {error}; {_EXPECTED}") from None
    num_devices = _num_devices(tree)
    if num_devices is None:
        raise TrainingError(f"{path} has no call of main with num_devices; {_EXPECTED}")
    try:
        namespace = _executed(text, str(path))
    # The code is the user's: it may raise anything.
    except Exception as error:
        raise TrainingError(f"{path} raised {type(error).__name__}: {error}; {_EXPECTED}") from error
    build = namespace.get("build")
    if not callable(build):
        raise TrainingError(f"{path} declares no function 'build'; {_EXPECTED}")
    return Loaded(build=build, num_devices=num_devices, called=str(path))


def _build_of_plan_file(path: Path) -> Loaded:
    return build_of_plan(read_plan(path))


_READERS: Mapping[str, Callable[[Path], Loaded]] = {".py": build_of_program, ".json": _build_of_plan_file}
"""By the ending of a path."""


def _executed(text: str, called: str) -> dict[str, Any]:
    # Under another name than __main__, so that it only declares.
    namespace: dict[str, Any] = {"__name__": "pase_emitted", "__file__": called}
    exec(compile(text, called, "exec"), namespace)
    return namespace


def _num_devices(tree: ast.Module) -> int | None:
    """Return the number that a program hands to `main`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "main":
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg == "num_devices" and isinstance(value, int) and value > 0:
                    return value
    return None
