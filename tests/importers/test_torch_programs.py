"""Programs of a torch module compute what torch computes, with the weights that `pase weights` reads."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pase import load  # noqa: E402
from pase.errors import EmitError, ModelError  # noqa: E402
from pase.importers.weights import read_weights  # noqa: E402
from pase.planning.planner import search  # noqa: E402
from pase.targets.programs import emit  # noqa: E402
from tests.importers.programs import run  # noqa: E402
from tests.importers.test_training import Block  # noqa: E402
from tests.importers.torch_zoo import module  # noqa: E402
from tests.runtime.plans import random_plan  # noqa: E402

TOKENS, BATCH, STEPS, WIDTH, HEADS = 48, 2, 16, 32, 4
nn, F = torch.nn, torch.nn.functional
Made = tuple[Any, dict[str, Any]]


class Language(nn.Module):  # type: ignore[misc, name-defined]
    """As nanoGPT has it: positions are looked up by a range of its own, the output's table is that of the input."""

    def __init__(self, positions: int = 2 * STEPS, *, returns_loss: bool = False, weighted: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, WIDTH), nn.Embedding(positions, WIDTH)
        self.block, self.norm = Block(WIDTH, HEADS), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.wte.weight
        self.returns_loss = returns_loss
        self.register_buffer("weight", torch.rand(TOKENS) if weighted else None)

    def forward(self, tokens: Any, targets: Any = None) -> Any:
        positions = torch.arange(0, tokens.shape[1], dtype=torch.long, device=tokens.device)
        scores = self.head(self.norm(self.block(self.wte(tokens) + self.wpe(positions))))
        if not self.returns_loss:
            return scores
        return {"scores": scores, "loss": F.cross_entropy(scores.view(-1, TOKENS), targets.view(-1), self.weight)}


class Computing(nn.Module):  # type: ignore[misc, name-defined]
    """Its layer is multiplied with what it computes of constants, of a weight, and of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rate = nn.Linear(STEPS, WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("table", torch.rand(5, WIDTH))

    def forward(self, x: Any) -> Any:
        angles = torch.outer(torch.arange(x.shape[0], dtype=torch.float32), 1.0 / 100 ** torch.linspace(0, 1, WIDTH))
        scale = torch.exp(self.rate).cumsum(0) + self.table[torch.tensor([3])].squeeze(0)
        return torch.tanh(self.layer(x)) * torch.sin(angles) * scale


def _tokens(seed: int = 0, steps: int = STEPS) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, TOKENS, (BATCH, steps)))


def _language(positions: int) -> Callable[[], Made]:
    return lambda: (Language(positions), {"tokens": _tokens()})


def _t5() -> Made:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": TOKENS, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": HEADS}
    module = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    return module, {"input_ids": _tokens(), "decoder_input_ids": _tokens(1, 6)}


MODELS: dict[str, Callable[[], Made]] = {
    "nanoGPT": _language(2 * STEPS),
    "nanoGPT of all positions": _language(STEPS),
    "computed": lambda: (Computing(), {"x": torch.rand(BATCH, STEPS)}),
}


def _check(made: Made, num_devices: int) -> None:
    """Check that a program of a random strategy returns, first, what the module does."""
    module, inputs = made
    torch.manual_seed(0)
    module.eval()
    source = (module, inputs, {"use_cache": False} if hasattr(module, "config") else {})
    plan = random_plan(load(source), num_devices, 0)
    found = run(plan, read_weights(source), {name: tensor.numpy() for name, tensor in inputs.items()})
    with torch.no_grad():
        expected = module(**inputs)
    expected = expected if isinstance(expected, torch.Tensor) else expected["logits"]
    same = [array for array in found.values() if array.shape == tuple(expected.shape)]
    assert same
    scale = float(expected.abs().max())
    assert min(float(np.abs(array - expected.numpy()).max()) for array in same) < 1e-4 * scale


@pytest.mark.parametrize("made", [*MODELS.values(), pytest.param(_t5, marks=pytest.mark.full)])
def test_whatever_emits_has_its_weights(made: Callable[[], Made]) -> None:
    _check(made(), 2)


def test_positions_looked_up_by_a_range_are_rows_of_their_table() -> None:
    """All of them: the weight lies along the steps, which can be split then. Some: it is read in part."""
    for positions, axes in ((STEPS, ("s", "d")), (2 * STEPS, (None, None))):
        graph = load((Language(positions), _tokens()))
        reads = [a for op in graph.operators for a in op.parameters]
        (read,) = (a for a in reads if a.shape == (positions, WIDTH) and a.tensor.startswith("e"))
        assert read.index_map == axes


def test_what_depends_on_an_input_beside_the_layers_is_no_constant() -> None:
    """A mask that is given: its zeros would have been kept as a weight, and nobody could give it."""

    masked = module(lambda self, x, mask: self.layer(x) * (mask > 0).float()[:, None], layer=nn.Linear(STEPS, WIDTH))
    source = (masked, (torch.rand(BATCH, STEPS), torch.ones(BATCH, dtype=torch.long)))
    with pytest.raises(EmitError, match=r"layer 'layer' .* depends on an input of the model that no layer reads"):
        emit(search(load(source), devices=1))
    assert set(read_weights(source)) == {"layer/w", "layer/bias"}


def test_a_loss_that_cannot_be_computed_is_named() -> None:
    tokens = _tokens()
    plan = search(load((Language(returns_loss=True, weighted=True), (tokens, tokens))), devices=2)
    with pytest.raises(EmitError, match=r"layer 'cross_entropy_loss:3' .* depends on an input of the model that no"):
        emit(plan)
    # Without weights of classes it is computed, and the scores are returned beside it.
    source = emit(search(load((Language(returns_loss=True), (tokens, tokens))), devices=2))
    assert 'outputs: Outputs = {"linear_4": (head, (2, 16, 48))}' in source


def test_weights_of_a_jax_function_are_refused_in_a_line() -> None:
    jax = pytest.importorskip("jax")
    shapes = {f"w{i}": jax.ShapeDtypeStruct((64, 64), "float32") for i in range(200)}
    with pytest.raises(ModelError, match=r"weights are read of .* a JAX function, whose arguments hold them") as caught:
        read_weights((lambda p, x: x @ p["w0"], shapes, jax.ShapeDtypeStruct((8, 64), "float32")))
    assert len(str(caught.value)) < 300
