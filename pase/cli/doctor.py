"""`pase doctor`: what is installed, what is missing for which purpose, and how to install it."""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import click
from click.shell_completion import get_completion_class

from pase._version import __version__
from pase.cli.main import EXIT_INPUT, PROGRAM, cli
from pase.cli.options import json_option
from pase.cli.output import print_json, print_table, say, say_all
from pase.common.documents import attributes
from pase.errors import PaseError

PURPOSES: Mapping[str, str] = MappingProxyType(
    {
        "mesh": "programs: run, train, calibrate, emitted programs",
        "data": "the digits of scikit-learn: train --data digits",
        "onnx": "models in ONNX files",
        "torch": "PyTorch modules",
        "keras": "Keras models and .keras files",
        "jax": "JAX functions, flax and equinox modules",
        "serve": "the page of serve",
        "notebook": "plans as data frames and graphs",
        "docs": "the documentation's site: scripts/docs",
        "bench": "scripts/bench: other solvers, plots",
        "dev": "scripts/test",
    }
)
"""Purpose of each extra."""


_REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[[^]]*\])?\s*([^;]*?)\s*(?:;\s*extra\s*==\s*["']([^"']+)["'])?""")
"""A requirement in PaSE's metadata: a name, versions, an extra."""


def _is_among(version: str, wanted: str) -> bool:
    """Return whether a version satisfies a requirement of setup.py: "==2.21.*", ">=3.11,<3.14"."""
    found = _order(version)
    if not found:
        return False
    for operator, bound in re.findall(r"(==|>=|<)\s*([\d.*]+)", wanted):
        limit = _order(bound)
        if operator == "==" and bound.endswith(".*"):
            parts = bound.count(".")
            fits = found[:parts] == limit[:parts]
        else:
            fits = {"==": found == limit, ">=": found >= limit, "<": found[:-1] < limit[:-1]}[operator]
        if not fits:
            return False
    return True


def _order(version: str) -> list[int]:
    """Return the numbers of a version, for comparison, followed by 0 for a pre-release and 1 otherwise.

    Empty for text that is not a version.
    """
    found = re.match(r"((?:\d+\.?)+)(a|b|c|rc|dev)?", version)
    if found is None:
        return []
    numbers = [int(part) for part in found[1].split(".") if part]
    return [*(numbers + [0] * 6)[:6], int(found[2] is None)]


class Package(NamedTuple):
    """A required package.

    Attributes:
        wanted: Accepted versions, such as "==2.21.*".
        installed: Installed version, None if it is not installed.
    """

    name: str
    wanted: str
    installed: str | None

    @property
    def fits(self) -> bool:
        """Whether an accepted version is installed."""
        return self.installed is not None and _is_among(self.installed, self.wanted)


class Extra(NamedTuple):
    """The packages of an extra; its name is "" for PaSE's own requirements."""

    name: str
    purpose: str
    packages: tuple[Package, ...]

    @property
    def is_complete(self) -> bool:
        """Whether all of its packages are installed in accepted versions."""
        return all(package.fits for package in self.packages)


class Installation(NamedTuple):
    """The installation of PaSE.

    Attributes:
        location: Folder of the package.
        python: Version of the interpreter.
        python_wanted: Versions that were tested.
        core: PaSE's own requirements.
        checkout: Folder of an editable installation, otherwise None.
    """

    version: str
    location: Path
    python: str
    python_wanted: str
    core: Extra
    extras: tuple[Extra, ...]
    checkout: Path | None

    @property
    def is_python_tried(self) -> bool:
        """Whether the interpreter's version was tested."""
        return _is_among(self.python, self.python_wanted)

    def install_command(self, extras: Iterable[str]) -> str:
        """Return the command that installs some extras, or, without any, PaSE itself."""
        listed = list(extras)
        names = f"[{','.join(listed)}]" if listed else ""
        pip = f"{quote(sys.executable)} -m pip install"
        if self.checkout is None:
            # By the names of the packages: PyPI's project named PaSE is another one.
            wanted = [extra for extra in self.extras if extra.name in listed] if listed else [self.core]
            packages = {f"{package.name}{package.wanted}": None for extra in wanted for package in extra.packages}
            return " ".join([pip, *map(quote, packages)])
        pins = self.checkout / "constraints.txt"
        constraints = f" -c {quote(str(pins))}" if pins.is_file() else ""
        return f"{pip}{constraints} -e {quote(str(self.checkout) + names)}"


def installation() -> Installation | None:
    """Return how PaSE is installed, None where it runs from a folder that was not installed."""
    try:
        own = distribution("pase")
    except PackageNotFoundError:
        return None
    names = ("", *(own.metadata.get_all("Provides-Extra") or ()))
    packages: dict[str, list[Package]] = {name: [] for name in names}
    for text in own.requires or ():
        required = _REQUIREMENT.fullmatch(text)
        assert required is not None, text
        name, wanted, extra = required.groups("")
        packages[extra].append(Package(re.sub(r"[-_.]+", "-", name).lower(), wanted, _version(name)))
    core, *extras = (
        Extra(name, PURPOSES.get(name, "") if name else "PaSE itself", tuple(packages[name])) for name in names
    )
    return Installation(
        version=__version__,
        location=Path(__file__).resolve().parents[1],
        python=".".join(map(str, sys.version_info[:3])),
        python_wanted=",".join(own.metadata.get_all("Requires-Python") or []),
        core=core,
        extras=tuple(extras),
        checkout=_checkout(own),
    )


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def _checkout(own: Distribution) -> Path | None:
    text = own.read_text("direct_url.json")
    if text is None:
        return None
    found = json.loads(text)
    url = urlsplit(found.get("url", ""))
    is_editable = found.get("dir_info", {}).get("editable", False)
    return Path(unquote(url.path)) if is_editable and url.scheme == "file" else None


@click.command("doctor", epilog="Example: pase doctor")
@json_option
def doctor_command(as_json: bool) -> int:
    """Say what is installed, which extras are missing for what, and what to type.

    Nothing is imported: versions are those that packages state. The exit status is 1 where something that is installed
    has a version that PaSE cannot use.
    """
    found = installation()
    if found is None:
        raise PaseError(
            "this PaSE was not installed, so that nothing says what it needs; install it: python -m pip install -e ."
        )
    # Installed in an unsupported version, or missing although PaSE itself requires it.
    wrong = [
        (extra, package)
        for extra in (found.core, *found.extras)
        for package in extra.packages
        if not package.fits and (package.installed is not None or extra is found.core)
    ]
    if as_json:
        print_json(_document(found))
    else:
        _print(found, wrong)
    return EXIT_INPUT if wrong else 0


def _document(found: Installation) -> dict[str, object]:
    return {
        "version": found.version,
        "location": str(found.location),
        "python": attributes(found, "version=python wanted=python_wanted tried=is_python_tried"),
        "extras": [
            {
                **attributes(extra, "name purpose complete=is_complete"),
                "packages": [attributes(package, "name wanted installed fits") for package in extra.packages],
                "install": None if extra.is_complete else found.install_command([extra.name]),
            }
            for extra in (found.core, *found.extras)
        ],
    }


def _print(found: Installation, wrong: Iterable[tuple[Extra, Package]]) -> None:
    say(f"pase {found.version} in {found.location}")
    tried = "" if found.is_python_tried else f", which was not tried: {found.python_wanted} was"
    say(f"Python {found.python}{tried}")
    say()
    print_table(
        ["<extra", "<for", "<", "<missing"],
        [
            [
                extra.name or "(none)",
                extra.purpose,
                "ready" if extra.is_complete else "missing",
                ", ".join(_lacking(package) for package in extra.packages if not package.fits),
            ]
            for extra in (found.core, *found.extras)
        ],
    )
    missing = [extra.name for extra in found.extras if not extra.is_complete]
    if missing:
        say()
        say("to install one of them, or several with commas between:")
        say_all([f"  {found.install_command(missing[:1])}"])
    for extra, package in wrong:
        needs = f"[{extra.name}]" if extra.name else "PaSE"
        say()
        say(f"{needs} needs {package.name} {package.wanted}; installed is {package.installed or 'none'}:")
        say_all([f"  {found.install_command([extra.name] if extra.name else [])}"])


def _lacking(package: Package) -> str:
    return package.name if package.installed is None else f"{package.name} {package.wanted} (is {package.installed})"


VARIABLE = "_PASE_COMPLETE"
"""Environment variable that the printed script sets when a word is to be completed; click reads it."""

SHELLS = ("bash", "zsh", "fish")


@click.command("completion", epilog="Example: pase completion bash")
@click.argument("shell", type=click.Choice(SHELLS))
def completion_command(shell: str) -> None:
    """Print what makes SHELL complete commands, options, models and machines.

    \b
    bash: add to ~/.bashrc                    eval "$(pase completion bash)"
    zsh:  add to ~/.zshrc                     eval "$(pase completion zsh)"
    fish: save as ~/.config/fish/completions/pase.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    say_all(found(cli, {}, PROGRAM, VARIABLE).source().splitlines())
