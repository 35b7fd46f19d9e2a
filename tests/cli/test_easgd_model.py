"""`pase easgd-model`: what a user sees, in tables and JSON, and what is refused."""

import re

import pytest

from pase.studies.easgd_costs import ALGORITHMS
from tests.cli.conftest import Command, document_of

MLP = ("easgd-model", "--network", "mlp")


@pytest.mark.parametrize("network", ["googlenet", "vgg19"])
def test_the_paper_s_networks_stand_beside_its_times(network: str, pase: Command) -> None:
    finished = pase("easgd-model", "--network", network)
    assert (finished.status, finished.err) == (0, "")
    lines = finished.out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    # The row of 64 nodes, 4352 cores: ours, ours overlapped, the paper's.
    row = next(line for line in lines if line.startswith("     64 "))
    paper = {"googlenet": ("1674 s", "91.6%"), "vgg19": ("1642 s", "80.2%")}[network]
    assert re.search(rf"{paper[0]} +{paper[1]} +[\d.]+ [MG]B/s$", row)
    for name in ALGORITHMS:
        assert any(line.startswith(f"{name} ") for line in lines)


def test_weak_scaling_in_json(pase: Command) -> None:
    document = document_of(pase, "easgd-model", "--network", "vgg19", "--workers", "1,64")
    assert (document["num_parameters"], document["weight_bytes"], document["num_arrays"]) == (
        143_667_240,
        574_668_960,
        19,
    )
    assert (document["latency_s"], document["bandwidth_bytes_per_s"]) == (0.7e-6, 5e9)
    assert document["iteration_time_s"] == 1318 / 80
    scaling = {entry["algorithm"]: entry["rows"] for entry in document["weak_scaling"]}
    message = 0.7e-6 + 574_668_960 / 5e9
    assert [row["workers"] for row in scaling["sync-easgd2"]] == [1, 64]
    assert scaling["sync-easgd2"][1]["time_s"] == pytest.approx(1318 + 80 * 12 * message)
    assert scaling["sync-easgd3"][1]["efficiency"] == pytest.approx(1)
    measured = document["paper"][-1]
    assert (measured["cores"], measured["time_s"], measured["efficiency"]) == (4352, 1642, 0.802)
    assert measured["bandwidth_that_explains_it"] == pytest.approx(1.70e9, rel=0.01)
    assert [(found["algorithm"], found["workers"]) for found in document["iterations"]] == [
        (name, workers) for name in ALGORITHMS for workers in (1, 64)
    ]
    for found in document["iterations"]:
        assert found["time_s"] == pytest.approx(sum(found["parts_s"].values()))


def test_one_algorithm_on_other_workers(pase: Command) -> None:
    document = document_of(
        pase, "easgd-model", "--algorithm", "async-easgd", "--workers", "4, 2,4", "--iteration-time", 0.5
    )
    assert [row["workers"] for row in document["weak_scaling"][0]["rows"]] == [2, 4]
    assert {found["algorithm"] for found in document["iterations"]} == {"async-easgd"}
    assert (document["iteration_time_s"], document["iteration_time_source"], document["paper"]) == (0.5, "given", None)
    table = pase("easgd-model", "--algorithm", "async-easgd", "--workers", "2,4", "--iteration-time", 0.5).out
    assert "sync-easgd2" not in table
    assert "a batch on one worker: 500 ms (given)" in table


def test_one_message_or_one_for_each_array(pase: Command) -> None:
    packed, apart = (
        document_of(pase, "easgd-model", "--network", "lenet5", flag) for flag in ("--packed", "--per-layer")
    )
    for one, many in zip(packed["iterations"], apart["iterations"], strict=True):
        assert (5 * one["messages"], one["bytes"]) == (many["messages"], many["bytes"])
    assert packed["packing"] == apart["packing"]
    assert packed["packing"]["saved_s"] == pytest.approx(4 * 0.7e-6)
    # Algorithm 4 on 64 workers: 2 · 63 transfers.
    assert (
        next(i for i in packed["iterations"] if (i["algorithm"], i["workers"]) == ("sync-easgd3", 64))["messages"]
        == 126
    )


def test_a_network_that_the_paper_has_not_is_computed_at_the_peak(pase: Command) -> None:
    document = document_of(pase, "easgd-model", *MLP[1:], "-b", 64, "--arg", "hidden=512", "--machine", "knl-10gbe")
    assert document["paper"] is None
    assert "FLOP of a step ÷ peak of Intel Xeon Phi 7250" in document["iteration_time_source"]
    assert document["latency_s"] == 7.2e-6
    double = document_of(pase, "easgd-model", *MLP[1:], "-b", 128, "--arg", "hidden=512", "--machine", "knl-10gbe")
    assert double["iteration_time_s"] == pytest.approx(2 * document["iteration_time_s"], rel=1e-6)


@pytest.mark.parametrize(
    "arguments", [("-b", 32), ("--arg", "classes=10"), ("--machine", "v100"), ("--iterations", 7)], ids=str
)
def test_the_paper_s_times_stand_beside_nothing_else(arguments: tuple[object, ...], pase: Command) -> None:
    """Of another batch, network, node or number of iterations its times say nothing."""
    document = document_of(pase, "easgd-model", *arguments)
    assert document["paper"] is None
    assert document["num_batches"] == (7 if "--iterations" in arguments else 1)


def test_all_that_the_paper_states(pase: Command) -> None:
    finished = pase("easgd-model", "--paper")
    assert (finished.status, finished.err) == (0, "")
    assert max(map(len, finished.out.splitlines())) <= 100
    assert re.search(
        r"^communication +52 / 51 % +87 / 92 % +25 / 68 % +20 / 20 % +14 / 4 %$", finished.out, re.MULTILINE
    )
    assert "**" not in finished.out
    document = document_of(pase, "easgd-model", "--paper")
    assert document["table_3"][1]["paper_time_s"] == 41
    assert document["table_3"][1]["time_s"] == pytest.approx(38.64)
    assert document["statements"][1] == {
        "where": "Table 3",
        "what": "Original EASGD: 5,000 iterations",
        "paper": "41 s",
        "ours": "38.6 s",
        "verdict": "close, -6%",
    }
