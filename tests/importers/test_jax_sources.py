"""What users give of a model in JAX: which of it are parameters, and what is said of all that cannot be imported."""

from pathlib import Path
from typing import Any

import pytest

from pase.errors import ModelError
from pase.importers.frameworks import import_model
from pase.importers.jax.function import JaxFrontEnd

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from tests.importers.jax_zoo import Tree, f32, tokens  # noqa: E402


def dense(params: Tree, x: Any) -> Any:
    return x @ params["w"] + params["b"]


PARAMS = {"w": f32(8, 4), "b": f32(4)}


def roles(source: object) -> dict[str, str]:
    """The role of each array, by its name."""
    trace = JaxFrontEnd().trace(source, batch=None, arguments={})
    return {leaf.value.name: leaf.role for leaf in trace.leaves if leaf.value.shape}


# -- parameters and inputs


def test_the_first_argument_holds_the_parameters() -> None:
    expected = {"w": "parameter", "b": "parameter", "input_0": "input"}
    assert roles((dense, PARAMS, f32(2, 8))) == expected
    assert roles((dense, (PARAMS, f32(2, 8)))) == expected
    assert roles({"function": dense, "parameters": PARAMS, "inputs": (f32(2, 8),)}) == expected


def test_a_function_of_arrays_alone_has_none() -> None:
    assert set(roles((lambda x, y: x @ y, f32(2, 8), f32(8, 4))).values()) == {"input"}


def test_whole_numbers_are_no_parameters() -> None:
    def apply(p: Tree, x: Any) -> Any:
        return x @ p["w"] * p["count"]

    found = roles((apply, {"w": f32(8, 4), "count": tokens(1)}, f32(2, 8)))
    assert found == {"count": "constant", "w": "parameter", "input_0": "input"}


def test_of_the_variables_of_flax_those_of_params_are_trained() -> None:
    def apply(variables: Tree, x: Any) -> Any:
        return x @ variables["params"]["w"] - variables["batch_stats"]["mean"]

    variables = {"params": {"w": f32(8, 4)}, "batch_stats": {"mean": f32(4)}}
    assert roles((apply, variables, f32(2, 8))) == {
        "w": "parameter",
        "batch_stats.mean": "constant",
        "input_0": "input",
    }


def test_arrays_that_a_function_closes_over_are_its_parameters_where_it_has_no_others() -> None:
    weight = jnp.ones((8, 4))
    model = import_model((lambda x: x @ weight, f32(2, 8)))
    assert model.graph.num_parameters == 32
    assert model.traces[0].notes == ("arrays that the function closes over are taken as its parameters: 1",)
    other = import_model((lambda p, x: x @ weight + p["b"], {"b": f32(4)}, f32(2, 8)))
    assert other.graph.num_parameters == 4


def test_numbers_and_flags_among_the_arguments_are_what_they_are() -> None:
    def apply(p: Tree, x: Any, times: int, is_wide: bool) -> Any:
        for _ in range(times):
            x = x @ p["w"]
        return x if is_wide else x[:, :1]

    graph = import_model((apply, {"w": f32(8, 8)}, f32(2, 8), 3, True)).graph
    assert [operator.kind for operator in graph.operators] == ["dense"] * 3


def test_arrays_that_are_one_are_one_weight() -> None:
    weight = jnp.ones((8, 8))
    model = import_model((lambda p, x: x @ p["a"] @ p["b"], {"a": weight, "b": weight}, f32(2, 8)))
    assert model.graph.num_parameters == model.traces[0].num_parameters == 64


def test_variables_of_nnx_that_are_no_param_are_constants() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.dense = nnx.Linear(8, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.norm(self.dense(x))

    model = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    graph = import_model((model, f32(2, 8))).graph
    assert [operator.name for operator in graph.operators] == ["dense", "norm"]
    assert graph.num_parameters == 8 * 4 + 4 + 4 + 4


# -- batch


def test_a_batch_takes_the_place_of_the_leading_dim_of_the_inputs() -> None:
    """Random keys are none."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    for source in ((dense, PARAMS, f32(2, 8)), (lambda p, _, x: dense(p, x), PARAMS, key, f32(2, 8))):
        assert import_model(source, batch=32).graph.operators[0].extents["b"] == 32


# -- what cannot be imported


def test_a_branch_that_no_data_chooses_is_taken() -> None:
    def apply(p: Tree, x: Any) -> Any:
        is_last = jnp.arange(4)[3] > 2
        return jax.lax.cond(is_last, dense, lambda p, x: dense(p, x) @ (p["w"].T @ p["w"]), p, x)

    assert [operator.kind for operator in import_model((apply, PARAMS, f32(2, 8))).graph.operators] == ["dense"]


def chosen(p: Tree, x: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, dense, lambda p, x: -dense(p, x), p, x)


def repeated(p: Tree, x: Any) -> Any:
    return jax.lax.while_loop(lambda y: y.sum() > 0, lambda y: y - 1, dense(p, x))


def called_back(p: Tree, x: Any) -> Any:
    return dense(p, jax.pure_callback(lambda a: a, x, x))


X, AT = f32(2, 8), r"\(test_jax_sources\.py:\d+, in {}\)"


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ((chosen, PARAMS, X), {}, f"operator cond is control flow {AT.format('chosen')}: it chooses between"),
        ((repeated, PARAMS, X), {}, f"operator while is control flow {AT.format('repeated')}: it runs as often"),
        (
            (lambda p, x: dense(p, x) if x.sum() > 0 else x, PARAMS, X),
            {},
            r"TracerBoolConversionError.*\(test_jax_sources\.py:\d+\); .* jnp.where",
        ),
        ((dense, PARAMS, f32(2, 9)), {}, r"cannot trace the function: TypeError: .*\(test_jax_sources\.py:\d+\)$"),
        ((called_back, PARAMS, X), {}, f"operator pure_callback {AT.format('called_back')} runs code"),
        (dense, {}, r"needs its arguments: give \(function, parameters, inputs…\)"),
        ({"function": dense}, {}, "given as a dict has no 'inputs'"),
        ({"function": dense, "weights": PARAMS, "inputs": X}, {}, "given as a dict has an entry 'weights'"),
        ((dense, PARAMS, X), {"arguments": {"layers": 2}}, "takes no argument 'layers': bind it in the function"),
        (
            (lambda p, x, y: dense(p, x).sum() + y, PARAMS, X, f32(3)),
            {"batch": 8},
            "leading dims 2, 3; --batch needs one that all share",
        ),
    ],
)
def test_what_cannot_be_imported_is_told(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        import_model(source, **options)


def test_a_module_of_flax_that_cannot_be_initialised_says_why() -> None:
    linen = pytest.importorskip("flax.linen")
    with pytest.raises(ModelError, match="flax cannot initialise BatchNorm with these inputs: TypeError"):
        import_model((linen.BatchNorm(use_running_average=True), f32(2, 8), 3, 4, 5))


def test_unknown_operators_are_refused_where_that_is_asked_for() -> None:
    source = (lambda p, x: jnp.linalg.cholesky(x @ p["w"]), {"w": f32(3, 3)}, f32(5, 3, 3))
    graph = import_model(source).graph
    assert "opaque" in {operator.kind for operator in graph.operators}
    with pytest.raises(ModelError, match="cholesky"):
        import_model(source, is_strict=True)


def test_a_factory_returns_a_function_and_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jax_networks_of_mine.py").write_text(
        "import jax, jax.numpy as jnp\n\n\n"
        "def net(batch: int = 2, width: int = 8):\n"
        "    weights = {'w': jax.ShapeDtypeStruct((width, 4), jnp.float32)}\n"
        "    return lambda p, x: x @ p['w'], weights, jax.ShapeDtypeStruct((batch, width), jnp.float32)\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    graph = import_model("jax_networks_of_mine:net", batch=16, arguments={"width": "32"}).graph
    assert list(graph.operators[0].extents.values()) == [16, 4, 32]


def test_other_callables_are_not_taken_for_functions_of_jax() -> None:
    front_end = JaxFrontEnd()
    torch = pytest.importorskip("torch")
    assert not front_end.takes((torch.nn.Linear(2, 2), torch.zeros(1, 2)))
    assert not front_end.takes("alexnet")
    assert not front_end.takes(({"w": 1}, 2))
    assert front_end.takes((dense, PARAMS, f32(2, 8)))
