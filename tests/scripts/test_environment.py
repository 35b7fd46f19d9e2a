"""The scripts around the package: what is installed when, and that nobody waits for what a command does not need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _bash(program: str, venv: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PASE_VENV": str(venv)}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", program], env=environment, capture_output=True, text=True, check=False
    )


def _with_fake_pip(calls: str) -> str:
    """Return a program that calls functions of _environment.sh; what would be installed is printed instead."""
    return f"""
        source {ROOT}/scripts/_environment.sh
        make_venv() {{ mkdir -p "$VENV/bin"; for f in python pase; do
            printf '#!/bin/sh\\n' >"$VENV/bin/$f"; chmod +x "$VENV/bin/$f"; done; }}
        install_step() {{ shift; printf '%s\\n' "${{*: -1}}"; }}
        is() {{ if environment_is_ready "$1"; then echo "$2: ready"; else echo "$2: missing"; fi; }}
        {calls}
    """


def test_what_searches_is_installed_alone_and_the_rest_when_it_is_needed(tmp_path: Path) -> None:
    calls = """
        ensure_environment "$CORE_EXTRAS"; is "$CORE_EXTRAS" core; is "$BASE_EXTRAS" base
        ensure_environment "$CORE_EXTRAS"
        ensure_environment "$BASE_EXTRAS"; is "$CORE_EXTRAS" core; is "$BASE_EXTRAS" base; is "$ALL_EXTRAS" all
        ensure_environment "$ALL_EXTRAS"; is "$CORE_EXTRAS" core; is "$BASE_EXTRAS" base; is "$ALL_EXTRAS" all
        ensure_environment "$CORE_EXTRAS"; ensure_environment "$BASE_EXTRAS"
    """
    done = _bash(_with_fake_pip(calls), tmp_path / "venv")
    assert done.returncode == 0, done.stderr
    every = "mesh,data,serve,onnx,torch,keras,jax,notebook,docs,dev"
    assert done.stdout.split("\n") == [
        *("setuptools", str(ROOT), "core: ready", "base: missing"),
        *("setuptools", f"{ROOT}[mesh,data,serve]", "core: ready", "base: ready", "all: missing"),
        *("setuptools", f"{ROOT}[{every}]", "core: ready", "base: ready", "all: ready"),
        "",
    ]
    assert "mostly TensorFlow" not in done.stderr.split("Setting up")[1]


def test_an_installation_that_was_cut_off_is_not_taken_for_one(tmp_path: Path) -> None:
    calls = """
        install_step() { [[ $1 == *PaSE* ]] && exit 3; true; }
        ensure_environment "$BASE_EXTRAS"
    """
    assert _bash(_with_fake_pip(calls), tmp_path / "venv").returncode == 3
    done = _bash(_with_fake_pip('is "$CORE_EXTRAS" core; is "$BASE_EXTRAS" base'), tmp_path / "venv")
    assert done.stdout == "core: missing\nbase: missing\n"


def test_fake_gpus_have_an_environment_with_another_release_of_pytorch_alone(tmp_path: Path) -> None:
    calls = """
        make_venv
        pip_install torch; cp "$VENV/pase-constraints.txt" "$VENV.pinned"
        use_fake_gpu_environment; make_venv
        pip_install torch; diff "$VENV/pase-constraints.txt" "${VENV%-fake-gpu}.pinned" || true
        ensure_environment "$ALL_EXTRAS" >/dev/null; is "$ALL_EXTRAS" fake
        TORCH_RELEASE=; is "$ALL_EXTRAS" pinned
    """
    done = _bash(_with_fake_pip(calls), tmp_path / "venv")
    assert done.returncode == 0, done.stderr
    changed = [line for line in done.stdout.splitlines() if line[0] in "<>"]
    assert changed == ["< torch==2.14.1", "> torch==2.13.0"]
    assert done.stdout.endswith("fake: ready\npinned: missing\n")
    assert (tmp_path / "venv.pinned").read_bytes() == (ROOT / "constraints.txt").read_bytes()


def test_the_help_of_the_tests_needs_no_environment(tmp_path: Path) -> None:
    environment = {**os.environ, "PASE_VENV": str(tmp_path / "venv")}
    done = subprocess.run(
        [ROOT / "scripts" / "test", "--help"], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "scripts/test ARGUMENT...         pytest alone" in done.stdout
    assert "#" not in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.fixture
def launcher(tmp_path: Path) -> Path:
    """A program that says how it was called, in place of scripts/pase."""
    path = tmp_path / "launcher"
    path.write_text('#!/bin/sh\necho "install $PASE_INSTALL, then:" "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def _run_without(package: str, arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command line where a package is not installed."""
    program = f"import sys; sys.modules[{package!r}] = None; from pase.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("tensorflow", "mesh", ["run", "lenet5", "--devices", "4", "--steps", "1"]),
        ("onnx", "onnx", ["search", "net.onnx", "--devices", "4"]),
    ],
)
def test_a_command_that_needs_more_asks_its_launcher_for_it(
    launcher: Path, tmp_path: Path, package: str, extra: str, arguments: list[str]
) -> None:
    asked = {"PASE_LAUNCHER": str(launcher), "PASE_LAUNCHER_EXTRAS": "mesh,onnx"}
    done = _run_without(package, arguments, asked)
    assert done.stdout == f"install {extra}, then: {' '.join(arguments)}\n", done.stderr
    assert done.returncode == 0


def test_without_a_launcher_it_says_what_is_missing(launcher: Path) -> None:
    arguments = ["run", "lenet5", "--devices", "4", "--steps", "1"]
    text = "running a program needs TensorFlow and Mesh-TensorFlow; PaSE's extra 'mesh' brings it"
    for environment in ({}, {"PASE_LAUNCHER": str(launcher), "PASE_LAUNCHER_EXTRAS": "data"}):
        done = _run_without("tensorflow", arguments, environment)
        assert (done.returncode, done.stdout) == (1, "")
        assert text in done.stderr.splitlines()[-1]
