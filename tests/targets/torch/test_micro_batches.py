"""Steps of several micro-batches: what ranks find of them beside one process and the whole batch, and send."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pase
from pase.errors import ModelError, ProgramError
from pase.graph import Graph
from pase.models import build
from pase.planning.plan import Plan
from pase.sharding.traffic import flows
from pase.targets.execute import max_relative_difference
from pase.targets.programs import emit
from pase.targets.torch.parallel import parallelize
from pase.targets.training.data import example_dims, micro_batch
from tests.runtime.networks import batch_norms, small
from tests.runtime.options import options
from tests.runtime.plans import make_plan, random_plan, recomputing
from tests.targets.torch.equality import RELATIVE, difference, full, micro_batches_of, of_step
from tests.targets.torch.modules import Batch, Language, floats, made, words
from tests.targets.torch.ranks import Pool
from tests.targets.torch.trained import events

EXAMPLES = 8


def _words(count: int = 1) -> Batch:
    """A batch, or as much of it as a micro-batch has."""
    return words(0, "words", "targets", shape=(EXAMPLES // count, 8))


def _language() -> nn.Module:
    torch.manual_seed(0)
    return Language().double()


def _step(_rank: int, _world: int, plan: Plan, batch: Batch) -> tuple[float, dict[str, Any]]:
    parallel = parallelize((_language(), _words(plan.micro_batches)), plan)
    loss = parallel.accumulate(**batch)
    return loss.item(), {name: full(p.grad) for name, p in parallel.named_parameters()}


@pytest.mark.parametrize(
    ("world", "count"), [(2, 4), *(pytest.param(*each, marks=pytest.mark.full) for each in ((1, 2), (4, 2)))]
)
def test_micro_batches_are_together_the_whole_batch(ranks: Pool, world: int, count: int) -> None:
    alone = _language()
    loss = alone(**_words())["loss"]
    loss.backward()
    graph = pase.load((_language(), _words(count)))
    plan = replace(recomputing(random_plan(graph, world, count), 1), micro_batches=count)
    for found, gradients in ranks.run(_step, plan, _words(), world=world):
        assert found == pytest.approx(loss.item(), rel=RELATIVE)
        for name, parameter in alone.named_parameters():
            assert parameter.grad is not None
            if parameter.grad.norm() > 1e-12:
                assert difference(gradients[name], parameter.grad) < RELATIVE, name


def test_gradients_are_summed_once() -> None:
    plan = make_plan(small("mlp"), 2, {layer.name: {"b": 2} for layer in small("mlp").operators})
    sizes = [sum(flow.total_bytes for flow in flows(replace(plan, micro_batches=count))) for count in (1, 4)]
    # Each micro-batch adds up its loss, one number, and the ranks agree on it.
    assert sizes[1] - sizes[0] == 3 * 2 * 4


class Sequences(nn.Module):
    """Reads two sequences, steps first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Any, y: Any) -> Any:
        return (self.last(torch.tanh(self.first(x))).mean(0) - y.mean(0)).square().mean()


def _sequences(examples: int) -> Batch:
    whole = {**floats(0, "x", 5, EXAMPLES, 6), **floats(1, "y", 7, EXAMPLES, 6)}
    return {name: x[:, :examples] for name, x in whole.items()}


def _of_sequences(_rank: int, _world: int, plan: Plan) -> tuple[float, Any]:
    torch.manual_seed(0)
    parallel = parallelize((Sequences().double(), _sequences(4)), plan, check=False)
    return parallel.accumulate(**_sequences(EXAMPLES)).item(), full(parallel.first.weight.grad)


def test_the_batch_may_be_behind_the_steps(ranks: Pool) -> None:
    torch.manual_seed(0)
    alone = Sequences().double()
    loss = alone(**_sequences(EXAMPLES))
    loss.backward()
    plan = replace(random_plan(pase.load((Sequences(), _sequences(4))), 2, 1), micro_batches=2)
    for found, gradient in ranks.run(_of_sequences, plan, world=2):
        assert found == pytest.approx(loss.item(), rel=RELATIVE)
        assert difference(gradient, alone.first.weight.grad) < RELATIVE


def test_inputs_without_examples_are_those_of_every_micro_batch() -> None:
    graph = small("mlp")
    assert example_dims(graph, [(24, 12), (12,), ()]) == [0, None, None]
    x = torch.arange(8).reshape(4, 2)
    assert micro_batch(x, 1, 2).tolist() == [[2, 3], [6, 7]]
    assert micro_batch(x, 1, 2, 1).tolist() == [[1], [3], [5], [7]]
    assert micro_batch(x, 1, 2, None) is x


# -- parts


def _by_parts(rank: int, world: int, plan: Plan) -> Any:
    batches = micro_batches_of("pieces", 0, plan.micro_batches)
    parallel = parallelize((made("pieces"), batches[0]), plan, check=False)
    boxes, batch = parallel.inputs(), of_step(batches)
    assert [parallel.inputs(other) for other in range(world)][rank] == boxes
    part = {key: value[tuple(slice(*one) for one in boxes[key])] for key, value in batch.items()}
    losses = [parallel.accumulate(**given).item() for given in (batch, part)]
    return losses, boxes["x"][0], list(parallel.sampler(19, seed=3))


@pytest.mark.parametrize("count", [2, pytest.param(1, marks=pytest.mark.full)])
def test_every_rank_may_be_given_its_own_part(ranks: Pool, count: int) -> None:
    """Examples are split throughout: half of them is all that a rank reads."""
    batches = micro_batches_of("pieces", 0, count)
    graph, examples = pase.load((made("pieces"), batches[0])), count * len(batches[0]["x"])
    splits = {operator.name: {"b": 2} for operator in graph.operators if "b" in operator.extents}
    found = ranks.run(_by_parts, replace(make_plan(graph, 2, splits), micro_batches=count), world=2)
    alone = made("pieces")
    expected = sum(alone(**batch).item() for batch in batches) / count
    for losses, _, _ in found:
        assert losses == pytest.approx([expected] * 2, rel=RELATIVE)
    assert [rows for _, rows, _ in found] == [(0, examples // 2), (examples // 2, examples)]
    samples = [batches for *_, batches in found]
    assert [[len(batch) for batch in batches] for batches in samples] == [[examples // 2] * (19 // examples)] * 2
    numbers = [number for batches in samples for batch in batches for number in batch]
    assert len(numbers) == len({*numbers})


def test_steps_of_another_size_are_refused() -> None:
    given = Sequences().double(), _sequences(4)
    parallel = parallelize(given, replace(random_plan(pase.load(given), 1, 0), micro_batches=2))
    with pytest.raises(ModelError, match="input 'x' has 4 examples; a step has 8, 2 micro-batches of 4"):
        parallel.accumulate(**_sequences(4))
    with pytest.raises(ModelError, match="the inputs do not fit the module's forward pass: missing a required argume"):
        parallel.accumulate(x=_sequences(EXAMPLES)["x"])


def test_a_module_without_a_loss_is_refused() -> None:
    module, x = nn.Linear(4, 4), torch.ones(4, 4)
    plan = replace(random_plan(pase.load((module, x)), 1, 0), micro_batches=2)
    with pytest.raises(ProgramError, match="0 of the 1 tensors that the model returns are single numbers; expected on"):
        parallelize((module, x), plan).accumulate(torch.ones(8, 4))


# -- programs


def _smaller(name: str, count: int) -> Graph:
    """A small network with a part of its batch."""
    given = dict(small(name).arguments)
    return build(name, arguments=given | {"batch": int(given["batch"]) // count})


@pytest.mark.parametrize(
    ("name", "world", "count"),
    [("mlp", 2, 3), pytest.param("transformer", 4, 2, marks=pytest.mark.full)],
)
def test_a_program_trains_on_the_whole_batch(ranks: Pool, name: str, world: int, count: int) -> None:
    # Not above: ranks load this module, too, and need no TensorFlow.
    from pase.targets.mesh_tensorflow.runtime.reference import reference_training

    plan = replace(random_plan(_smaller(name, count), world, 3), micro_batches=count)
    source = emit(plan, target="torch")
    assert f"main(build, num_devices={world}, micro_batches={count})" in source
    reference = reference_training(small(name), options(3))
    for own in ranks.run(events, source, options(3), False, count, world=world):
        assert max_relative_difference(own[-1]["losses"], reference.losses) < RELATIVE
        found = [event["accuracy"] for event in own if event["event"] == "step"]
        assert not found or found == pytest.approx(reference.accuracies, rel=RELATIVE)


def test_files_of_data_hold_the_examples_of_whole_steps(ranks: Pool, tmp_path: Path) -> None:
    # Not above: ranks load this module, too, and need no TensorFlow.
    from pase.targets.mesh_tensorflow.runtime.reference import reference_training

    numbers = np.random.default_rng(0)
    arrays = {"inputs": numbers.standard_normal((72, 12)), "labels": numbers.integers(12, size=72)}
    np.savez(tmp_path / "data.npz", **arrays)  # type: ignore[arg-type]
    given = options(4, data_path=tmp_path / "data.npz", test_data_path=tmp_path / "data.npz", test_every=2)
    source = emit(recomputing(random_plan(_smaller("mlp", 2), 2, 1), 0), target="torch")
    reference = reference_training(small("mlp"), given)
    found = ranks.run(events, source, given, False, 2, world=2)[0]
    assert max_relative_difference(found[-1]["losses"], reference.losses) < RELATIVE
    tests = [event["loss"] for event in found if event["event"] == "tested"]
    assert tests == pytest.approx([test.loss for test in reference.tests], rel=RELATIVE)


def test_statistics_are_those_of_each_micro_batch_in_turn(ranks: Pool) -> None:
    source = emit(replace(random_plan(batch_norms(), 4, 2), micro_batches=2), target="torch")
    alone = emit(replace(random_plan(batch_norms(), 1, 2), micro_batches=2), target="torch")
    found = [
        ranks.run(events, text, options(3), False, 2, world=world)[0][-1]["losses"]
        for text, world in ((source, 4), (alone, 1))
    ]
    assert max_relative_difference(*found) < RELATIVE
