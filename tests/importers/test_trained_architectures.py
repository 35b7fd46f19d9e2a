"""Architectures of transformers, unmodified: which have a program that trains them, and what it computes."""

import os
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pase.errors import PaseError  # noqa: E402
from pase.targets.programs import emit  # noqa: E402
from tests.importers.architectures import ARCHITECTURES, CLASSES, TOKENS  # noqa: E402
from tests.importers.test_training import (  # noqa: E402
    RATE,
    SAME_AS_PYTORCH,
    STEPS,
    Source,
    arrays,
    double,
    graph_of,
    numbers,
    trained,
    whole,
)
from tests.runtime.plans import random_plan  # noqa: E402

REFUSED = {
    "bloom": "'GeLUFunction' .* has a backward pass of its own",
    "mixtral": "what it does in training alone is not known",
    "swin": "random_tensor = .* is computed in training",
    "segformer": "random_tensor = .* is computed in training",
    "wav2vec2": "mask_time_indices = .* is computed in training",
}
"""What their programs lack."""

OF_INPUTS = (
    "bart", "falcon", "gemma", "gpt2", "gpt_neo", "gpt_neox", "gptj", "llama", "marian", "mistral", "olmo", "opt",
    "phi", "qwen2", "roberta", "t5", "whisper",
)  # fmt: skip
"""Models that compute what their first layers or their loss reads of their inputs: labels one place on, positions."""


def source(name: str) -> Source:
    torch.manual_seed(0)
    model, inputs, _ = ARCHITECTURES["transformers"][name](4)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    given: dict[str, Any] = {}
    for key, x in inputs.items():
        most = CLASSES if x.ndim == 1 else TOKENS - 4
        # The first numbers stand for padding and the like.
        given[key] = numbers(*x.shape) if x.is_floating_point() else whole(most, *x.shape) + 3 * (x.ndim > 1)
    return model.double().eval(), given


@pytest.mark.full
@pytest.mark.parametrize("name", ARCHITECTURES["transformers"])
def test_an_architecture_trains_as_pytorch_does(name: str) -> None:
    """Without dropout, under two strategies; or it is refused by what cannot be written."""
    model, inputs = made = source(name)
    graph = graph_of(made)
    if name in REFUSED:
        with pytest.raises(PaseError, match=REFUSED[name]):
            emit(random_plan(graph, 4, 0))
        return
    if name in OF_INPUTS:
        assert "def build(" in emit(random_plan(graph, 4, 0))
        return
    weights = double(made)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    expected = []
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimiser.step()
        expected.append(loss.item())
    for seed in range(2):
        losses, _ = trained(random_plan(graph, 4, seed), weights, arrays(inputs))
        np.testing.assert_allclose(losses, expected, rtol=SAME_AS_PYTORCH)
