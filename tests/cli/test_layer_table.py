"""Tables in which a block that repeats stands once: written out again they are those of `--all-layers`."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.conftest import Command

NETWORKS = {
    # [layers of a block, how often it comes], the longest runs of each
    "transformer": (["transformer", "-p", "8"], [(12, 6), (19, 5)]),
    "resnet101": (["resnet101", "-p", "4"], [(7, 3), (7, 22), (7, 2)]),
}
SMALL = ("gpt", *(f"--arg={text}" for text in ("layers=6", "vocabulary=64", "steps=16", "model_width=16", "heads=4")))


def table(out: str) -> tuple[list[str], list[list[str]]]:
    """Return the first table of an output: its header, and its rows as cells; names within blocks are indented."""
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("layer "))
    end = lines.index("", start)
    return re.split(r"  +", lines[start]), [re.split(r"(?<=\S)  +", line) for line in lines[start + 1 : end]]


def blocks(rows: Sequence[Sequence[str]]) -> list[tuple[int, list[list[str]]]]:
    """Return the rows of a table as blocks, each with how often it comes; rows by themselves come once."""
    found: list[tuple[int, list[list[str]]]] = []
    for name, *cells in rows:
        if times := re.fullmatch(r"× (\d+)", name):
            assert not cells
            found.append((int(times[1]), []))
        elif name.startswith("  "):
            found[-1][1].append([name.strip(), *cells])
        else:
            found.append((1, [[name, *cells]]))
    return found


def expanded(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return all rows of a table, with those of blocks as often as they come."""
    return [row for times, block in blocks(rows) for row in block * times]


@pytest.mark.parametrize("network", ["transformer", pytest.param("resnet101", marks=pytest.mark.full)])
def test_a_folded_table_holds_all_layers(network: str, pase: Command, tmp_path: Path) -> None:
    arguments, expected = NETWORKS[network]
    path = tmp_path / "plan.json"
    folded = pase("search", *arguments, "-o", path)
    names = [layer["name"] for layer in json.loads(path.read_text(encoding="utf-8"))["layers"]]
    outputs = [(folded.out, pase("search", *arguments, "--all-layers").out)]
    outputs.append(tuple(pase("explain", path, "--no-why", *flag).out for flag in ([], ["--all-layers"])))  # type: ignore[arg-type]
    for brief, whole in outputs:
        (header, rows), (all_header, all_rows) = table(brief), table(whole)
        assert header == all_header
        assert [row[0] for row in all_rows] == names
        assert [row[1:] for row in expanded(rows)] == [row[1:] for row in all_rows]
        assert expanded(all_rows) == all_rows
        # What is printed has its own row, in the same order.
        printed = [row for _, block in blocks(rows) for row in block]
        assert [row for row in all_rows if row[0] in {name for name, *_ in printed}] == printed
        assert "with what one of them costs; --all-layers prints each." in brief
        assert "--all-layers" not in whole
    assert set(expected) <= {(len(block), times) for times, block in blocks(table(folded.out)[1])}


def test_figures_of_the_whole_are_those_of_all_layers(pase: Command) -> None:
    folded, whole = (pase("search", *SMALL, "-p", "4", *flag).out for flag in ([], ["--all-layers"]))
    assert re.search(r"^× 6$", folded, re.MULTILINE)
    sums = [out.partition("\n\ngpt on 4 ")[2].rpartition("  search time")[0] for out in (folded, whole)]
    assert sums[0] == sums[1] != ""


def test_where_nothing_repeats_the_table_is_as_ever(pase: Command) -> None:
    finished, whole = (pase("search", "mlp", "-p", "8", *flag).out for flag in ([], ["--all-layers"]))
    without_time = [re.sub(r"search time .*", "", out) for out in (finished, whole)]
    assert without_time[0] == without_time[1]
    assert table(finished)[0][:2] == ["layer", "iteration space"]
    assert "\n× " not in finished


def test_blocks_that_are_split_otherwise_stay_apart(pase: Command) -> None:
    finished = pase("search", *SMALL, "-p", "4", "--pin", "layer3_ff_1: e=4")
    rows = table(finished.out)[1]
    assert "e=4" in next(row for row in rows if row[0] == "layer3_ff_1")
    assert all(times < 6 for times, _ in blocks(rows))
    whole = table(pase("search", *SMALL, "-p", "4", "--pin", "layer3_ff_1: e=4", "--all-layers").out)[1]
    assert [row[1:] for row in expanded(rows)] == [row[1:] for row in whole]


def test_programs_get_every_layer(pase: Command, tmp_path: Path) -> None:
    documents = [json.loads(pase("search", *SMALL, "-p", "4", "--json", *flag).out) for flag in ([], ["--all-layers"])]
    for document in documents:
        document["search"].pop("time_s")
    assert documents[0] == documents[1]
    assert len(documents[0]["layers"]) > 6 * 12


def test_why_names_layers_with_the_same_row_once(pase: Command, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    sizes = ("vocabulary=64", "steps=8", "model_width=16", "heads=4", "hidden=32", "layers=2")
    model = ("transformer", "-b", "16", *(f"--arg={text}" for text in sizes), "--flops", "1e9")
    assert pase("search", *model, "-p", "4", "--cost-model", "alpha_beta", "-o", path).status == 0
    brief, whole = pase("explain", path).out, pase("explain", path, "--all-layers").out
    (_, rows), (_, all_rows) = table(brief), table(whole)
    assert "× n: n layers with the same row" in brief

    def without_names(cells: Sequence[str]) -> tuple[str, ...]:
        configuration, binding, *rest = cells
        return configuration, re.sub(r"(from|to) \S+", "", binding), *rest

    counted: Counter[tuple[str, ...]] = Counter()
    for name, *cells in rows:
        counted[without_names(cells)] += int(name.partition(" × ")[2] or 1)
    assert counted == Counter(without_names(row[1:]) for row in all_rows)
    assert len(rows) < len(all_rows) == len(json.loads(path.read_text(encoding="utf-8"))["layers"])
    reasons = [out.partition("\nWhy:\n")[2].partition("\n\n")[0].splitlines() for out in (brief, whole)]
    assert [len(found) for found in reasons] == [len(rows), len(all_rows)]
    assert {re.sub(r"  \(× \d+\)$", "", line) for line in reasons[0]} <= set(reasons[1])
