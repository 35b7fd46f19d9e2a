"""What commands print: tables and numbers for people, one JSON object for programs, and nothing else."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import pase as library
from pase.cli import output
from pase.common.words import quantity, visible
from pase.machine import preset_names
from pase.models import MODELS
from pase.planning.plan_file import plan_schema, read_plan
from tests.cli.conftest import Command
from tests.networks import SMALL

_SIZES = ("layers=6", "vocabulary=64", "steps=16", "model_width=16", "heads=4")
SMALL_GPT = ("gpt", "-p", "4", *(f"--arg={text}" for text in _SIZES))
LENET = ("lenet5", "--devices", "4", "--batch", "16")


def _arguments(name: str) -> list[str]:
    return [word for key, value in SMALL[name].items() for word in ("--arg", f"{key}={value}")]


# ---------------------------------------------------------------------------------------------------------- search


def test_search_says_what_a_plan_costs_as_placed_where_that_is_another_figure(pase: Command) -> None:
    for model, is_another in (("alpha_beta", True), ("paper", False)):
        finished = pase("search", "rnnlm", "--devices", "16", "--machine", "1080ti", "--cost-model", model)
        assert finished.status == 0
        line = r"  as placed +\d+ ms   \(\d+\.\d\d% more, with one placement for all layers\)\n"
        assert bool(re.search(line, finished.out)) == is_another


def test_search_says_where_keys_and_values_go_round(pase: Command) -> None:
    long = ("gpt", "--devices", "4", "--batch", "1", "--keep-batch", "--arg", "steps=65536", "--arg", "layers=2")
    for way, is_ring in (("gather", False), ("auto", True)):
        finished = pase("search", *long, "--machine", "h100", "--cost-model", "alpha_beta", "--attention", way)
        assert finished.status == 0
        told = "attention               keys and values circulate in layer1_self_attention and 1 more\n"
        assert (told in finished.out) == is_ring


def test_search_prints_a_line_for_each_layer_and_what_is_known(pase: Command) -> None:
    finished = pase("search", *LENET)
    assert finished.status == 0
    header, *rows = finished.out.split("\n\n")[0].splitlines()
    columns = ["layer", "iteration space", "configuration", "layer cost", "transfer cost", "share"]
    assert re.split(r"  +", header) == columns
    plan = library.search(library.load("lenet5", batch=16), 4)
    assert [row.split()[0] for row in rows] == [layer.name for layer in plan.layers]
    for row, layer in zip(rows, plan.layers, strict=True):
        _, space, configuration, own, transfer, share = re.split(r"  +", row)
        assert space == " ".join(f"{dim}={extent}" for dim, extent in layer.dims.items())
        splits = [f"{dim}={k}" for dim, k in layer.splits.items() if k > 1]
        replicas = [f"×{layer.num_replicas}"] if layer.num_replicas > 1 else []
        assert configuration == " ".join([*(splits or ["not split"]), *replicas])
        assert own == quantity(layer.layer_cost, "FLOP")
        assert transfer == quantity(sum(t.cost for t in layer.transfers), "FLOP")
        part = layer.layer_cost + sum(t.cost for t in layer.transfers)
        assert float(share.rstrip("%")) == pytest.approx(100 * part / plan.total_cost, abs=0.051)
    below = finished.out.split("\n\n")[1]
    ratio = plan.baselines["data_parallel"] / plan.total_cost
    total = re.escape(quantity(plan.total_cost, "FLOP"))
    peak = re.escape(quantity(plan.total_cost / 11.34e12, "s"))
    for line in (
        r"^lenet5 on 4 × NVIDIA GeForce GTX 1080 Ti \(1080ti\), cost model paper$",
        rf"^  total cost +{total}, {peak} at a device's peak   \(proven optimal\)$",
        rf"^  data parallelism +\S+ .?FLOP   \({ratio:.2f} × ours\)$",
        r"^  largest dependent set +1   \(ordering generate_seq\)$",
        r"^  search time +\d+ m?s$",
    ):
        assert re.search(line, below, re.MULTILINE), line


def test_search_names_an_extent_that_is_worth_padding_and_no_other(pase: Command) -> None:
    """Nobody splits a kernel of 5 or an image of 14: that these divide by nothing is not worth a word."""
    assert pase("search", *LENET).err == ""
    small = ("gpt", "-p", 16, "-b", 8, "--arg", "layers=1", "--arg", "steps=64")
    odd = pase("search", *small, "--arg", "vocabulary=50257")
    said = re.fullmatch(
        r"pase: 50,257 \(tokens: v, fc: v, softmax: v\) cannot be cut 16 ways; with 50,272 in its place the cheapest "
        r"strategy costs (\S+ .FLOP), (\S+)% less\n",
        odd.err,
    )
    assert said, odd.err
    even = pase("search", *small, "--arg", "vocabulary=50272")
    assert even.err == ""
    assert f"total cost              {said[1]}," in even.out


@pytest.mark.parametrize("name", ["lenet5", "rnnlm"])
def test_search_prints_one_json_object_that_is_the_plan(name: str, pase: Command, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    finished = pase("search", name, "-p", 4, *_arguments(name), "--json", "-o", path)
    assert (finished.status, finished.err) == (0, "")
    document = json.loads(finished.out)
    assert json.loads(path.read_text(encoding="utf-8")) == document
    schema = json.loads(plan_schema())
    assert Draft202012Validator(schema).is_valid(document)
    assert {"schema_version", "total_cost", "lower_bound", "gap", "exact", "layers", "baselines", "search"} <= set(
        document
    )
    assert {"ordering", "largest_dependent_set", "time_s", "peak_memory_bytes"} <= set(document["search"])
    assert {"name", "kind", "dims", "splits", "layer_cost"} <= set(document["layers"][0])
    assert document["baselines"]["data_parallel"] >= document["total_cost"]
    assert read_plan(path).total_cost == document["total_cost"]


def test_search_says_where_the_plan_went_on_standard_error(pase: Command, tmp_path: Path) -> None:
    finished = pase("search", *LENET, "-o", tmp_path / "plan.json")
    assert "plan.json" not in finished.out
    assert finished.err.endswith(f"pase: plan written to {tmp_path / 'plan.json'}\n")


def test_search_takes_the_machine_and_its_figures(pase: Command) -> None:
    def total(*arguments: str) -> float:
        return float(json.loads(pase("search", "alexnet", "-p", 8, "--json", *arguments).out)["total_cost"])

    slow = total("--bandwidth", "1e9")
    assert total("--machine", "2080ti") != total("--machine", "1080ti") == total()
    assert slow > total()
    # The ratio of FLOP to bytes is all that counts (Eq. 1).
    machine = library.load_machine("1080ti")
    ratio = machine.flop_per_byte(8)
    assert total("--flops", str(ratio * 1e9), "--bandwidth", "1e9") == pytest.approx(total(), rel=1e-9)


def test_search_explains_the_orderings(pase: Command) -> None:
    finished = pase("search", *LENET, "--explain-ordering")
    table = finished.out.split("\n\n")[2].splitlines()
    assert [line.split()[0] for line in table[2:]] == ["generate_seq", "breadth_first", "min_fill", "min_weight"]
    document = json.loads(pase("search", *LENET, "--explain-ordering", "--json").out)
    assert [entry["name"] for entry in document["orderings"]] == [line.split()[0] for line in table[2:]]


@pytest.mark.parametrize("ordering", ["generate_seq", "breadth_first"])
def test_search_with_a_given_ordering_says_so(ordering: str, pase: Command) -> None:
    document = json.loads(pase("search", *LENET, "--ordering", ordering, "--json").out)
    assert document["search"]["ordering"] == ordering


# ----------------------------------------------------------------------------------------------- tables and solving


def test_tables_that_were_written_are_solved_to_the_same_cost(pase: Command, tmp_path: Path) -> None:
    path = tmp_path / "tables.npz"
    written = pase("tables", *LENET, "-o", path)
    assert (written.status, written.out) == (0, "")
    assert "8 vertices, 7 edges" in written.err
    plan = json.loads(pase("search", *LENET, "--json").out)
    solution = json.loads(pase("solve", path, "--json").out)
    fields = {"cost", "lower_bound", "gap", "exact", "configurations", "time_s", "peak_memory_bytes"}
    assert fields <= set(solution)
    assert solution["cost"] == pytest.approx(plan["total_cost"], rel=1e-12)
    assert solution["exact"] is True
    assert len(solution["configurations"]) == 8
    text = pase("solve", path)
    assert text.err == ""
    assert text.out.startswith("tables.npz: 8 vertices, 7 edges\n")
    assert f"{solution['cost']!r}   (proven optimal)" in text.out
    assert text.out.endswith(" ".join(map(str, solution["configurations"])) + "\n")


def test_tables_are_written_for_other_solvers(pase: Command, tmp_path: Path) -> None:
    path = tmp_path / "tables.cfn"
    document = json.loads(pase("tables", *LENET, "-o", path, "--json").out)
    assert document["output"] == str(path)
    assert (document["vertices"], document["edges"]) == (8, 7)
    assert document["distinct_edge_tables"] <= 7
    exported = json.loads(path.read_text(encoding="utf-8"))
    assert document["largest_domain"] == max(len(values) for values in exported["variables"].values())
    pase("tables", *LENET, "-o", tmp_path / "tables.npz")
    assert pase("solve", tmp_path / "tables.npz", "--export", tmp_path / "solved.cfn").status == 0
    assert json.loads((tmp_path / "solved.cfn").read_text(encoding="utf-8"))["variables"] == exported["variables"]


# ------------------------------------------------------------------------------------------------------------ lists


def test_models_lists_each_network_with_what_arg_reaches(pase: Command) -> None:
    finished = pase("models")
    assert (finished.status, finished.err) == (0, "")
    rows = {line.split()[0]: line for line in finished.out.splitlines()[1:]}
    assert list(rows) == list(MODELS)
    for name, entry in MODELS.items():
        for parameter in entry.parameters:
            assert parameter == "batch" or f" {parameter}=" in rows[name]
        assert re.search(rf"  {entry.default_batch}  ", rows[name])
    document = json.loads(pase("models", "--json").out)
    assert [model["name"] for model in document["models"]] == list(MODELS)
    assert all(model["parameters"]["batch"] == model["default_batch"] for model in document["models"])


def test_machines_lists_the_presets_and_shows_one(pase: Command, tmp_path: Path) -> None:
    listed = pase("machines").out.splitlines()
    assert [line.split()[0] for line in listed] == ["name", *preset_names()]
    assert max(map(len, listed)) <= 100
    shown = pase("machines", "--show", "1080ti").out
    assert shown.startswith("1080ti: nodes of 8 GeForce GTX 1080 Ti")
    assert shown.count("source: ") == 4
    assert "kernels  products" not in shown
    kernels = pase("machines", "--show", "h100").out
    assert "overlap  0.9 of the backward pass overlaps with all-reduces" in kernels
    assert "kernels  products 0.8, convolutions 0.53, attention 0.35, memory 0.9" in kernels
    assert "half at    100 rows or columns, depth 100, in bfloat16" in kernels
    document = json.loads(pase("machines", "--show", "2080ti", "--json").out)
    assert [machine["name"] for machine in document["machines"]] == ["2080ti"]
    names = [machine["name"] for machine in json.loads(pase("machines", "--json").out)["machines"]]
    assert names == list(preset_names())


# -------------------------------------------------------------------------------------------------- hostile contents

HOSTILE = "\x1b[31mred\x1b[0m \x1b]0;title\x07 [bold]b[/bold] [red] a\tb\rc\x9b2J \u202etxt\u2028 \ud800"
"""Colours, a window's title, markup, a return that would overwrite the line, a C1 control, a change of direction."""


def _is_harmless(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def test_a_machine_file_cannot_steer_the_terminal(pase: Command, tmp_path: Path) -> None:
    from importlib import resources

    toml = (resources.files("pase.machine") / "presets" / "1080ti.toml").read_text(encoding="utf-8")
    path = tmp_path / "evil.toml"
    quoted = json.dumps(HOSTILE.replace("\ud800", ""))
    path.write_text(
        re.sub(r'(?m)^(name|description|source) = ".*"$', lambda m: f"{m[1]} = {quoted}", toml), encoding="utf-8"
    )
    for arguments in (["machines", "--show", path], ["search", *LENET, "--machine", path]):
        finished = pase(*arguments)
        assert finished.status == 0
        assert _is_harmless(finished.out + finished.err)
        assert "[bold]b[/bold] [red] a\\tb\\rc" in finished.out


def test_names_in_a_table_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(["<name", "[b]cost"], [[HOSTILE, "[red]"], ["", "1"]])
    printed = capsys.readouterr().out
    assert _is_harmless(printed)
    assert "\\x1b[31mred" in printed
    assert "[bold]b[/bold] [red]" in printed
    assert "[b]cost" in printed
    assert len(printed.splitlines()) == 3


@given(st.text(st.characters(exclude_categories=[])))
def test_what_is_printable_stays_and_the_rest_is_written_out(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable()
    assert shown.encode("utf-8").decode("utf-8") == shown
    if text.isprintable():
        assert shown == text
