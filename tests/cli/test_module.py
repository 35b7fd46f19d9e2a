"""`python -m pase` is the command line."""

import subprocess
import sys

from pase import __version__


def test_the_package_is_run_as_a_program() -> None:
    command = [sys.executable, "-m", "pase"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    assert (version.returncode, version.stdout) == (0, f"pase, version {__version__}\n")
    unknown = subprocess.run([*command, "serch"], capture_output=True, text=True, check=False)
    assert unknown.returncode == 2
    assert "serch" in unknown.stderr
