"""`pase doctor`: what is installed here, what is missing for what, and what to type."""

import click

from pase.cli.installation import Extra, Installation, Package, installation
from pase.cli.main import EXIT_INPUT
from pase.cli.options import json_option
from pase.cli.output import print_json, print_table, say, say_whole
from pase.errors import PaseError


@click.command("doctor", epilog="Example: pase doctor")
@json_option
def command(as_json: bool) -> int:
    """Say what is installed, which extras are missing for what, and what to type.

    Nothing is imported: versions are those that packages state. The exit status is 1 where something that is installed
    has a version that PaSE cannot use.
    """
    found = installation()
    if found is None:
        raise PaseError(
            "this PaSE was not installed, so that nothing says what it needs; install it: python -m pip install -e ."
        )
    if as_json:
        print_json(_document(found))
    else:
        _print(found)
    return EXIT_INPUT if _wrong(found) else 0


def _wrong(found: Installation) -> list[tuple[Extra, Package]]:
    """Return what is installed in a version that is of no use, and what PaSE itself lacks."""
    return [
        (extra, package)
        for extra in (found.core, *found.extras)
        for package in extra.packages
        if not package.fits and (package.installed is not None or extra is found.core)
    ]


def _document(found: Installation) -> dict[str, object]:
    return {
        "version": found.version,
        "location": str(found.location),
        "python": {"version": found.python, "wanted": found.python_wanted, "tried": found.is_python_tried},
        "extras": [_extra_document(found, extra) for extra in (found.core, *found.extras)],
    }


def _extra_document(found: Installation, extra: Extra) -> dict[str, object]:
    return {
        "name": extra.name,
        "purpose": extra.purpose,
        "complete": extra.is_complete,
        "packages": [
            {"name": package.name, "wanted": package.wanted, "installed": package.installed, "fits": package.fits}
            for package in extra.packages
        ],
        "install": None if extra.is_complete else found.install_command([extra.name]),
    }


def _print(found: Installation) -> None:
    say(f"pase {found.version} in {found.location}")
    tried = "" if found.is_python_tried else f", which was not tried: {found.python_wanted} was"
    say(f"Python {found.python}{tried}")
    say()
    print_table(
        [("extra", "left"), ("for", "left"), ("", "left"), ("missing", "left")],
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
        say_whole(f"  {found.install_command(missing[:1])}")
    for extra, package in _wrong(found):
        needs = f"[{extra.name}]" if extra.name else "PaSE"
        say()
        say(f"{needs} needs {package.name} {package.wanted}; installed is {package.installed or 'none'}:")
        say_whole(f"  {found.install_command([extra.name] if extra.name else [])}")


def _lacking(package: Package) -> str:
    return package.name if package.installed is None else f"{package.name} {package.wanted} (is {package.installed})"
