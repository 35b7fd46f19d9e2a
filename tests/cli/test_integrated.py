"""`pase integrated` and `pase halo`: what a user sees of a study, and of halos, in tables and JSON."""

import json
import re
from pathlib import Path

import pytest

from pase.studies.integrated.chain import CONVENTIONS
from tests.cli.conftest import Command

PAPER = ("integrated", "alexnet", "--arg", "grouped=true", "--processes", 512, "--batch", 2048)


def test_the_paper_in_json(pase: Command) -> None:
    finished = pase(*PAPER, "--json")
    assert (finished.status, finished.err) == (0, "")
    document = json.loads(finished.out)
    assert (document["num_weights"], document["machine"]) == (60_954_656, "cori-knl")
    assert (document["latency_s"], document["bandwidth_bytes_per_s"]) == (2e-6, 6e9)
    # Eq. 4: eight layers of 9 messages, 511/512 of all weights, both twice.
    assert document["pure_batch_s"] == pytest.approx(2 * (8 * 9 * 2e-6 + 511 / 512 * 60_954_656 * 4 / 6e9))
    assert [(grid["pr"], grid["pc"]) for grid in document["grids"]] == [(2**k, 2 ** (9 - k)) for k in range(10)]
    for grid in [*document["grids"], document["best_of_all"]]:
        assert grid["time_s"] == pytest.approx(sum(grid["terms_s"].values()))
        assert grid["speedup_over_pure_batch"] == pytest.approx(document["pure_batch_s"] / grid["time_s"])
    assert document["grids"][0]["time_s"] == document["pure_batch_s"]
    assert document["grids"][-1]["time_s"] == document["pure_model_s"]
    assert document["best"] == min(document["grids"], key=lambda grid: grid["time_s"])
    assert (document["best"]["pr"], document["best"]["pc"]) == (4, 128)
    assert set(document["variants"]) == {"dense_only", "domain", "per_layer"}
    assert document["best_of_all"]["variant"] == "dense_only"
    conv4 = next(layer for layer in document["layers"] if layer["name"] == "conv4")
    assert conv4["crossover_batch"] == pytest.approx(2 * 9 * 192 / (3 * 169))
    assert set(document["conventions"]) == {*CONVENTIONS, "word_bytes"}


def test_the_first_version(pase: Command) -> None:
    document = json.loads(pase(*PAPER, "--version", 1, "--json").out)
    assert (document["best"]["pr"], document["best"]["pc"], document["variants"]) == (4, 128, {})
    assert document["pure_domain_convolutions_s"] is None
    last = document["grids"][-1]
    assert last["terms_s"]["input_gradient_all_reduce"] == 2 * last["terms_s"]["activation_all_gather"]


def test_one_grid_and_one_convention(pase: Command) -> None:
    finished = pase(*PAPER, "--grid", "16x32", "--convention", "redistribution=yes", "--json")
    document = json.loads(finished.out)
    assert [(grid["pr"], grid["pc"]) for grid in document["grids"]] == [(16, 32)]
    assert document["conventions"]["redistribution"]
    assert document["variants"]["dense_only"]["best"]["terms_s"]["redistribution"] > 0
    assert document["variants"]["domain"] == {"grids": [], "best": None}


def test_the_tables(pase: Command) -> None:
    finished = pase(*PAPER, "--per-layer", "--compute-time", 0.04)
    assert (finished.status, finished.err) == (0, "")
    assert max(map(len, finished.out.splitlines())) <= 100
    first, second = finished.out.splitlines()[:2]
    assert first == "alexnet: 8 weighted layers, 60,954,656 weights (10,568 biases and the like are not counted)"
    assert second.startswith("512 processes, batch 2048; α 2.00 µs, 1/β 6.00 GB/s;")
    assert re.search(r"^pure batch parallelism +81\.4 ms$", finished.out, re.MULTILINE)
    assert re.search(r"^4x128 +29\.9 ms +2\.72 .* +69\.9 ms +1\.74$", finished.out, re.MULTILINE)
    assert "best: dense_only on 32x16, 9.35 ms, 8.71 times as fast as pure batch parallelism" in finished.out
    assert re.search(r"^conv1 +150,528 +290,400 +34,848 +0\.08 +0 +0\.24 +domain$", finished.out, re.MULTILINE)


def test_overlap_hides_some_of_it(pase: Command) -> None:
    arguments = (*PAPER, "--compute-time", "0.04", "--json")
    plain, hidden = (json.loads(pase(*arguments, *more).out)["best"] for more in ((), ("--overlap",)))
    assert plain["step_time_s"] == pytest.approx(0.04 + plain["time_s"])
    assert hidden["step_time_s"] == pytest.approx(0.04 + plain["time_s"] / 3)
    assert plain["time_s"] == hidden["time_s"]


def test_an_epoch_has_as_many_steps_as_its_samples_fill(pase: Command) -> None:
    best = json.loads(pase(*PAPER, "--samples", 1_200_000, "--json").out)["best"]
    assert best["epoch_time_s"] == pytest.approx(best["time_s"] * 1_200_000 / 2048)
    whole = json.loads(pase(*PAPER, "--samples", 1_200_000, "--convention", "whole_iterations=yes", "--json").out)
    assert whole["best"]["epoch_time_s"] == pytest.approx(best["time_s"] * 586)
    tables = pase(*PAPER, "--samples", 1_200_000, "--compute-time", 0.04).out
    assert re.search(r"^4x128 .* 17\.5 s +69\.9 ms +1\.74$", tables, re.MULTILINE)
    assert max(map(len, tables.splitlines())) <= 100


def test_beyond_the_batch(pase: Command) -> None:
    finished = pase("integrated", "alexnet", "--processes", 64, "--batch", 16)
    assert finished.status == 0
    warnings = finished.err.splitlines()
    assert [line.partition(";")[0].partition(":")[0] for line in warnings] == ["pase", "pase"]
    assert "has less than one sample for each of 64 processes" in warnings[0]
    assert "2 grids with more columns than the batch has samples are left out" in warnings[1]
    assert "dense_only: on none of these grids" in finished.out


def test_the_documentation_has_every_convention(pase: Command) -> None:
    text = (Path(__file__).parents[2] / "docs" / "integrated.md").read_text(encoding="utf-8")
    listed = pase("integrated", "--help").out
    assert all(f"`{name}`" in text and name in listed for name in CONVENTIONS)


def test_computation_by_batch_and_grids_of_their_own(pase: Command) -> None:
    arguments = (*PAPER[:-3], 1024, "--batch", 512, "--compute-time", "1=0.02,256=0.6")
    document = json.loads(pase(*arguments, "--json").out)
    own = document["variants"]["own_grids"]["best"]
    assert own["convolutions"] == {"pr": 2, "pc": 512}
    first = document["grids"][0]
    assert (first["pr"], first["pc"]) == (2, 512)
    # One sample on half of the weights.
    assert first["compute_time_s"] == pytest.approx(0.02 / 2)
    assert first["step_time_s"] == pytest.approx(first["time_s"] + 0.01)
    assert first["held_words"]["weights"] == 60_954_656 / 2
    text = pase(*arguments, "--memory", "--convolutions", "4x256").out
    assert "rows in convolutions, on a grid of their own (Fig. 10), 4x256\n" in text
    assert re.search(r"^2x512 +122 MB +.* +3 of 8$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 120


def test_a_recurrent_network(pase: Command) -> None:
    finished = pase("integrated", "rnnlm", "-p", 8, "--json")
    assert finished.status == 0
    assert [layer["name"] for layer in json.loads(finished.out)["layers"]] == ["embedding", "lstm/1", "lstm/2", "fc"]


B2 = ("halo", "--extent", 11, "--kernel", 5, "--stride", 1, "--padding", 2, "--workers", 3)


def test_the_table_of_figure_b2(pase: Command) -> None:
    finished = pase(*B2)
    assert (finished.status, finished.err) == (0, "")
    first, _, header, *rows, _, legend = finished.out.splitlines()
    assert first == "input 11, output 11: kernel 5, stride 1, dilation 1, padding 2"
    assert header.split() == ["worker", "output", "owns", "needs", "halo", "unused", "padding"]
    assert [re.split(r"  +", row.strip()) for row in rows] == [
        ["0", "[0, 4)", "[0, 4)", "[0, 6)", "0 | 2", "0 | 0", "2 | 0"],
        ["1", "[4, 8)", "[4, 8)", "[2, 10)", "2 | 2", "0 | 0", "0 | 0"],
        ["2", "[8, 11)", "[8, 11)", "[6, 11)", "2 | 0", "0 | 0", "0 | 2"],
    ]
    assert "left | right" in legend


def test_the_json_of_figure_b5(pase: Command) -> None:
    finished = pase("halo", "--extent", 20, "--kernel", 2, "--stride", 2, "--workers", 6, "--json")
    assert (finished.status, finished.err) == (0, "")
    document = json.loads(finished.out)
    assert {key: value for key, value in document.items() if key != "workers"} == {
        "extent": 20,
        "kernel": 2,
        "stride": 2,
        "dilation": 1,
        "padding": 0,
        "output_extent": 10,
    }
    assert len(document["workers"]) == 6
    assert document["workers"][3] == {
        "output": [6, 8],
        "owned_input": [11, 14],
        "needed_input": [12, 16],
        "halo_left": 0,
        "halo_right": 2,
        "unused_left": 1,
        "unused_right": 0,
        "padding_left": 0,
        "padding_right": 0,
    }


def test_dilation_reaches_the_geometry(pase: Command) -> None:
    document = json.loads(pase("halo", "--extent", 9, "--kernel", 2, "--dilation", 4, "--workers", 2, "--json").out)
    assert [worker["needed_input"] for worker in document["workers"]] == [[0, 7], [3, 9]]


@pytest.mark.parametrize("extent", [1, 64, 99_999])
def test_the_table_fits_80_columns(extent: int, pase: Command) -> None:
    finished = pase("halo", "--extent", extent, "--kernel", 1, "--workers", 12, "--padding", 3)
    assert max(map(len, finished.out.splitlines())) <= 80


def test_workers_with_nothing_to_do_are_shown(pase: Command) -> None:
    finished = pase("halo", "--extent", 3, "--kernel", 2, "--workers", 4)
    assert finished.status == 0
    assert finished.out.splitlines()[-3].split() == ["3", "none", "none", "none", *(["0", "|", "0"] * 3)]
