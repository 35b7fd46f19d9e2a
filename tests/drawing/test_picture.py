import re
from itertools import combinations
from xml.etree import ElementTree

import pytest

from pase.planning.plan import Plan
from pase.views.exports.svg import svg
from tests.drawing.graphs import overlap
from tests.hostile import HOSTILE_NAMES, hostile_plan
from tests.networks import small_plan, tiny_plan

SPACE = "{http://www.w3.org/2000/svg}"
DRAWN = {"svg", "title", "desc", "style", "defs", "pattern", "g", "rect", "path", "text"}
FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufdcf\ufdf0-\ufffd\U00010000-\U0010ffff]")


def _read(text: str) -> ElementTree.Element:
    root = ElementTree.fromstring(text)
    assert {element.tag.removeprefix(SPACE) for element in root.iter()} <= DRAWN
    return root


def _groups(root: ElementTree.Element, part: str) -> list[ElementTree.Element]:
    """Return the groups with a title that hold such a part: boxes, edges or frames."""
    found = [group for group in root.iter(f"{SPACE}g") if group.find(f"{SPACE}title") is not None]
    return [group for group in found if any(part in (e.get("class") or "").split() for e in group)]


def _title(element: ElementTree.Element) -> str:
    return element.findtext(f"{SPACE}title") or ""


def _number(element: ElementTree.Element, key: str) -> float:
    return float(element.attrib[key])


@pytest.mark.parametrize(("name", "fold"), [("alexnet", False), ("transformer", False), ("gpt", True)])
def test_layers_are_boxes_that_do_not_overlap(name: str, fold: bool) -> None:
    plan = small_plan(name, 4)
    root = _read(svg(plan, fold=fold))
    boxes = []
    for group in _groups(root, "box"):
        box = group.find(f"{SPACE}rect")
        assert box is not None
        x, y, width, height = (_number(box, key) for key in ("x", "y", "width", "height"))
        boxes.append(((x + width / 2, y + height / 2), (width, height)))
    assert not any(overlap(a, b) for a, b in combinations(boxes, 2))
    names = [_title(group).splitlines()[0] for group in _groups(root, "box")]
    if fold:
        assert set(names) <= {layer.name for layer in plan.layers}
    else:
        assert names == [layer.name for layer in plan.layers]
        assert len(_groups(root, "edge")) == len({(edge.producer, edge.consumer) for edge in plan.graph.edges})
        assert not _groups(root, "frame")


def test_repeated_blocks_are_framed_and_counted() -> None:
    plan = small_plan("gpt", 4)
    root = _read(svg(plan))
    (frame,) = _groups(root, "frame")
    assert frame.findtext(f"{SPACE}text") == "×2"
    folded = len(_groups(root, "box"))
    assert folded + 12 == len(plan.layers)
    assert f"drawn as {folded} because blocks repeat" in (root.findtext(f"{SPACE}desc") or "")


def test_the_text_in_a_box_and_its_colour() -> None:
    plan = tiny_plan()
    root = _read(svg(plan))
    looks: dict[tuple[str, ...], set[str | None]] = {}
    for group, layer in zip(_groups(root, "box"), plan.layers, strict=True):
        name, configuration = (text.text for text in group.findall(f"{SPACE}text"))
        assert name == layer.name
        assert configuration is not None
        for dim, factor in layer.splits.items():
            assert (f"{dim}={factor}" in configuration.split()) == (factor > 1)
        box = group.find(f"{SPACE}rect")
        assert box is not None
        split = tuple(sorted(dim for dim, factor in layer.splits.items() if factor > 1))
        looks.setdefault(split, set()).add(box.get("class"))
    # One look for each class, and the legend has all of them.
    assert all(len(found) == 1 for found in looks.values())
    assert len(looks) == len(set.union(*looks.values())) > 1
    legend = [text.text or "" for text in root.iter(f"{SPACE}text")]
    for split in looks:
        label = f"split in {' '.join(split)}" if split else "not split"
        assert any(text.startswith(f"{label} (") for text in legend)


def test_the_more_moves_the_wider_the_edge() -> None:
    plan = small_plan("alexnet", 8)
    moved = {
        (transfer.producer, layer.name): transfer.forward_bytes + transfer.backward_bytes
        for layer in plan.layers
        for transfer in layer.transfers
    }
    widths = {}
    for group in _groups(_read(svg(plan, fold=False)), "edge"):
        line = group.find(f"{SPACE}path")
        assert line is not None
        producer, consumer = _title(group).split(":")[0].split(" → ")
        widths[(producer, consumer)] = _number(line, "stroke-width")
        assert (group.get("class") == "moving") == (moved[(producer, consumer)] > 0)
        assert ("nothing moves" in _title(group)) == (moved[(producer, consumer)] == 0)
    by_bytes = sorted(widths, key=lambda edge: moved[edge])
    assert [widths[edge] for edge in by_bytes] == sorted(widths.values())
    assert moved[by_bytes[-1]] > 0
    assert len(set(widths.values())) == len({moved[edge] for edge in widths})


def test_everything_is_within_the_picture() -> None:
    for plan in (small_plan("transformer", 8), hostile_plan()):
        root = _read(svg(plan))
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        (graph,) = (
            group
            for group in root.findall(f"{SPACE}g")
            if any("edge" in (e.get("class") or "") for e in group.iter())
            and any(e.get("class") == "name" for e in group.iter())
        )
        dx, dy = map(float, re.findall(r"[\d.]+", graph.attrib["transform"]))
        for element in graph.iter():
            if "x" in element.attrib:
                assert 0 <= _number(element, "x") + dx <= width
                assert 0 <= _number(element, "y") + dy <= height
            for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", element.get("d") or ""):
                assert 0 <= float(x) + dx <= width
                assert 0 <= float(y) + dy <= height


@pytest.mark.parametrize("everywhere", [False, True])
def test_names_are_text_whatever_they_hold(everywhere: bool) -> None:
    text = svg(hostile_plan(everywhere=everywhere))
    text.encode("utf-8")
    root = _read(text)
    assert not FORBIDDEN.search(text)
    boxes = _groups(root, "box")
    for group, name in zip(boxes, HOSTILE_NAMES, strict=False):
        # Whole in the title; shortened, on one line, in the box.
        assert _title(group).startswith(FORBIDDEN.sub("\ufffd", name) + "\n")
        shown = (group.findtext(f"{SPACE}text") or "").strip()
        assert len(shown) < 60
        assert shown or not name.strip()
        assert "\n" not in shown
    assert len(boxes) == len(HOSTILE_NAMES) + 1
    others = [text.text for text in root.iter(f"{SPACE}text") if re.fullmatch(r"\d+ others .*", text.text or "")]
    assert len(others) == 1
    # Nothing in the picture acts or comes from elsewhere.
    for element in root.iter():
        assert not [key for key in element.attrib if key.startswith("on") or "href" in key]
        assert not any("url(" in value for value in element.attrib.values())
    style = root.findtext(f"{SPACE}style") or ""
    assert "@import" not in style
    assert all(target.startswith("#pase-") for target in re.findall(r"url\((.*?)\)", style))


def test_pictures_in_one_page_leave_one_another_alone() -> None:
    plans: list[Plan] = [small_plan("alexnet", 4), small_plan("alexnet", 8)]
    ids = []
    for plan in plans:
        root = _read(svg(plan))
        own = root.attrib["id"]
        ids.append([element.attrib["id"] for element in root.iter() if "id" in element.attrib])
        assert all(found == own or found.startswith(f"{own}-") for found in ids[-1])
        for rule in (root.findtext(f"{SPACE}style") or "").split("}"):
            selector = rule.rsplit("{", 1)[0].strip().removeprefix("@media (prefers-color-scheme:dark){")
            assert not selector or selector.startswith(f"#{own}")
        assert svg(plan) == svg(plan)
    assert not set(ids[0]) & set(ids[1])


def test_it_can_be_read_aloud_and_in_the_dark() -> None:
    root = _read(svg(small_plan("alexnet", 8)))
    assert root.get("role") == "img"
    labels = {element.get("id"): element.text for element in root if element.get("id")}
    title, description = (labels[name] for name in root.attrib["aria-labelledby"].split())
    assert title is not None
    assert title.startswith("alexnet on 8 × ")
    assert description is not None
    assert "12 layers" in description
    assert "prefers-color-scheme:dark" in (root.findtext(f"{SPACE}style") or "")
