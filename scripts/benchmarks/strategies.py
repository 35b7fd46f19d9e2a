"""Every built-in network under random strategies and the searched one: losses and weights beside one device's."""

import argparse
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from pase.graph import Scalar
from scripts.benchmarks.tables import markdown, publish
from scripts.benchmarks.trials import Outcome, Trial, attempt

DEVICES = (2, 4, 8)

_WORDS: dict[str, Scalar] = {"batch": 4, "vocabulary": 16, "steps": 4, "model_width": 8, "heads": 2}
_IMAGES: dict[str, Scalar] = {"batch": 8, "image": 32, "classes": 8}

NETWORKS: dict[str, dict[str, Scalar]] = {
    "mlp": {"batch": 8, "inputs": 8, "hidden": 16, "classes": 8},
    "rnnlm": {"batch": 4, "vocabulary": 16, "units": 8, "steps": 4},
    "lenet5": {"batch": 8, "classes": 8},
    "alexnet": _IMAGES | {"image": 123, "width": 16},
    "vgg16": _IMAGES | {"width": 16},
    "vgg19": _IMAGES | {"width": 16},
    "gpt": _WORDS | {"layers": 2},
    "transformer": _WORDS | {"hidden": 16, "layers": 1},
    "transformer_big": _WORDS | {"hidden": 16, "layers": 1, "tied": False},
    "bert_large": _WORDS | {"hidden": 16, "layers": 2},
    "resnet101": _IMAGES | {"image": 64, "width": 16, "blocks": "1,2,2,1"},
    "densenet121": _IMAGES | {"image": 64, "growth": 4, "blocks": "2,2,2,2"},
    "googlenet": _IMAGES | {"width": 8},
    "inception_v3": _IMAGES | {"image": 137, "width": 16},
}
"""Arguments of the builders, cheapest network first: small extents with many divisors, few of what is repeated."""

_TASKS_OF_A_PROCESS = 100
"""Then another one takes over: TensorFlow keeps some of what its graphs have used."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be chosen."""
    parser.add_argument(
        "--networks",
        type=lambda text: tuple(text.split(",")),
        default=tuple(NETWORKS),
        metavar="A,B",
        help=f"by default all: {','.join(NETWORKS)}",
    )
    parser.add_argument(
        "--number", type=int, default=50, help="random strategies of each network and number of devices (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=3, help="training steps of each (%(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time (%(default)s)")
    parser.add_argument(
        "--resume-file",
        type=Path,
        metavar="FILE",
        help="lines of JSON: every result is added as it comes; good ones that are there are not tried again",
    )


def main(
    *, write: bool, networks: Sequence[str], number: int, steps: int, workers: int, resume_file: Path | None
) -> None:
    """Print the table, or put it into docs/testing.md; SystemExit where a network is unknown or a trial failed."""
    unknown = set(networks) - set(NETWORKS)
    if unknown:
        raise SystemExit(f"no network {', '.join(sorted(unknown))} here; there are {', '.join(NETWORKS)}")
    known = {} if resume_file is None else read_outcomes(resume_file)
    # More than are wanted now count too, where they are of these networks.
    found = {trial: outcome for trial, outcome in known.items() if outcome.is_good and _is_of(trial, networks, steps)}
    waiting = [trial for trial in trials(networks, number, steps) if trial not in found]
    print(f"{len(found)} strategies were tried before, {len(waiting)} are left", flush=True)
    for outcome in outcomes(waiting, workers):
        found[outcome.trial] = outcome
        print(_line(outcome), flush=True)
        if resume_file is not None:
            with resume_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
    publish("testing.md", {"strategies": table(found.values())}, write=write)
    failures = [outcome for outcome in found.values() if not outcome.is_good]
    if failures:
        lines = "\n".join(_line(outcome) for outcome in failures)
        raise SystemExit(f"{len(failures)} of {len(found)} strategies failed:\n{lines}")


def _is_of(trial: Trial, networks: Sequence[str], steps: int) -> bool:
    return (
        trial.network in networks
        and trial.arguments == tuple(NETWORKS[trial.network].items())
        and trial.steps == steps
        and trial.num_devices in DEVICES
    )


def trials(networks: Sequence[str], number: int, steps: int) -> Iterator[Trial]:
    """Yield what is to be tried, network by network; for each number of devices the searched strategy first."""
    for network in networks:
        arguments = tuple(NETWORKS[network].items())
        for seed in (None, *range(number)):
            for num_devices in DEVICES:
                yield Trial(network=network, arguments=arguments, num_devices=num_devices, seed=seed, steps=steps)


def read_outcomes(path: Path) -> dict[Trial, Outcome]:
    """Return what a file of results holds, the last of each trial; a last line that was cut off is left out."""
    found = {}
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    for line in lines:
        fields = json.loads(line)
        about = fields.pop("trial")
        arguments = tuple((name, value) for name, value in about.pop("arguments"))
        trial = Trial(arguments=arguments, **about)
        found[trial] = Outcome(trial=trial, **fields)
    return found


def outcomes(waiting: Iterable[Trial], workers: int) -> Iterator[Outcome]:
    """Try strategies in other processes, many in each, and yield what each showed, whatever happens to it."""
    left = deque(waiting)
    while left:
        running: dict[Future[Outcome], Trial] = {}
        # A process of its own for each: TensorFlow's threads do not survive a fork.
        with ProcessPoolExecutor(
            workers, mp_context=get_context("spawn"), max_tasks_per_child=_TASKS_OF_A_PROCESS
        ) as pool:
            is_broken = False
            while (left and not is_broken) or running:
                while left and not is_broken and len(running) < workers:
                    trial = left.popleft()
                    running[pool.submit(attempt, trial)] = trial
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    trial, error = running.pop(future), future.exception()
                    is_broken = is_broken or isinstance(error, BrokenProcessPool)
                    if error is None:
                        yield future.result()
                    else:
                        yield Outcome(trial=trial, error=f"{type(error).__name__}: {error}")


def table(found: Iterable[Outcome]) -> str:
    """Return a row for each network: how many strategies at each number of devices, and the worst of them."""
    by_network: dict[str, list[Outcome]] = {}
    for outcome in found:
        by_network.setdefault(outcome.trial.network, []).append(outcome)
    rows = []
    for network, own in by_network.items():
        of_devices = {p: [outcome for outcome in own if outcome.trial.num_devices == p] for p in DEVICES}
        rows.append(
            [
                network,
                ", ".join(f"{name} {value}" for name, value in own[0].trial.arguments),
                str(max(outcome.num_layers for outcome in own)),
                " / ".join(str(sum(outcome.trial.seed is not None for outcome in of_devices[p])) for p in DEVICES),
                " / ".join(str(sum(outcome.trial.seed is None for outcome in of_devices[p])) for p in DEVICES),
                f"{sum(not outcome.is_good for outcome in own)}",
                *_worst([outcome for outcome in own if not outcome.error]),
            ]
        )
    by_devices = f"p = {' / '.join(map(str, DEVICES))}"
    headers = [
        *("network", "built with", "layers", f"random, {by_devices}", f"searched, {by_devices}", "failed"),
        *("loss, worst", "weights, worst", "by its own size", "s per program"),
    ]
    return markdown(headers, rows)


def _worst(ran: Sequence[Outcome]) -> tuple[str, str, str, str]:
    if not ran:
        return "", "", "", ""
    return (
        f"{max(outcome.loss_difference for outcome in ran):.1e}",
        f"{max(outcome.weight_difference for outcome in ran):.1e}",
        f"{max(outcome.own_difference for outcome in ran):.1e}",
        f"{sum(outcome.time_s for outcome in ran) / len(ran):.1f}",
    )


def _line(outcome: Outcome) -> str:
    trial = outcome.trial
    strategy = "searched" if trial.seed is None else f"seed {trial.seed}"
    what = f"{trial.network} p={trial.num_devices} {strategy}"
    if outcome.error:
        return f"{what}: FAILED: {outcome.error}"
    numbers = f"loss {outcome.loss_difference:.1e}, weights {outcome.weight_difference:.1e} ({outcome.worst_weight})"
    return f"{what}: {'' if outcome.is_good else 'FAILED: '}{numbers}, {outcome.time_s:.1f} s"
