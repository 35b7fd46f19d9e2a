"""The report as somebody sees it, in a real browser."""

import re
import time
from collections.abc import Callable
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pase
from pase.common.words import duration, quantity
from pase.planning.plan import configuration_text
from pase.views.reports.document import render, report_document
from tests.hostile import HOSTILE_NAMES, hostile_plan
from tests.networks import slow_machine, small_graph, staged_plan
from tests.report import handmade
from tests.report.browser import PHONE, opened

Look = Callable[..., Any]

PAGE = Path(str(files("pase.views.reports").joinpath("page")))
READY = "performance.getEntriesByName('pase-ready')[0].startTime"
DRAWN = "document.querySelectorAll('.chart').length === document.querySelectorAll('.chart svg').length"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def until(page: Any, condition: str) -> None:
    """Wait for a condition; the page's policy forbids the browser to evaluate it by itself."""
    end = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(15)


def vertex(page: Any, layer: int) -> Any:
    return page.locator(f"#view .vertex[data-layer='{layer}']")


def select(page: Any, layer: int) -> Any:
    vertex(page, layer).click()
    return page.locator("#panel.open")


def middle(page: Any, layer: int) -> tuple[float, float]:
    """Return how far a layer's middle is from the graph's, in pixels."""
    box, whole = vertex(page, layer).locator(".paper").bounding_box(), page.locator("#canvas").bounding_box()
    return tuple(  # type: ignore[return-value]
        abs(box[at] + box[size] / 2 - whole[at] - whole[size] / 2) for at, size in (("x", "width"), ("y", "height"))
    )


# -- opening


def test_it_says_what_was_found_and_draws_everything(look: Look) -> None:
    page = look(handmade.small())
    total = quantity(handmade.TOTAL, "FLOP")
    assert page.locator("h1").inner_text() == (
        f"alexnet on 32 × GeForce GTX 1080 Ti: {total} a step, proven optimal, 13.1 × better than data parallelism"
    )
    assert page.locator("#view .vertex").count() == 6
    assert page.locator("#view .edge").count() == 5
    until(page, DRAWN)
    assert page.locator(".chart svg").count() == 3
    assert page.evaluate(OVERFLOW) == 0
    check_widths(page)
    check_quantities(page)


def check_widths(page: Any) -> None:
    """Edges are the wider the more they move, and those that move nothing are marked."""
    widths = [float(edge.get_attribute("stroke-width")) for edge in page.locator("#view .edge").all()]
    sizes = [forward + backward for *_, forward, backward in handmade.EDGES]
    assert np.array_equal(np.argsort(widths, stable=True), np.argsort(sizes, stable=True))
    assert max(widths) > 4 * min(widths)
    assert page.locator("#view .edge.still").count() == sizes.count(0)


def check_quantities(page: Any) -> None:
    """Numbers read as on the command line."""
    source = (PAGE / "quantities.js").read_text(encoding="utf-8")
    values = [0, 1e-13, 3.2e-5, 0.00099951, 0.5, 1, 9.994, 9.996, 12.34, 99.94, 99.96, 999.4, 999.6, 1234, 34.1e9, 8e25]
    found = page.evaluate(f"(values) => {{ {source}; return values.map((v) => quantity(v, 'FLOP')); }}", values)
    assert found == [quantity(value, "FLOP") for value in values]
    times = [0.0, 0.012, 0.9994, 1.04, 99.9, 100.0, 125.0, 7200.5]
    found = page.evaluate(f"(values) => {{ {source}; return values.map(duration); }}", times)
    assert found == [duration(time_s) for time_s in times]


# -- a layer


def test_a_click_shows_all_about_a_layer(look: Look) -> None:
    page = look(handmade.small())
    assert page.locator("#panel.open").count() == 0
    panel = select(page, 3)
    text = panel.inner_text()
    assert panel.locator("h3").inner_text() == "fc1"
    assert panel.get_attribute("aria-label") == "Layer fc1"
    for said in (
        "n=4 c=8",
        "fc1: because the next best would cost more",
        "906 MFLOP",
        "1.63 GFLOP",
        "b=16 n=2 costs 580 MFLOP more a step (+1.7% in all), with 2 other layers configured anew.",
        "125 configurations",
        "9,216",
        "1,152",
        "17.7 MB + 3.50 MB",
    ):
        assert said in text, said
    assert panel.locator(".neighbours button").all_inner_texts() == ["conv2", "fc2"]
    panel.locator(".neighbours button", has_text="conv2").click()
    assert page.locator("#panel h3").inner_text() == "conv2"
    assert vertex(page, 2).locator(".paper").is_visible()
    page.locator("#panel .close").click()
    assert page.locator("#panel.open").count() == 0


LAID_OUT = (
    ((1, 4, 8), [("b", 1, [0]), ("c", 8, [2])], "in order"),
    ((2, 4, 2), [("b", 2, [0]), ("n·c", 8, [1, 2])], "shuffled"),
    ((2, 2, 2), [("c", 2, [2]), ("n", 2, [1])], "shuffled"),
    ((4, 1, 1), [("b", 4, [0])], "shuffled"),
)
"""Splits of b, n and c, a tensor's dims with their parts and what numbers those, and the order of the devices."""


def test_cells_name_the_devices_that_hold_a_part(look: Look) -> None:
    document = handmade.small()
    plan = document["plans"][0]
    shuffled = np.random.default_rng(3).permutation(32)
    plan["device_orders"] = [list(range(32)), shuffled.tolist()]
    for layer, (splits, tensor, order) in zip(plan["layers"], LAID_OUT, strict=False):
        dims = [{"label": label, "extent": 64, "parts": parts, "by": by} for label, parts, by in tensor]
        layer |= {"dims": handmade.DENSE, "splits": list(splits), "replicas": 32 // prod(splits)}
        layer |= {"devices": int(order == "shuffled"), "tensors": [{"name": "t", "role": "activation", "dims": dims}]}
        layer["runner_up"] = None
    page = look(document)
    for index, (splits, tensor, order) in enumerate(LAID_OUT):
        cells = select(page, index).locator(".cell").all()
        found = {frozenset(map(int, cell.get_attribute("data-devices").split())) for cell in cells}
        # The same by NumPy: the order as an array over splits and replicas, one box of it for each part.
        held = (shuffled if order == "shuffled" else np.arange(32)).reshape(*splits, -1)
        used = [i for _, _, by in tensor for i in by]
        held = held.transpose(*used, *(i for i in range(held.ndim) if i not in used))
        assert found == {frozenset(row) for row in held.reshape(prod(parts for _, parts, _ in tensor), -1).tolist()}


def test_many_parts_are_drawn_coarser_and_so_they_say(look: Look) -> None:
    document = handmade.small()
    layer = document["plans"][0]["layers"][3]
    document["plans"][0] |= {"num_devices": 1024, "device_orders": [list(range(1024))]}
    layer |= {"splits": [32, 32, 1], "replicas": 1}
    layer["tensors"] = [handmade._tensor("x", "activation", handmade.DENSE, layer["splits"], (0, 1))]
    panel = select(look(document), 3)
    cells = [set(map(int, cell.get_attribute("data-devices").split())) for cell in panel.locator(".cell").all()]
    assert len(cells) == 64
    assert all(len(cell) == 16 for cell in cells)
    assert set().union(*cells) == set(range(1024))
    assert "each cell is 16 of 1,024 parts" in panel.inner_text()


# -- finding, folding, filtering


def test_search_narrows_selects_and_centres(look: Look) -> None:
    page = look(handmade.small())
    page.keyboard.press("/")
    page.keyboard.type("FC")
    assert page.locator("#hits [role=option]").count() == 2
    assert page.locator("#view .ring.hit").count() == 2
    for layer, said in ((3, "1 of 2"), (4, "2 of 2"), (3, "1 of 2")):
        page.keyboard.press("Enter")
        assert page.locator("#found").inner_text() == said
        assert page.locator("#panel h3").inner_text() == handmade.NETWORK[layer][0]
        assert max(middle(page, layer)) < 3
    page.keyboard.press("Shift+Enter")
    assert page.locator("#found").inner_text() == "2 of 2"
    page.locator("#find").fill("no such layer")
    assert page.locator("#found").inner_text() == "none"
    page.keyboard.press("Escape")
    assert page.locator("#find").input_value() == ""


def test_repeats_are_drawn_once_until_they_are_unfolded(look: Look) -> None:
    page = look(handmade.repeated(24))
    assert page.locator("#view .vertex").count() == 4
    assert "×24" in vertex(page, 1).text_content()
    page.locator("#find").fill("mlp_17")
    page.keyboard.press("Enter")
    assert page.locator("#panel h3").inner_text() == "mlp_17"
    assert "One of 24 equal layers" in page.locator("#panel").inner_text()
    page.locator("#view .block-button").click()
    until(page, "document.querySelectorAll('#view .vertex').length > 4")
    assert page.locator("#unfold").inner_text() == "Fold repeats"
    page.locator("#fit").click()
    until(page, "document.querySelectorAll('#view .vertex').length === 50")
    page.locator("#unfold").click()
    until(page, "document.querySelectorAll('#view .vertex').length === 4")


def test_the_legend_filters_by_what_is_split(look: Look) -> None:
    page = look(handmade.small())
    item = page.locator("#legend .class", has_text="b n")
    item.click()
    until(page, "document.querySelectorAll('#view .vertex.dim').length === 5")
    assert item.get_attribute("aria-pressed") == "true"
    page.locator("#legend .class").first.click()
    until(page, "document.querySelectorAll('#view .vertex.dim').length === 3")


def test_dragging_and_the_wheel_move_the_graph(look: Look) -> None:
    page = look(handmade.small())
    before = vertex(page, 2).bounding_box()
    whole = page.locator("#canvas").bounding_box()
    x, y = whole["x"] + 30, whole["y"] + 200
    page.mouse.move(x, y)
    # Without a click the wheel is the page's.
    page.mouse.wheel(0, 60)
    until(page, "scrollY > 0")
    page.evaluate("scrollTo(0, 0)")
    page.mouse.down()
    page.mouse.move(x + 50, y + 40, steps=4)
    page.mouse.up()
    page.wait_for_timeout(50)
    after = vertex(page, 2).bounding_box()
    assert (after["x"] - before["x"], after["y"] - before["y"]) == pytest.approx((50, 40), abs=3)
    page.mouse.click(x, y)
    page.mouse.wheel(0, -200)
    page.wait_for_timeout(50)
    assert vertex(page, 2).bounding_box()["width"] > 1.2 * after["width"]
    assert page.evaluate("scrollY") == 0


# -- keys


def test_everything_can_be_done_from_the_keyboard(look: Look) -> None:
    page = look(handmade.small())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.locator("#fit").focus()
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "view":
            break
    assert page.evaluate("document.activeElement.id") == "view"
    said = page.locator("#said")
    assert said.inner_text().startswith("conv1, conv2d, b=32")
    for key, name in (
        ("ArrowDown", "pool1"),
        ("ArrowDown", "conv2"),
        ("ArrowUp", "pool1"),
        ("End", "softmax"),
        ("ArrowDown", "softmax"),
        ("ArrowUp", "fc2"),
    ):
        page.keyboard.press(key)
        assert said.inner_text().startswith(f"{name}, "), key
    page.keyboard.press("Enter")
    assert page.locator("#panel.open h3").inner_text() == "fc2"
    assert page.evaluate("document.activeElement.id") == "panel"
    page.keyboard.press("Escape")
    assert page.locator("#panel.open").count() == 0
    assert page.evaluate("document.activeElement.id") == "view"
    before = vertex(page, 4).bounding_box()["width"]
    page.keyboard.press("+")
    page.wait_for_timeout(50)
    assert vertex(page, 4).bounding_box()["width"] > before
    page.keyboard.press("?")
    assert page.locator("#help[open]").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("#help[open]").count() == 0


# -- looks

CONTRAST = """
(selectors) => {
  const rgb = (text) => {
    const numbers = text.match(/[\\d.]+/g).map(Number);
    return { c: numbers.slice(0, 3), a: numbers.length > 3 ? numbers[3] : 1 };
  };
  const light = (c) => c.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const { c, a } = rgb(getComputedStyle(at).backgroundColor);
      if (a === 1) return c;
    }
    return [255, 255, 255];
  };
  return selectors.map((selector) => {
    const node = document.querySelector(selector);
    const [a, b] = [light(rgb(getComputedStyle(node).color).c), light(behind(node))].sort((x, y) => y - x);
    return [selector, (a + 0.05) / (b + 0.05)];
  });
}
"""
CLASS_COLOUR = "getComputedStyle(document.documentElement).getPropertyValue('--class-1')"
TEXTS = [
    "h1",
    "#contents a",
    ".fact dt",
    ".fact dd span",
    "h2",
    ".key li",
    ".legend-title",
    "#panel h4",
    "#panel .why",
    "#panel .note",
    "button.link",
    "summary",
    "footer p",
    "#find",
]


def test_texts_stand_out_in_light_and_dark(look: Look) -> None:
    page = look(handmade.small())
    select(page, 3)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        until(page, f"document.documentElement.dataset.theme === '{scheme}'")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 150) == (scheme == "dark")
        assert page.evaluate(CLASS_COLOUR) == handmade.CLASSES[1][scheme]
        for selector, ratio in page.evaluate(CONTRAST, TEXTS):
            assert ratio >= 4.5, (scheme, selector)


def test_the_theme_can_be_chosen(look: Look) -> None:
    page = look(handmade.small(), color_scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    until(page, DRAWN)
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    # Chromium puts away what a page stores a moment later; what is loaded before that has none of it.
    for _ in range(20):
        page.wait_for_timeout(100)
        page.reload()
        if page.evaluate("getComputedStyle(document.body).backgroundColor") != dark:
            break
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


def test_it_is_read_on_a_phone(look: Look) -> None:
    page = look(handmade.beside(), viewport=PHONE, has_touch=True, is_mobile=True)
    until(page, DRAWN)
    assert page.evaluate(OVERFLOW) <= 0
    page.locator("#canvas").scroll_into_view_if_needed()
    vertex(page, 2).tap()
    sheet = page.locator("#panel.open").bounding_box()
    assert sheet["y"] + sheet["height"] == pytest.approx(PHONE["height"], abs=1)
    assert sheet["height"] <= 0.6 * PHONE["height"]
    assert page.evaluate(OVERFLOW) <= 0
    page.locator("#panel .close").tap()
    assert page.locator("#panel.open").count() == 0
    before = vertex(page, 2).locator(".paper").bounding_box()["width"]
    pinch(page, apart=2.0)
    until(page, f"document.querySelector('#view .paper').getBoundingClientRect().width > {1.5 * before}")


def pinch(page: Any, *, apart: float) -> None:
    """Put two fingers on the graph and move them apart."""
    box = page.locator("#canvas").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    touch = page.context.new_cdp_session(page)
    for kind, reach in (("Start", 40), ("Move", 50), ("Move", 60), ("Move", 40 * apart)):
        points = [{"x": x, "y": y - reach, "id": 0}, {"x": x, "y": y + reach, "id": 1}]
        touch.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})
        page.wait_for_timeout(20)
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def test_paper_is_light_and_shows_every_table(look: Look) -> None:
    page = look(handmade.beside(), color_scheme="dark")
    select(page, 3)
    page.emulate_media(media="print", color_scheme="dark")
    until(page, "document.querySelectorAll('#paper svg').length > 0")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate(CLASS_COLOUR) == handmade.CLASSES[1]["light"]
    assert not page.locator("#panel").is_visible()
    assert not page.locator("#find").is_visible()
    assert page.locator("#paper .vertex").count() == 6
    tables = page.locator("#sections details.as-table")
    assert tables.count() >= 6
    assert all(one.locator("table").first.is_visible() for one in tables.all())
    assert page.evaluate("document.querySelectorAll('.chart svg').length") == 5
    assert len(page.pdf()) > 20_000
    page.emulate_media(media="screen", color_scheme="dark")
    until(page, "document.querySelectorAll('#paper svg').length === 0")
    assert page.locator("#sections details.as-table[open]").count() == 1  # as it was before


# -- several plans


def test_plans_stand_beside_each_other(look: Look) -> None:
    document = handmade.beside()
    page = look(document)
    page.locator("[role=tab]", has_text="data parallel").click()
    heading = page.locator("h1").inner_text()
    assert "gap 90.00%, lower bound 14.1 GFLOP" in heading
    assert heading.endswith("as good as data parallelism")
    page.locator("[role=tab][aria-selected=true]").press("ArrowLeft")
    assert "proven optimal" in page.locator("h1").inner_text()
    sums = page.locator("#beside table").first.locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in sums] == ["ours", "data parallel", "third"]
    assert "13.1 ×" in sums[1]
    ours, other = ({layer["name"]: layer["splits"] for layer in plan["layers"]} for plan in document["plans"][:2])
    different = [name for name in ours if ours[name] != other[name]]
    assert different == ["conv2", "fc1", "fc2", "softmax"]
    found = page.locator("#beside details.as-table[open] tbody th").all_inner_texts()
    assert found == different
    until(page, DRAWN)
    assert (
        page.locator("#sweep p")
        .first.inner_text()
        .startswith("From 1 to 32 devices, a step gets 22.6 × cheaper with PaSE")
    )
    page.locator("#sweep summary").click()
    until(page, "document.querySelectorAll('#sweep tbody tr').length === 6")
    assert "–" in page.locator("#sweep tbody tr").first.inner_text()


def test_what_is_not_known_is_left_out(look: Look) -> None:
    page = look(handmade.bare())
    assert (
        page.locator("h1").inner_text()
        == "bare on 32 × GeForce GTX 1080 Ti: 12.3 ms a step, gap 100.00%, lower bound 0 s"
    )
    assert "nothing is known of why" in select(page, 0).inner_text()
    until(page, DRAWN)
    page.locator("#sweep summary").click()
    until(page, "document.querySelectorAll('#sweep tbody tr').length === 1")
    assert "nothing fits" in page.locator("#sweep tbody").inner_text()
    assert not {"NaN", "null", "undefined", "Infinity"} & set(re.findall(r"\w+", page.locator("body").inner_text()))


# -- names from outside


def visible(name: str) -> str:
    """Return a name as a page's text gives it, without what is not seen."""
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f\u2400-\u2421\u200b-\u202e\ufffd\ud800-\udfff]+", "", name)


EACH_LAYER = """
() => [...document.querySelectorAll('#costs tbody [data-link]')].map((link) => {
  link.click();
  const { scrollWidth, clientWidth } = document.documentElement;
  return [link.textContent, document.querySelector('#panel h3').textContent, scrollWidth - clientWidth];
})
"""


def test_hostile_names_are_nothing_but_text(look: Look) -> None:
    page = look(handmade.hostile(HOSTILE_NAMES))
    until(page, DRAWN)
    kinds = "['script', 'img', 'iframe', 'style', 'object', 'link'].map((tag) => document.querySelectorAll(tag).length)"
    before = page.evaluate(kinds)
    assert before == [4, 0, 0, 1, 0, 1]
    page.locator("#costs summary").click()
    until(page, "document.querySelectorAll('#costs tbody tr').length > 30")
    for name, (link, heading, overflow) in zip(HOSTILE_NAMES, page.evaluate(EACH_LAYER), strict=True):
        assert visible(name).startswith(re.sub(r"…$|\(blank\)|\(noname\)", "", visible(link)))
        assert visible(heading) == (visible(name) if name.strip() else "(blank)" if name else "(noname)")
        assert overflow == 0
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    for chart in page.locator(".chart").all():
        chart.hover()
    page.locator("#find").fill("<IMG")
    assert page.locator("#hits [role=option]").count() > 0
    page.keyboard.press("Enter")
    page.locator("[role=tab]").nth(1).click()
    until(page, DRAWN)
    assert page.evaluate(kinds) == before
    assert page.evaluate("window.__pwned") is None


def test_long_names_do_not_break_a_phone(look: Look) -> None:
    page = look(handmade.hostile([*HOSTILE_NAMES[:3], HOSTILE_NAMES[5], "w" * 10_000]), viewport=PHONE)
    until(page, DRAWN)
    assert page.evaluate(OVERFLOW) <= 0
    select(page, 4)
    assert page.locator("#panel h3").text_content() == "w" * 10_000
    assert page.evaluate(OVERFLOW) <= 0


# -- very many layers


def test_five_thousand_layers_open_and_move_at_once(look: Look) -> None:
    page = look(handmade.long(5000))
    assert page.evaluate(READY) < 2000
    near = page.locator("#view .vertex").count()
    assert 10 < near < 700
    page.locator("#fit").click()
    until(page, "document.querySelectorAll('#view .boxes').length === 3")
    # Seen from afar there are few elements, and one by one again from near.
    assert page.evaluate("document.querySelectorAll('#view *').length") < 100
    page.locator("#find").fill("layer4321")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('#view .vertex').length > 10")
    assert page.locator("#panel h3").inner_text() == "block864/layer4321"
    assert max(middle(page, 4321)) < 3
    assert page.evaluate("document.querySelectorAll('#view .vertex').length") < 700


# -- plans that were searched


def test_a_searched_plan_is_told_as_it_is(look: Look) -> None:
    plan = pase.search(pase.load("alexnet"), devices=8, machine="1080ti")
    page = look(report_document({"alexnet": plan}, explains=False))
    assert f"{quantity(plan.total_cost, 'FLOP')} a step, proven optimal" in page.locator("h1").inner_text()
    page.locator("#fit").click()
    for index, layer in enumerate(plan.layers):
        panel = select(page, index)
        assert panel.locator("h3").inner_text() == layer.name
        for figure in panel.locator("figure.tensor").all():
            cells = [cell.get_attribute("data-devices").split() for cell in figure.locator(".cell").all()]
            # Every device holds one part of every tensor.
            assert not cells or sorted(int(device) for cell in cells for device in cell) == list(range(8))
    until(page, DRAWN)


def test_stages_are_drawn_over_time(look: Look) -> None:
    plan = staged_plan()
    document = report_document({"gpt": plan}, explains=False)
    page = look(document)
    stages = document["plans"][0]["stages"]
    section = page.locator("#stages")
    assert "4 micro-batches through 2 stages (1f1b)" in section.locator("p").first.inner_text()
    bars = section.locator("rect.pass")
    assert bars.count() == len(stages["passes"])
    widths = bars.evaluate_all("bars => bars.map(bar => bar.getBoundingClientRect().width)")
    whole = section.locator("svg").evaluate("one => one.getBoundingClientRect().width")
    for width, (*_, begin, end) in zip(widths, stages["passes"], strict=True):
        assert width == pytest.approx(whole * (end - begin) / stages["step_time_s"], abs=0.1)
    assert "micro-batch 0" in bars.first.locator("title").text_content()
    assert section.locator("tbody tr").count() == 2
    recomputed = next(index for index, layer in enumerate(plan) if layer.is_recomputed)
    assert "stage 0" in (text := select(page, recomputed).locator(".modes").inner_text())
    assert "recomputed" in text
    assert page.evaluate(OVERFLOW) == 0


def test_the_head_of_a_plan_in_stages_agrees_with_what_is_below_it(look: Look) -> None:
    page = look(report_document({"gpt": staged_plan()}, explains=False))
    where = page.locator("#summary .where").inner_text()
    shares = [float(share) for share in re.findall(r"([\d.]+)%", where)]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
    assert "waiting" in where
    assert "Means over the devices of all stages." in where
    facts = dict(zip(*(page.locator(f"#summary {name}").all_inner_texts() for name in ("dt", "dd")), strict=True))
    assert facts["Layers"].split("\n")[1].startswith("batch 16 (4 micro-batches of 4)")
    moved = facts["Moved in a step"].split("\n")[0]
    assert f"{moved} move in a step, between all devices" in page.locator("#traffic").inner_text()
    page.locator("#costs details summary").first.click()
    assert "share of all devices' time" in page.locator("#costs thead").inner_text().lower()


def test_the_beginning_of_a_long_step_says_that_it_is_one(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pase.views.reports.document.MOST_PASSES", 7)
    page = look(report_document({"gpt": staged_plan()}, explains=False), viewport=PHONE)
    assert "The first " in page.locator("#stages .note").inner_text()
    assert page.evaluate(OVERFLOW) == 0


def test_another_configuration_says_what_it_costs_and_what_else_would_change(look: Look) -> None:
    plan = pase.search(small_graph("transformer"), 8, machine=slow_machine())
    document = report_document({"small": plan}, explains=False, interactive=True)
    choices, layers = document["plans"][0]["choices"], document["plans"][0]["layers"]
    page = look(document)
    seen = 0
    for index in range(0, len(plan.layers), 14):
        page.locator("#fit").click()
        items = select(page, index).locator(".others > li")
        found = choices["lists"][choices["layers"][index]]
        assert items.count() == len(found["entries"])
        own = configuration_text(plan.layers[index].splits, 8)
        assert items.first.inner_text() == f"{own} as it is"
        for number in range(1, min(items.count(), 12), 3):
            row, difference, changed = found["entries"][number]
            item, flat = items.nth(number), choices["changes"][changed]
            text = configuration_text(dict(zip(plan.layers[index].dims, choices["splits"][row], strict=True)), 8)
            cost = "the same cost: a tie"
            if difference:
                percent = f"{100 * difference:.{3 if difference < 0.01 else 1}f}".replace("0.000", "<0.001")
                cost = f"+{percent}% · +{quantity(difference * plan.total_cost, 'FLOP')}"
            assert item.locator("summary").inner_text() == f"{text} {cost}"
            item.locator("summary").click()
            item.locator("table, .note").first.wait_for()
            if not flat:
                assert "No other layer would change." in item.inner_text()
                continue
            expected = [
                [
                    layers[index + beside]["name"],
                    configuration_text(plan.layers[index + beside].splits, 8),
                    configuration_text(
                        dict(zip(plan.layers[index + beside].dims, choices["splits"][to], strict=True)), 8
                    ),
                ]
                for beside, to in zip(flat[::2], flat[1::2], strict=True)
            ]
            cells = item.locator("tbody tr").evaluate_all(
                "rows => rows.map((row) => [...row.cells].map((c) => c.textContent))"
            )
            assert cells == expected
            seen += 1
    assert seen > 2
    # A layer that would change is a click away.
    name = cells[0][0]
    page.locator("#panel .others tbody button", has_text=name).first.click()
    assert page.locator("#panel h3").inner_text() == name
    page.locator("#panel .others summary").first.focus()
    page.keyboard.press("Enter")
    page.locator("#panel .others details[open] :is(table, .note)").first.wait_for()
    assert page.evaluate(OVERFLOW) == 0


def test_where_other_configurations_are_not_known_the_page_says_so(look: Look) -> None:
    document = handmade.small()
    page = look(document)
    assert select(page, 3).locator("h4", has_text="Other configurations").count() == 0
    document["plans"][0] |= {"choices": None, "choices_note": "a plan within a memory limit <b>"}
    page = look(document)
    assert select(page, 3).locator(".part", has_text="Other configurations").locator(".note").inner_text() == (
        "a plan within a memory limit <b>"
    )
    nothing: dict[str, Any] = {"splits": [], "changes": [], "lists": [], "layers": [None] * 100}
    document["plans"][0] |= {"choices": nothing, "choices_note": "the time limit of 1 s"}
    page = look(document)
    assert select(page, 3).locator(".part", has_text="Other configurations").locator(".note").inner_text() == (
        "Not reached: the time limit of 1 s"
    )


def test_other_configurations_of_hostile_names_are_text(look: Look) -> None:
    page = look(report_document({"hostile": hostile_plan()}, explains=False, interactive=True))
    page.locator("#find").fill("alert")
    page.keyboard.press("Enter")
    summaries = page.locator("#panel.open .others summary")
    for summary in summaries.all():
        summary.click()
    assert summaries.count() > 0
    until(page, "[...document.querySelectorAll('.others details')].every((one) => one.querySelector('table, p'))")
    assert page.locator("#panel img, #panel script, #panel iframe").count() == 0
    assert page.evaluate("window.__pwned") is None


def test_ninety_six_layers_are_there_at_once(look: Look) -> None:
    plan = pase.search(pase.load("gpt", arguments={"layers": 96}), devices=8, machine="1080ti")
    document = report_document({"gpt": plan}, explains=False)
    page = look(document)
    assert page.evaluate(READY) < 2000
    assert len(render(document)) < 8e6
    assert page.locator("#view .vertex").count() < 40
    assert "×96" in page.locator("#view .block-button").first.text_content()


# -- the watcher itself


def test_what_a_page_should_not_do_is_heard(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    slip = "<img src=x onerror='window.__pwned = 1'><script>alert(1)</script><script>fetch('http://x.invalid')</script>"
    path.write_text(render(handmade.small()).replace("</body>", f"{slip}</body>"), encoding="utf-8")
    with pytest.raises(AssertionError) as heard, opened(browser, path) as page:
        assert page.evaluate("window.__pwned") is None
    text = str(heard.value)
    assert text.count("Content Security Policy") >= 3
    assert "dialog" not in text
