"""Attention with masks, biases and heads that share keys: by its definition, and which kernel computes it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import pase
from pase.targets.torch.layers import masked_attention
from pase.targets.torch.parallel import parallelize
from pase.targets.torch.tensor import Dim, Tensor
from tests.targets.torch.ranks import Pool
from tests.targets.torch.test_layers import check, drawn

B, H, G, S, T, K, E = (Dim(*item) for item in (("b", 2), ("h", 4), ("g", 3), ("s", 6), ("t", 12), ("k", 6), ("e", 2)))
ALL = (B, H, G, S, T)

FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"


def beside(x: Any, dims: tuple[Dim, ...], last: Dim | None = None) -> Any:
    """A tensor of some dims as one of all of a score's, perhaps with one more."""
    of = ALL if last is None else (*ALL, last)
    order = [dims.index(dim) for dim in of if dim in dims]
    return x.permute(order).reshape([dim.size if dim in dims else 1 for dim in of])


CASES: dict[str, tuple[tuple[Dim, ...], tuple[Dim, ...], tuple[Dim, ...], tuple[Dim, ...], bool]] = {
    "groups": ((B, S, H, G, K), (B, T, H, K), (), (), False),
    "groups, causal": ((B, S, H, G, K), (B, T, H, K), (), (), True),
    "groups, a mask of examples": ((B, S, H, G, K), (B, T, H, K), (B, S, T), (), False),
    "heads of two dims, a mask of examples": ((B, H, G, S, K), (B, H, G, T, K), (B, T), (), False),
    "a mask of some heads": ((B, H, G, S, K), (B, H, G, T, K), (H, S, T), (G, T, S), False),
    "a mask and a bias of the heads": ((B, S, H, K), (B, T, H, K), (B, S, T), (H, S, T), False),
    "a bias, causal": ((B, H, S, K), (B, H, T, K), (), (S, T), True),
    "no batch": ((S, K), (T, K), (S, T), (), False),
    "keys for all of the batch": ((B, S, H, K), (T, H, K), (B, T), (), False),
}


@pytest.mark.parametrize("name", CASES)
def test_masked_attention(name: str) -> None:
    """Values have features of their own; one row of each mask is empty: it takes the mean of all values."""
    q, k, masked, biased, causal = CASES[name]
    v = (*k[:-1], E)
    out = [*(dim for dim in q if dim not in (S, K)), S, E]
    kept = (drawn([dim.size for dim in masked], "mask") > 0).long()
    if S in masked:
        kept.select(masked.index(S), 0).fill_(0)

    def definition(**given: Any) -> Any:
        own = {letter: beside(given[letter], dims, dims[-1]) for letter, dims in (("q", q), ("k", k), ("v", v))}
        scores = (own["q"] * own["k"]).sum(-1) * 0.3
        if masked:
            scores = scores + torch.where(beside(given["mask"], masked) != 0, 0.0, -1e30)
        scores = scores + beside(given["bias"], biased) if biased else scores
        if causal:
            scores = scores.masked_fill(torch.ones(S.size, T.size).triu(1).bool(), -torch.inf)
        y = (torch.exp(scores - scores.amax(-1, keepdim=True)).unsqueeze(-1) * own["v"]).sum(-2)
        y = y / torch.exp(scores - scores.amax(-1, keepdim=True)).sum(-1, keepdim=True)
        return y.reshape([dim.size for dim in out])

    def layer(**given: Tensor) -> Tensor:
        masks, biases = ([given[name]] if name in given else [] for name in ("mask", "bias"))
        return masked_attention(
            given["q"], given["k"], given["v"], out, T, masks=masks, biases=biases, scale=0.3, causal=causal
        )

    check(
        layer,
        definition,
        {"q": q, "k": k, "v": v} | ({"bias": biased} if biased else {}),
        indices={"mask": (masked, 2)} if masked else {},
        values={"mask": kept} if masked else {},
    )


class Called(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.name())
        found = function(*args, **(kwargs or {}))
        self.largest = max(self.largest, found.numel() if isinstance(found, torch.Tensor) else 0)
        return found


class Attends(nn.Module):
    """Attention of 4 heads, over 2 or 4 of keys, with padding or a bias that is made of the tokens."""

    def __init__(self, heads: int, how: str) -> None:
        super().__init__()
        self.heads, self.how = heads, how
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 4 * heads), nn.Linear(16, 4 * heads)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Any, words: Any) -> Any:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (part(x).unflatten(-1, (self.heads, 4)).transpose(1, 2) for part in (self.k, self.v))
        mask = None
        if self.how == "padded":
            mask = (words > 0)[:, None, None, :]
        elif self.how == "biased":
            mask = (words[:, None, :, None] - words[:, None, None, :]).abs().to(x.dtype) * -0.1
        is_causal = self.how == "causal"
        y = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=self.heads != 4)
        return self.out(y.transpose(1, 2).flatten(2))


def _found(_rank: int, _world: int, heads: int, how: str, low: bool) -> Any:
    """What the parallel module finds on one rank, and the module by itself; the operators that the first calls."""
    torch.manual_seed(5)
    dtype = torch.float32 if low else torch.float64
    module = Attends(heads, how).to(dtype)
    batch = {"x": torch.randn(3, 32, 16, dtype=dtype), "words": torch.randint(0, 4, (3, 32))}
    batch["words"][:, 0] = 1
    alone = module(**batch)
    alone.square().sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    options = {"precision": "bf16-mixed"} if low else {}
    parallel = parallelize(
        (module, batch), pase.search((module, batch), devices=1, machine="h100", **options), check=False
    )
    with Called() as called:
        found = parallel(**batch)
        found = getattr(found, "logits", found)
        found.square().sum().backward()
    gradients = {name.removeprefix("module."): p.grad for name, p in parallel.named_parameters()}
    differences = [float((found - alone).detach().abs().max())]
    differences += [float((gradients[name] - own).abs().max()) for name, own in expected.items()]
    return differences, called.names, called.largest


@pytest.mark.parametrize(
    ("heads", "how"),
    [
        *((4, "causal"), (4, "padded"), (2, "plain"), (2, "biased")),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((4, "plain"), (4, "biased"), (2, "causal"), (2, "padded"))
        ),
    ],
)
def test_the_fused_kernel_computes_attention(ranks: Pool, heads: int, how: str) -> None:
    ((differences, names, largest),) = ranks.run(_found, heads, how, False, world=1)
    assert max(differences) <= 1e-12
    assert FUSED in names
    assert f"{FUSED}_backward" in names
    assert not [name for name in names if "softmax" in name]
    # Nothing is as large as the scores.
    assert largest < 3 * 4 * 32 * 32


@pytest.mark.parametrize("how", ["padded", "biased"])
def test_the_fused_kernel_computes_attention_in_a_low_type(ranks: Pool, how: str) -> None:
    ((differences, names, _),) = ranks.run(_found, 2, how, True, world=1)
    assert max(differences[:1]) <= 0.05
    assert FUSED in names


# -- in a ring


@pytest.mark.parametrize(
    ("q", "k", "causal"),
    [
        pytest.param((B, S, H, K), (B, S, H, K), False, id="heads"),
        pytest.param((B, S, H, K), (B, S, H, K), True, id="heads, causal", marks=pytest.mark.full),
        pytest.param((B, S, H, G, K), (B, S, H, K), False, id="groups", marks=pytest.mark.full),
        pytest.param((B, S, H, G, K), (B, S, H, K), True, id="groups, causal"),
        pytest.param((B, H, S, K), (S, H, K), False, id="keys for all of the batch"),
        pytest.param((B, H, S, K), (S, H, K), True, id="keys for all of the batch, causal", marks=pytest.mark.full),
        pytest.param((S, K), (S, K), False, id="no heads", marks=pytest.mark.full),
        pytest.param((S, K), (S, K), True, id="no heads, causal"),
    ],
)
def test_keys_that_are_split_as_the_queries_go_round(q: tuple[Dim, ...], k: tuple[Dim, ...], causal: bool) -> None:
    v = (*k[:-1], E)
    out = [*(dim for dim in q if dim not in (S, K)), S, E]
    every = (B, H, G, S)

    def definition(q_: Any, k_: Any, v_: Any) -> Any:
        names = dict(zip((*every, K, E), "bhgske", strict=True))
        first, second, third = ("".join(names[dim] for dim in dims) for dims in (q, k, v))
        scores = "".join(names[dim] for dim in every if dim in q) + "t"
        found = torch.einsum(f"{first},{second.replace('s', 't')}->{scores}", q_, k_) * 0.3
        if causal:
            found = found.masked_fill(torch.ones(S.size, S.size).triu(1).bool(), -torch.inf)
        result = "".join(names[dim] for dim in out)
        return torch.einsum(f"{scores},{third.replace('s', 't')}->{result}", torch.softmax(found, -1), v_)

    found = check(
        lambda q_, k_, v_: masked_attention(q_, k_, v_, out, S, scale=0.3, causal=causal),
        definition,
        {"q_": q, "k_": k, "v_": v},
        fixed=(K, E),
        number=6,
    )
    assert any(own.sent for own in found)
