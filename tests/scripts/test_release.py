"""What is published: source archive and wheel, built as `python -m build` does, and used without the checkout."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import pase

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "build", "dist", "docs"
)
HOOK = "import sys; from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]))"


def built(folder: Path, hook: str, target: Path) -> Path:
    """What a hook of the build's back end makes of a folder."""
    target.mkdir(exist_ok=True)
    finished = subprocess.run(
        [sys.executable, "-c", HOOK.format(hook=hook), str(target)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return target / finished.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive of a copy of the checkout, and the wheel of what is in that archive."""
    work = tmp_path_factory.mktemp("release")
    shutil.copytree(ROOT, work / "checkout", ignore=LEFT_OUT, symlinks=True)
    sdist = built(work / "checkout", "build_sdist", work / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    return sdist, built(unpacked, "build_wheel", work / "dist")


def modules(folder: Path, prefix: str) -> set[str]:
    """Files of a package as an archive names them."""
    kinds = ("*.py", "*.json", "*.toml", "py.typed")
    found = (path for kind in kinds for path in folder.rglob(kind))
    return {f"{prefix}/{path.relative_to(folder).as_posix()}" for path in found}


def expected() -> set[str]:
    # pase/models is a link to models, where the checkout has it.
    own = {name for name in modules(ROOT / "pase", "pase") if not name.startswith("pase/models/")}
    return own | modules(ROOT / "models", "pase/models")


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[1]) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
    information = f"pase-{pase.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(information)} == expected()
    assert {f"{information}METADATA", f"{information}entry_points.txt"} <= names
    # Where it lies depends on the version of setuptools.
    assert any(name.startswith(information) and name.endswith("/LICENSE") for name in names)


@pytest.mark.slow
def test_the_source_archive_can_be_tested(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    for path in (
        "setup.py",
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "constraints.txt",
        "scripts/test",
    ):
        assert path in names
    assert {f"tests/{path.relative_to(ROOT / 'tests').as_posix()}" for path in (ROOT / "tests").rglob("*.py")} <= names


@pytest.mark.slow
def test_it_runs_from_the_wheel_alone(archives: tuple[Path, Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(archives[1]) as wheel:
        wheel.extractall(site)
    program = (
        "import pase, sys; from pase.cli.main import run; "
        "assert pase.__file__.startswith(sys.argv[1]), pase.__file__; "
        "commands = [['search', 'mlp', '--devices', '8'], ['machines', '--show', 'h100'], ['models']]; "
        "sys.exit(any(map(run, commands)))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program, str(site)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    assert "proven optimal" in finished.stdout
