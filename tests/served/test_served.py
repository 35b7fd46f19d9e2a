"""The page of `pase serve` as somebody uses it, in a real browser, and what it keeps from others."""

import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from signal import SIGINT
from subprocess import PIPE, Popen
from typing import Any
from urllib.parse import urlsplit

import pytest

import pase
from pase.common.words import quantity
from pase.machine import load_machine, override_machine
from pase.views.reports.served import Planner, rows_of, told
from tests.networks import slow_machine, small_graph
from tests.report.browser import started

pytest.importorskip("uvicorn", reason="the extra 'serve' is not installed")

PLANNED = "performance.getEntriesByName('pase-replan').length"


@pytest.fixture(scope="module")
def plan() -> pase.Plan:
    machine = override_machine(load_machine("1080ti"), flop_per_s=1e11, bandwidth_bytes_per_s=None)
    return pase.search(small_graph("transformer"), 8, machine=machine)


@contextmanager
def served(plan: pase.Plan, folder: Path) -> Iterator[str]:
    """Yield the address that `pase serve` prints for a plan; Ctrl-C ends it at last."""
    plan.save(folder / "plan.json")
    command = [sys.executable, "-c", "from pase.cli.main import main; main()", "serve", str(folder / "plan.json")]
    with Popen(command, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address.startswith("http://"), process.communicate()
            yield address
        finally:
            process.send_signal(SIGINT)
            _, errors = process.communicate(timeout=300)
    assert "Traceback" not in errors, errors


@pytest.fixture(scope="module")
def address(plan: pase.Plan, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(plan, tmp_path_factory.mktemp("served")) as found:
        yield found


def _asked(
    address: str, path: str, *, method: str = "GET", body: str | None = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    parts = urlsplit(address)
    with closing(HTTPConnection("127.0.0.1", parts.port, timeout=300)) as connection:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read().decode(), dict(response.getheaders())


# -- who is answered


def test_it_listens_on_this_machine_alone(address: str) -> None:
    assert urlsplit(address).hostname == "127.0.0.1"
    assert len(urlsplit(address).query) > 30


def test_without_the_token_nothing_is_told(address: str) -> None:
    token = urlsplit(address).query
    for path in ("/", "/?token=", f"/?{token}x", f"/?{token[:-1]}", "/other", "/?token=%C3%A4"):
        status, text, _ = _asked(address, path)
        assert (status, "forbidden" in text) == (403, True), path
    assert _asked(address, "/replan", method="POST", body="{}")[0] == 403
    assert _asked(address, f"/?{token}")[0] == 200
    assert _asked(address, f"/other?{token}")[0] == 404


@pytest.mark.parametrize("header", [{"Host": "example.org"}, {"Host": "127.0.0.1"}, {"Origin": "http://example.org"}])
def test_other_sites_are_refused_even_with_the_token(address: str, header: dict[str, str]) -> None:
    query = urlsplit(address).query
    assert _asked(address, f"/?{query}", **header)[0] == 403
    assert _asked(address, f"/replan?{query}", method="POST", body="{}", **header)[0] == 403


def test_the_page_may_load_nothing_from_elsewhere(address: str) -> None:
    status, text, headers = _asked(address, f"/?{urlsplit(address).query}")
    policy = headers["content-security-policy"]
    assert status == 200
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["cache-control"] == "no-store"
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text


AT = {"devices": 3, "bandwidth_bytes_per_s": 16, "device_memory_bytes": 25}


def _body(**positions: object) -> str:
    return json.dumps({**AT, **positions})


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ("{", 400, "the request is not JSON"),
        ("[" * 9_000, 400, "the request is not JSON"),
        ("x" * 20_000, 413, "the request is too large"),
        ("[]", 400, "expected the position of every control, devices (0 to "),
        ("{}", 400, "expected the position of every control"),
        ('{"devices": 1}', 400, "expected the position of every control"),
        (_body(machine="h100"), 400, "expected the position of every control"),
        (_body(devices=True), 400, "expected the position of every control"),
        (_body(devices=1.0), 400, "expected the position of every control"),
        (_body(devices=-1), 400, "expected the position of every control"),
        (_body(devices=99), 400, "expected the position of every control"),
        (_body(devices="many"), 400, "expected the position of every control"),
        (_body(device_memory_bytes=0), 200, "fits"),
    ],
)
def test_what_makes_no_sense_is_answered_with_a_text(address: str, body: str, status: int, text: str) -> None:
    found, answer, _ = _asked(address, f"/replan?{urlsplit(address).query}", method="POST", body=body)
    assert found == status
    assert text in json.loads(answer)["error"]
    assert "\n" not in json.loads(answer)["error"]


def test_every_answer_has_the_security_headers(address: str) -> None:
    query = urlsplit(address).query
    for expected, method, path, body in (
        (200, "POST", f"/replan?{query}", _body()),
        (400, "POST", f"/replan?{query}", "{"),
        (403, "GET", "/", None),
        (404, "GET", f"/other?{query}", None),
        (405, "PUT", f"/replan?{query}", "{}"),
        (413, "POST", f"/replan?{query}", "x" * 20_000),
    ):
        status, _, headers = _asked(address, path, method=method, body=body)
        assert status == expected
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"


def test_those_who_hang_up_leave_no_traceback(plan: pase.Plan, tmp_path: Path) -> None:
    """What is on standard error is looked at when the server ends."""
    with served(plan, tmp_path) as address:
        parts = urlsplit(address)
        assert parts.port
        request = f"POST /replan?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: 100\r\n\r\n{{"
        for text in (request, request.replace("100", "1"), request[:20]):
            with socket.create_connection(("127.0.0.1", parts.port)) as connection:
                connection.sendall(text.encode())
                time.sleep(0.2)
        assert _asked(address, f"/?{parts.query}")[0] == 200


# -- what is answered


def test_answers_are_those_of_searches(plan: pase.Plan) -> None:
    planner = Planner(plan)
    state = planner.start()["state"]
    assert (state["at"], state["error"]) == (AT, "")
    assert state["answer"]["total_cost"] == pytest.approx(plan.total_cost, rel=1e-12)
    assert state["answer"]["speedup"] == pytest.approx(plan.baselines["data_parallel"] / plan.total_cost, rel=1e-12)
    for changes in ({"devices": 2}, {"bandwidth_bytes_per_s": 3}, {}):
        answer = planner.replan({**AT, **changes})["answer"]
        machine = planner._session.answer.machine
        fresh = pase.search(small_graph("transformer"), answer["devices"], machine=machine)
        assert answer["total_cost"] == pytest.approx(fresh.total_cost, rel=1e-12)
        assert (answer["exact"], answer["certificate"]) == (True, "proven optimal")
        assert answer["cost"] == quantity(fresh.total_cost, "FLOP")


def test_a_state_does_not_depend_on_those_before_it(plan: pase.Plan) -> None:
    """Whoever asks for the same positions is told the same, and so is whoever opens the page afterwards."""
    planner, other = Planner(plan), Planner(plan)
    moved = {**AT, "devices": 1, "bandwidth_bytes_per_s": 4}
    for positions in ({**AT, "device_memory_bytes": 20}, {**AT, "bandwidth_bytes_per_s": 30}, moved):
        found = planner.replan(positions)
    expected = other.replan(moved)
    for state in (found, expected, planner.start()["state"]):
        state["answer"].pop("time")
    assert found == expected
    nothing = planner.replan({**AT, "device_memory_bytes": 0})
    assert "fits" in nothing["error"]
    assert nothing["at"]["device_memory_bytes"] == 0
    again = planner.start()["state"]
    assert (again["at"], again["error"]) == (nothing["at"], nothing["error"])


def test_every_layer_is_in_one_row_with_its_configuration(plan: pase.Plan) -> None:
    session = pase.Session("gpt", 8)
    answer = told(session.answer)
    graph = session.answer.step.graph
    texts = [tuple(answer["choices"][number]) for number in answer["of"]]
    assert sorted(layer for layers, _ in answer["rows"] for layer in layers) == list(range(len(graph.operators)))
    assert max(times for _, times in answer["rows"]) >= 10
    for layers, times in rows_of(graph, texts):
        assert len(layers) == times
        assert len({(graph.operators[v].kind, texts[v]) for v in layers}) == 1


@pytest.fixture(scope="module")
def step_plan() -> pase.Plan:
    return pase.search(small_graph("gpt"), 8, machine=slow_machine(), cost_model="step", micro_batches=2)


@pytest.mark.parametrize(
    ("moved", "settings"),
    [
        ({}, {"micro_batches": 2}),
        ({"micro_batches": "1"}, {}),
        ({"micro_batches": "4", "state": "zero2 where it is cheaper"}, {"micro_batches": 4, "modes": ["zero2"]}),
        (
            {"state": "any of these where it is cheaper", "recompute": "what is cheaper to recompute"},
            {"micro_batches": 2, "modes": ["zero1", "zero2", "zero3", "recompute"]},
        ),
        (
            {"state": "zero3 everywhere"},
            {"micro_batches": 2, "modes": ["zero3"], "constraints": {"pin": {"*": "zero3 *"}}},
        ),
        ({"stages": "2"}, {"stages": 2, "micro_batches": 2}),
        ({"stages": "auto", "micro_batches": "auto"}, {"stages": "auto", "micro_batches": "auto"}),
    ],
)
def test_stages_micro_batches_and_modes_are_moved(
    step_plan: pase.Plan, moved: dict[str, str], settings: dict[str, Any]
) -> None:
    planner = Planner(step_plan)
    texts = {control["name"]: control["texts"] for control in planner.start()["controls"]}
    start = planner.start()["state"]["at"]
    first = {"stages": "1", "micro_batches": "2", "state": "replicated", "recompute": "nothing"}
    assert {name: texts[name][start[name]] for name in first} == first
    positions = {name: texts[name].index(text) for name, text in moved.items()}
    state = planner.replan({**start, **positions})
    answer, at = state["answer"], state["at"]
    limit = step_plan.device_memory_bytes
    fresh = pase.search(
        small_graph("gpt"),
        8,
        machine=slow_machine(),
        cost_model="step",
        device_memory_bytes=limit,
        **settings,
    )
    assert (state["error"], at) == ("", {**start, **positions})
    assert answer["total_cost"] == pytest.approx(fresh.total_cost, rel=1e-9)
    assert answer["step"] == fresh.step_text
    found = [answer["choices"][number] for number in answer["of"]]
    stages = {int(stage or "0") for stage, *_ in found}
    assert stages == set(range(fresh.num_stages))
    if "constraints" in settings:
        state_of = dict(zip(answer["layers"], (state for _, _, state, _ in found), strict=True))
        assert {name for name, state in state_of.items() if state} == {
            own.name for own in fresh if own.state == "zero3"
        }
        assert len(set(state_of.values())) == 2


def test_settings_say_where_controls_stand_at_first(step_plan: pase.Plan) -> None:
    planner = Planner(step_plan, settings={"stages": "auto", "modes": ["zero1", "zero2", "recompute"]})
    start = planner.start()
    texts = {control["name"]: control["texts"][start["state"]["at"][control["name"]]] for control in start["controls"]}
    shown = {name: texts[name] for name in ("stages", "micro_batches", "state", "recompute")}
    assert list(shown.values()) == ["auto", "2", "zero1 or zero2 where it is cheaper", "what is cheaper to recompute"]
    fresh = pase.search(
        small_graph("gpt"),
        8,
        machine=slow_machine(),
        cost_model="step",
        device_memory_bytes=step_plan.device_memory_bytes,
        stages="auto",
        micro_batches=2,
        modes=["zero1", "zero2", "recompute"],
    )
    assert start["state"]["answer"]["total_cost"] == pytest.approx(fresh.total_cost, rel=1e-9)


def test_what_has_no_time_leaves_steps_alone(plan: pase.Plan) -> None:
    planner = Planner(plan)
    assert [control["name"] for control in planner.start()["controls"]] == list(AT)
    assert "alpha_beta and step" in planner.start()["note"]


# -- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as found:
        yield found


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page, opened; at the end it must not have complained, nor asked anybody else."""
    heard: list[str] = []
    own = browser.new_page()
    own.set_default_timeout(20_000)
    own.on("console", lambda message: heard.append(message.text) if message.type in ("warning", "error") else None)
    own.on("pageerror", lambda error: heard.append(str(error)))
    site, query = address.split("?")
    _asked(address, f"/replan?{query}", method="POST", body=_body())  # whatever other tests have moved
    own.on("request", lambda request: None if request.url.startswith((site, "data:")) else heard.append(request.url))
    own.goto(address)
    yield own
    own.close()
    assert not heard, heard


def _slide(page: Any, name: str, to: int) -> float:
    """Move a control; return the time in ms until its answer stood on the page, as the page measures it."""
    before = page.evaluate(PLANNED)
    page.locator(f"[name={name}]").evaluate(
        "(input, to) => { input.value = to; input.dispatchEvent(new Event('input')); }", to
    )
    end = time.monotonic() + 300
    while page.evaluate(PLANNED) == before:
        assert time.monotonic() < end
        page.wait_for_timeout(5)
    return float(page.evaluate("performance.getEntriesByName('pase-replan').at(-1).duration"))


def test_steps_are_moved_on_the_page(browser: Any, step_plan: pase.Plan, tmp_path: Path) -> None:
    with served(step_plan, tmp_path) as address:
        page = browser.new_page()
        page.goto(address)
        assert page.locator("#step").inner_text() == "2 micro-batches"
        options = page.locator("select[name=state] option").all_inner_texts()
        _slide(page, "state", options.index("zero3 everywhere"))
        assert "zero3" in page.locator("#layers td:nth-child(5)").all_inner_texts()
        _slide(page, "stages", 1)
        assert page.locator("#step").inner_text() == "2 micro-batches through 2 stages of 4 devices (1f1b)"
        assert {text for text in page.locator("#layers td:nth-child(3)").all_inner_texts() if text} == {"0", "1"}
        assert page.locator("select[name=state]").input_value() == str(options.index("zero3 everywhere"))
        page.close()


def _at(page: Any, name: str) -> tuple[int, int]:
    slider = page.locator(f"input[name={name}]")
    return int(slider.input_value()), int(slider.get_attribute("max"))


def test_sliders_plan_again_and_mark_what_has_changed(page: Any, plan: pase.Plan) -> None:
    assert page.locator("h1").inner_text() == f"transformer on 8 × {plan.machine.device.name}"
    assert page.locator("#cost").inner_text() == quantity(plan.total_cost, "FLOP")
    assert page.locator("#certificate").inner_text() == "proven optimal"
    assert page.locator("tr.changed").count() == 0
    at, _ = _at(page, "bandwidth_bytes_per_s")
    _slide(page, "bandwidth_bytes_per_s", 0)
    slower = page.locator("#cost").inner_text()
    assert slower != quantity(plan.total_cost, "FLOP")
    changed = page.locator("tr.changed")
    assert changed.count() > 0
    row = changed.first.locator("td").all_inner_texts()
    assert row[3] != row[6] != ""
    page.locator("#keep").click()
    assert page.locator("tr.changed").count() == 0
    _slide(page, "bandwidth_bytes_per_s", at)
    assert page.locator("#cost").inner_text() == quantity(plan.total_cost, "FLOP")
    assert page.locator("tr.changed").count() > 0
    assert page.locator("#answer").get_attribute("aria-busy") == "false"
    _slide(page, "devices", 0)
    assert page.locator("h1").inner_text() != f"transformer on 8 × {plan.machine.device.name}"


def test_keys_move_sliders_and_the_last_position_counts(page: Any) -> None:
    slider = page.locator("input[name=bandwidth_bytes_per_s]")
    slider.focus()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    at, _ = _at(page, "bandwidth_bytes_per_s")
    page.wait_for_timeout(1500)
    told_of = page.locator("label", has=slider).locator("output").inner_text()
    shown = page.locator("#cost").inner_text()
    _slide(page, "bandwidth_bytes_per_s", at)
    assert page.locator("#cost").inner_text() == shown
    assert slider.get_attribute("aria-valuetext") == told_of


def test_a_limit_that_nothing_fits_is_told_and_the_answer_is_marked(page: Any) -> None:
    _, last = _at(page, "device_memory_bytes")
    _slide(page, "device_memory_bytes", last)
    shown = page.locator("#cost").inner_text()
    assert not page.locator("#error").is_visible()
    label = page.locator("label", has=page.locator("input[name=device_memory_bytes]"))
    assert label.locator("output").inner_text() == "no limit"
    _slide(page, "device_memory_bytes", 0)
    for _ in range(2):
        assert "fits" in page.locator("#error").inner_text()
        assert page.locator("#stale").is_visible()
        assert page.locator("#cost").inner_text() == shown
        assert _at(page, "device_memory_bytes")[0] == 0
        page.reload()
    _slide(page, "device_memory_bytes", last)
    assert not page.locator("#error").is_visible()
    assert not page.locator("#stale").is_visible()


def _shown(page: Any) -> tuple[Any, ...]:
    texts = tuple(page.locator(f"#{name}").inner_text() for name in ("title", "cost", "certificate", "speedup"))
    outputs = page.locator("#controls output").all_inner_texts()
    positions = [_at(page, name)[0] for name in AT]
    return (*texts, outputs, positions, page.locator("#layers td:nth-child(4)").all_inner_texts())


def test_after_a_reload_and_in_a_second_tab_the_page_shows_the_same(page: Any, address: str) -> None:
    _slide(page, "bandwidth_bytes_per_s", 5)
    _slide(page, "devices", 1)
    shown = _shown(page)
    page.reload()
    assert _shown(page) == shown
    second = page.context.browser.new_page()
    second.goto(address)
    assert _shown(second) == shown
    # What the second one does is no matter to what the first one asks for.
    _slide(second, "bandwidth_bytes_per_s", 30)
    _slide(page, "devices", 2)
    assert _shown(page)[5] == [2, 5, shown[5][2]]
    third = page.context.browser.new_page()
    third.goto(address)
    assert _shown(third) == _shown(page)
    for one in (second, third):
        one.close()
