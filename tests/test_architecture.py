"""The shape of the code: imports point one way, frameworks stay in their own modules, nothing global changes."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import pase

ROOT = Path(pase.__file__).parent

ORDER = (
    "pase._loading",
    "pase._version",
    "pase.errors",
    "pase.common",
    "pase.graph",
    "pase.models",
    "pase.importers",
    "pase.machine",
    "pase.tables",
    "pase.sharding",
    "pase.studies.integrated",
    "pase.costs",
    "pase.solver",
    "pase.planning",
    "pase.analysis",
    "pase.targets.training",  # what the programs of all frameworks share
    # With the one module that loads the framework.
    "pase.targets.mesh_tensorflow.primitives",
    "pase.targets.mesh_tensorflow.runtime",
    "pase.datasets",  # of what programs read
    "pase.calibration",
    "pase.targets.emitter",
    "pase.targets",
    "pase.easgd",
    "pase.studies",  # of the algorithms as training declares them
    "pase.views",
    "pase",  # the public names
    "pase.cli",
    "pase.__main__",
)
"""Modules and packages, in the order in which data flows through them: each may import those before it."""

FRAMEWORKS = {
    "tensorflow": ("pase.targets.mesh_tensorflow.primitives.compat",),
    "mesh_tensorflow": ("pase.targets.mesh_tensorflow.primitives.compat",),
    "torch": ("pase.importers", "pase.targets.torch", "pase.calibration.ranks", "pase.calibration.kernels"),
    "keras": ("pase.importers",),
    "jax": ("pase.importers", "pase.targets.jax"),
    "onnx": ("pase.importers",),
    "scipy": (),
    "sklearn": ("pase.datasets.registry",),
}
"""Where each may be imported at all."""


def _modules() -> Iterator[tuple[str, Path]]:
    # Through pase/models, a link in a checkout, so that every module has its installed name.
    for folder in (ROOT, *sorted(p for p in ROOT.rglob("*") if p.is_dir()), *sorted((ROOT / "models").rglob("*/"))):
        for path in sorted(folder.glob("*.py")):
            parts = ("pase", *path.relative_to(ROOT).with_suffix("").parts)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(_modules())


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@cache
def _imports(module: str) -> tuple[tuple[str, int], ...]:
    """Return (imported module, line), those within functions included."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            found += ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively; give the module's full name"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.append((full if full in MODULES else node.module, node.lineno))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            # What is imported by its name is imported all the same.
            found += ((arg.value, node.lineno) for arg in node.args if isinstance(arg, ast.Constant))
    return tuple(found)


def _rank(module: str) -> int:
    parts = module.split(".")
    for length in range(len(parts), 1, -1):
        prefix = ".".join(parts[:length])
        if prefix in ORDER:
            return ORDER.index(prefix)
    assert module == "pase", f"{module} has no place in ORDER: put it where its data comes from and goes to"
    return ORDER.index("pase")


def _own_imports(module: str) -> Iterator[tuple[str, int]]:
    return ((name, line) for name, line in _imports(module) if name == "pase" or name.startswith("pase."))


def test_there_is_something_to_look_at() -> None:
    assert len(MODULES) > 60
    assert {"pase", "pase.models.alexnet", "pase.sharding.overlap", "pase.graph.operators.windows"} <= set(MODULES)
    assert ("pase.sharding.shards", 1) in {(name, 1) for name, _ in _imports("pase.sharding.overlap")}


def test_imports_point_one_way() -> None:
    for module in MODULES:
        for name, line in _own_imports(module):
            assert _rank(name) <= _rank(module), f"{module}:{line} imports {name}, which comes after it"


def test_packages_import_nothing_in_circles() -> None:
    edges = {module: {name for name, _ in _own_imports(module)} - {module} for module in MODULES}
    # A package's __init__ only collects its modules: importing a name from it is importing them all.
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module in done:
            return
        for name in sorted(edges.get(module, ())):
            visit(name, (*path, module))
        done.add(module)

    for module in sorted(MODULES):
        visit(module, ())


def test_the_solver_sees_tables_alone() -> None:
    solver = [m for m in MODULES if m.split(".")[1:2] == ["solver"]]
    assert len(solver) > 3
    allowed = ("pase.solver", "pase.tables.cost_tables", "pase.solver.ordering", "pase.errors")
    for module in solver:
        for name, line in _imports(module):
            own = name.split(".")[0] == "pase"
            assert not own or name.startswith(allowed), f"{module}:{line} imports {name}"
            assert name.split(".")[0] not in FRAMEWORKS, f"{module}:{line} imports {name}"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_frameworks_are_imported_where_they_are_needed(framework: str) -> None:
    for module in MODULES:
        for name, line in _imports(module):
            if name.split(".")[0] == framework:
                assert module.startswith(FRAMEWORKS[framework] or ("nowhere",)), f"{module}:{line} imports {name}"


# -- text of programs and formats

WRITERS = {"code", "dot", "mermaid", "toml", "xml"}
"""`Grammar.write` of each language, as modules name it."""


def _calls(module: str) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, node


def _is_literal(node: ast.expr, constants: set[str]) -> bool:
    """Return whether a template is text of PaSE's own source, one of two such texts, or a name that was given one."""
    if isinstance(node, ast.IfExp):
        return _is_literal(node.body, constants) and _is_literal(node.orelse, constants)
    return (isinstance(node, ast.Constant) and isinstance(node.value, str)) or (
        isinstance(node, ast.Name) and node.id in constants
    )


def test_text_of_programs_is_made_in_one_module() -> None:
    """Nobody else makes a `Text`, and whoever writes one has `Grammar.write` by a name of `WRITERS`."""
    home, makers = "pase.targets.emitter.text", 0
    for module in MODULES:
        imported = {name for name, _ in _imports(module) if name == home}
        for name, call in _calls(module):
            assert name != "Text" or module == home or not imported, f"{module}:{call.lineno} makes text of its own"
            makers += name == "Grammar"
    written = [
        node
        for module in MODULES
        for node in _tree(module).body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Grammar(")
    ]
    assert len(written) == makers == len(WRITERS)
    assert all(ast.unparse(node.value).endswith(").write") for node in written)
    assert {ast.unparse(node.targets[0]) for node in written} == WRITERS


def test_templates_stand_in_the_source() -> None:
    found = 0
    for module in MODULES:
        assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(_tree(module)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                assigned.setdefault(node.targets[0].id, []).append(node.value)
        constants = {name for name, values in assigned.items() if all(_is_literal(v, set()) for v in values)}
        for name, call in _calls(module):
            if name in WRITERS:
                found += 1
                assert _is_literal(call.args[0], constants), f"{module}:{call.lineno}: a template that is made of text"
    assert found > 150


# -- state


def _is_mutable(value: ast.expr | None) -> bool:
    literal = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    makers = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict", "bytearray"}
    call = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in makers
    return isinstance(value, literal) or call


def test_no_module_holds_state() -> None:
    for module in MODULES:
        for node in ast.walk(_tree(module)):
            assert not isinstance(node, ast.Global), f"{module}:{node.lineno} changes a global"
        for node in _tree(module).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not _is_mutable(node.value):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                is_name = isinstance(target, ast.Name) and not target.id.startswith("__")
                assert not is_name or target.id.isupper(), f"{module}:{node.lineno}: {target.id} can change"  # type: ignore[attr-defined]


def test_the_package_itself_holds_names_and_no_logic() -> None:
    docstring, *imports, on_demand, methods, _, names = _tree("pase").body
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    assert isinstance(names, ast.Assign)
    assert isinstance(methods, ast.Assign)
    assert all(hasattr(import_module(module), name) for module, name in pase.METHODS_OF_PLANS.values())
    assert all(hasattr(pase.Plan, name) for name in pase.METHODS_OF_PLANS)
    assert len(pase.__all__) <= 23
    assert all(hasattr(pase, name) for name in pase.__all__)
    # What type checkers see is what is loaded on demand.
    assert isinstance(on_demand, ast.If)
    assert ast.unparse(on_demand.test) == "TYPE_CHECKING"
    assert all(isinstance(node, ast.ImportFrom) for node in on_demand.body)
    (assignment,) = on_demand.orelse
    assert isinstance(assignment, ast.Assign)
    assert isinstance(assignment.value, ast.Call)
    seen = {node.module: tuple(alias.name for alias in node.names) for node in on_demand.body}  # type: ignore[attr-defined]
    assert ast.literal_eval(assignment.value.args[1]) == seen
    # A module of a name's own would take its place when it is imported.
    assert not {f"pase.{name}" for given in seen.values() for name in given} & set(MODULES)


# -- what a process loads

HEAVY = (
    *("tensorflow", "mesh_tensorflow", "torch", "keras", "jax", "onnx"),
    *("scipy", "networkx", "matplotlib", "pandas", "sklearn", "jinja2", "jsonschema"),
)

PROGRAMS = (
    "import pase",
    "from pase.cli.main import run; assert run(['search', 'alexnet', '--devices', '8', '--json']) == 0",
    "from pase.cli.main import run; assert run(['models']) == 0",
    "import pase.targets.programs",
    "from pase.cli.main import run; assert run(['easgd-model', '--workers', '2']) == 0",
    "import pase.targets.mesh_tensorflow.primitives",
    "import pase.targets.mesh_tensorflow.runtime",
    "import pase.datasets, pase.calibration, pase.cli.calibrate",
    "from pase.cli.main import run; assert run(['halo', '--extent', '9', '--kernel', '2', '--workers', '3']) == 0",
    "from pase.cli.main import run; assert run(['train', 'mlp', '--processes', '9']) == 1",
    "from pase.cli.main import run; assert run(['train', 'mlp', '--processes', '9']) == 1",
)


def test_no_framework_is_loaded() -> None:
    """One process has all of them one after the other, and says after each what it has loaded by then."""
    told = f"print('loaded:', *[name for name in {HEAVY!r} if name in sys.modules])"
    check = "import sys\n" + "".join(f"{program}\n{told}\n" for program in PROGRAMS)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", check],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT.parent,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    loaded = [line for line in result.stdout.splitlines() if line.startswith("loaded:")]
    assert dict(zip(PROGRAMS, loaded, strict=True)) == dict.fromkeys(PROGRAMS, "loaded:")
