"""`pase inspect` and `--strict`, as a user calls them."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pase.importers.ir.trace import Trace
from tests.cli.conftest import Command, pase

__all__ = ["pase"]


class Stub:
    """A front end whose models are traces."""

    package = "none_such"
    extra = "none"

    def takes(self, source: object) -> bool:
        return isinstance(source, Trace)

    def trace(self, source: object, **_: Any) -> Trace:
        assert isinstance(source, Trace)
        return source


SOURCE = """
from pase.importers.ir.ops import Generic
from tests.importers.traces import Tracer

def plain(layers=2):
    t = Tracer()
    x = t.leaf("x", (8, 16))
    for i in range(int(layers)):
        y = t.linear(x, t.weight(f"h.{i}.w", 16, 64), scope=f"h.{i}.fc")
        y = t.linear(t.point("relu", y), t.weight(f"h.{i}.v", 64, 16), scope=f"h.{i}.out")
        x = t.point("add", x, y, scope=f"h.{i}")
    return t.trace(x)

def whole():
    t = Tracer()
    x = t.linear(t.leaf("x", (64, 256)), t.weight("w", 256, 256), scope="fc")
    return t.trace(t.add(Generic(flop_per_point=7.0), x, shape=(256, 64), scope="odd"))

def strange():
    t = Tracer()
    x = t.linear(t.leaf("x", (8, 16)), t.weight("w", 16, 32), scope="fc")
    return t.trace(t.add(Generic(passes=((0, 0),), flop_per_point=7.0), x, shape=(8, 5), scope="odd"))
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "inspected_nets.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pase.importers.frameworks.FRONT_ENDS", (Stub(),))
    monkeypatch.delitem(sys.modules, "inspected_nets", raising=False)
    yield "inspected_nets"
    sys.modules.pop("inspected_nets", None)


def test_steps_vertices_and_counts_are_printed(nets: str, pase: Command) -> None:
    finished = pase("inspect", f"{nets}:plain")
    assert (finished.status, finished.err) == (0, "")
    lines = [line.split() for line in finished.out.splitlines()]
    assert ["h.0.fc", "dense", "b=8", "n=64", "c=16", "1,024"] in lines
    assert ["source", "8"] in lines
    assert ["vertices", "6"] in lines
    assert "  parameters              4,096" in finished.out
    assert "treated generically     nothing: every operator is known" in finished.out


def test_layers_that_repeat_are_listed_once(nets: str, pase: Command) -> None:
    finished = pase("inspect", f"{nets}:plain", "--arg", "layers=40")
    assert len(finished.out.splitlines()) < 40
    assert re.search(r"^× 40\n  h\.0\S* ", finished.out, re.MULTILINE)
    assert "with what one of them costs; --all prints each" in finished.out
    everything = pase("inspect", f"{nets}:plain", "--arg", "layers=40", "--all").out
    assert sum(line.startswith("h.") for line in everything.splitlines()) == 120


def test_what_is_not_known_is_named_with_its_share(nets: str, pase: Command) -> None:
    finished = pase("inspect", f"{nets}:strange")
    assert finished.status == 0
    assert "Generic is treated generically: only dims that pass through it can be split" in finished.out
    assert "y0_1=5" in finished.out
    found = json.loads(pase("inspect", f"{nets}:strange", "--json").out)
    assert found["generic"] == [{"name": "odd", "operator": "Generic"}]
    assert found["generic_share"]["flop"] == pytest.approx(7 * 40 / (7 * 40 + 2 * 8 * 16 * 32))
    assert found["generic_share"]["elements"] == pytest.approx(40 / (40 + 256))
    assert found["differences"] == []


def test_the_document_is_whole(nets: str, pase: Command) -> None:
    found = json.loads(pase("inspect", f"{nets}:plain", "--json").out)
    assert found["parameters"] == sum(vertex["parameters"] for vertex in found["vertices"]) == 4096
    assert found["contraction_flop"] == 2 * 2 * 2 * 8 * 16 * 64
    assert found["forward_flop"] == sum(vertex["forward_flop"] for vertex in found["vertices"])
    assert found["vertices"][2] == {
        "name": "h.0",
        "kind": "pointwise",
        "scope": "h.0",
        "dims": {"b": 8, "n": 16},
        "unsplittable": [],
        "parameters": 0,
        "forward_flop": 128.0,
    }
    assert {"producer": "h.0.fc", "consumer": "h.0.out"} in found["edges"]
    assert found["passes"][0] == {"name": "source", "operators": 8}
    assert found["passes"][-1] == {"name": "vertices", "operators": 6}


@pytest.mark.parametrize("command", [["inspect"], ["search", "--devices", "4"]])
def test_strict_refuses_what_is_not_known(command: Sequence[str], nets: str, pase: Command) -> None:
    assert pase(*command, f"{nets}:strange").status == 0
    finished = pase(*command, f"{nets}:strange", "--strict")
    assert (finished.status, finished.out) == (1, "")
    assert "operators that nothing is known of: Generic; without --strict they are split along the" in finished.err
    assert pase(*command, f"{nets}:plain", "--strict").status == 0


def test_search_warns_of_what_costs_because_nothing_is_known_of_it(nets: str, pase: Command) -> None:
    """A function that keeps everything whole makes the layer before it pay."""
    finished = pase("search", f"{nets}:whole", "--devices", "4")
    assert finished.status == 0
    assert "nothing is known of Generic (layer odd) but what passes through it" in finished.err
    found = json.loads(pase("search", f"{nets}:whole", "--devices", "4", "--json").out)
    assert found["opaque"]["layers"] == [{"name": "odd", "operator": "Generic"}]
    assert 0 < found["opaque"]["lower_bound_if_free"] < 0.9 * found["total_cost"]
    finished = pase("search", f"{nets}:plain", "--devices", "4", "--json")
    assert "opaque" not in json.loads(finished.out)
    assert "nothing is known" not in finished.err


def test_a_built_in_network_is_shown_too(pase: Command) -> None:
    finished = pase("inspect", "alexnet", "--batch", "16")
    assert finished.status == 0
    assert any(line.split()[:2] == ["conv1", "conv2d"] for line in finished.out.splitlines())
    assert json.loads(pase("inspect", "alexnet", "--json").out)["passes"] == []


def test_what_is_no_model_is_one_line(pase: Command) -> None:
    for model in ("no_such_module_anywhere:net", "net.pt", "alexnett"):
        finished = pase("inspect", model)
        assert (finished.status, finished.out, len(finished.err.splitlines())) == (1, "", 1), model
