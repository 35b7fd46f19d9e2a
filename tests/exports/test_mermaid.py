"""Mermaid: every line is one of the few statements that a flowchart of a plan needs, whatever the names."""

import re

import pytest

from pase import Builder, Plan
from pase.common.words import short, visible
from pase.graph.operators import dense
from pase.planning.plan import configuration_text
from pase.views.exports import ExportOptions, export
from pase.views.exports.graph_text import MOST_CHARACTERS, MOST_EDGES, mermaid
from tests.hostile import HOSTILE_NAMES, hostile_plan
from tests.networks import small_plan
from tests.runtime.plans import make_plan

# What may stand between quotes: words and entity codes, lines parted by the one element that is ours.
LABEL = r'"((?:[^\W_]|(?<=[^\W_])_(?=[^\W_])| |#\d+;|<br>)*)"'
STATEMENTS = {
    "chart": r"flowchart TD",
    "comment": r"%% labels of edges are bytes of a step, [a-z, ]*",
    "node": rf"n(\d+)\[{LABEL}\]:::split(\d+)",
    "block": rf"subgraph block\d+\[{LABEL}\]",
    "end": r"end",
    "edge": rf"n(\d+) (-->|-\.->)(?:\|{LABEL}\|)? n(\d+)",
    "width": r"linkStyle (\d+) stroke-width:([\d.]+)px",
    "colour": r"classDef split(\d+) fill:(#[0-9a-f]{6}),stroke:#333333,color:#000000",
}


def read(plan: Plan, *, fold: bool = False) -> dict[str, list[tuple[str, ...]]]:
    """Return the parts of each statement by its kind; every line must be one."""
    found: dict[str, list[tuple[str, ...]]] = {kind: [] for kind in STATEMENTS}
    for line in export(plan, "mermaid", ExportOptions(fold=fold)).text.removesuffix("\n").split("\n"):
        matches = [(kind, re.fullmatch(of, line.strip(" "))) for kind, of in STATEMENTS.items()]
        groups = [(kind, match.groups()) for kind, match in matches if match]
        assert len(groups) == 1, line
        found[groups[0][0]].append(groups[0][1])
    return found


def shown(label: str) -> list[str]:
    return [re.sub(r"#(\d+);", lambda code: chr(int(code[1])), line) for line in label.split("<br>")]


@pytest.mark.parametrize("name", ["alexnet", "transformer_big"])
def test_nodes_and_edges_are_those_of_the_graph(name: str) -> None:
    plan = small_plan(name, 8)
    found = read(plan)
    index = plan.graph.index
    assert {number: shown(label) for number, label, _ in found["node"]} == {
        str(i): [layer.name, configuration_text(layer.splits, 8)] for i, layer in enumerate(plan.layers)
    }
    assert sorted((int(u), int(v)) for u, _, _, v in found["edge"]) == sorted(
        (index[edge.producer], index[edge.consumer]) for edge in plan.graph.edges
    )
    assert {number for _, _, number in found["node"]} == {number for number, _ in found["colour"]}
    # An edge is wide exactly where its label says that bytes move.
    wide = {int(number) for number, _ in found["width"]}
    assert wide == {i for i, (_, _, label, _) in enumerate(found["edge"]) if label}


def test_blocks_that_repeat_are_drawn_once() -> None:
    plan = small_plan("gpt", 4)
    found = read(plan, fold=True)
    assert [shown(label) for (label,) in found["block"]] == [["×2"]]
    assert len(found["node"]) < len(plan.layers)
    assert any(arrow == "-.->" for _, arrow, _, _ in found["edge"])


@pytest.mark.parametrize("everywhere", [False, True])
def test_hostile_names_stay_in_their_labels(everywhere: bool) -> None:
    plan = hostile_plan(everywhere=everywhere)
    found = read(plan)
    assert [shown(label)[0] for _, label, _ in found["node"]] == [short(layer.name) for layer in plan.layers]
    assert [(int(u), int(v)) for u, _, _, v in found["edge"]] == [(i, i + 1) for i in range(len(plan.layers) - 1)]


@pytest.mark.parametrize("name", [*HOSTILE_NAMES[:-1], "a_b_c", "_a_", "a__b", "1. one", "- one", "`x`", "fa:fa-ban"])
def test_a_label_shows_a_name_as_it_is(name: str) -> None:
    label = mermaid('"{}"', name)
    assert re.fullmatch(LABEL, label)
    assert shown(label[1:-1]) == [visible(name)]


def test_what_mermaid_does_not_draw_by_itself_is_told() -> None:
    whole = ExportOptions(fold=False)
    assert export(small_plan("alexnet", 8), "mermaid", whole).notes == ()
    net = Builder("deep")
    x = net.input((4, 4))
    for i in range(MOST_EDGES + 2):
        x = net.add(dense, f"fc{i}", x, out=(("n", 4),))
    plan = make_plan(net.build(), 2, {})
    exported = export(plan, "mermaid", whole)
    (note,) = exported.notes
    assert note.startswith(
        f"the flowchart has {len(exported.text):,} characters and 501 edges; Mermaid draws 50,000 and 500"
    )
    assert note.endswith(": fold it, or use dot or svg")
    assert len(exported.text) <= MOST_CHARACTERS
    assert export(plan, "mermaid").notes == ()
