"""PyTorch modules: parameters and FLOP as PyTorch counts them, vertices as the published counts have them."""

import warnings
from time import process_time
from typing import Any

import pytest

from pase import load
from pase.importers.frameworks import ImportedModel, import_model, imported
from pase.importers.ir import ops
from pase.importers.ir.trace import Names
from pase.importers.torch.export import TorchFrontEnd, trace_module
from pase.importers.torch.tensors import _ctc_loss, ctc_operator
from tests.importers.torch_zoo import OWN, resnet, transformers_model
from tests.importers.torch_zoo import module as module_of

torch = pytest.importorskip("torch")


def _inputs(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), dict(given)) if isinstance(given, dict) else (tuple(given), {})


def _imported(module: Any, given: Any) -> ImportedModel:
    positional, keywords = _inputs(given)
    return imported(trace_module(module, positional, keywords), arguments={})


def _counted_flop(module: Any, given: Any) -> int:
    """Run a module on tensors without values under PyTorch's own counter."""
    from torch.utils.flop_counter import FlopCounterMode

    positional, keywords = _inputs(given)
    module = module.to("meta").eval()
    with warnings.catch_warnings(), FlopCounterMode(display=False) as counter, torch.no_grad():
        warnings.simplefilter("ignore")
        module(*(x.to("meta") for x in positional), **{name: x.to("meta") for name, x in keywords.items()})
    return int(counter.get_total_flops())


def _num_parameters(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# Of products that its counter leaves out: three tensors at once (nn.Bilinear).
_UNCOUNTED = {"products": 2 * 2 * 7 * 8 * 8 * 8 + 2 * 2 * 7 * 8 * 8}
# The rows of another weight are a parameter of their own to PyTorch.
_COUNTED_TWICE = {"tied": 20 * 16}


@pytest.mark.parametrize("name", OWN)
def test_parameters_and_flop_are_what_the_framework_counts(name: str) -> None:
    with TorchFrontEnd().without_weights():
        module, given = OWN[name]()
    model = _imported(module, given)
    assert model.traces[0].num_parameters == _num_parameters(module) - _COUNTED_TWICE.get(name, 0)
    assert model.graph.num_parameters == model.traces[0].num_parameters
    assert model.graph.forward_flop(contractions_only=True) == _counted_flop(module, given) + _UNCOUNTED.get(name, 0)


@pytest.mark.full
def test_resnet_101_has_the_published_vertices() -> None:
    with TorchFrontEnd().without_weights():
        module, given = resnet()
    model = _imported(module, given)
    assert model.num_operators["source"] == 345
    assert model.num_operators["vertices"] == 244
    assert model.graph.num_parameters == 44_549_160


def test_alexnet_has_the_published_vertices() -> None:
    with TorchFrontEnd().without_weights():
        model = _imported(*OWN["alexnet"]())
    assert model.num_operators["source"] == 22
    assert model.num_operators["vertices"] == pytest.approx(12, rel=0.15)


@pytest.mark.parametrize("kind", ["bloom", pytest.param("gpt2", marks=pytest.mark.full), "mamba"])
def test_models_of_transformers_import_whole(kind: str) -> None:
    """Others are imported in test_batch, with their losses."""
    pytest.importorskip("transformers")
    module, given = transformers_model(kind, **({"steps": 4} if kind == "mamba" else {}))
    model = _imported(module, given)
    assert model.traces[0].num_parameters == _num_parameters(module)
    assert not list(model.generic)
    # Outside tracing GPT-2 looks at the values of masks.
    if kind != "gpt2":
        assert model.graph.forward_flop(contractions_only=True) == _counted_flop(module, given)


def test_experts_are_a_dim_of_their_products() -> None:
    pytest.importorskip("transformers")
    module, given = transformers_model("mixtral")
    model = _imported(module, given)
    assert model.traces[0].num_parameters == _num_parameters(module)
    # Nothing more can be said of the choice of experts.
    assert {operator for _, operator in model.generic} == {"aten.topk.default"}
    up = [op for op in model.graph.operators if any(access.shape == (4, 128, 32) for access in op.reads)]
    assert len(up) == 2
    # Two of four experts for each of 16 tokens: 8 rows of 32 for each, which meet its matrix of [32, 128].
    assert all(sorted(op.extents.values()) == [4, 8, 32, 128] for op in up)


def test_a_module_is_left_as_it_was() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.BatchNorm1d(4))
    module[2].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    load((module, torch.ones(3, 4)))
    assert [part.training for part in module.modules()] == [True, True, True, False]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not module._forward_hooks


@pytest.mark.parametrize("weights", ["cpu", "meta"])
@pytest.mark.parametrize("inputs", ["cpu", "meta"])
def test_weights_and_inputs_may_lie_apart(weights: str, inputs: str) -> None:
    with torch.device(weights):
        parts = {"layer": torch.nn.Linear(4, 5), "shift": torch.ones(5)}
    module = module_of(lambda self, x: self.layer(x) + self.shift + torch.arange(5), **parts)
    graph = load((module, torch.zeros(2, 4, device=inputs)))
    assert graph.num_parameters == 25
    assert module.layer.weight.device.type == module.shift.device.type == weights


def test_a_module_without_weights_takes_no_memory() -> None:
    with TorchFrontEnd().without_weights():
        # A schedule whose values a constructor asks for, beside weights of 64 GiB.
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        module = torch.nn.Sequential(torch.nn.Linear(1 << 17, 1 << 17), torch.nn.Dropout(rates[1]))
        given = torch.zeros(1, 1 << 17)
    assert rates == [0, 0.25, 0.5]
    assert load((module, given)).num_parameters == (1 << 34) + (1 << 17)


def test_inputs_by_name_and_results_of_any_make() -> None:
    class Both(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, *, scale: Any, mask: Any = None) -> Any:
            return {"first": [x * scale], "cache": object(), "none": mask, "second": (x + scale, 3)}

    x = torch.zeros(4, 3)
    by_name = trace_module(Both(), (), {"x": x, "scale": x})
    assert len(by_name.outputs) == 2
    assert TorchFrontEnd().trace((Both(), (x,), {"scale": x}), batch=None, arguments={}).outputs == by_name.outputs
    assert TorchFrontEnd().trace((Both(), {"x": x, "scale": x}), batch=9, arguments={}).leaves[0].value.shape == (9, 3)


def test_caches_are_no_results() -> None:
    pytest.importorskip("transformers")
    module, given = transformers_model("gpt2", n_layer=1, use_cache=True)
    assert len(trace_module(module, (), given).outputs) == 1


def test_complex_numbers_are_not_left_out() -> None:
    parts = {name: torch.nn.Linear(8, 8) for name in ("before", "after")}
    mixing = module_of(lambda self, x: self.after(torch.fft.fft(self.before(x)).real), **parts)
    model = _imported(mixing, (torch.zeros(2, 8),))
    assert [operator for _, operator in model.generic] == ["aten.fft_fft.default"]
    assert model.graph.num_parameters == 2 * 72
    assert len(model.graph.edges) >= 2


def test_control_flow_on_what_the_module_makes_itself_is_followed() -> None:
    def masked(self: Any, x: Any) -> Any:
        mask = torch.ones(x.shape[:2], device=x.device)
        mask[:, 0] = 0
        chosen = self.layer if (mask > 0).any().item() else self.other
        if torch.zeros_like(x).sum() > 0:
            return self.other(x)
        return chosen(x) * mask[:, :, None]

    module = module_of(masked, layer=torch.nn.Linear(4, 4), other=torch.nn.Linear(4, 8))
    graph = load((module, torch.zeros(2, 3, 4)))
    assert graph.num_parameters == 20


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_ctc_loss_is_computed_as_pytorch_does(reduction: str) -> None:
    """Texts of several lengths, one of them too long for its steps: its loss is infinite, or left out."""
    torch.manual_seed(0)
    given = (
        torch.randn(6, 3, 5).log_softmax(-1),
        torch.tensor([[1, 2, 2], [3, 0, 0], [4, 4, 4]]),
        torch.tensor([6, 5, 3]),
        torch.tensor([3, 0, 3]),
    )
    ctc_operator(torch)
    for is_zero in (False, True):
        options = {"reduction": reduction, "zero_infinity": is_zero}
        found = _ctc_loss(torch, *given, **options)
        assert torch.equal(found, torch.nn.functional.ctc_loss(*given, **options))


def test_weights_that_are_not_used_are_told() -> None:
    """A tied weight takes part by any of its names."""
    linear = torch.nn.Linear(4, 4)
    linear.spare = torch.nn.Parameter(torch.zeros(3))
    trace = trace_module(linear, (torch.zeros(2, 4),), {})
    assert trace.num_parameters == 23
    assert "1 weight takes no part in what the module returns: spare" in trace.notes
    parts = {"emb": torch.nn.Embedding(16, 4), "out": torch.nn.Linear(4, 16, bias=False)}
    parts |= {"spare": torch.nn.Linear(4, 4), "other": torch.nn.Linear(4, 4, bias=False)}
    parts["out"].weight, parts["other"].weight = parts["emb"].weight, parts["spare"].weight
    module, tokens = module_of(lambda self, x: self.out(self.emb(x)), **parts), torch.zeros(2, 3, dtype=torch.long)
    found = "2 weights take no part in what the module returns: spare.weight, spare.bias"
    assert trace_module(module, (tokens,), {}).notes == (found,)
    del module.spare, module.other
    assert trace_module(module, (tokens,), {}).notes == ()


def test_a_wrapped_module_is_the_one_within() -> None:
    module = torch.nn.Linear(4, 4)
    names = [leaf.value.name for leaf in trace_module(torch.nn.DataParallel(module), (torch.zeros(2, 4),), {}).leaves]
    assert names == ["weight", "bias", "input"]


def test_the_source_is_told() -> None:
    class Layer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 4)})

        def forward(self, x: Any) -> Any:
            return self.inner["first"](x)

    (node,) = trace_module(Layer(), (torch.zeros(2, 4),), {}).nodes
    assert node.origin.operator == "aten.linear.default"
    assert node.origin.scope == "inner.first"
    assert node.origin.line.startswith("test_torch.py:")


def test_the_precision_of_weights_is_noted() -> None:
    trace = trace_module(torch.nn.Linear(4, 4, dtype=torch.bfloat16), (torch.zeros(2, 4, dtype=torch.bfloat16),), {})
    assert any("weights are bfloat16" in note for note in trace.notes)


def test_regions_are_in_line() -> None:
    from torch.utils.checkpoint import checkpoint

    def regions(self: Any, x: Any) -> Any:
        x = checkpoint(self.layer, x, use_reentrant=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layer(x)
        with torch.no_grad():
            return self.layer(x.float())

    trace = trace_module(module_of(regions, layer=torch.nn.Linear(4, 4)), (torch.zeros(2, 4),), {})
    assert sum(node.origin.operator == "aten.linear.default" for node in trace.nodes) == 3
    assert not any(isinstance(node.op, ops.Generic) for node in trace.nodes)


def test_a_factory_makes_a_module_without_weights(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pase_test_networks.py").write_text(
        "import torch\n\ndef net(batch=2, width=4):\n    module = torch.nn.Linear(width, width)\n"
        "    assert module.weight.is_meta\n    return module, torch.zeros(batch, width)\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    model = import_model("pase_test_networks:net", batch=6, arguments={"width": 1 << 16})
    assert model.graph.num_parameters == (1 << 32) + (1 << 16)
    assert model.traces[0].leaves[-1].value.shape == (6, 1 << 16)


def test_assertions_need_no_second_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.export` puts an assertion before each cast; a second trace takes as long as the first."""

    def again(*_: object) -> None:
        raise AssertionError("the program is traced again")

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", again)
    cast = module_of(lambda self, x: torch.relu(self.fc(x).to(torch.float32)), fc=torch.nn.Linear(8, 4))
    graph = import_model((cast, (torch.zeros(2, 8),))).graph
    assert [operator.kind for operator in graph.operators] == ["dense"]


def test_names_that_are_wished_for_often_take_no_longer_each() -> None:
    names, start_s = Names(), process_time()
    found = [names.new("step") for _ in range(30_000)]
    assert len(set(found)) == 30_000
    assert found[-1] == "step_30000"
    assert process_time() - start_s < 2
