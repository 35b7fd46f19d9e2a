"""`pase compare`: the strategies beside one another, as tables, as JSON and as plans."""

import json
import re
from pathlib import Path

import pytest

from pase.analysis.baselines.registry import BASELINES
from pase.costs import COST_MODELS
from pase.planning.plan_file import read_plan
from tests.cli.conftest import Command, document_of

ALEXNET = ("alexnet", "-b", "16", "--arg", "image=64", "--arg", "width=8", "--arg", "classes=16", "-p", "8")
APPLY = ["pase", "data_parallel", "owt", "integrated_grid", "mcmc"]
QUICK = ("--steps", "500")

# The names are part of the interface: add some, never rename one.
FIELDS = {
    *("name", "total_cost", "compute", "communication", "memory_bytes_per_device", "ratio_to_data_parallel"),
    *("fits_device", "search_time_s", "cost_model", "cost_unit", "lower_bound", "exact", "gap"),
}


def test_json_holds_every_strategy_with_its_parts(pase: Command) -> None:
    document = document_of(pase, "compare", *ALEXNET, *QUICK)
    assert [entry["name"] for entry in document["strategies"]] == APPLY
    assert {entry["name"] for entry in document["not_applicable"]} == set(BASELINES) - set(APPLY)
    ours, data_parallel = document["strategies"][:2]
    for entry in document["strategies"]:
        assert set(entry) == FIELDS
        assert entry["total_cost"] == pytest.approx(entry["compute"] + entry["communication"], rel=1e-12)
        assert entry["total_cost"] >= ours["total_cost"]
        assert entry["ratio_to_data_parallel"] == pytest.approx(entry["total_cost"] / data_parallel["total_cost"])
        assert 0 < entry["memory_bytes_per_device"] < 11e9
        assert entry["fits_device"] is True
        assert entry["lower_bound"] == pytest.approx(ours["total_cost"])
        assert entry["gap"] == pytest.approx(1 - ours["total_cost"] / entry["total_cost"], abs=1e-12)
    assert ours["exact"] is True
    assert data_parallel["ratio_to_data_parallel"] == pytest.approx(1)


def test_ours_is_what_search_finds(pase: Command) -> None:
    searched = json.loads(pase("search", *ALEXNET, "--json").out)
    ours, data_parallel, *_ = document_of(pase, "compare", *ALEXNET, "--only", "data_parallel")["strategies"]
    assert ours["total_cost"] == pytest.approx(searched["total_cost"], rel=1e-12)
    assert data_parallel["total_cost"] == searched["baselines"]["data_parallel"]


@pytest.mark.parametrize(("word", "models"), [("both", ["alpha_beta", "paper"]), ("all", sorted(COST_MODELS))])
def test_several_cost_models_have_their_own_tables(pase: Command, word: str, models: list[str]) -> None:
    arguments = ("mlp", "-p", "4", "--cost-model", word, "--only", "data_parallel", "--only", "mcmc", *QUICK)
    document = document_of(pase, "compare", *arguments)
    found = [(entry["cost_model"], entry["name"]) for entry in document["strategies"]]
    assert found == [(model, name) for model in models for name in ("pase", "data_parallel", "mcmc")]
    printed = pase("compare", *arguments).out
    for model in models:
        assert f"cost model {model}\n" in printed
    assert len(re.findall(r"^strategy ", printed, re.MULTILINE)) == len(models)


def test_the_table_fits_a_terminal_and_says_what_does_not_apply(pase: Command) -> None:
    printed = pase("compare", *ALEXNET, *QUICK).out.splitlines()
    assert max(map(len, printed)) <= 100
    rows = [line.split()[0] for line in printed[3 : 3 + len(APPLY)]]
    assert rows == APPLY
    assert "  pase: proven optimal" in "\n".join(printed)
    assert "  megatron does not apply: it needs attention" in printed


def test_what_does_not_fit_a_device_is_marked(pase: Command) -> None:
    """VGG-16 of 512 images on two devices of 11 GB."""
    arguments = ("vgg16", "-p", "2", "-b", "512", "--only", "data_parallel")
    strategies = document_of(pase, "compare", *arguments)["strategies"]
    assert [entry["memory_bytes_per_device"] > 11.8e9 for entry in strategies] == [True, True]
    assert [entry["fits_device"] for entry in strategies] == [False, False]
    printed = pase("compare", *arguments).out
    assert len(re.findall(r" \* [0-9.]+ GB ", printed)) == 2
    assert re.search(r"^  \*: more memory than the 11.8 GB of a device$", printed, re.MULTILINE)


def test_every_strategy_is_written_as_a_plan(pase: Command, tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    finished = pase("compare", *ALEXNET, *QUICK, "-o", folder)
    assert finished.status == 0
    assert finished.err.startswith(f"pase: 5 plans written to {folder}: pase.json, data_parallel.json, ")
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.json" for name in APPLY)
    plan = read_plan(folder / "owt.json")
    assert {dim: k for dim, k in plan["fc1"].splits.items() if k > 1} == {"n": 8}
    assert not plan.exact
    assert plan.lower_bound == pytest.approx(read_plan(folder / "pase.json").total_cost)
    assert pase("explain", folder / "owt.json").status == 0
    assert pase("emit", folder / "owt.json", "-o", tmp_path / "train.py").status == 0
    document = document_of(pase, "compare", *ALEXNET, "--only", "owt", "-o", folder, "--cost-model", "all")
    assert {f"owt.{model}.json" for model in COST_MODELS} <= {path.name for path in folder.iterdir()}
    assert [entry["name"] for entry in document["strategies"]] == ["pase", "owt"] * len(COST_MODELS)


def test_the_random_search_is_told_its_seed_and_its_start(pase: Command) -> None:
    arguments = (*ALEXNET, "--only", "mcmc", "--steps", "200", "--start", "random")
    costs = [
        document_of(pase, "compare", *arguments, "--seed", seed)["strategies"][1]["total_cost"] for seed in (1, 1, 2)
    ]
    assert costs[0] == costs[1] != costs[2]
    from_data_parallel = document_of(
        pase, "compare", *ALEXNET, "--only", "mcmc", "--steps", "0", "--start", "data_parallel"
    )
    assert from_data_parallel["strategies"][1]["ratio_to_data_parallel"] == pytest.approx(1)


def test_steps_are_compared_with_those_that_people_train_with(pase: Command, tmp_path: Path) -> None:
    arguments = [
        "mlp",
        "-b",
        "16",
        "-p",
        "4",
        "--machine",
        "v100",
        "--cost-model",
        "alpha_beta",
        "--micro-batches",
        "2",
    ]
    document = json.loads(pase("compare", *arguments, "--json", "-o", tmp_path / "plans").out)
    names = ["pase", "data_parallel", "integrated_grid", "mcmc", "zero1", "zero2", "zero3", "zero3_recompute"]
    assert [strategy["name"] for strategy in document["strategies"]] == names
    assert sorted(path.stem for path in (tmp_path / "plans").iterdir()) == sorted(names)
    shown = pase("compare", *arguments)
    assert shown.status == 0
    assert "2 micro-batches; all have as many micro-batches" in shown.out
    limited = pase("compare", *arguments, "--only", "megatron", "--optimizer", "adam", "--memory-per-device", "machine")
    assert "megatron does not apply" in limited.out
    assert "within the limit" in limited.out


def test_a_plan_of_stages_in_turns_says_among_which_cuts_it_is_the_best(pase: Command, tmp_path: Path) -> None:
    sizes = ("layers=4", "model_width=64", "heads=4", "steps=32", "vocabulary=96")
    model = ["gpt", *(each for size in sizes for each in ("--arg", size)), "--batch", "16"]
    asked = ["--devices", "4", "--machine", "v100", "--cost-model", "step", "--micro-batches", "4", "--stages", "4"]
    found = pase("search", *model, *asked, "--schedule", "interleaved", "-o", tmp_path / "plan.json")
    assert found.status == 0
    assert "; of stages in turns the most even cuts alone)" in found.out
    assert "4 micro-batches through 4 groups of 1 devices with 3 stages each (interleaved)" in found.out
    shown = pase("explain", tmp_path / "plan.json", "--schemes")
    assert (shown.status, " 4 × 3 " in shown.out) == (0, True)
    assert "; of stages in turns the most even cuts alone" in shown.out
