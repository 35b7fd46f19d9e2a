"""JAX functions under plans, on virtual devices: the numbers of the function, each part where it is planned."""

from typing import Any

import pytest

from tests.targets.jax.devices import Devices

pytest.importorskip("jax")


def run(devices: Devices, model: str, *cases: str) -> Any:
    """Train a model under plans: numbers of devices and kinds of plans."""
    split = [(int(case.partition(" ")[0]), case.partition(" ")[2]) for case in cases]
    return devices.run("tests.targets.jax.on_devices:train", model, split)


def check(case: str, result: dict[str, Any]) -> None:
    """Losses of three steps, all gradients and the weights after the steps are those of the function on one device."""
    assert result["devices"] == int(case.split()[0])
    assert max(result["differences"].values()) < 1e-12, (case, result["differences"])
    assert result["wrong"] == [], case


@pytest.mark.parametrize(
    ("model", "cases"),
    [
        ("mlp", ["4 mesh 1", "4 random 1"]),
        ("gpt", ["2 random 1"]),
        pytest.param("cnn", ["4 held", "8 held"], marks=pytest.mark.full),
        pytest.param(
            "mlp",
            ["4 searched", *(f"{p} {kind} {i}" for p in (2, 4, 8) for kind in ("mesh", "random") for i in range(4, 8))],
            marks=pytest.mark.full,
        ),
        *(
            pytest.param(
                model,
                [f"{p} {kind}" for p in (2, 4, 8) for kind in ("searched", "mesh 1", "mesh 2", "random 2")],
                marks=pytest.mark.full,
            )
            for model in ("cnn", "gpt", "scanned", "flax", "equinox", "nested")
        ),
    ],
)
def test_a_function_computes_the_same_under_a_plan(devices: Devices, model: str, cases: list[str]) -> None:
    results = run(devices, model, *cases)
    for case, result in zip(cases, results, strict=True):
        check(case, result)
    assert any(result["split"] for result in results)


@pytest.mark.full
def test_a_loop_whose_turns_are_split_alike_stays_one_and_is_written_out_otherwise(devices: Devices) -> None:
    cases = ["4 alike 1", "4 mesh 1"]
    for case, result in zip(cases, run(devices, "scanned", *cases), strict=True):
        check(case, result)
        assert result["loops"] == ("alike" in case)
        assert result["split"] > 2


def test_convolutions_that_xla_computes_wrong_are_held_back_and_named(devices: Devices) -> None:
    notes = devices.run("tests.targets.jax.on_devices:notes", "cnn", 4, "held")
    held = [note.partition(":")[0] for note in notes if "held back, because XLA" in note]
    assert sorted(", ".join(held).split(", ")) == ["conv1", "conv2", "conv3"]


def test_xla_moves_the_bytes_that_are_predicted(devices: Devices) -> None:
    """Sums and gathers, which are done in one way; of other moves XLA makes more (docs/how-to/parallelize-jax.md)."""
    for kind, (moved, predicted) in devices.run("tests.targets.jax.on_devices:moved", "mlp", 4).items():
        assert moved == predicted > 0, kind
