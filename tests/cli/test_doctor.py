"""`pase doctor`, beside what setuptools and pip say, and with packages that are missing or of other versions."""

import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from pase.cli import doctor as module
from pase.cli.doctor import PURPOSES, Package, installation
from tests.cli.conftest import Command

ROOT = Path(__file__).resolve().parents[2]


class Installed:
    """A distribution as metadata describe it."""

    def __init__(self, version: str, requires: list[str] | None = None, direct_url: str | None = None) -> None:
        self.version = version
        self.requires = requires
        self._direct_url = direct_url

    @property
    def metadata(self) -> "Installed":
        return self

    def get_all(self, name: str) -> list[str] | None:
        return {"Provides-Extra": ["mesh", "onnx"], "Requires-Python": [">=3.11,<3.14"]}.get(name)

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._direct_url


REQUIRES = [
    "click>=8.1",
    'tensorflow-cpu==2.21.*; extra == "mesh"',
    'SciPy>=1.13; extra == "mesh"',
    'onnx>=1; extra == "onnx"',
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Installed]:
    """What is installed, to be changed."""
    found = {"pase": Installed("1", REQUIRES), "click": Installed("8.2"), "onnx": Installed("1.18")}

    def distribution(name: str) -> Installed:
        # As metadata are found: however the name is written.
        if name.lower() not in found:
            raise PackageNotFoundError(name)
        return found[name.lower()]

    monkeypatch.setattr(module, "distribution", distribution)
    return found


def version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def test_here_it_says_what_the_metadata_say(pase: Command) -> None:
    finished = pase("doctor", "--json")
    document = json.loads(finished.out)
    assert (finished.status, finished.err) == (0, "")
    extras = {extra["name"]: extra for extra in document["extras"]}
    assert set(extras) >= {"", "mesh", "onnx", "torch", "keras", "jax", "dev"}
    for extra in extras.values():
        assert extra["purpose"], extra["name"]
        for package in extra["packages"]:
            assert package["installed"] == version_of(package["name"])
        assert extra["complete"] is all(package["fits"] for package in extra["packages"])
        assert (extra["install"] is None) is extra["complete"]
    # What tests run with.
    assert all(extras[name]["complete"] for name in ("", "mesh", "onnx", "torch", "keras", "jax", "dev"))
    assert {package["name"] for package in extras[""]["packages"]} >= {"click", "numpy", "rich"}
    assert document["location"] == str(ROOT / "pase")
    assert document["python"]["tried"]


def test_every_extra_has_a_purpose() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    names = [line.split('"')[1] for line in setup.splitlines() if line.startswith('    "') and '": [' in line]
    assert sorted(names) == sorted(PURPOSES)


def test_what_is_missing_is_said_with_what_to_type(pase: Command, installed: dict[str, Installed]) -> None:
    installed["scipy"] = Installed("1.14")
    finished = pase("doctor")
    assert finished.status == 0
    rows = {line.split()[0]: line for line in finished.out.splitlines() if line}
    assert "missing" in rows["mesh"]
    assert rows["mesh"].endswith("tensorflow-cpu")
    assert "ready" in rows["onnx"]
    assert f"{shlex.quote(sys.executable)} -m pip install 'tensorflow-cpu==2.21.*' 'scipy" in finished.out


def test_a_version_that_is_of_no_use_is_a_fault(pase: Command, installed: dict[str, Installed]) -> None:
    installed |= {"tensorflow-cpu": Installed("2.20.0"), "scipy": Installed("1.14")}
    finished = pase("doctor")
    assert finished.status == 1
    assert "[mesh] needs tensorflow-cpu ==2.21.*; installed is 2.20.0:" in finished.out
    (mesh,) = [extra for extra in json.loads(pase("doctor", "--json").out)["extras"] if extra["name"] == "mesh"]
    assert [package["fits"] for package in mesh["packages"]] == [False, True]


def test_what_pase_itself_lacks_is_a_fault(pase: Command, installed: dict[str, Installed]) -> None:
    del installed["click"]
    finished = pase("doctor")
    assert finished.status == 1
    assert "PaSE needs click >=8.1; installed is none:" in finished.out
    assert "-m pip install 'click>=8.1'" in finished.out


def test_a_checkout_is_installed_with_its_pins(tmp_path: Path, installed: dict[str, Installed]) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    url = folder.as_uri()
    installed["pase"] = Installed("1", REQUIRES, json.dumps({"url": url, "dir_info": {"editable": True}}))
    found = installation()
    assert found is not None
    words = shlex.split(found.install_command(["mesh", "onnx"]))
    assert words[1:] == ["-m", "pip", "install", "-e", f"{folder}[mesh,onnx]"]
    (folder / "constraints.txt").touch()
    assert shlex.split(found.install_command([]))[4:] == ["-c", f"{folder}/constraints.txt", "-e", str(folder)]


@pytest.mark.parametrize("url", [{"url": "file:///x"}, {"url": "https://x", "vcs_info": {}}, {}])
def test_other_installations_are_no_checkout(url: dict[str, Any], installed: dict[str, Installed]) -> None:
    installed["pase"] = Installed("1", REQUIRES, json.dumps(url))
    found = installation()
    assert found is not None
    assert found.checkout is None


def test_without_an_installation_it_says_so(pase: Command, installed: dict[str, Installed]) -> None:
    del installed["pase"]
    finished = pase("doctor")
    assert (finished.status, finished.out) == (1, "")
    assert "this PaSE was not installed" in finished.err


@pytest.mark.parametrize("wanted", ["==2.21.*", ">=1", ">=1.1", "==0.1.21", ">=3.11,<3.14", "<3.14,>=3.11"])
def test_versions_are_compared_as_pip_compares_them(wanted: str) -> None:
    early = ["1", "1.0rc1", "1.1rc1", "1.0.post1+cpu", "1.dev3", "0.1.21"]
    for found in [*early, "2.21.3", "2.22.0", "2.21.0rc1", "3.11.2", "3.14.0", "3.14.0rc1"]:
        fits = SpecifierSet(wanted).contains(found, prereleases=True)
        assert Package(name="x", wanted=wanted, installed=found).fits is fits, found
    assert not any(Package(name="x", wanted=wanted, installed=found).fits for found in (None, "unknown"))


def test_a_python_that_was_not_tried_is_named(pase: Command, installed: dict[str, Installed]) -> None:
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr(sys, "version_info", (3, 14, 0))
        assert "Python 3.14.0, which was not tried: >=3.11,<3.14 was" in pase("doctor").out
