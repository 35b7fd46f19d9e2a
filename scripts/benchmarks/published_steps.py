"""Published steps of large language models, and what the cost model `step` makes of each, scheme by scheme."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pase.costs import AlphaBetaCostModel
from pase.costs.collectives import hierarchical_all_gather
from pase.graph import Builder, Graph, Operator, Precision, Tensor
from pase.graph.operator import Access, Dim, SliceOf
from pase.graph.operators import (
    add_parameter,
    attention,
    contract,
    dense,
    dropout,
    elementwise,
    embedding,
    layer_norm,
    pointwise,
    softmax,
    softmax_loss,
)
from pase.graph.precision import uniform
from pase.machine import Machine, load_machine
from scripts.benchmarks.large_steps import (
    LayerTime,
    Scheme,
    StepParts,
    layer_times,
    stage_layers,
    step_model,
    step_parts,
    total,
)

STEPS = Path(__file__).with_name("published_steps.toml")

VOCABULARY = 51_200
"""Of the GPTs of both papers; the second one's rows do not say it."""

DIMS = ("b", "s", "d")

TWO_BLOCKS = ("before", "block")
"""The second one has before it what each has but the first."""

MEGATRON = replace(uniform("float16", "megatron"), masters="float32", moments="float32")
"""Weights, activations and gradients in float16; the optimizer's copies in float32."""

LOSS_BYTES = 54
"""Of each logit, that Megatron-LM's cross-entropy reads and writes: in float16, made float32, in kernels of its own for
the largest, the difference, the exponential, the sum and the share, and backward."""

LOSS_BYTES_TITAN = 40
"""Of each logit, in torchtitan's cross-entropy: made float32, its softmax and its gradient, which are kept apart."""

LINKS = {"a100": (0.82, 0.9), "h100": (0.82, 0.85)}
"""The share of the links within a node and between nodes that NCCL reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured step, as `published_steps.toml` has it; sizes that a source does not give are 0."""

    id: int
    model: str
    gpus: int
    gpu: str
    seq: int
    source: str
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    vocab: int = VOCABULARY
    precision: str = ""
    tp: int = 1
    pp: int = 1
    dp: int = 1
    vp: int = 1
    mbs: int = 0
    gbs: int = 0
    recompute: str = ""
    step_s: float = 0.0
    parallelism: str = ""
    local_batch: int = 0
    tokens_per_s_per_gpu: float = 0.0
    memory_gib: float = 0.0
    notes: str = ""


def published_steps() -> list[Row]:
    """Return the rows of `published_steps.toml`."""
    known = {field.name for field in fields(Row)}
    rows: list[dict[str, Any]] = tomllib.loads(STEPS.read_text(encoding="utf-8"))["step"]
    return [
        Row(memory_gib=row.get("peak_mem_GiB", 0.0), **{name: row[name] for name in row if name in known})
        for row in rows
    ]


def predicted(row: Row) -> StepParts:
    """Return the predicted step of a row."""
    return torchtitan_step(row) if row.parallelism else megatron_step(row)


def measured_s(row: Row) -> float:
    """Return the seconds of a measured step."""
    if row.step_s:
        return row.step_s
    degree = degrees(row)
    apart = degree["TP"] * degree["PP"] * degree["CP"]
    return row.local_batch * row.seq / (row.tokens_per_s_per_gpu * apart)


def model_flop(row: Row) -> float:
    """Return the FLOP of a step's products, without recomputation, attention as if nothing were masked."""
    if not row.parallelism:
        per_token = 72 * row.layers * row.hidden**2
        share = 1 + row.seq / (6 * row.hidden) + row.vocab / (12 * row.layers * row.hidden)
        return row.gbs * row.seq * per_token * share
    sizes = LLAMAS[row.model]
    weights = sizes.layers * sizes.block_weights + sizes.hidden * sizes.vocab
    per_token = 6 * weights + 12 * sizes.layers * sizes.hidden * row.seq
    return row.tokens_per_s_per_gpu * row.gpus * measured_s(row) * per_token


def machine_of(name: str, figures: tuple[float, float] = (0.6, 0.6 / 0.8 * 0.35)) -> Machine:
    """Return a machine as rows have it: links as collectives reach them; of torchtitan's H100, what sets them apart.

    figures: of these, the share of the peak that products reach, and attention.
    """
    machine = load_machine(name)
    levels = tuple(
        replace(level, bandwidth_bytes_per_s=share * level.bandwidth_bytes_per_s)
        for level, share in zip(machine.levels, LINKS[name], strict=True)
    )
    machine = replace(machine, levels=levels)
    if name == "h100" and machine.kernels:
        products, attention = figures
        kernels = replace(
            machine.kernels, products=products, attention=attention, memory=0.92, norms=0.92, functions=0.92
        )
        device = replace(machine.device, memory_bandwidth_bytes_per_s=2.4e12, memory_bytes=95 * 2**30)
        machine = replace(machine, device=device, kernels=kernels)
    return machine


def _bytes_per_s(machine: Machine) -> float:
    """Return the bytes that kernels read and write in a second."""
    assert machine.kernels
    assert machine.device.memory_bandwidth_bytes_per_s
    return machine.kernels.memory * machine.device.memory_bandwidth_bytes_per_s


# -- Megatron-LM


def gpt(row: Row, batch: int, blocks: Sequence[str] = TWO_BLOCKS) -> Graph:
    """Return a GPT of some blocks as Megatron-LM runs a batch: attention in single kernels."""
    net = Builder("gpt", precision=MEGATRON)
    x = net.add(embedding, "first_tokens", net.input((batch, row.seq)), vocabulary=row.vocab, size=row.hidden)
    x = net.add(add_parameter, "first_positions", x, dims=DIMS, over=("s", "d"))
    for block in blocks:
        x = _gpt_block(net, block, x, row)
    x = net.add(layer_norm, "last_norm", x)
    x = net.add(dense, "last_head", x, lead=("b", "s"), reduce=("d",), out=(("v", row.vocab),), bias=False)
    net.add(softmax_loss, "last_loss", x, dims=("b", "s", "v"))
    return net.build()


def _gpt_block(net: Builder, name: str, x: Tensor, row: Row) -> Tensor:
    size = row.hidden // row.heads
    scores = ("b", "h", "s", "t")
    y = net.add(layer_norm, f"{name}_norm1", x)
    thrice = (("h", row.heads), ("c", 3 * size))
    y = net.add(dense, f"{name}_qkv", y, lead=("b", "s"), reduce=("d",), out=thrice)
    q = net.add(thirds, f"{name}_split", y)
    k, v = (replace(q, output=number) for number in (1, 2))
    y = net.add(contract, f"{name}_core_scores", q, k, axes=(("b", "s", "h", "c"), ("b", "t", "h", "c")), out=scores)
    y = net.add(softmax, f"{name}_core_softmax", y, dims=scores, over="t")
    y = net.add(dropout, f"{name}_core_dropout", y, dims=scores, rate=0.1)
    y = net.add(contract, f"{name}_core_values", y, v, axes=(scores, ("b", "t", "h", "c")), out=("b", "s", "h", "c"))
    y = net.add(elementwise, f"{name}_core_copy", y, dims=("b", "s", "h", "c"))
    y = net.add(dense, f"{name}_o", y, lead=("b", "s"), reduce=("h", "k"), out=(("d", row.hidden),))
    x = net.add(elementwise, f"{name}_add1", x, y, dims=DIMS)
    y = net.add(layer_norm, f"{name}_norm2", x)
    wide = (("e", 4 * row.hidden),)
    y = net.add(dense, f"{name}_up", y, lead=("b", "s"), reduce=("d",), out=wide, activation="gelu")
    y = net.add(dense, f"{name}_down", y, lead=("b", "s"), reduce=("e",), out=(("d", row.hidden),))
    return net.add(elementwise, f"{name}_add2", x, y, dims=DIMS)


def thirds(name: str, x: tuple[int, ...]) -> Operator:
    """Return the three views of x, shape [b, s, h, 3 c]."""
    *lead, width = x
    extents = dict(zip("bshc", x, strict=True))
    part = width // 3
    return Operator(
        name=name,
        kind="piece",
        dims=tuple(Dim(dim, extent) for dim, extent in extents.items()),
        reads=(Access(tensor="x", shape=x, index_map=tuple("bshc")),),
        writes=tuple(
            Access(
                tensor=f"y{number}",
                shape=(*lead, part),
                index_map=(*"bsh", SliceOf(dim="c", offset=number * part, extent=part)),
            )
            for number in range(3)
        ),
        work=(),
    )


def megatron_step(row: Row) -> StepParts:
    """Return the predicted step of a row of either of Megatron-LM's papers."""
    machine = machine_of("a100")
    is_by_sequence = "sequence parallel" in row.recompute
    split = dict.fromkeys("ghev", row.tp) | ({"s": row.tp} if is_by_sequence else {})
    model = step_model(machine, row.tp, MEGATRON)
    times = layer_times(gpt(row, row.mbs), split, model)
    bytes_per_s = _bytes_per_s(machine)
    loss_s = LOSS_BYTES * row.mbs * row.seq * row.vocab / row.tp / bytes_per_s
    # Forward the three parts are views; backward their gradients are put together.
    times["block_split"] = replace(times["block_split"], forward_s=0.0)
    times["last_loss"] = replace(times["last_loss"], forward_s=loss_s, backward_s=0.0)
    of: dict[str, LayerTime] = {part: total(_named(times, part)) for part in ("first", "block", "last")}
    again = replace(of["block"], backward_s=0.0, messages_s=of["block"].messages_s / 2)
    if row.recompute.startswith("selective"):
        again = replace(total(_named(times, "block_core")), backward_s=0.0, messages_s=0.0)
    scheme = Scheme(
        stages=row.pp,
        chunks=row.vp,
        micro_batches=row.gbs // (row.dp * row.mbs),
        replicas=row.dp,
        shards=1,
        tensor=row.tp,
        hand_over_bytes=2.0 * row.mbs * row.seq * row.hidden,
        gradient_bytes=2,
        weight_bytes=2,
        optimizer_bytes=54,
        adding_bytes=6,
        is_gathered=not is_by_sequence,
    )
    spread = step_model(machine, row.gpus, MEGATRON)
    return step_parts(
        of["block"], again, (of["first"], of["last"]), row.layers, scheme, spread, bytes_per_s=bytes_per_s
    )


def _named(times: Mapping[str, LayerTime], prefix: str) -> list[LayerTime]:
    return [time for name, time in times.items() if name.startswith(f"{prefix}_")]


# -- torchtitan


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """Sizes of a Llama 3.1 (Grattafiori et al. 2024, Table 3)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocab: int = 128_256

    @property
    def block_weights(self) -> int:
        """Of one block, norms aside."""
        kv = self.kv_heads * self.hidden // self.heads
        return 2 * self.hidden * (self.hidden + kv) + 3 * self.hidden * self.feed_forward


LLAMAS = {
    "Llama 3.1 8B": Llama(layers=32, hidden=4096, heads=32, kv_heads=8, feed_forward=14_336),
    "Llama 3.1 70B": Llama(layers=80, hidden=8192, heads=64, kv_heads=8, feed_forward=28_672),
    "Llama 3.1 405B": Llama(layers=126, hidden=16_384, heads=128, kv_heads=8, feed_forward=53_248),
}

FSDP_BF16 = replace(
    uniform("bfloat16", "fsdp"), gradients="float32", collectives="float32", masters="float32", moments="float32"
)
"""Gathered weights and activations in bfloat16; gradients reduced, and kept by the optimizer, in float32."""

FSDP_FLOAT8 = replace(FSDP_BF16, name="fsdp-float8", products="float8")

AGAIN_SELECTIVE = (
    "k",
    "o",
    "up",
    "norm1",
    "norm2",
    "rope_q",
    "rope_k",
    "repeat_k",
    "repeat_v",
    "gated",
    "add1",
    "add2",
)
"""Of a block, what torchtitan's selective checkpoints by operation compute again: every second product, and all that is
neither a product nor attention."""


def llama(sizes: Llama, precision: Precision, batch: int, seq: int, blocks: Sequence[str] = TWO_BLOCKS) -> Graph:
    """Return a Llama of some blocks for a batch of sequences."""
    net = Builder("llama", precision=precision)
    x = net.add(embedding, "first_tokens", net.input((batch, seq)), vocabulary=sizes.vocab, size=sizes.hidden)
    for block in blocks:
        x = _llama_block(net, block, x, sizes)
    x = net.add(layer_norm, "last_norm", x)
    x = net.add(dense, "last_head", x, lead=("b", "s"), reduce=("d",), out=(("v", sizes.vocab),), bias=False)
    net.add(softmax_loss, "last_loss", x, dims=("b", "s", "v"))
    return net.build()


def _llama_block(net: Builder, name: str, x: Tensor, sizes: Llama) -> Tensor:
    batch, seq, _ = x.shape
    size, groups = sizes.hidden // sizes.heads, sizes.heads // sizes.kv_heads

    def product(part: str, x: Tensor, reduce: tuple[str, ...], **out: int) -> Tensor:
        made = tuple(out.items())
        return net.add(dense, f"{name}_{part}", x, lead=("b", "s"), reduce=reduce, out=made, bias=False)

    y = net.add(layer_norm, f"{name}_norm1", x)
    q = product("q", y, ("d",), h=sizes.heads, c=size)
    q = net.add(elementwise, f"{name}_rope_q", q, dims=("b", "s", "h", "c"))
    of = {}
    for part in "kv":
        made = product(part, y, ("d",), u=sizes.kv_heads, c=size)
        if part == "k":
            made = net.add(elementwise, f"{name}_rope_k", made, dims=("b", "s", "u", "c"))
        grouped = net.reshape(made, (batch, seq, sizes.kv_heads, 1, size))
        out = (batch, seq, sizes.kv_heads, groups, size)
        made = net.add(
            pointwise, f"{name}_repeat_{part}", grouped, dims=("b", "s", "u", "r", "c"), out=out, function="identity"
        )
        of[part] = net.reshape(made, (batch, seq, sizes.heads, size))
    y = net.add(attention, f"{name}_attention", q, of["k"], of["v"], causal=True, is_fused=True)
    y = product("o", y, ("h", "k"), d=sizes.hidden)
    x = net.add(elementwise, f"{name}_add1", x, y, dims=DIMS)
    y = net.add(layer_norm, f"{name}_norm2", x)
    gate, up = (product(part, y, ("d",), e=sizes.feed_forward) for part in ("gate", "up"))
    y = net.add(elementwise, f"{name}_gated", gate, up, dims=("b", "s", "e"), function="multiply")
    y = product("down", y, ("e",), d=sizes.hidden)
    return net.add(elementwise, f"{name}_add2", x, y, dims=DIMS)


def degrees(row: Row) -> dict[str, int]:
    """Return the degrees that torchtitan's rows name, as FSDP32 TP8."""
    named = re.findall(r"(FSDP|TP|PP|CP)(\d+)", row.parallelism)
    return dict.fromkeys(("FSDP", "TP", "PP", "CP"), 1) | {name: int(number) for name, number in named}


@dataclass(frozen=True, slots=True, kw_only=True)
class Titan:
    """How torchtitan runs a row.

    fsdp, tp, pp, cp: degrees. micro_batches: of the local batch. micro_batch, seq: sequences of one, and positions of
    each on a device.
    """

    sizes: Llama
    fsdp: int
    tp: int
    pp: int
    cp: int
    chunks: int
    micro_batches: int
    micro_batch: int
    seq: int
    is_float8: bool
    is_compiled: bool
    is_selective: bool
    is_async: bool

    @classmethod
    def of(cls, row: Row) -> "Titan":
        """Return what a row says; where it does not, what torchtitan did then: as many micro-batches as stages."""
        degree = degrees(row)
        return cls(
            sizes=LLAMAS[row.model],
            **{name.lower(): number for name, number in degree.items()},
            chunks=2 if "interleaved" in row.parallelism else 1,
            micro_batches=degree["PP"],
            micro_batch=row.local_batch // degree["PP"],
            seq=row.seq // degree["CP"],
            is_float8="float8" in row.notes or row.notes == "same",
            is_compiled="eager" not in row.notes,
            is_selective="selective" in row.notes or row.notes == "+float8",
            is_async="asyncTP" in row.parallelism or degree["PP"] > 1,
        )

    @property
    def tokens(self) -> int:
        """Of a micro-batch, on a device."""
        return self.micro_batch * self.seq

    @property
    def kv(self) -> int:
        """Numbers of the keys of a token, and of its values."""
        return self.sizes.kv_heads * self.sizes.hidden // self.sizes.heads


def torchtitan_step(row: Row, machine: Machine | None = None) -> StepParts:
    """Return the predicted step of a row of torchtitan's; machine: another one than its own."""
    machine, titan = machine or machine_of("h100"), Titan.of(row)
    sizes, tp = titan.sizes, titan.tp
    precision = FSDP_FLOAT8 if titan.is_float8 else FSDP_BF16
    split = dict.fromkeys("ghuev", tp) | {"s": tp}
    model, spread = (step_model(machine, devices, precision) for devices in (tp, row.gpus))
    graph = llama(sizes, precision, titan.micro_batch, titan.seq)
    times = layer_times(graph, split, model)
    bytes_per_s = _bytes_per_s(machine)
    if titan.is_float8:
        # The head stays in bfloat16.
        times["last_head"] = layer_times(graph.in_precision(FSDP_BF16), split, model)["last_head"]
        # What is gathered is made float8 before: half of it. What is scattered stays in bfloat16.
        of_block = [name for name in times if name.startswith("block")]
        times |= {name: replace(times[name], messages_s=0.75 * times[name].messages_s) for name in of_block}
        times["block_norm1_casts"] = _casts(titan, total(_named(times, "block")).weights, bytes_per_s)
    # A device has a part of the queries, and in the mean as many times the keys that it may attend to.
    times["block_attention"] = times["block_attention"].scaled(titan.cp)
    loss_s = LOSS_BYTES_TITAN * titan.tokens * sizes.vocab / tp / bytes_per_s
    times["last_loss"] = replace(times["last_loss"], forward_s=loss_s, backward_s=0.0)
    if not titan.is_compiled:
        times["block_norm1_more"] = _unfused(titan, bytes_per_s)
    if titan.cp > 1:
        times["block_keys"] = _split_context(titan, spread, bytes_per_s)
    block = total(_named(times, "block"))
    if titan.is_selective:
        names = [*(f"block_{part}" for part in AGAIN_SELECTIVE), "block_norm1_casts", "block_norm1_more"]
        again = replace(total([times[name] for name in names if name in times]), backward_s=0.0, messages_s=0.0)
    else:
        # The backward pass needs nothing of what is behind the last product.
        unused_s = times["block_down"].forward_s + times["block_add2"].forward_s
        again = replace(
            block,
            forward_s=block.forward_s - unused_s,
            backward_s=0.0,
            messages_s=block.messages_s * (1 / 3 if titan.is_float8 else 3 / 8),
            blocking_s=block.blocking_s / 4,
        )
    scheme = Scheme(
        stages=titan.pp,
        chunks=titan.chunks,
        micro_batches=titan.micro_batches,
        replicas=titan.fsdp * titan.cp,
        shards=titan.fsdp * titan.cp,
        tensor=tp,
        hand_over_bytes=2.0 * titan.tokens * sizes.hidden,
        is_async=titan.is_async,
        gradient_bytes=4,
        weight_bytes=2,
        optimizer_bytes=40,
        adding_bytes=6 if titan.pp > 1 else 0,
        gather_bytes=4,
        scatter_bytes=6,
    )
    ends = total(_named(times, "first")), total(_named(times, "last"))
    return step_parts(block, again, ends, sizes.layers, scheme, spread, bytes_per_s=bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Bytes on the device of a pipeline that needs most, which add up.

    states: shards of weights, gradients and the optimizer's moments, in float32. gathered: weights in bfloat16, and
    gradients that wait to be scattered. saved: what the backward pass keeps. working: the loss, or a block's backward.
    """

    states: float
    gathered: float
    saved: float
    working: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.states + self.gathered + self.saved + self.working


def torchtitan_memory(row: Row) -> PeakMemory:
    """Return the predicted peak of a row of torchtitan's."""
    titan = Titan.of(row)
    last = titan.pp - 1
    stages = [_stage_memory(titan, stage, has_loss=stage == last) for stage in range(titan.pp)]
    return max(stages, key=lambda stage: stage.total)


def _stage_memory(titan: Titan, stage: int, *, has_loss: bool) -> PeakMemory:
    """Return what a device of a stage holds when most is in flight; with one stage and with the last, at the loss."""
    sizes, tokens, tp = titan.sizes, titan.tokens, titan.tp
    layers = sum(stage_layers(sizes.layers, titan.pp * titan.chunks)[stage :: titan.pp])
    end = sizes.vocab * sizes.hidden / tp
    ends = end * ((stage == 0) + has_loss)
    weights = layers * sizes.block_weights / tp + ends
    # Within a pipeline all weights stay gathered, and gradients wait in float32; else two blocks are, and one's wait.
    gathered = (2 + 4) * weights if titan.pp > 1 else 2 * ends + (2 * 2 + 2 + 4) * sizes.block_weights / tp
    of_block = sizes.hidden / tp
    if titan.is_selective:
        # Queries, values, the gate, the last product and attention's result.
        of_block += (3 * sizes.hidden + titan.kv + sizes.feed_forward) / tp
    in_flight: float = min(titan.micro_batches, titan.pp - stage)
    if titan.chunks > 1:
        warm_up = 2 * (titan.pp - stage - 1) + (titan.chunks - 1) * titan.pp + 1
        in_flight = min(titan.micro_batches, warm_up / titan.chunks)
    inside = 2 * sizes.hidden + (6 * sizes.hidden + 3 * titan.kv + 5 * sizes.feed_forward) / tp
    loss = (18 if tp > 1 else 12) * sizes.vocab / tp
    return PeakMemory(
        states=16 * weights / (titan.fsdp * titan.cp),
        gathered=gathered,
        saved=2 * tokens * of_block * layers * in_flight,
        working=tokens * max(2 * inside, loss * has_loss),
    )


def _casts(titan: Titan, weights: float, bytes_per_s: float) -> LayerTime:
    """Return what it takes to make operands float8: each number is read for the maximum, read again and written."""
    hidden, wide = titan.sizes.hidden, titan.sizes.feed_forward
    inputs = titan.tokens * (2 * hidden + (hidden + wide) / titan.tp) + weights
    gradients = titan.tokens * (2 * hidden + (hidden + 2 * titan.kv + 2 * wide) / titan.tp)
    return LayerTime(forward_s=5 * inputs / bytes_per_s, backward_s=5 * (inputs + gradients) / bytes_per_s)


def _unfused(titan: Titan, bytes_per_s: float) -> LayerTime:
    """Return what norms, rotations and gates take more where each operation is a kernel of its own.

    Of a number, forward and backward, what is touched beyond one fused kernel: 32 and 65 bytes of a norm, in float32;
    16 and 14 of a rotation, as complex numbers; 4 and 8 of a gate.
    """
    hidden, wide = titan.sizes.hidden, titan.sizes.feed_forward
    forward, backward = (
        titan.tokens * (2 * norm * hidden + rotation * (hidden + titan.kv) + gate * wide) / titan.tp / bytes_per_s
        for norm, rotation, gate in ((32, 16, 4), (65, 14, 8))
    )
    return LayerTime(forward_s=forward, backward_s=backward)


def _split_context(titan: Titan, spread: AlphaBetaCostModel, bytes_per_s: float) -> LayerTime:
    """Return what PyTorch's ring attention takes more.

    Keys and values of all heads are gathered forward and backward; their gradients go round in float32. Results are
    merged in float32: after the first part, 42 bytes of each number, 86 backward.
    """
    cp = titan.cp
    own = titan.tokens * titan.sizes.hidden / titan.tp
    members = [1, cp] if titan.tp > 1 else [cp, 1][: len(spread.links)]
    gather_s = float(hierarchical_all_gather(2 * 2 * cp * own, members, spread.links))
    return LayerTime(
        forward_s=(6 + 42 * (cp - 1)) * own / bytes_per_s,
        backward_s=86 * cp * own / bytes_per_s,
        blocking_s=4 * gather_s,
    )
