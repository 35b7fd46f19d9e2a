"""`pase search` and the memory of a device."""

import json
import re
from pathlib import Path

from pase import SearchOptions, load, search
from pase.common.words import quantity
from pase.planning.plan_file import read_plan
from tests.cli.conftest import Command

GPT = ("gpt", "--devices", "2", "--arg", "layers=2", "--optimizer", "adam")


def test_the_memory_of_a_device_is_shown_beside_what_it_has(pase: Command) -> None:
    finished = pase("search", "lenet5", "--devices", "4", "--batch", "16")
    memory = search(load("lenet5", batch=16), 4).memory
    shown = re.escape(quantity(memory.total_bytes, "B"))
    assert re.search(rf"^  memory of a device +{shown}   \(0% of its 11.8 GB\)$", finished.out, re.MULTILINE)
    assert "device needs" not in finished.err


def test_a_strategy_that_devices_cannot_hold_is_warned_of(pase: Command) -> None:
    finished = pase("search", *GPT)
    assert finished.status == 0
    assert re.search(
        r"^pase: a device needs [\d.]+ GB; NVIDIA GeForce GTX 1080 Ti has 11.8 GB; --memory-per-device machine looks",
        finished.err,
        re.MULTILINE,
    )
    document = json.loads(pase("search", *GPT, "--json").out)
    memory = document["memory"]
    assert memory["optimiser_bytes"] == 2 * memory["weights_bytes"]
    assert memory["total_bytes"] == sum(memory[key] for key in memory if key not in ("optimiser", "total_bytes"))


def test_a_limit_has_its_price(pase: Command, tmp_path: Path) -> None:
    """Between what the least and the best strategy need; data parallelism needs more than is allowed."""
    options = SearchOptions(optimiser="adam")
    free = search(load("rnnlm"), 8, options=options)
    limit = free.memory.total_bytes - 100_000_000
    path = tmp_path / "plan.json"
    finished = pase("search", "rnnlm", "-p", 8, "--optimizer", "adam", "--memory-per-device", f"{limit}B", "-o", path)
    plan = read_plan(path)
    assert plan.exact
    assert plan.device_memory_bytes == limit >= plan.memory.total_bytes
    dearer = plan.total_cost / free.total_cost - 1
    assert 0 < dearer < 0.5
    for line in (
        r"^  total cost +[\d.]+ TFLOP.*   \(proven optimal within the limit\)$",
        rf"^  memory of a device +[\d.]+ GB, with adam   \([\d.]+% of the limit, {quantity(limit, 'B')}; \d+% of its",
        rf"^  without the limit +[\d.]+ TFLOP   \(the limit costs {dearer:.2%} more\)$",
        r"^  data parallelism +[\d.]+ TFLOP   \([\d.]+ × ours; needs [\d.]+ GB, too much\)$",
    ):
        assert re.search(line, finished.out, re.MULTILINE), line


def test_nine_tenths_of_the_machine_are_a_limit(pase: Command) -> None:
    finished = pase("search", "rnnlm", "-p", 4, "--optimizer", "adam", "--memory-per-device", "machine", "--json")
    document = json.loads(finished.out)
    assert document["memory_limit_bytes_per_device"] == document["machine"]["device"]["memory_bytes"] * 9 // 10
    assert document["memory"]["total_bytes"] <= document["memory_limit_bytes_per_device"]
    assert document["exact"] is True


def test_nothing_fits(pase: Command) -> None:
    finished = pase("search", *GPT, "--memory-per-device", "10GB")
    assert (finished.status, finished.out) == (1, "")
    (line,) = finished.err.splitlines()
    assert re.fullmatch(
        r"pase: no strategy of 'gpt' fits 10.0 GB on each of 2 devices: the least that one takes is [\d.]+ GB, "
        r"[\d.]+ GB too much; layer '\w+' binds with [\d.]+ GB of it \(\d+%\); (\d+) devices would do, or try a "
        r"smaller batch(; or keep these 2 with --cost-model alpha_beta .*)?",
        line,
    )


SHARDED_BETWEEN = (
    *("search", "mlp", "--devices", 8, "--batch", 64, "--machine", "h100", "--cost-model", "alpha_beta"),
    *("--arg", "inputs=16", "--arg", "hidden=4096", "--arg", "layers=8", "--arg", "classes=16", "--modes", "all"),
    *(
        "--pin",
        "fc1: b=8",
        "--pin",
        "fc8: b=8",
        *(text for i in range(2, 8) for text in ("--pin", f"fc{i}: b=8 zero3")),
    ),
)
"""Sharded layers between a first and a last one that are replicated, whose gradients are of one bucket."""


def test_gradients_of_both_ends_hold_up_no_others(pase: Command, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    finished = pase(*SHARDED_BETWEEN, "--memory-per-device", "413MB", "-o", path)
    plan = read_plan(path)
    # Were all gradients whole until the end, they would take 403 MB, besides weights of 51 MB and what reductions hold.
    assert 412_000_000 < plan.peak.bytes <= plan.device_memory_bytes == 413_000_000
    fact = (
        r"^  at its peak +weights [\d.]+ MB · gradients [\d.]+ MB · activations [\d.]+ kB · buffers [\d.]+ MB   \(.*\)$"
    )
    assert re.search(fact, finished.out, re.MULTILINE)
