"""What `pase.parallelize` takes and gives of JAX: functions, modules, models; what it refuses; what is told."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pase
from pase import PaseError
from pase.importers.frameworks import imported
from pase.planning.plan import Plan
from pase.targets.named_mesh import named_mesh
from tests.runtime.plans import random_plan

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from pase.importers.jax.function import source_of, traced  # noqa: E402
from pase.targets.jax.constraints import Constraints, constraints_of  # noqa: E402
from tests.importers import jax_zoo as zoo  # noqa: E402
from tests.targets.jax.models import numbers  # noqa: E402


def loss(weights: Any, x: Any) -> Any:
    return jnp.tanh(x @ weights["w"]).sum()


WEIGHTS, X = {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)}, np.ones((2, 4), np.float32)


@pytest.fixture(name="plan", scope="module")
def _plan() -> Plan:
    return pase.search((loss, WEIGHTS, X), devices=1)


def test_a_function_is_called_and_differentiated_as_before(plan: Plan) -> None:
    parallel = pase.parallelize(loss, plan)
    assert parallel.__name__ == "loss"
    assert repr(parallel) == "<loss on 1 devices>"
    assert parallel(WEIGHTS, X) == parallel(WEIGHTS, x=X) == jax.jit(parallel)(WEIGHTS, X)
    ours, theirs = (jax.value_and_grad(function)(WEIGHTS, X) for function in (parallel, loss))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1]["w"], theirs[1]["w"], rtol=1e-6)
    assert parallel.notes == ()


def test_how_arguments_lie_is_known_from_their_shapes(plan: Plan) -> None:
    parallel = pase.parallelize((loss, jax.eval_shape(lambda: WEIGHTS), zoo.f32(2, 4)), plan)
    weights, x = jax.device_put((WEIGHTS, X), parallel.shardings)
    assert weights["w"].sharding.mesh == parallel.mesh == x.sharding.mesh
    assert parallel(weights, x) == pase.parallelize((loss, (WEIGHTS, X)), plan)(WEIGHTS, X)
    with pytest.raises(PaseError, match=r"shardings of the arguments are known after tracing: call the function first"):
        _ = pase.parallelize(loss, plan).shardings


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda f: f({"w": np.ones((4, 5), np.float32)}, X),
            r"plan is of another function.* dims b=2, n=5, c=4; expected",
        ),
        (lambda f: f(WEIGHTS, np.ones((3, 4), np.float32)), r"of other arguments: layer .* b=3, .* expected b=2"),
        (lambda f: f(WEIGHTS), "loss"),
        (lambda f: f(WEIGHTS, y=X), r"loss cannot be called so: missing a required argument: 'x'"),
    ],
)
def test_arguments_that_are_not_the_plans_are_refused(plan: Plan, call: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(PaseError, match=text):
        call(pase.parallelize(loss, plan))


def test_another_function_and_other_devices_are_refused(plan: Plan) -> None:
    def other(weights: Any, x: Any) -> Any:
        return jnp.sin(x @ weights["w"]).sum()

    with pytest.raises(PaseError, match=r"of another function.* computes 'sin' where the plan has 'tanh'"):
        pase.parallelize((other, WEIGHTS, X), plan)
    found = len(jax.devices())
    wide = pase.search((loss, WEIGHTS, X), devices=2 * found)
    with pytest.raises(PaseError, match=rf"plan is for {2 * found} devices, and there are {found}; .*device_count="):
        pase.parallelize(loss, wide)
    with pytest.raises(PaseError, match=r"plan is for 1 devices, and there are 2; give as many .*\[:1\]"):
        pase.parallelize(loss, plan, devices=[*jax.devices()[:1], *jax.devices()[:1]])
    with pytest.raises(PaseError, match=r"a str cannot be made parallel; give .* torch.nn.Module, or a JAX function"):
        pase.parallelize("alexnet", plan)


def test_a_plan_is_of_a_function_in_float32_and_float64() -> None:
    """Numbers in the program's text are rounded to that type, too."""

    def by(factor: float) -> Callable[..., Any]:
        def scaled(weights: Any, x: Any) -> Any:
            return jnp.tanh(x @ weights["w"] * factor + 0.1).sum()

        return scaled

    scaled = by(0.3)
    plan = pase.search((scaled, WEIGHTS, X), devices=1)
    parallel = pase.parallelize(scaled, plan)
    assert parallel(WEIGHTS, X).dtype == jnp.float32
    with jax.enable_x64(True):
        double = [jax.tree.map(np.float64, tree) for tree in (WEIGHTS, X)]
        assert parallel(*double).dtype == jnp.float64
        np.testing.assert_allclose(parallel(*double), scaled(*double), rtol=1e-14)
    with pytest.raises(PaseError, match=r"of another function.* computes 'multiply'"):
        pase.parallelize((by(0.31), WEIGHTS, X), plan)


# -- modules and models


def test_a_module_of_flax_is_called_with_its_variables() -> None:
    module, ids = zoo.flax_transformer(layers=1), np.arange(16).reshape(2, 8)
    variables = numbers(jax.eval_shape(module.init, jax.random.key(0), ids))
    plan = pase.search((module, variables, ids), devices=1)
    for function in (module, module.apply, (module, ids)):
        parallel = pase.parallelize(function, plan)
        np.testing.assert_allclose(parallel(variables, ids), module.apply(variables, ids), atol=1e-5)
        assert jax.tree.structure(parallel.shardings[0]) == jax.tree.structure(variables)
    with pytest.raises(PaseError, match=r"called with its variables first, \{'params'"):
        pase.parallelize(module, plan)(ids)


def test_a_module_of_nnx_is_called_with_itself() -> None:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.first = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
            self.last = nnx.Linear(16, 4, rngs=nnx.Rngs(1))

        def __call__(self, x: Any) -> Any:
            return self.last(nnx.relu(self.first(x)))

    net, x = Net(), np.ones((6, 8), np.float32)
    parallel = pase.parallelize(net, pase.search((net, x), devices=1))

    def squared(function: Callable[..., Any]) -> Any:
        return nnx.jit(nnx.value_and_grad(lambda net, x: (function(net, x) ** 2).mean()))(net, x)

    ours, theirs = squared(parallel), squared(lambda net, x: net(x))
    for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_model_of_equinox_is_called_with_itself() -> None:
    import equinox as eqx

    class Batched(eqx.Module):  # type: ignore[misc]
        net: Any

        def __call__(self, x: Any) -> Any:
            return jax.vmap(self.net)(x)

    model, x = Batched(eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))), np.ones((6, 8), np.float32)
    parallel = pase.parallelize((model, x), pase.search((model, x), devices=1))
    np.testing.assert_allclose(parallel(model, x), model(x), rtol=1e-6)
    arrays, _ = eqx.partition(model, eqx.is_array)
    assert jax.tree.structure(jax.device_put(arrays, parallel.shardings[0])) == jax.tree.structure(arrays)

    def squared(model: Any, x: Any) -> Any:
        return (model(x) ** 2).mean()

    trained = pase.parallelize(squared, pase.search((squared, model, x), devices=1))
    ours, theirs = (eqx.filter_jit(eqx.filter_value_and_grad(function))(model, x) for function in (trained, squared))
    for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    with pytest.raises(PaseError, match=r"the model comes first, a Batched, then its inputs"):
        parallel(x)


# -- which values are told how they lie


def constraints(*source: Any) -> tuple[Constraints, Any, Plan]:
    """Return the constraints of a random plan for 8 devices."""
    found = traced(source_of(jax, source))
    model = imported(found.trace, arguments={})
    plan = random_plan(model.graph, 8, seed=3)
    return constraints_of(found, model, model.graph, named_mesh(plan)), found, plan


def with_loss(apply: Callable[..., Any]) -> Callable[..., Any]:
    def trained(weights: Any, ids: Any, labels: Any) -> Any:
        scores = jax.nn.log_softmax(apply(weights, ids))
        return -jnp.take_along_axis(scores, labels[..., None], -1).mean()

    return trained


@pytest.mark.parametrize("name", ["gpt2", "llama", "flax_resnet", "flax_transformer", "equinox_attention"])
def test_what_every_layer_writes_is_told(name: str) -> None:
    ids = zoo.tokens(8, 16)
    if name in ("gpt2", "llama"):
        apply, weights = getattr(zoo, name)()
        found, _, plan = constraints(with_loss(apply), weights, ids, ids)
    elif name == "equinox_attention":
        found, _, plan = constraints(*zoo.equinox_attention())
    else:
        found, _, plan = constraints(getattr(zoo, name)(), zoo.f32(8, 32, 32, 3) if name == "flax_resnet" else ids)
    assert found.missing == ()
    assert len(found.writes) >= len(plan.graph.operators)


def test_a_weight_that_is_read_in_pieces_and_a_stack_of_weights_lie_whole_where_they_are_cut() -> None:
    apply, weights = zoo.gpt2(layers=1)
    found, *_ = constraints(with_loss(apply), weights, zoo.tokens(8, 16), zoo.tokens(8, 16))
    assert found.given["wpe"] == ((), ())  # the first positions of a longer table
    apply, weights = zoo.llama()
    found, *_ = constraints(with_loss(apply), weights, zoo.tokens(8, 16), zoo.tokens(8, 16))
    stacked = {name: spec for name, spec in found.given.items() if name.startswith("layers.")}
    assert len(stacked) == 9
    assert all(spec[0] == () for spec in stacked.values())
    assert any(any(spec) for spec in stacked.values())


def test_views_of_a_tensor_lie_as_its_parts_do() -> None:
    from pase.importers.ir.views import View
    from pase.targets.jax.constraints import inverse, spec_reshaped, spec_through

    sizes = {"a": 2, "b": 2, "c": 4}
    heads = View.plain((8, 16, 32)).reshaped((8, 16, 4, 8))
    assert heads is not None
    turned = heads.transposed((0, 2, 1, 3))
    assert spec_through((("a",), (), ("c",)), turned, sizes) == (("a",), ("c",), (), ())
    # 8 parts of 32 points: 4 heads, in halves.
    assert spec_through(((), (), ("c", "a")), turned, sizes) == ((), ("c",), (), ("a",))
    # Parts of heads · features are contiguous where all heads are apart.
    back = inverse(turned)
    assert back is not None
    assert spec_through(((), ("c",), ("b",), ("a",)), back, sizes) == ((), ("b",), ("c", "a"))
    assert spec_through(((), (), (), ("a",)), back, sizes) == ((), (), None)
    assert spec_reshaped((("a", "b"), ()), (4, 6), (2, 2, 6), sizes) == (("a",), ("b",), ())
    # One axis over two dims says nothing of either.
    assert spec_reshaped((("c",), ()), (4, 6), (2, 2, 6), sizes) == (None, None, ())
    assert spec_reshaped(((), None), (4, 6), (6, 4), sizes) is None
    assert spec_reshaped(((), ()), (4, 6), (6, 4), sizes) == ((), ())
