"""Shell completion, in the shells themselves where they are there."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from pase.cli.doctor import SHELLS
from pase.cli.main import COMMANDS, cli
from pase.machine import preset_names
from pase.models import MODELS
from tests.cli.conftest import Command


def completed(words: list[str], tmp_path: Path) -> list[str]:
    """What bash offers for the last of some words."""
    program = tmp_path / "pase"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "from pase.cli.main import main; main()" "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(pase completion bash)"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); compopt() { :; }; '
        '_pase_completion pase; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    bash = shutil.which("bash")
    assert bash is not None
    finished = subprocess.run(
        [bash, "-c", script, "bash", "pase", *words], env=environment, capture_output=True, text=True, check=True
    )
    assert finished.stderr == ""
    return finished.stdout.split()


def starting(names: Iterable[str], beginning: str) -> list[str]:
    return sorted(name for name in names if name.startswith(beginning))


def test_bash_offers_what_begins_like_that(tmp_path: Path) -> None:
    assert sorted(completed(["s"], tmp_path)) == starting(COMMANDS, "s")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ([""], sorted(COMMANDS)),
        (["search", "res"], ["resnet101"]),
        (["train", "lenet5", "--algorithm", "sync-easgd"], ["sync-easgd1", "sync-easgd2", "sync-easgd3"]),
        (["search", "alexnet", "--machine", "knl-"], starting(preset_names(), "knl-")),
    ],
)
def test_what_begins_like_that_is_offered(words: list[str], offered: list[str]) -> None:
    found = ShellComplete(cli, {}, "pase", "_PASE_COMPLETE").get_completions(words[:-1], words[-1])
    assert sorted(item.value for item in found if item.type == "plain") == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_one_of_the_shell(shell: str, pase: Command, tmp_path: Path) -> None:
    finished = pase("completion", shell)
    assert (finished.status, finished.err) == (0, "")
    assert f"_PASE_COMPLETE={shell}_complete" in finished.out
    found = shutil.which(shell)
    if found is not None:
        (tmp_path / "script").write_text(finished.out)
        subprocess.run([found, "-n", tmp_path / "script"], check=True)


def test_models_are_offered_beside_files() -> None:
    from pase.cli.options import complete_models

    items = complete_models(None, None, "")  # type: ignore[arg-type]
    assert items[0].type == "file"
    assert [item.value for item in items[1:]] == list(MODELS)
