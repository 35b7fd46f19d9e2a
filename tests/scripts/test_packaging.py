"""Packaging: what is installed under which name, with which requirements, and that the programs around it parse."""

import ast
import os
import re
import runpy
import stat
import subprocess
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import pase

ROOT = Path(__file__).parents[2]
PROGRAMS = ("scripts/pase", "scripts/test", "scripts/bench", "scripts/docs", "scripts/gpu-check", ".ci/run")
SHELL = (*PROGRAMS, "scripts/_environment.sh")


@cache
def _setup() -> dict[str, Any]:
    """Return what setup.py hands to setuptools."""
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        with mock.patch("setuptools.setup") as setup:
            runpy.run_path(str(ROOT / "setup.py"))
    finally:
        os.chdir(before)
    return dict(setup.call_args.kwargs)


def _names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


@cache
def _pinned() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(r.name): Version(str(r.specifier).removeprefix("==")) for r in requirements}


@pytest.mark.parametrize("name", SHELL)
def test_programs_are_correct_shell_and_end_at_the_first_failure(name: str) -> None:
    path = ROOT / name
    finished = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")
    if name in PROGRAMS:
        assert path.stat().st_mode & stat.S_IXUSR
        text = path.read_text(encoding="utf-8")
        assert text.startswith("#!/usr/bin/env bash\n")
        assert "\nset -euo pipefail\n" in text


def test_every_benchmark_has_its_module() -> None:
    main = import_module("scripts.benchmarks.__main__")
    for name, text in main.BENCHMARKS.items():
        path = ROOT / "scripts" / "benchmarks" / f"{name.replace('-', '_')}.py"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert "write" in [argument.arg for argument in functions["main"].args.kwonlyargs]
        for document in re.findall(r"docs/[\w-]+\.md", text):
            assert (ROOT / document).is_file()


def test_the_version_is_written_once() -> None:
    assert _setup()["version"] == pase.__version__
    assert Version(pase.__version__) > Version("0")


def test_the_command_is_the_function_that_is_tested() -> None:
    (entry,) = _setup()["entry_points"]["console_scripts"]
    name, module, function = re.fullmatch(r"(\w+) = ([\w.]+):(\w+)", entry).groups()  # type: ignore[union-attr]
    assert name == "pase"
    assert callable(getattr(import_module(module), function))


def test_the_extras_are_all_there_and_the_core_needs_little() -> None:
    extras = {"mesh", "data", "onnx", "torch", "keras", "jax", "notebook", "docs", "dev"}
    assert set(_setup()["extras_require"]) >= extras
    assert _names(_setup()["install_requires"]) == {"click", "msgspec", "numpy", "rich"}


def test_every_requirement_has_a_pinned_version_that_satisfies_it() -> None:
    everything = [*_setup()["install_requires"], *(r for extra in _setup()["extras_require"].values() for r in extra)]
    for text in everything:
        requirement = Requirement(text)
        assert requirement.specifier, f"{text} takes any version"
        assert requirement.specifier.contains(_pinned()[canonicalize_name(requirement.name)]), text


def test_the_pins_are_sorted_and_leave_out_what_breaks_them() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins == sorted(pins)
    assert all(re.fullmatch(r"[a-z0-9-]+==[a-z0-9.]+", pin) for pin in pins)
    assert not _pinned().keys() & {"torchvision", "torchaudio", "tensorflow"}


def test_the_newest_changes_are_those_of_this_version() -> None:
    (newest, *_) = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(pase.__version__)} \(\d{{4}}-\d\d-\d\d\)", newest)


def test_only_the_python_that_was_tried_is_allowed() -> None:
    assert _setup()["python_requires"] == ">=3.11,<3.14"
    declared = [text.rpartition(" ")[2] for text in _setup()["classifiers"] if ":: Python :: 3." in text]
    assert declared == ["3.11", "3.12", "3.13"]


def test_the_settings_of_the_tools_are_strict() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert settings["mypy"]["strict"] is True
    assert settings["pytest"]["ini_options"]["filterwarnings"] == ["error"]
    assert settings["coverage"]["run"]["branch"] is True
    assert settings["ruff"]["line-length"] == 120


def test_the_checks_run_what_they_should() -> None:
    assert "/../scripts/test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    test = (ROOT / "scripts" / "test").read_text(encoding="utf-8")
    checks = (r"ruff\" check", r"ruff\" format --check", r"mypy\" --strict", r"pytest\" .*\{coverage\[@\]\}")
    for command in (*checks, r"coverage=\(--cov "):
        assert re.search(command, test), command
    assert (ROOT / ".pre-commit-config.yaml").is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
