"""What is published: source archive and wheel, built as `python -m build` does, and used without the checkout."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pase

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "build", "dist", "site"
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
    kinds = ("*.py", "*.json", "*.toml", "py.typed", "*.html", "*.css", "*.js", "*.txt")
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


def requirements(name: str, found: dict[str, Distribution]) -> None:
    """Add a package that is installed here and all that it needs, extras left out, by name."""
    if canonicalize_name(name) in found:
        return
    found[canonicalize_name(name)] = own = distribution(name)
    for text in own.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirements(requirement.name, found)


@pytest.mark.slow
def test_it_is_installed_and_runs_in_an_environment_with_its_core_alone(
    archives: tuple[Path, Path], tmp_path: Path
) -> None:
    """What the wheel says that it needs is all that is there: packages of this environment, by links."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", "--quiet"]
    subprocess.run([*pip, "--no-compile", str(archives[1])], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    core: dict[str, Distribution] = {}
    with zipfile.ZipFile(archives[1]) as wheel:
        (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        wanted = message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist") or []
    for requirement in map(Requirement, wanted):
        if requirement.marker is None:
            requirements(requirement.name, core)
    for one in core.values():
        for top in {path.parts[0] for path in one.files or () if path.parts[0] != ".."}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(one.locate_file(top))))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*arguments: str) -> str:
        finished = subprocess.run(
            [environment / "bin" / "pase", *arguments],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
        assert "Traceback" not in finished.stderr
        return finished.stdout

    assert "proven optimal" in run("search", "mlp", "--devices", "8", "-o", "plan.json")
    run("report", "plan.json", "-o", "report.html")
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    found = json.loads(run("doctor", "--json"))
    assert found["version"] == pase.__version__
    assert found["location"] == str(site / "pase")
