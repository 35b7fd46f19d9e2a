"""What a start takes and loads: `import pase`, `pase --help`, `--version` and the completion of a command."""

import ast
import inspect
import json
import os
import pickle
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pase
from scripts.benchmarks.startup import BARS_S, STARTS, table
from scripts.benchmarks.tables import ROOT
from scripts.benchmarks.timing import Timing

FRAMEWORKS = {
    *("tensorflow", "mesh_tensorflow", "torch", "keras", "jax", "onnx", "pandas", "matplotlib"),
    *("scipy", "sklearn", "networkx", "jinja2", "jsonschema", "rich"),
}
TRIES = 3

WITHOUT_NUMPY = ("import pase", "pase --version", "pase --help", "pase s⇥")


def loaded(code: str, *arguments: str) -> set[str]:
    """Return all modules that a program has loaded in its end."""
    told = "import sys, atexit; atexit.register(lambda: print('loaded', *sys.modules, file=sys.stderr)); "
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", told + code, *arguments], capture_output=True, text=True, check=True
    )
    start, *modules = finished.stderr.split()
    assert start == "loaded"
    return set(modules)


@pytest.mark.parametrize("name", BARS_S)
def test_a_start_is_quick(name: str) -> None:
    """Seconds of the processor, the best of several tries: what else the machine does is no matter."""
    code, *arguments = STARTS[name]
    times_s = []
    for _ in range(TRIES):
        start_s = children_s()
        subprocess.run([sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL, check=True)
        times_s.append(children_s() - start_s)
    assert min(times_s) < BARS_S[name]


def children_s() -> float:
    """Return the seconds of the processor that processes have had that we started and that have ended."""
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.parametrize("name", WITHOUT_NUMPY)
def test_a_start_loads_no_numpy(name: str) -> None:
    modules = loaded(*STARTS[name])
    assert "pase" in modules
    assert {module.partition(".")[0] for module in modules}.isdisjoint(FRAMEWORKS | {"numpy"})
    assert name != "import pase" or "click" not in modules
    # Some 50 and 120 of Python's own and click's.
    assert len(modules) < (100 if name == "import pase" else 200)


SEARCH = "search alexnet --devices 8"
UNUSED = ("pase.analysis.explanation", "pase.analysis.simulation", "pase.importers.lower", "pase.targets", "pase.easgd")
"""Packages that few commands need."""
COMMANDS = {SEARCH: 105, "machines": 105, "models": 115, "tables lenet5 --devices 4 --json -o {}/tables.npz": 107}
"""How many modules of PaSE a command loads at most."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_loads_what_it_uses(command: str, tmp_path: Path) -> None:
    run, *_ = STARTS["pase --help"]
    modules = [name for name in loaded(run, *command.format(tmp_path).split()) if name.partition(".")[0] == "pase"]
    assert not [name for name in modules if name.startswith(UNUSED)]
    assert len(modules) <= COMMANDS[command]


def test_all_public_names_load_no_framework() -> None:
    modules = {module.partition(".")[0] for module in loaded(*STARTS["from pase import *"])}
    assert {"numpy", "pase"} <= modules
    assert modules.isdisjoint(FRAMEWORKS | {"click"})


def test_a_rank_of_a_program_for_pytorch_loads_no_compiler_at_its_start() -> None:
    """PyTorch's pipelines load it, which takes as long as the rest; one schedule needs a function of theirs."""
    for path in (ROOT / "pase" / "targets" / "torch").rglob("*.py"):
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.ImportFrom):
                names = [f"{statement.module}.{alias.name}" for alias in statement.names]
            elif isinstance(statement, ast.Import):
                names = [alias.name for alias in statement.names]
            else:
                continue
            late = ("torch._dynamo", "torch._inductor", "torch.distributed.pipelining")
            assert not [name for name in names if name.startswith(late)], path


def test_names_are_there_before_and_after_they_are_loaded() -> None:
    code = (
        "import json, pase\n"
        "before = [name for name in pase.__all__ if name not in dir(pase)]\n"
        "import pase.planning.planner, pase.graph, pase.importers, pase.machine, pase.planning.plan\n"
        "import pase.targets.programs\n"
        "import pase.views.exports.tables, pase.analysis.explanation.explain, pase.analysis.simulation.engine\n"
        "import pase.views.reports.document, pase.analysis.baselines.compare\n"
        "from pase import *\n"
        "kinds = {name: type(getattr(pase, name)).__name__ for name in pase.__all__}\n"
        "same = [getattr(pase, name) is globals()[name] for name in pase.__all__]\n"
        "print(json.dumps([before, kinds, all(same)]))"
    )
    finished = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    missing, kinds, are_same = json.loads(finished.stdout)
    assert missing == []
    assert are_same
    assert {name for name, kind in kinds.items() if kind == "function"} == {
        *("compare", "emit", "explain", "export", "load", "load_machine", "load_plan", "machines", "report", "search"),
        *("check", "evaluate", "parallelize", "simulate"),
    }
    assert {name for name, kind in kinds.items() if kind == "str"} == {"__version__"}
    assert set(kinds.values()) == {"function", "str", "type"}


def test_what_looks_at_the_package_sees_its_names() -> None:
    assert set(pase.__all__) <= set(dir(pase))
    assert {name for name, _ in inspect.getmembers(pase)} >= set(pase.__all__)
    described = pydoc.render_doc(pase, renderer=pydoc.plaintext)
    # On one line, or one for each argument from Python 3.13 on.
    assert re.search(r"search\(\s*model: '?object'?,\s*devices: int", described)
    options = pase.SearchOptions(ordering="generate_seq")
    assert pickle.loads(pickle.dumps(options)) == options


def test_a_name_that_is_not_there_is_said() -> None:
    with pytest.raises(AttributeError, match=r"^module 'pase' has no attribute 'serach'$"):
        _ = pase.serach  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'pase'"):
        exec("from pase import nothing")
    assert not hasattr(pase, "planning_of")


def test_the_table_of_starts_is_one_of_the_documentation() -> None:
    timing = Timing(median_s=1.0, min_s=1.0, max_s=1.0, peak_bytes=0)
    made = table(dict.fromkeys(STARTS, timing)).splitlines()
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- startup -->\n")[2].partition("<!-- /startup -->")[0].split("\n")
    rows = [line for line in shown if line.startswith("|")]
    assert rows[:2] == made[:2]
    assert [row.split(" | ")[0] for row in rows[2:]] == [row.split(" | ")[0] for row in made[2:]]
    for row in rows[2:]:
        name, least_s, median_s, *_, bar = (cell.strip(" `") for cell in row.strip("|").split("|"))
        assert float(least_s) <= float(median_s)
        assert not bar or (float(median_s) < float(bar) == BARS_S[name])
