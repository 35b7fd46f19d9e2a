"""What of a module stands behind the names of its graph, so that it can be run under a plan."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pase.errors import ModelError  # noqa: E402
from pase.graph import Graph  # noqa: E402
from pase.graph.operators import with_fan_outs  # noqa: E402
from pase.importers import load  # noqa: E402
from pase.importers.frameworks import difference  # noqa: E402
from pase.importers.torch.live import LiveModel, trace_live  # noqa: E402
from tests.importers.torch_zoo import module as module_of  # noqa: E402

F = torch.nn.functional
VOCABULARY, STEPS, WIDTH = 12, 6, 8


class Language(torch.nn.Module):  # type: ignore[misc]
    """Predicts the next token; labels are moved one place on within it, and a mask is made of where tokens are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("places", torch.arange(STEPS * WIDTH, dtype=torch.float32).reshape(STEPS, WIDTH))

    def forward(self, tokens: Any, labels: Any = None, *, scale: float = 1.0) -> dict[str, Any]:
        logits = self.head(self.table(tokens) + scale * self.places)
        if labels is None:
            return {"logits": logits}
        moved = F.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), moved.reshape(-1))
        return {"loss": loss, "logits": logits, "tokens": tokens, "moved": moved}


def language() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    tokens = torch.randint(1, VOCABULARY, (4, STEPS))
    return Language(), {"tokens": tokens, "labels": tokens.clone()}


@cache
def traced() -> tuple[Any, dict[str, Any], LiveModel]:
    """For tests that leave the module as it is."""
    module, inputs = language()
    return module, inputs, trace_live((module, inputs))


def state_of(module: Any) -> dict[str, Any]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def values(live: LiveModel, module: Any, given: Mapping[str, Any], names: Any) -> dict[str, Any]:
    return live.part(names)(given, state_of(module))


def test_what_a_model_computes_of_its_inputs_is_had_of_these() -> None:
    module, inputs, live = traced()
    given = live.call.bound((), inputs)
    assert given == inputs
    by_name = {item.name: item for item in live.inputs.values()}
    assert by_name["tokens"].is_given
    assert by_name["tokens"].inputs == ("tokens",)
    (other,) = (item for name, item in by_name.items() if name != "tokens")
    assert not other.is_given
    assert other.inputs == ("labels",)
    found = values(live, module, given, [other.use.value])[other.use.value]
    expected = torch.cat([inputs["labels"][:, 1:], torch.full((4, 1), -100)], dim=1)
    assert torch.equal(found.reshape(expected.shape), expected)


def test_weights_that_are_tied_are_one_parameter() -> None:
    _, _, live = traced()
    names = {weight.parameter for weight in live.weights.values()}
    assert names == {"table.weight"}
    assert len(live.weights) == 2
    assert live.unread == ()


def test_constants_are_buffers_and_what_is_computed_of_them() -> None:
    module, inputs = language()
    live = trace_live((module, inputs))
    # Beside it there is what the loss counts, which depends on the labels.
    (constant,) = (constant for constant in live.constants.values() if not constant.inputs)
    assert (constant.inputs, constant.parameters, constant.is_random) == ((), (), False)
    found = values(live, module, {}, [constant.use.value])[constant.use.value]
    assert torch.equal(found.reshape(STEPS, WIDTH), module.places)
    module.places.fill_(3.0)
    assert values(live, module, {}, [constant.use.value])[constant.use.value].eq(3).all(), "of the module as it is now"


class Places(torch.nn.Module):  # type: ignore[misc]
    """Adds to what it computes tensors of the shape of that: written into, filled, given the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        made = torch.empty_like(x)
        made[:] = torch.arange(WIDTH)
        places = (made, torch.full_like(x, 2.0), torch.full_like(x, fill_value=3.0), x.new_full((WIDTH,), 4.0))
        return x * sum(places, torch.zeros_like(x) + torch.ones_like(x) + x.new_zeros(WIDTH) + x.new_ones(WIDTH))


def test_what_is_made_in_the_shape_of_another_value_needs_no_value() -> None:
    torch.manual_seed(0)
    module, inputs = Places(), {"x": torch.randn(4, WIDTH)}
    live = trace_live((module, inputs))
    uses = {constant.use.value for constant in live.constants.values()}
    assert uses
    assert all((c.inputs, c.parameters) == ((), ()) for c in live.constants.values())
    assert {i.name for i in live.inputs.values()} == {"x"}
    y = module.first(inputs["x"])
    found = sum(values(live, module, {}, uses).values())
    assert torch.equal((y * found).broadcast_to(y.shape), module(**inputs))


def test_what_a_module_returns_is_had_in_its_structure() -> None:
    module, inputs, live = traced()
    expected = module(**inputs)
    tensors = []
    for output in live.outputs:
        assert not output.problem
        if output.layer:
            assert output.output is not None
            tensors.append(torch.zeros(output.shape))
        else:
            tensors.append(values(live, module, inputs, [output.name])[output.name])
    found = live.returned(tensors)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape
    assert torch.equal(found["tokens"], inputs["tokens"])
    assert torch.equal(found["moved"], expected["moved"])
    assert [output.layer != "" for output in live.outputs] == [True, True, False, False]


Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    """What a module returns."""

    y: Any
    rest: Any = None


@pytest.mark.parametrize(
    "make",
    [
        lambda a, _: a,
        lambda a, b: (a, [b, a], None),
        lambda a, b: {"a": a, "more": {"b": b, "n": 3}},
        lambda a, b: OrderedDict(b=b, a=a),
        lambda a, b: Pair(a, b),
        lambda a, b: Record(y=a, rest=(b, "text")),
    ],
)
def test_structures(make: Callable[[Any, Any], Any]) -> None:
    def forward(self: Any, x: Any) -> Any:
        a = self.one(x)
        return make(a, self.two(a))

    net = module_of(forward, one=torch.nn.Linear(3, 4), two=torch.nn.Linear(4, 5))
    live = trace_live((net, torch.zeros(2, 3)))
    a, b = torch.zeros(2, 4), torch.ones(2, 5)
    expected = make(a, b)
    found = live.returned([a if output.shape == (2, 4) else b for output in live.outputs])
    assert type(found) is type(expected)
    assert str(found) == str(expected)


def test_statistics_of_a_batch_are_those_of_the_module_that_has_them() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
    live = trace_live((net, torch.zeros(2, 3, 8, 8)))
    (layer,) = live.statistics
    assert live.statistics[layer] == "1"
    buffers = {constant.buffer for (own, _), constant in live.constants.items() if own == layer}
    assert buffers == {"1.running_mean", "1.running_var"}


def test_a_module_on_the_device_meta_is_traced() -> None:
    with torch.device("meta"):
        module = torch.nn.Linear(3, 4)
    live = trace_live((module, torch.zeros(2, 3, device="meta")))
    assert {weight.parameter for weight in live.weights.values()} == {"weight", "bias"}
    assert module.weight.is_meta


# -- calls


def test_inputs_may_be_given_by_position_and_by_name() -> None:
    _, inputs, live = traced()
    tokens, labels = inputs["tokens"], inputs["labels"]
    for args, kwargs in (
        ((tokens, labels), {}),
        ((tokens,), {"labels": labels}),
        ((), {"labels": labels, "tokens": tokens}),
        ((tokens, labels), {"scale": 1.0}),
    ):
        found = live.call.bound(args, kwargs)
        assert found["tokens"] is tokens
        assert found["labels"] is labels


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "input 'labels' is a NoneType; the plan is for a tensor of shape"),
        ({"tokens": torch.zeros(3, STEPS, dtype=torch.long)}, r"input 'tokens' is of shape \[3, 6\].*\[4, 6\]: pad"),
        ({"scale": 2.0}, "input 'scale' is given, which the module was not traced with"),
        ({"mask": torch.zeros(2)}, "unexpected keyword argument 'mask'"),
    ],
)
def test_another_call_is_refused(change: Mapping[str, Any], message: str) -> None:
    _, inputs, live = traced()
    with pytest.raises(ModelError, match=message):
        live.call.bound((), {**inputs, **change})
    with pytest.raises(ModelError, match="missing"):
        live.call.bound((), {"tokens": inputs["tokens"]})


def test_a_value_that_was_given_to_the_trace_stays_what_it_is() -> None:
    module, inputs = language()
    live = trace_live((module, {**inputs, "scale": 0.5}))
    live.call.bound((), {**inputs, "scale": 0.5})
    with pytest.raises(ModelError, match=r"input 'scale' is 2.0; the module was traced with 0.5"):
        live.call.bound((), {**inputs, "scale": 2.0})


# -- whether a plan is of a model


def test_a_graph_that_was_traced_again_is_the_same() -> None:
    """So it is in other numbers, with fan-outs, under another name."""
    module, inputs = language()
    graph, found = load((module, inputs)), traced()[2].model.graph
    assert found == graph
    renamed = replace(graph, name="other", arguments=(("batch", 4),))
    double = trace_live((module.double(), inputs)).model.graph
    for one, other in ((graph, found), (with_fan_outs(graph), found), (graph, renamed), (graph, double)):
        assert difference(one, other) == ""


def _mlp(*widths: int, activation: str = "ReLU") -> Graph:
    layers: list[Any] = []
    for wide, narrow in pairwise(widths):
        layers += [torch.nn.Linear(wide, narrow), getattr(torch.nn, activation)()]
    return load((torch.nn.Sequential(*layers), torch.zeros(4, widths[0])))


@pytest.mark.parametrize(
    ("widths", "activation", "message"),
    [
        ((8, 16, 4), "ReLU", ""),
        ((8, 12, 4), "ReLU", "layer '0' has dims b=4, n=12, c=8; expected b=4, n=16, c=8"),
        ((8, 16, 4, 4), "ReLU", "the plan has 2 layers, the model 3; layer '4' of the model is not in the plan"),
        ((8, 16), "ReLU", "the plan has 2 layers, the model 1; layer '2' of the plan is not in the model"),
        ((8, 16, 4), "Tanh", "layer '0' computes 'tanh' where the plan has 'relu'"),
    ],
)
def test_a_difference_is_told_by_its_layer(widths: tuple[int, ...], activation: str, message: str) -> None:
    found = difference(_mlp(8, 16, 4), _mlp(*widths, activation=activation))
    assert found.startswith(message)
    assert bool(found) == bool(message)


def _computed(function: Callable[[Any], Any], dtype: Any = torch.float32) -> Graph:
    """A layer, and a function of what it gives."""
    parts = {"layer": torch.nn.Linear(4, 8), "norm": torch.nn.RMSNorm(8)}
    net = module_of(lambda self, x: function(self.norm(self.layer(x))), **parts)
    return load((net.to(dtype), torch.zeros(4, 4, dtype=dtype)))


@pytest.mark.parametrize(
    ("expected", "found", "message"),
    [
        # What a normalisation adds where it is not told is of the type of its numbers.
        ((torch.relu,), (torch.relu, torch.float64), "'add' of 2.22045e-16 where the plan has 1.19209e-07"),
        ((lambda x: x * 3,), (lambda x: x * 2,), "'multiply' of 2 where the plan has 3"),
        (
            (lambda x: F.dropout(x, 0.5),),
            (lambda x: F.dropout(x, 0.25),),
            "'dropout' with rate 0.25 where the plan has 0.5",
        ),
    ],
)
def test_what_differs_of_a_step_is_told(expected: tuple[Any, ...], found: tuple[Any, ...], message: str) -> None:
    assert difference(_computed(*expected), _computed(*found)).endswith(f"computes {message}")


def test_weights_that_are_shared_otherwise_are_a_difference() -> None:
    module, inputs = language()
    apart = Language()
    apart.head.weight = torch.nn.Parameter(apart.head.weight.detach().clone())
    assert "shared as 'table.weight'" in difference(load((module, inputs)), load((apart, inputs)))
