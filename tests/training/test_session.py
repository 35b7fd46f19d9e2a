"""A training from what was asked for to its end: data, tests, checkpoints, metrics, and going on exactly."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase.easgd.actors import Part
from pase.easgd.checkpoint import Checkpoint, Checkpointing, read_checkpoint
from pase.easgd.job import Job, TrainingRequest, make_job
from pase.easgd.ranks import Outcome
from pase.easgd.session import prepare, train
from pase.errors import DatasetError, ProgramError, TrainingError

ARGUMENTS: dict[str, Any] = {"inputs": 6, "hidden": 8, "classes": 3, "layers": 2}
NUM_WEIGHTS = 6 * 8 + 8 + 8 * 3 + 3


def request(job: Job | None = None, **others: Any) -> TrainingRequest:
    """Return a training of two small layers by two workers."""
    asked = job or make_job(num_workers=2, num_steps=6, learning_rate=0.1)
    return TrainingRequest(
        **{"source": "mlp", "batch": 4, "arguments": ARGUMENTS, "job": asked} | others,  # type: ignore[arg-type]
    )


def trained(asked: TrainingRequest) -> tuple[Outcome, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    return train(asked, report=events.append), events


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def data_file(path: Path, num_rows: int, seed: int = 0) -> str:
    """Write examples whose class is the largest of their first three inputs."""
    inputs = np.random.default_rng(seed).normal(size=(num_rows, 6)).astype(np.float32)
    np.savez(path, inputs=inputs, labels=np.argmax(inputs[:, :3], axis=1).astype(np.int32))
    return str(path)


def arrays(checkpoint: Checkpoint) -> dict[tuple[str, str], bytes]:
    """Return the bytes of everything that a checkpoint holds."""
    slots = {(name, slot): array for name, own in checkpoint.slots.items() for slot, array in own.items()}
    whole = {(name, ""): array for name, array in checkpoint.weights.items()} | slots
    return {key: array.tobytes() for key, array in whole.items()}


EXACT = {
    "sync-easgd3": (),
    "original-easgd": (),
    "async-measgd": (0, 1, 1),
    "async-msgd": (1, 0, 0),
    "hogwild-easgd": (0, 1),
}
"""What goes on exactly, and the order in which workers are then served."""


FEW = {"sync-easgd3", "async-measgd"}
"""Rounds, and events whose workers have momentum: of the others, the runtime's own tests show as much."""


def few(names: Iterable[str]) -> list[Any]:
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in names]


@pytest.mark.parametrize("name", few(EXACT))
def test_a_resumed_training_is_that_which_was_not_interrupted(name: str, tmp_path: Path) -> None:
    job = make_job(algorithm=name, num_workers=2, num_steps=6, learning_rate=0.1, arrivals=EXACT[name] or None)
    data = data_file(tmp_path / "data.npz", 23)
    whole = Checkpointing(folder=tmp_path / "whole", save_every=3)
    outcome, events = trained(request(job, data=data, seed=5, checkpointing=whole))
    in_the_middle = of_kind(events, "saved")[0]["path"]
    rest = Checkpointing(folder=tmp_path / "rest", save_every=3, resume=in_the_middle)
    resumed, events = trained(request(job, data=data, checkpointing=rest))
    (told,) = of_kind(events, "resumed")
    assert told == {"event": "resumed", "after": outcome.num_events // 2, "path": in_the_middle, "changed": []}
    assert resumed.centre.tobytes() == outcome.centre.tobytes()
    # What was done before took no time of this training.
    assert (events[-1]["num_samples"], resumed.num_events) == (6 * 2 * 4, outcome.num_events)
    assert events[-1]["examples_per_s"] * events[-1]["time_s"] == pytest.approx(3 * 2 * 4)
    first, second = (read_checkpoint(path) for path in (whole.newest(), rest.newest()) if path)
    assert first.step == second.step == outcome.num_events
    assert arrays(first) == arrays(second)
    assert first.options == second.options


def test_every_event_has_its_fields(tmp_path: Path) -> None:
    job = make_job(num_workers=2, num_steps=6, learning_rate=0.1, report_every=3, test_every=4)
    data, tests = data_file(tmp_path / "data.npz", 30), data_file(tmp_path / "tests.npz", 10, seed=1)
    kept = Checkpointing(folder=tmp_path / "kept", save_every=5)
    outcome, events = trained(request(job, data=data, test_data=tests, checkpointing=kept))
    assert events[0] == {
        "event": "started",
        "algorithm": "sync-easgd3",
        "learning_rate": 0.1,
        "rho": pytest.approx(4.5),
        "momentum": None,
        "num_workers": 2,
        "num_steps": 6,
        "num_weights": NUM_WEIGHTS,
        "num_messages_per_exchange": 1,
        "batch_size": 4,
    }
    assert sorted((event["worker"], event["step"]) for event in of_kind(events, "step")) == [
        (0, 3),
        (0, 6),
        (1, 3),
        (1, 6),
    ]
    assert [event["after"] for event in of_kind(events, "tested")] == [4, 6]
    assert [event["path"] for event in of_kind(events, "saved")] == [
        str(tmp_path / "kept" / f"step-{step:010d}.safetensors") for step in (5, 6)
    ]
    done = events[-1]
    last = of_kind(events, "tested")[-1]
    assert (done["event"], done["num_events"], done["num_samples"]) == ("done", 6, 6 * 2 * 4)
    # Two whole batches of the ten examples.
    assert (done["loss"], done["accuracy"], done["num_examples"]) == (last["loss"], last["accuracy"], 8)
    assert [worker["num_steps"] for worker in done["workers"]] == [6, 6]
    assert done["num_bytes"] == sum(worker["num_bytes"] for worker in done["workers"])
    assert done["checkpoint"] == str(tmp_path / "kept" / "step-0000000006.safetensors")
    assert json.loads(json.dumps(events)) == events
    assert (outcome.lost, outcome.num_refused) == ((), 0)


@pytest.mark.parametrize("name", few(["sync-easgd3", "sync-sgd", "async-measgd", "hogwild-easgd"]))
def test_events_say_where_the_time_of_steps_went(name: str) -> None:
    _, events = trained(request(make_job(algorithm=name, num_workers=2, num_steps=6, report_every=2)))
    done, parts = events[-1], [part.value for part in Part]
    has_master = name != "sync-easgd3"
    assert (done["master_parts"] is not None) == has_master
    for each in [*(worker["parts"] for worker in done["workers"]), *([done["master_parts"]] if has_master else [])]:
        assert set(each) == {*parts, "other_s", "time_s", "hidden_s"}
        assert sum(each[name] for name in (*parts, "other_s")) == pytest.approx(each["time_s"], rel=1e-9)
        assert min(each[name] for name in (*parts, "hidden_s")) >= 0
    for number, worker in enumerate(done["workers"]):
        assert min(worker["parts"][name] for name in ("data_s", "compute_s", "worker_update_s")) > 0
        assert worker["communication_s"] == worker["parts"]["host_exchange_s"] + worker["parts"]["worker_exchange_s"]
        laps = [step["parts"] for step in of_kind(events, "step") if step["worker"] == number]
        # What comes after the last report is in none of them.
        assert 0 < sum(lap["compute_s"] for lap in laps) <= worker["parts"]["compute_s"] * (1 + 1e-9)
        assert sum(lap["time_s"] for lap in laps) <= worker["time_s"]


def test_a_training_ends_when_it_is_good_enough(tmp_path: Path) -> None:
    tests = data_file(tmp_path / "tests.npz", 8, seed=1)
    job = make_job(num_workers=2, num_steps=5000, test_every=1, until_accuracy=0.01, algorithm="async-easgd")
    asked = request(job, data=data_file(tmp_path / "data.npz", 30), test_data=tests)
    outcome, events = trained(asked)
    assert outcome.num_events < 5000
    tested = of_kind(events, "tested")
    assert tested[-1]["accuracy"] >= 0.01
    assert all(test["accuracy"] < 0.01 for test in tested[:-1])
    with prepare(asked) as prepared:
        assert prepared.evaluator is not None
        # The very centre that was tested.
        assert (events[-1]["loss"], events[-1]["accuracy"], 8) == prepared.evaluator.evaluate(outcome.centre)


def test_packed_and_per_layer_train_alike(tmp_path: Path) -> None:
    packed, _ = trained(request())
    per_layer, events = trained(request(packed=False))
    assert of_kind(events, "started")[0]["num_messages_per_exchange"] == 2
    assert per_layer.centre.tobytes() == packed.centre.tobytes()
    assert (per_layer.num_bytes, per_layer.num_messages) == (packed.num_bytes, 2 * packed.num_messages)


def test_metrics_go_on_where_the_training_does(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    data, tests = data_file(tmp_path / "data.npz", 30), data_file(tmp_path / "tests.npz", 8, seed=1)
    job = make_job(
        algorithm="async-easgd", num_workers=2, num_steps=4, report_every=1, test_every=2, arrivals=(0, 1, 0)
    )
    kept = Checkpointing(folder=tmp_path / "kept", save_every=3)
    asked = request(job, data=data, test_data=tests, checkpointing=kept, metrics_path=path)
    trained(asked)
    before = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    # Of 8 events, the first worker had the first of three and the last.
    assert sorted((line["worker"], line["step"]) for line in before if line["event"] == "step") == [
        *((0, step) for step in (1, 2, 3, 4, 5)),
        *((1, step) for step in (1, 2, 3)),
    ]
    assert [line["step"] for line in before if line["event"] == "tested"] == [2, 4]
    resumed = replace(kept, resume=str(tmp_path / "kept" / "step-0000000006.safetensors"))
    trained(replace(asked, checkpointing=resumed))
    after = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = [(line["event"], line["step"], line.get("worker")) for line in after]
    assert len(names) == len(set(names))
    assert set(names) == {(line["event"], line["step"], line.get("worker")) for line in before}
    with pytest.raises(ProgramError, match="holds the metrics of another training; name another file"):
        train(request(metrics_path=path))


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"dtype": "float16"}, "the number type is 'float16'; expected float32 or float64$"),
        ({"seed": -1}, "the seed is -1; expected 0 to 9223372036854775807$"),
        ({"data": "nowhere.npz"}, "there are no data 'nowhere.npz'"),
        ({"data": "mnist"}, "data 'mnist': mnist needs a path; expected mnist:FOLDER"),
        (
            {"job": make_job(num_workers=2, test_every=1)},
            "--test-every needs data to test on: --test-data PATH, or --data that have a test part$",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(others: dict[str, Any], message: str) -> None:
    with pytest.raises((TrainingError, DatasetError), match=message):
        request(**others)


def test_data_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    narrow = tmp_path / "narrow.npz"
    np.savez(narrow, inputs=np.zeros((9, 5), np.float32), labels=np.zeros(9, np.int32))
    with pytest.raises(DatasetError, match=r"examples of 'inputs' of .*narrow\.npz are 5; the model reads 6"):
        train(request(data=str(narrow)))
    with pytest.raises(DatasetError, match=r"narrow\.npz are 5; the model reads 6"):
        train(request(test_data=str(narrow), data=data_file(tmp_path / "data.npz", 30)))
    few = data_file(tmp_path / "few.npz", 5)
    with pytest.raises(TrainingError, match="5 examples for 6 workers; each needs one of its own, use fewer workers"):
        train(request(make_job(num_workers=6, num_steps=1), data=few))


def test_a_failure_names_the_checkpoint_that_is_left(tmp_path: Path) -> None:
    data = data_file(tmp_path / "data.npz", 30)
    kept = Checkpointing(folder=tmp_path / "kept", save_every=1)
    diverging = make_job(algorithm="sync-sgd", num_workers=2, num_steps=500, learning_rate=1e18)
    with pytest.raises(TrainingError, match=r"not finite|is nan|is inf") as raised:
        train(request(diverging, data=data, checkpointing=kept))
    newest = kept.newest()
    assert newest is not None
    assert f"; the last checkpoint is {newest}: go on from it with --resume" in str(raised.value)
    assert all(np.isfinite(array).all() for array in read_checkpoint(newest).weights.values())
