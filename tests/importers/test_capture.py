"""A module's captured graph computes what the module itself does: values, gradients and buffers, in two steps."""

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional, utils  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from pase.errors import ModelError  # noqa: E402
from pase.importers.torch.capture import Captured, captured, corresponding  # noqa: E402
from pase.importers.torch.export import exported, tensors_of  # noqa: E402

_TOLERANCE = 1e-11


def call(capture: Captured, module: nn.Module, inputs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return what a captured graph gives of a module's own tensors: outputs, and what is written."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    arguments = []
    for node in capture.graph.graph.find_nodes(op="placeholder"):
        name = node.name
        held_name = capture.parameters.get(name) or capture.buffers.get(name)
        if held_name is not None:
            arguments.append(held[held_name])
        else:
            arguments.append(capture.constants[name] if name in capture.constants else inputs[capture.inputs[name]])
    results = list(capture.graph(*arguments))
    count = len(capture.outputs)
    return results[:count], dict(zip(capture.written, results[count:], strict=True))


def scalar(tensors: list[Any]) -> Any:
    """Return a number that depends on every element of tensors that have gradients."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.requires_grad:
            weights = torch.sin(torch.arange(tensor.numel(), dtype=torch.float64) + 1)
            total = total + (tensor.double() * weights.reshape(tensor.shape)).sum()
    return total


def assert_equal(ours: Any, theirs: Any, what: str) -> None:
    """Check tensors, either of which may be None for zeros."""
    if ours is None and theirs is None:
        return
    ours = torch.zeros_like(theirs) if ours is None else ours.detach()
    theirs = torch.zeros_like(ours) if theirs is None else theirs.detach()
    scale = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=_TOLERANCE * scale, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def assert_as_module(
    make: Callable[[], nn.Module], inputs: dict[str, Any], *, trains: bool = True, steps: int = 2
) -> None:
    """Check that two steps of SGD by the captured graph are those of the module.

    Args:
        make: Makes the module, with the same values each time.
        inputs: By name.
        trains: Whether it is in training or in evaluation.
        steps: Of SGD.
    """
    module, reference, own = make(), make(), make()
    modes = [part.training for part in module.modules()]
    capture = captured(torch, module, (), inputs, trains=trains)
    assert modes == [part.training for part in module.modules()]
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, own.state_dict()[name]), f"{name} is not as it was"
    if not trains:
        reference.eval()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (reference, own)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.manual_seed(step)
        expected = list({id(x): x for x in tensors_of(torch, reference(**deepcopy(inputs)))}.values())
        scalar(expected).backward()
        torch.manual_seed(step)
        outputs, written = call(capture, own, deepcopy(inputs))
        scalar(outputs).backward()
        held = {**dict(own.named_parameters()), **dict(own.named_buffers())}
        with torch.no_grad():
            for name, value in written.items():
                held[name].copy_(value)
        assert len(outputs) == len(expected)
        for i, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
            assert_equal(ours, theirs, f"output {i}")
        for (name, ours), theirs in zip(own.named_parameters(), reference.parameters(), strict=True):
            assert_equal(ours.grad, theirs.grad, f"gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
        for name, theirs in reference.state_dict().items():
            assert_equal(own.state_dict()[name], theirs, name)


class Sign(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, scale: float) -> Any:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return torch.sign(x) * scale

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        (x,) = ctx.saved_tensors
        return dy * (x.abs() < 1) * ctx.scale, None


class Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.save_for_backward(x, y)
        is_positive = x * y > 0
        ctx.mark_non_differentiable(is_positive)
        return x * y, is_positive

    @staticmethod
    def backward(ctx: Any, dz: Any, _: Any) -> Any:
        x, y = ctx.saved_tensors
        return 2 * dz * y, 3 * dz * x


class Reverse(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(_ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, dy: Any) -> Any:
        return -dy


reverse = Reverse.apply
"""As users name it: bound before anything is traced."""


class Layers(nn.Module):  # type: ignore[misc]
    """Three products, other parts, and a function of the module and its input."""

    def __init__(self, function: Callable[[Any, Any], Any], **parts: Any) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function
        for name, value in parts.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


# -- where gradients end


def stopped(self: Any, x: Any) -> Any:
    y = self.first(x)
    halves = self.second(y).chunk(2, 1)
    copy = y.clone()
    copy.detach_()
    with torch.no_grad():
        product = halves[0] * halves[1]
    return y * y.detach(), self.third(y) * copy + y.data, product.sum() * y


def switched(self: Any, x: Any) -> Any:
    with torch.no_grad():
        y = self.first(x)
        with torch.enable_grad():
            z = self.second(y)
        w = z * 2
    with torch.inference_mode():
        t = self.third(x)
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    u = self.third(z)
    torch.set_grad_enabled(before)
    return self.third(y) + z + w + u * t.clone()


def in_autocast(self: Any, x: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = functional.layer_norm(self.first(x).relu(), (8,))
        with torch.no_grad():
            y = y * self.second(x)
        with torch.autocast("cpu", enabled=False):
            z = self.third(y.double())
        return functional.cross_entropy(self.first(z), torch.arange(4))


def written_without_gradients(self: Any, x: Any) -> Any:
    """Autograd does not see what is written, into what has a gradient, into weights and into a view of one."""
    y = self.first(x) * 1
    with torch.no_grad():
        y.mul_(2)
        y[0] = 0.0
        for parameter in self.second.parameters():
            parameter.clamp_(-0.1, 0.1)
        norm = self.third.weight.norm(dim=1, keepdim=True)
        self.third.weight.copy_(self.third.weight / norm)
    self.third.bias.data[0].zero_()
    self.first.bias.data = self.first.bias.data.clamp(-0.2, 0.2)
    return self.third(self.second(y)) + self.first(x)


def target_network(self: Any, x: Any) -> Any:
    with torch.no_grad():
        for parameter, target in zip(self.first.parameters(), self.target.parameters(), strict=True):
            target.mul_(0.9).add_(parameter, alpha=0.1)
        y = self.target(x)
    return -functional.cosine_similarity(self.second(self.first(x)), y).mean()


def target_of(module: nn.Module) -> nn.Module:
    module.target = deepcopy(module.first).requires_grad_(False)  # type: ignore[operator]
    return module


def own_backward(self: Any, x: Any) -> Any:
    y = reverse(Sign.apply(self.first(x), 2.0))
    product, is_positive = Product.apply(y, self.second(x))
    return torch.where(is_positive, product, y * y)


def checkpointed(self: Any, x: Any) -> Any:
    y = checkpoint(self.first, x, use_reentrant=False)
    y = checkpoint(lambda y: functional.dropout(self.second(y).relu(), 0.3), y, use_reentrant=True)
    return self.third(y)


def iterated(self: Any, x: Any) -> Any:
    """Calls a layer without gradients, then with them; `flatten` gives back the weight itself."""
    with torch.no_grad():
        y = self.layer(x) + x @ self.first.weight.flatten(1)
    return self.layer(y) + y @ self.first.weight + self.second(functional.dropout(y, 0.5, training=False))


def recomputed(self: Any, x: Any) -> Any:
    """A checkpoint within another, and one of what has no gradient; batch norms are recomputed, too."""
    y = self.first(x)

    def outer(z: Any) -> Any:
        return checkpoint(lambda w: self.second(w).tanh(), z.relu(), use_reentrant=False) + z

    y = checkpoint(outer, y, use_reentrant=False)
    y = checkpoint(lambda z: self.norm(z).tanh(), y, use_reentrant=False)
    y = checkpoint(lambda z: self.other(z).relu(), y, use_reentrant=True)
    return self.third(y) + checkpoint(self.first, x, use_reentrant=True)


# -- gradients within the forward pass


def penalised(self: Any, x: Any) -> Any:
    """Gradients of gradients, through what is made of other functions and saves its results."""
    x = x.detach().requires_grad_()
    y = self.norm(functional.silu(self.first(x)).reshape(2, 2, 8))
    scores = torch.softmax(self.second(y) @ y.transpose(1, 2), -1) @ y
    (slope,) = torch.autograd.grad(scores.tanh().sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad((slope[:, 0] * x[:, 1]).sum(), x, create_graph=True)
    (stopped,) = torch.autograd.grad(self.third(x).sigmoid().sum(), x, retain_graph=True)
    return slope, curve * self.third(x), stopped * self.second(x)


def of_energy(self: Any, x: Any) -> Any:
    """The point at which a gradient is taken depends on weights, too."""

    def energy(y: Any, z: Any) -> tuple[Any, Any]:
        h = functional.softplus(self.second(y) + self.drop(z))
        return h.sum(), h

    gradients, (total, h) = torch.func.grad_and_value(energy, argnums=(0, 1), has_aux=True)(self.first(x), x)
    with torch.no_grad():
        still = torch.func.grad(lambda y: self.first(y).tanh().sum())(x)
    return gradients[0] * gradients[1], total * h, still * self.third(x)


# -- buffers


class Observer(nn.Module):  # type: ignore[misc]
    """Assigns to its buffers, and returns what they were."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(8))
        self.register_buffer("high", torch.ones(8), persistent=False)

    def forward(self, x: Any) -> Any:
        before = self.low
        if self.training:
            self.low = torch.minimum(self.high, x.detach().amin(0))
            self.low, self.high = self.high * 1.0, self.low
        return before, x * self.low - self.high


def moving_average(self: Any, x: Any) -> Any:
    y = self.first(x)
    with torch.no_grad():
        self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
    self.assigned = (0.9 * self.assigned + 0.1 * y.mean(0)).detach()
    return self.second(y - self.mean) + self.assigned


class Quantised(Layers):
    """A codebook that follows the encoder's outputs, in buffers; is_data: written by `.data`."""

    def __init__(self, *, is_data: bool) -> None:
        codes = torch.randn(16, 8)
        super().__init__(Quantised.quantised, codes=codes, sums=codes.clone(), counts=torch.ones(16))
        self.is_data = is_data

    def quantised(self, x: Any) -> Any:
        z = self.first(x)
        distances = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.codes.t() + self.codes.pow(2).sum(1)
        nearest = distances.argmin(1)
        one_hot = functional.one_hot(nearest, 16).to(z.dtype)
        q = functional.embedding(nearest, self.codes)
        if self.training and self.is_data:
            self.counts.data.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
            self.sums.data.mul_(0.9).add_(one_hot.t() @ z.detach(), alpha=0.1)
            self.codes.data.copy_(self.sums / (self.counts + 1e-5).unsqueeze(1))
        elif self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(one_hot.t() @ z, alpha=0.1)
                self.codes.copy_(self.sums / (self.counts + 1e-5).unsqueeze(1))
        loss = functional.mse_loss(z, q.detach())
        return self.second(z + (q - z).detach()), loss


class Queue(Layers):
    """Contrasts with what a queue holds of earlier batches."""

    def __init__(self) -> None:
        super().__init__(Queue.contrasted, queue=torch.randn(8, 16), place=torch.zeros(1, dtype=torch.long))

    def contrasted(self, x: Any) -> Any:
        query = functional.normalize(self.first(x), dim=1)
        with torch.no_grad():
            key = functional.normalize(self.second(x), dim=1)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().detach()], 1)
        self.enqueue(key)
        return functional.cross_entropy(scores, torch.zeros(4, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, key: Any) -> None:
        places = (self.place + torch.arange(4)) % 16
        self.queue[:, places] = key.t()
        self.place[0] = (self.place[0] + 4) % 16


def normalised(**kind: Any) -> nn.Module:
    return Layers(
        lambda self, x: self.norm(self.second(self.norm(self.first(x)).relu())), norm=nn.BatchNorm1d(8, **kind)
    )


def partly_in_evaluation() -> nn.Module:
    parts = {"norm": nn.BatchNorm1d(8), "other": nn.BatchNorm1d(8), "drop": nn.Dropout(0.5), "lost": nn.Dropout(0.5)}
    module = Layers(
        lambda self, x: self.norm(self.drop(self.first(x))) * self.other(self.lost(self.second(x))), **parts
    )
    module.norm.eval()
    module.drop.eval()
    return module


def of_instances(*, is_evaluated: bool = False) -> nn.Module:
    norms = nn.InstanceNorm2d(8, track_running_stats=True), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    module = nn.Sequential(nn.Conv2d(8, 8, 3), norms[0], nn.Conv2d(8, 4, 1), norms[1])
    if is_evaluated:
        norms[0].eval()
    return module


# -- chance


def drawn(self: Any, x: Any) -> Any:
    y = self.first(x)
    a = torch.empty_like(y).uniform_(-1, 1) + y.clone().exponential_(2.0) + torch.normal(y.detach(), 1.0)
    b = torch.bernoulli(torch.sigmoid(y)) + y.clone().normal_(1, 2) + torch.rand_like(y) + y.clone().log_normal_()
    c = y[:, torch.randperm(8)] + y[torch.arange(4), torch.randint(0, 8, (4,))].unsqueeze(1)
    d = torch.multinomial(torch.softmax(y, -1), 2) * y[:, :2]
    return (a + b) * y + c, d


def skipped(self: Any, x: Any) -> Any:
    """Leaves out paths of examples, in two ways."""
    y = self.first(x)
    if self.training:
        y = y.div(0.8) * y.new_empty((4, 1)).bernoulli_(0.8)
    mask = 0.8 + torch.rand((4, 1), dtype=y.dtype)
    mask.floor_()
    return x + y + self.second(y) * mask


def sampled(self: Any, x: Any) -> Any:
    mean, log_variance = self.first(x), self.second(x)
    if self.training:
        mean = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
    return self.third(mean), functional.gumbel_softmax(log_variance, hard=True)


def with_auxiliary_head(self: Any, x: Any) -> Any:
    y = self.first(x)
    return (self.second(y), self.third(y)) if self.training else self.second(y)


# -- layers


class Gpt(nn.Module):  # type: ignore[misc]
    """One block with fused projections, dropout in all places and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.norm = nn.Embedding(20, 8), nn.Embedding(6, 8), nn.LayerNorm(8)
        self.fused, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Dropout(0.1))
        self.head.weight = self.tokens.weight

    def forward(self, x: Any) -> Any:
        b, t = x.shape
        y = functional.dropout(self.tokens(x) + self.places(torch.arange(t)), 0.1, self.training)
        heads = (z.view(b, t, 2, 4).transpose(1, 2) for z in self.fused(self.norm(y)).split(8, -1))
        rate = 0.1 if self.training else 0.0
        z = functional.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=rate)
        y = y + self.out(z.transpose(1, 2).contiguous().view(b, t, 8))
        logits = self.head(y + self.mlp(y))
        return functional.cross_entropy(logits[:, :-1].reshape(-1, 20), x[:, 1:].reshape(-1))


class Convolutions(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up, self.groups, self.relu = nn.ConvTranspose2d(8, 4, 2, 2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        y = self.norm(self.conv(x))
        y += x
        y = functional.max_pool2d(self.relu(y), 2)
        y = functional.interpolate(
            functional.pixel_shuffle(self.groups(self.up(y)), 2), scale_factor=2, mode="bilinear"
        )
        return functional.adaptive_avg_pool2d(y, 3).flatten(1)


MASK = [[False, True], [False, False]]


def attended(self: Any, x: Any) -> Any:
    y = self.first(x).reshape(2, 2, 8)
    causal = torch.triu(torch.ones(2, 2, dtype=torch.bool), 1)
    return self.attention(y, y, y, attn_mask=causal, key_padding_mask=torch.tensor(MASK))


def encoded(self: Any, x: Any) -> Any:
    return self.encoder(self.first(x).reshape(2, 2, 8), src_key_padding_mask=torch.tensor(MASK))


def recurrent(kind: type[nn.Module], **options: Any) -> nn.Module:
    return Layers(
        lambda self, x: self.cells(self.first(x).unsqueeze(0))[0], cells=kind(8, 4, batch_first=True, **options)
    )


def written_in_place(self: Any, x: Any) -> Any:
    y = self.first(x)
    y[:, 0] = y[:, 1] * 2
    y[1].mul_(3)
    y.masked_fill_(x > 0, 1.5)
    w = torch.zeros_like(y)
    w[torch.tensor([0, 2])] = self.second(x)[:2]
    w.index_add_(0, torch.tensor([1, 1]), y[2:])
    y = y.clone()
    y.view(-1)[:3].add_(self.third(x)[0, :3])
    return y * w.clamp_(min=-1)


def looped(self: Any, x: Any) -> Any:
    state, states = torch.zeros(8, dtype=x.dtype), []
    for row in x:
        state = torch.tanh(self.first(row) + self.second(state))
        states.append(state)
    return {"states": torch.stack(states), "last": [state, None, 3]}


def losses(self: Any, x: Any) -> Any:
    y, z, labels = self.first(x), self.second(x), torch.tensor([0, 3, -100, 7])
    weights = torch.arange(8, dtype=x.dtype) + 0.5
    scores = y.unsqueeze(1).expand(4, 2, 8).log_softmax(-1)
    texts = torch.tensor([[1, 2], [3, 1]]), torch.tensor([4, 4]), torch.tensor([2, 1])
    return (
        functional.cross_entropy(y, labels, weight=weights, label_smoothing=0.1),
        functional.triplet_margin_loss(y, z, self.third(x)),
        functional.gaussian_nll_loss(y, z, self.third(x).square(), eps=0.1),
        functional.kl_div(y.log_softmax(-1), x.softmax(-1), reduction="batchmean"),
        functional.ctc_loss(scores, *texts, zero_infinity=True),
        functional.binary_cross_entropy_with_logits(y, x.sigmoid(), pos_weight=weights),
    )


def counted(self: Any, x: Any) -> Any:
    """Functions that PyTorch asks for values in: how large their results are, and whether their weights are zero."""
    y, labels = self.first(x), torch.tensor([0, 2, 2, 1])
    counts = torch.bincount(labels, minlength=3)
    shares = labels.bincount(x[:, 0].detach(), 4)
    return y.t().cov(), torch.cov(self.second(x)[0], correction=0), y[:, :3] / counts.to(y.dtype), y[:, :4] * shares


def mapped(self: Any, x: Any) -> Any:
    def of_one(row: Any, column: Any) -> tuple[Any, Any]:
        with torch.no_grad():
            still = self.second(row).tanh()
        return self.first(row).tanh() * row.norm() + still, (self.third(column) * row.detach()).softmax(0)

    return torch.func.vmap(of_one, in_dims=(0, 1))(x, self.second(x).t())


def tied() -> nn.Module:
    module = Layers(lambda self, x: self.third(self.second(self.first(x))))
    module.third.weight = module.first.weight
    module.second.requires_grad_(False)
    module.unused = nn.Parameter(torch.randn(3))
    return module


def with_layer(layer: nn.Module) -> nn.Module:
    return Layers(lambda self, x: self.layer(self.first(x)), layer=layer)


IMAGES, TOKENS, ROWS = (4, 8, 6, 6), (2, 6), (4, 8)

IN_SUITE: dict[str, Callable[[], nn.Module]] = {
    "stopped gradients": lambda: Layers(stopped),
    "gradients switched": lambda: Layers(switched),
    "writes under no_grad": lambda: Layers(written_without_gradients),
    "autograd functions": lambda: Layers(own_backward),
    "moving averages": lambda: Layers(moving_average, mean=torch.zeros(8), assigned=torch.zeros(8)),
    "codebook": lambda: Quantised(is_data=True),
    "partly in evaluation": partly_in_evaluation,
    "chance": lambda: Layers(drawn),
    "without gradients, then with": lambda: Layers(
        iterated, layer=utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    ),
    "gradients of gradients": lambda: Layers(penalised, norm=nn.LayerNorm(8)),
    "gradients by torch.func": lambda: Layers(of_energy, drop=nn.Dropout(0.3)),
    "recomputed": lambda: Layers(recomputed, norm=nn.BatchNorm1d(8), other=nn.BatchNorm1d(8, momentum=None)),
    "buffers of a part": lambda: Layers(lambda self, x: self.part(self.first(x)), part=Observer()),
}

IN_FULL: dict[str, Callable[[], nn.Module]] = {
    "autocast": lambda: Layers(in_autocast),
    "target network": lambda: target_of(Layers(target_network)),
    "checkpoints": lambda: Layers(checkpointed),
    "codebook under no_grad": lambda: Quantised(is_data=False),
    "queue": Queue,
    "batch norm twice": normalised,
    "batch norm by all batches": lambda: normalised(momentum=None),
    "batch norm by the batch": lambda: normalised(track_running_stats=False),
    "batch norm without weights": lambda: normalised(affine=False),
    "spectral_norm": lambda: with_layer(utils.parametrizations.spectral_norm(nn.Linear(8, 8))),
    "spectral_norm by hooks": lambda: with_layer(utils.spectral_norm(nn.Linear(8, 8))),
    "weight_norm": lambda: with_layer(utils.parametrizations.weight_norm(nn.Linear(8, 8))),
    "weight_norm by hooks": lambda: with_layer(utils.weight_norm(nn.Linear(8, 8))),
    "orthogonal": lambda: with_layer(utils.parametrizations.orthogonal(nn.Linear(8, 8))),
    "left out": lambda: Layers(skipped),
    "sampled": lambda: Layers(sampled),
    "auxiliary head": lambda: Layers(with_auxiliary_head),
    "tied, frozen and unused": tied,
    "lstm": lambda: recurrent(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.3),
    "gru": lambda: recurrent(nn.GRU),
    "rnn": lambda: recurrent(nn.RNN),
    "attention": lambda: Layers(attended, attention=nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)),
    "encoder": lambda: Layers(
        encoded, encoder=nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    ),
    "in place": lambda: Layers(written_in_place),
    "loop": lambda: Layers(looped),
    "mapped over examples": lambda: Layers(mapped),
    "counts and covariances": lambda: Layers(counted),
    "losses": lambda: Layers(losses),
    "gpt": Gpt,
    "embedding of bounded norm": lambda: nn.Sequential(nn.Embedding(20, 8, max_norm=0.5), nn.Linear(8, 8)),
    "convolutions": Convolutions,
    "instance norm": of_instances,
    "instance norm in evaluation": lambda: of_instances(is_evaluated=True),
    "dropouts": lambda: nn.Sequential(
        nn.Conv2d(8, 8, 1), nn.Dropout2d(0.3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2), nn.RReLU()
    ),
}
"""By names of what they show."""

OF_IMAGES = {"convolutions", "instance norm", "instance norm in evaluation", "dropouts"}
OF_TOKENS = {"gpt", "embedding of bounded norm"}


def made(name: str) -> tuple[Callable[[], nn.Module], dict[str, Any]]:
    """Return what makes a module, the same one each time, and its inputs."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return {**IN_SUITE, **IN_FULL}[name]().double()

    torch.manual_seed(1)
    if name in OF_TOKENS:
        inputs = torch.randint(0, 20, TOKENS)
    else:
        inputs = torch.randn(IMAGES if name in OF_IMAGES else ROWS, dtype=torch.float64)
    return make, {"input" if isinstance(make(), nn.Sequential) else "x": inputs}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("name", [*IN_SUITE, *(pytest.param(name, marks=pytest.mark.full) for name in IN_FULL)])
def test_captured_graph_trains_as_the_module_does(name: str) -> None:
    assert_as_module(*made(name))


@pytest.mark.parametrize(
    "name", ["codebook", *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt", "dropouts"))]
)
def test_captured_graph_of_evaluation_is_the_module_in_evaluation(name: str) -> None:
    assert_as_module(*made(name), trains=False)


def test_graph_has_no_operator_that_writes_and_each_weight_once() -> None:
    make, inputs = made("gpt")
    capture = captured(torch, make(), (), inputs, trains=True)
    calls = capture.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.dropout.default)
    # Two of its blocks, and that of attention, whose fused kernel would draw by itself.
    assert len(calls) == 3
    targets = [node.target for node in capture.graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert not any(target._schema.is_mutable for target in targets)
    assert sorted(capture.parameters.values()) == sorted(name for name, _ in make().named_parameters())
    assert capture.parameters["p_head_weight"] == "tokens.weight"


def test_nodes_that_the_importer_reads_are_named() -> None:
    """All that evaluation and training both compute; in training there is also what is drawn and what is counted."""
    make, inputs = made("gpt")
    module = make()
    capture = captured(torch, module, (), inputs, trains=True)
    program, _ = exported(torch, module, (), inputs)
    names = corresponding(program, capture)
    nodes = {node.name: node for node in capture.graph.graph.nodes}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        example, other = node.meta["val"], nodes[names[node.name]].meta["val"]
        assert getattr(example, "shape", None) == getattr(other, "shape", None)
    assert len(set(names.values())) == len(names)
    drops = [names[name] for name in ("dropout", "dropout_1")]
    assert all(nodes[name].target is torch.ops.aten.dropout.default for name in drops)


# -- what is refused


class Stateful(Layers):
    """Keeps something from call to call that is no buffer."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__(function)
        self.steps, self.is_even, self.last, self.all = 0, True, None, []
        self.register_buffer("count", torch.zeros(()))


def initialising(self: Any, x: Any) -> Any:
    if self.is_even:
        with torch.no_grad():
            self.first.bias.copy_(x.mean(0))  # here
        self.is_even = False
    return self.first(x)


def branching(self: Any, x: Any) -> Any:
    y = self.first(x) if self.last is None else self.second(x)  # here
    self.last = "known"
    return y


def counting(self: Any, x: Any) -> Any:
    self.steps += 1  # here
    return self.first(x) / self.steps


def alternating(self: Any, x: Any) -> Any:
    self.is_even = not self.is_even  # here
    return self.first(x) if self.is_even else self.second(x)


def growing(self: Any, x: Any) -> Any:
    self.all.append(self.first(x).detach())
    return self.second(x)


def remembering(self: Any, x: Any) -> Any:
    y = self.first(x)
    if self.last is not None:
        y = y + self.last  # here
    self.last = y.detach()
    return self.second(y)


def drawing(self: Any, x: Any) -> Any:
    return self.first(x) * random.uniform(0.5, 1.5)  # here


def dropping(self: Any, x: Any) -> Any:
    if self.training and torch.rand([]) < 0.5:  # here
        return x
    return self.second(x)


def sizing(self: Any, x: Any) -> Any:
    return self.first(x)[x > 0].sum()  # here


def mapping(self: Any, x: Any) -> Any:
    return torch.func.vmap(torch.func.grad(lambda row: self.first(row).sum()))(x).sum()  # here


def jacobian(self: Any, x: Any) -> Any:
    return torch.func.jacrev(lambda y: self.first(y).sum(0))(x).sum()  # here


def stepping(self: Any, x: Any) -> Any:
    self.first(x).sum().backward()  # here
    return self.second(x)


def reversing(self: Any, x: Any) -> Any:
    x = x.detach().requires_grad_()
    y = reverse(self.first(x))  # here
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def recomputing(self: Any, x: Any) -> Any:
    def counted(y: Any) -> Any:
        self.count.add_(1)
        return self.first(y).tanh()

    return checkpoint(counted, self.second(x), use_reentrant=False)  # here


def resizing(self: Any, x: Any) -> Any:
    self.count = torch.zeros(2)
    return self.first(x)


def turning(self: Any, x: Any) -> Any:
    return torch.func.vmap(self.first, out_dims=1)(x)


REFUSED = {
    turning: "a tensor that no traced call gives: .* move dims behind torch.func.vmap",
    recomputing: "'count' is written within a checkpoint at .*here",
    resizing: "'count' becomes one of another shape",
    initialising: "'first.bias' is written at .*here.*, in the first call alone: .*'is_even'",
    branching: "here.* is computed in the first call, .*here.* in later ones: attribute 'last'",
    counting: "the forward pass changes attribute 'steps' at .*here",
    alternating: "the forward pass changes attribute 'is_even' at .*here",
    growing: "the forward pass changes attribute 'all'",
    remembering: "in the first call, .*here.* in later ones: attribute 'last'",
    drawing: "draws random numbers of Python's or NumPy's own at .*here",
    dropping: "control flow depends on values at .*here",
    sizing: "size depends on values at .*here",
    mapping: "by a transform of torch.func at .*here",
    jacobian: "by a transform of torch.func at .*here",
    stepping: r"calls backward\(\) at .*here",
    reversing: "computes gradients, and calls torch.autograd.Function 'Reverse' at .*here",
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_no_graph_can_contain_is_refused_with_its_line(function: Callable[[Any, Any], Any]) -> None:
    module = Stateful(function)
    with pytest.raises(ModelError, match=REFUSED[function]):
        captured(torch, module, (torch.randn(4, 8),), {}, trains=True)
    assert (module.steps, module.is_even, module.last, module.all) == (0, True, None, [])


def test_attributes_that_nothing_reads_are_noted() -> None:
    def kept(self: Any, x: Any) -> Any:
        self.last = self.first(x)
        return self.second(self.last)

    module = Stateful(kept)
    capture = captured(torch, module, (torch.randn(4, 8),), {}, trains=True)
    assert capture.notes == ("tensors that the forward pass writes into attributes stay in the trace: 'last'",)
    assert module.last is None
