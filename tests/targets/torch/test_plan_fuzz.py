"""Random plans of modules' own graphs on simulated ranks, compared with the unmodified modules; mutations are found."""

from dataclasses import replace

import pytest

from tests.runtime.plans import make_plan
from tests.targets.torch.fuzz_models import FUZZ_MODELS
from tests.targets.torch.plan_fuzz import MUTATIONS, fuzz, needed, outcome, subject

QUICK = ("masked", "views", "function")


def test_random_plans_compute_what_the_modules_do() -> None:
    found = list(fuzz(QUICK, 21, worlds=(2,)))
    assert [(own.name, own.seed, own.wrong, own.refused) for own in found if own.wrong or own.refused] == []


@pytest.mark.parametrize("name", ["spread", "bias"])
def test_what_is_left_out_is_found(name: str) -> None:
    mutation = MUTATIONS[name]
    assert any(own.wrong for own in fuzz(("masked",), 6, worlds=(2,), mutation=mutation))


def test_what_is_wrong_is_told_by_the_layers_whose_splits_it_needs() -> None:
    mutation = MUTATIONS["spread"]
    wrong = next(own for own in fuzz(("function",), 10, worlds=(2,), mutation=mutation) if own.wrong)
    split = [layer for layer in needed(wrong, mutation).layers if any(parts > 1 for parts in layer.splits.values())]
    assert len(split) == 1


def test_new_values_of_buffers_are_not_recomputed() -> None:
    """All layers are recomputed together, and one reads across ranks what the buffer is computed of."""
    of = subject("stopped")
    plan = make_plan(of.live.model.graph, 2, {"first": {"s": 2}})
    plan = replace(plan, layers=tuple(replace(layer, is_recomputed=True) for layer in plan.layers))
    found = outcome(of, 0, plan)
    assert (found.refused, found.wrong) == ("", ())


@pytest.mark.full
@pytest.mark.parametrize("name", FUZZ_MODELS)
def test_more_random_plans_compute_what_the_module_does(name: str) -> None:
    found = list(fuzz((name,), 60, seed=1000, worlds=(2, 3, 4, 6)))
    assert [(own.seed, own.wrong) for own in found if own.wrong] == []


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in MUTATIONS if name not in ("spread", "bias")])
def test_whatever_is_left_out_is_found(name: str) -> None:
    assert any(own.wrong for own in fuzz(tuple(FUZZ_MODELS), 30, mutation=MUTATIONS[name]))
