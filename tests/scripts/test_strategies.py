"""The benchmark of strategies: what it draws, what it compares, and that it goes on after a failure and from a file."""

import json
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path

import numpy as np
import pytest

from pase import load
from scripts.benchmarks import strategies
from scripts.benchmarks.strategies import NETWORKS, outcomes, read_outcomes, table, trials
from scripts.benchmarks.trials import (
    SMALLEST_SHARE,
    TOLERANCE,
    Outcome,
    Trial,
    configurations,
    random_strategy,
    weight_differences,
)
from tests.networks import tiny_graph, tiny_plan
from tests.runtime import plans

MLP = Trial(network="mlp", arguments=tuple(NETWORKS["mlp"].items()), num_devices=2, seed=None, steps=3)


@pytest.mark.full
def test_every_built_in_network_is_tried() -> None:
    from pase.models import MODELS

    assert set(NETWORKS) == set(MODELS)
    for name, arguments in NETWORKS.items():
        graph = load(name, arguments=arguments)
        # Small extents and fewer of the layers that repeat, but every kind of them.
        assert {op.kind for op in graph.operators} == {op.kind for op in load(name).operators}


def test_configurations_are_all_that_divide() -> None:
    for name in ("mlp", "rnnlm", "lenet5"):
        for operator in load(name, arguments=NETWORKS[name]).operators:
            for p in (2, 4, 6, 8):
                found = {tuple(splits.items()) for splits in configurations(operator, p)}
                assert found == {tuple(splits.items()) for splits in plans.configurations(operator, p)}


def test_random_strategies_are_valid_and_differ() -> None:
    plan = tiny_plan()
    found = [random_strategy(plan, seed) for seed in range(20)]
    assert random_strategy(plan, 3) == found[3]
    assert len({tuple(tuple(layer.splits.values()) for layer in one.layers) for one in found}) > 10
    for one in found:
        for layer in one.layers:
            assert all(layer.dims[dim] % parts == 0 for dim, parts in layer.splits.items())
            assert plan.num_devices % prod(layer.splits.values()) == 0
            assert sorted(layer.devices) == list(range(plan.num_devices))
    assert found[0].graph == tiny_graph()


def test_weights_are_compared_by_size_and_small_ones_by_their_layer() -> None:
    expected = {"fc/w": np.array([2.0, -4.0]), "fc/bias": np.array([1e-6, 0.0]), "norm/scale": np.array([1e-3])}
    found = {"fc/w": np.array([2.0, -4.4]), "fc/bias": np.array([1e-6, 1e-9]), "norm/scale": np.array([1.1e-3])}
    differences = weight_differences(found, expected)
    assert differences["fc/w"] == pytest.approx((0.1, 0.1))
    assert differences["fc/bias"] == pytest.approx((1e-9 / (4 * SMALLEST_SHARE), 1e-3))
    assert differences["norm/scale"] == pytest.approx((0.1, 0.1))


def test_rounding_of_a_weight_without_a_gradient_is_no_difference() -> None:
    keys = {"keys/w": np.array([1.0]), "keys/bias": np.array([1e-20])}
    differences = weight_differences({"keys/w": np.array([1.0]), "keys/bias": np.array([-3e-19])}, keys)
    assert differences["keys/bias"][0] < TOLERANCE
    assert differences["keys/bias"][1] == 0
    # A gradient that should not be there is one.
    assert weight_differences({"keys/w": np.array([1.0]), "keys/bias": np.array([1e-9])}, keys)["keys/bias"][0] > 1e-7


def test_what_is_no_number_is_not_good() -> None:
    assert not Outcome(trial=MLP, loss_difference=float("nan")).is_good
    assert not Outcome(trial=MLP, weight_difference=float("nan")).is_good
    good = Outcome(trial=MLP, loss_difference=1e-16, weight_difference=0.0)
    assert good.is_good
    assert not Outcome(trial=MLP, loss_difference=1e-16, weight_difference=2e-12).is_good
    assert not Outcome(trial=MLP, loss_difference=0.0, weight_difference=0.0, error="no").is_good


def test_the_table_has_a_row_for_each_network() -> None:
    found = [
        Outcome(
            trial=trial,
            num_layers=4,
            loss_difference=1e-16 if trial.seed is None else 2e-16,
            weight_difference=1e-13,
            own_difference=3e-10,
            time_s=1.5,
        )
        for trial in trials(("mlp", "gpt"), 2, 3)
    ]
    found.append(Outcome(trial=MLP, error="it broke"))
    _, _, mlp, gpt = table(found).splitlines()
    assert [cell.strip() for cell in mlp.split("|")[3:-1]] == [
        *("4", "2 / 2 / 2", "2 / 1 / 1", "1", "2.0e-16", "1.0e-13", "3.0e-10", "1.5")
    ]
    assert gpt.startswith("| gpt | batch 4, vocabulary 16")


@pytest.mark.full
def test_it_goes_on_after_a_failure_and_from_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = Trial(network="mlp", arguments=(("no_such", 1),), num_devices=2, seed=0, steps=3)
    failed, good = outcomes([bad, MLP], workers=1)
    assert failed.trial == bad
    assert "ModelError" in failed.error
    assert good.trial == MLP
    assert good.is_good
    assert 0 < good.own_difference < TOLERANCE

    path = tmp_path / "done.jsonl"
    lines = [json.dumps(strategies.asdict(outcome)) for outcome in (good, failed)]
    path.write_text("\n".join([*lines, lines[0][:40]]), encoding="utf-8")
    assert read_outcomes(path) == {MLP: good, bad: failed}

    # The searched strategies of 4 and 8 devices are left, and fail.
    def broken(waiting: Iterable[Trial], workers: int) -> Iterator[Outcome]:
        return (Outcome(trial=trial, error="it broke") for trial in waiting)

    monkeypatch.setattr(strategies, "outcomes", broken)
    with pytest.raises(SystemExit, match=r"2 of 3 strategies failed:\nmlp p=4 searched: FAILED: it broke\nmlp p=8"):
        strategies.main(write=False, networks=("mlp",), number=0, steps=3, workers=1, resume_file=path)
    assert "1 strategies were tried before, 2 are left" in capsys.readouterr().out


def test_an_unknown_network_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"no network mlpp here; there are mlp, rnnlm"):
        strategies.main(write=False, networks=("mlpp",), number=0, steps=3, workers=1, resume_file=None)
