"""`pase simulate`: its tables, its JSON, its trace, and what it says of bad input."""

import json
from pathlib import Path

import pytest

from pase.analysis.simulation.pipeline import simulate_stages
from pase.analysis.simulation.simulation import simulate
from pase.machine import load_machine
from pase.planning.plan_file import write_plan
from tests.cli.conftest import Command
from tests.networks import small_plan, staged_plan, tiny_plan


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    write_plan(tiny_plan(), path)
    return path


def test_it_prints_the_totals_and_the_critical_path(pase: Command, plan: Path) -> None:
    finished = pase("simulate", plan)
    assert (finished.status, finished.err) == (0, "")
    assert "mlp on 4 × NVIDIA GeForce GTX 1080 Ti" in finished.out
    assert "one step" in finished.out
    for row in ("forward", "backward", "update", "computing", "waiting", "node", "latencies", "links taken by others"):
        assert f"\n{row}" in finished.out
    assert max(map(len, finished.out.splitlines())) <= 100


def test_json_has_what_the_library_finds(pase: Command, plan: Path) -> None:
    document = json.loads(pase("simulate", plan, "--json").out)
    step = simulate(tiny_plan())
    assert document["step_time_s"] == step.step_time_s
    assert (document["model"], document["num_devices"], document["collectives"]) == ("mlp", 4, "hierarchical")
    assert document["overlap"] is True
    assert [phase["name"] for phase in document["phases"]] == ["forward", "backward", "update"]
    assert [device["device"] for device in document["devices"]] == [0, 1, 2, 3]
    assert [level["name"] for level in document["levels"]] == ["node"]
    path = document["critical_path"]
    assert sum(path["activities_s"].values()) == pytest.approx(step.step_time_s)
    assert path["parts"][0]["begin_s"] == 0
    assert path["parts"][-1]["end_s"] == step.step_time_s
    assert set(path["parts"][0]) == {
        *("activity", "producer", "consumer", "tensor", "phase", "device", "level", "begin_s", "end_s"),
    }


def test_the_machine_the_collectives_and_the_overlap_can_be_chosen(pase: Command, plan: Path) -> None:
    def step_time_s(*arguments: str) -> float:
        return float(json.loads(pase("simulate", plan, "--json", *arguments).out)["step_time_s"])

    assert step_time_s("--collectives", "program") == simulate(tiny_plan(), collectives="program").step_time_s
    assert step_time_s("--no-overlap") == simulate(tiny_plan(), overlaps=False).step_time_s
    other = simulate(tiny_plan(), machine=load_machine("2080ti")).step_time_s
    assert step_time_s("--machine", "2080ti") == other != step_time_s()


def test_it_writes_a_trace(pase: Command, plan: Path, tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    finished = pase("simulate", plan, "--trace", trace)
    assert f"trace written to {trace}" in finished.out
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["plan.json", "step.json"]


def test_devices_that_do_not_fill_the_machine_are_named_with_the_field(pase: Command, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(small_plan("mlp", 12), path)
    finished = pase("simulate", path)
    assert finished.status == 1
    assert "levels[0].devices is 8, which does not divide 12 devices" in finished.err


# -- plans in stages


def test_a_plan_in_stages_is_simulated_pass_by_pass(pase: Command, staged: str) -> None:
    finished = pase("simulate", staged)
    assert (finished.status, finished.err) == (0, "")
    assert "4 micro-batches through 2 stages of 4 devices (1f1b)" in finished.out
    for text in ("one step", "closed form", "devices wait", "\nstage  layers", "in flight", "\nthe step waits for"):
        assert text in finished.out
    assert max(map(len, finished.out.splitlines())) <= 100


def test_json_of_stages_has_what_the_library_finds(pase: Command, staged: str) -> None:
    document = json.loads(pase("simulate", staged, "--json").out)
    found = simulate_stages(staged_plan())
    assert (document["step_time_s"], document["closed_form_s"]) == (found.step_time_s, found.closed_form_s)
    assert [stage["memory_bytes"] for stage in document["stages"]] == [use.memory_bytes for use in found.stages]
    assert document["stages"][0]["times_s"]["forward"] == found.times_s[0]["forward"]
    assert len(document["passes"]) == len(found.passes)
    assert set(document["passes"][0]) == {"work", "stage", "micro_batch", "begin_s", "end_s"}
    assert document["critical_path"][-1]["end_s"] == found.step_time_s


def test_a_trace_of_stages_is_written_and_collectives_are_refused(pase: Command, staged: str, tmp_path: Path) -> None:
    assert "trace written to" in pase("simulate", staged, "--trace", tmp_path / "step.json").out
    assert {event["pid"] for event in json.loads((tmp_path / "step.json").read_text())["traceEvents"]} == {0, 1}
    finished = pase("simulate", staged, "--collectives", "ring")
    assert finished.status == 1
    assert "leave out --collectives" in finished.err
