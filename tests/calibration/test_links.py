"""Levels from times between processes: of made-up ones the figures that made them, of real ones a file that is read."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pase.calibration.measured import (
    OverlapSample,
    RankSamples,
    Rate,
    TransferSample,
    behind,
    level_sizes,
    measured_links,
    sent_to,
)
from pase.errors import CalibrationError
from pase.machine import load_machine, machine_text, parse_machine
from pase.machine.machine import KERNELS

NODE, CLUSTER = (1e-4, 25e6), (4e-4, 5e6)
"""α, and 1/β of a whole link."""


def transfers(latency_s: float, bytes_per_s: float) -> tuple[TransferSample, ...]:
    return tuple(TransferSample(size_bytes=2**i, time_s=latency_s + 2**i / bytes_per_s) for i in range(10, 23, 2))


def samples(*sizes: int) -> RankSamples:
    # Of a node's link each of the two ranks behind it has half.
    levels = [transfers(*NODE), transfers(CLUSTER[0], CLUSTER[1] / 2)]
    rate = Rate(shape="9 × 9", amount=3e6, time_s=1e-3)
    return RankSamples(
        backend="gloo",
        torch_version="2.13.0",
        device_name="made up",
        memory_bytes=2**30,
        level_sizes=sizes,
        matmul=(rate,),
        convolution=(replace(rate, time_s=1e-4),),
        stream=(rate,),
        kernels=(),
        launch_s=1e-5,
        exchanges=tuple(levels[: len(sizes)]),
        all_reduces=(TransferSample(size_bytes=2**24, time_s=7.0),),
        overlap=OverlapSample(computing_s=0.2, summing_s=0.5, both_s=0.55),
    )


@pytest.mark.parametrize(
    ("ranks", "per_node", "sizes"),
    [(4, 2, (2, 4)), (8, 4, (4, 8)), (4, 4, (4,)), (4, 1, (4,)), (2, 2, (2,))],
)
def test_levels_of_processes_in_nodes(ranks: int, per_node: int, sizes: tuple[int, ...]) -> None:
    assert level_sizes(ranks, per_node) == sizes


@pytest.mark.parametrize(
    ("ranks", "per_node", "problem"),
    [(1, 1, "need 2 processes or more; found 1"), (6, 4, "6 processes in nodes of 4"), (4, 0, "in nodes of 0")],
)
def test_processes_that_make_no_levels(ranks: int, per_node: int, problem: str) -> None:
    with pytest.raises(CalibrationError, match=problem):
        level_sizes(ranks, per_node)


@pytest.mark.parametrize("sizes", [(2, 4), (2, 8), (4, 8), (3, 6), (5,), (2, 4, 8)])
def test_at_every_level_each_rank_sends_to_one_of_another_group_that_no_other_sends_to(sizes: tuple[int, ...]) -> None:
    for level, size in enumerate(sizes):
        receivers = [sent_to(rank, level, sizes) for rank in range(sizes[-1])]
        assert sorted(receivers) == list(range(sizes[-1]))
        for rank, receiver in enumerate(receivers):
            assert rank // size == receiver // size
            assert level == 0 or rank // sizes[level - 1] != receiver // sizes[level - 1]
            assert rank % behind(level, sizes) == receiver % behind(level, sizes)


def test_the_machine_has_the_figures_that_made_the_samples() -> None:
    found = measured_links(samples(2, 4), date="2026-01-31", name="mine")
    machine = found.machine
    assert parse_machine(machine_text(machine), source="t") == machine
    assert [(level.name, level.num_devices) for level in machine.levels] == [("node", 2), ("cluster", 4)]
    for level, (latency_s, bandwidth) in zip(machine.levels, (NODE, CLUSTER), strict=True):
        assert level.latency_s == pytest.approx(latency_s, rel=1e-3)
        assert level.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-3)
    # As many FLOP at 3 GFLOP/s and at 30.
    assert machine.device.peak_flop_per_s == {"float32": pytest.approx(2 / (1 / 3e9 + 1 / 30e9), rel=1e-3)}
    assert machine.device.memory_bandwidth_bytes_per_s == 3e9
    # Within a node one half each way, between nodes all of it over a link that two share: 2 ½ n / 25 + n / 5 MB/s.
    (prediction,) = found.all_reduces
    assert prediction.predicted_s == pytest.approx(2**24 / 25e6 + 2**24 / 5e6, rel=1e-2)
    assert found.all_reduce_error == pytest.approx(1 - prediction.predicted_s / 7.0)


@pytest.mark.parametrize(
    ("computing_s", "summing_s", "both_s", "share"),
    [(0.2, 0.5, 0.5, 1.0), (0.2, 0.5, 0.7, 0.0), (0.2, 0.5, 0.55, 0.75), (0.4, 0.1, 0.45, 0.5), (0.2, 0.5, 0.9, 0.0)],
)
def test_of_the_shorter_of_two_what_hides_is_the_overlap(
    computing_s: float, summing_s: float, both_s: float, share: float
) -> None:
    beside = OverlapSample(computing_s=computing_s, summing_s=summing_s, both_s=both_s)
    assert beside.share == pytest.approx(share)
    machine = measured_links(replace(samples(2, 4), overlap=beside), date="2026-01-31").machine
    assert machine.collectives == "ring"
    assert machine.overlap is not None
    assert machine.overlap.share == pytest.approx(share)
    assert f"products take {computing_s:g} s, a sum among all {summing_s:g} s, both" in machine.overlap.source


def test_the_sources_say_what_was_measured_when_and_how() -> None:
    machine = measured_links(samples(2, 4), date="2026-01-31").machine
    for source in (machine.device.source, *(level.source for level in machine.levels)):
        assert "measured on 2026-01-31 with PyTorch 2.13.0 and gloo, with all 4 processes at work at once" in source
    assert "messages of 1 KiB to 4 MiB from each process to one of the next group, 2 behind" in machine.levels[1].source
    (level,) = measured_links(samples(2), date="2026-01-31").machine.levels
    assert level.name == "cluster"


@pytest.mark.parametrize("field", ["matmul", "stream", "all_reduces"])
def test_samples_that_do_not_suffice(field: str) -> None:
    nothing = replace(samples(2, 4), **{field: ()})  # type: ignore[arg-type]
    with pytest.raises(CalibrationError, match="measure again"):
        measured_links(nothing, date="2026-01-31")


BRIEFLY = """
from dataclasses import replace
from pase.calibration import kernels, ranks

kernels._ON_CPU = replace(
    kernels._ON_CPU, extents=(64, 256), depths=(64,), copies=((4, 16),), convolutions=((1, 8, 8, 8, 3),),
    attentions=((2, 16, 8),), arrays=(2**14, 2**18),
)
ranks._RATE_S, ranks._KERNEL_S, ranks._CHAIN_S, ranks._CHAINS, ranks._CHAINS_S = 0.02, 0.01, 0.005, 2, 0.01
ranks._LARGEST_BYTES, ranks._BESIDE_RUNS = 4 * 2**20, 2
ranks.main()
"""


@pytest.mark.slow
def test_two_processes_measure_themselves(tmp_path: Path) -> None:
    """As `torchrun` starts them, on loopback, but with few and short messages and kernels."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    output = tmp_path / "two.toml"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", BRIEFLY, "-o", str(output)],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in started:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    machine = load_machine(output)
    (level,) = machine.levels
    assert (machine.name, level.num_devices) == ("two", 2)
    assert machine.device.name.endswith("(one of 2 processes)")
    assert 1e6 < level.bandwidth_bytes_per_s < 1e12
    assert 1e8 < machine.peak_flop_per_s() < 1e13
    assert machine.collectives == "ring"
    assert machine.overlap is not None
    assert 0 <= machine.overlap.share <= 1
    assert machine.kernels is not None
    assert 1e-6 < machine.kernels.launch_s < 1e-2
    assert {sample.what for sample in machine.kernels.samples} == set(KERNELS)
    assert "A launch is that of 16 layers" in machine.kernels.source
