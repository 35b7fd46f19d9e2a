"""`scripts/fuzz`: has every reader read inputs that were changed, as long as one likes."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pase.common.documents import write_atomically
from tests.fuzz import arrays, documents, keras_models, onnx_models, torch_files
from tests.fuzz.harness import Outcome, Target, generator, run

TARGETS = (*documents.TARGETS, *arrays.TARGETS, *onnx_models.TARGETS, *keras_models.TARGETS, *torch_files.TARGETS)
"""By the files that they read."""

_PIECE = 20_000
"""Inputs of one target at a time."""


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    found = argparse.ArgumentParser(prog="scripts/fuzz", description="Have readers of files read what was changed.")
    found.add_argument("--minutes", type=float, metavar="M", help="how long, over all targets")
    found.add_argument("--inputs", type=int, metavar="N", help="how many, over all targets")
    found.add_argument("--seed", type=int, default=0, metavar="S", help="of the inputs [0]")
    found.add_argument("--target", action="append", choices=[t.name for t in TARGETS], help="may be repeated [all]")
    found.add_argument("--only", type=int, metavar="NUMBER", help="read one input of one target, without a fork")
    found.add_argument("--json", action="store_true", help="print one JSON object at the end")
    found.add_argument("--log", type=Path, metavar="FILE", help="write counts and failures there after every piece")
    return found


def main() -> None:
    """Run what the command line says; end with status 1 where an input failed."""
    arguments = parser().parse_args()
    targets = [target for target in TARGETS if arguments.target is None or target.name in arguments.target]
    if arguments.only is not None:
        with TemporaryDirectory(prefix="pase-fuzz-") as folder:
            targets[0].prepare()(generator(targets[0].name, arguments.seed, arguments.only), Path(folder))
        print("accepted")
        return
    if (arguments.minutes is None) == (arguments.inputs is None):
        parser().error("give either --minutes or --inputs")
    outcomes = {target.name: Outcome() for target in targets}
    for target, outcome in _runs(targets, arguments.seed, arguments.minutes, arguments.inputs):
        outcomes[target.name].add(outcome)
        for failure in outcome.failures:
            print(f"{failure.target} --seed {failure.seed} --only {failure.number}: {failure.what}", file=sys.stderr)
        if arguments.log:
            write_atomically(arguments.log, json.dumps(_counts(outcomes)) + "\n")
    found = _counts(outcomes)
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, counts in found.items():
            told = ", ".join(f"{counts[key]:,} {key}" for key in ("inputs", "accepted", "refused"))
            print(f"{name}: {told}, {len(counts['failures']):,} failed")
    sys.exit(any(outcome.failures for outcome in outcomes.values()))


def _counts(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, Any]]:
    return {name: {"inputs": outcome.total, **asdict(outcome)} for name, outcome in outcomes.items()}


def _runs(
    targets: list[Target], seed: int, minutes: float | None, inputs: int | None
) -> Iterator[tuple[Target, Outcome]]:
    """Yield what came of pieces of inputs of each target: so many of each, or pieces of each in turn for so long."""
    whole = sum(target.share for target in targets)
    if inputs is not None:
        for target in targets:
            yield target, run(target, target.prepare(), seed=seed, first=0, count=round(inputs * target.share / whole))
        return
    end_s = time.monotonic() + 60 * (minutes or 0)
    readers = {target.name: target.prepare() for target in targets}
    done = dict.fromkeys(readers, 0)
    while time.monotonic() < end_s:
        for target in targets:
            # Each target has its share of a round's time.
            until_s = min(end_s, time.monotonic() + 120 * target.share / whole)
            reader, first = readers[target.name], done[target.name]
            outcome = run(target, reader, seed=seed, first=first, count=_PIECE, until_s=until_s)
            done[target.name] += outcome.total
            yield target, outcome


if __name__ == "__main__":
    main()
