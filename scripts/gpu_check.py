"""`scripts/gpu-check`: what the PyTorch target computes on this machine beside the unmodified model, and how fast.

Needs PyTorch and NumPy alone. Every check runs on ranks of its own, and one that fails leaves the others as they are.
"""

import argparse
import copy
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf, isnan
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import pase
from pase import Plan
from pase.analysis.baselines.registry import EXPERTS
from pase.calibration.kernels import calibrated
from pase.common.documents import write_atomically
from pase.errors import MachineError
from pase.graph.precision import precision_of
from pase.machine import AUTO, Machine, load_machine, machine_text, override_machine
from pase.targets.torch.launch import call
from scripts.benchmarks.kernels import fit_table, passes_s
from scripts.benchmarks.tables import ROOT, markdown
from scripts.benchmarks.trials import random_strategy

PAGE = ROOT / "docs" / "gpu.md"
MACHINE = ROOT / "docs" / "gpu.toml"
"""Where the machine with its kernels is written, samples and all."""
LIMIT_S = 450.0
"""For all checks together."""
TOLERANCE = 1e-12
"""Of float64: the largest difference of a loss, a gradient or a weight, relative to the tensor's largest number."""
BF16_TOLERANCE = 0.02
"""Of a loss in bfloat16, relative: its numbers have 8 bits, and sums in another order round otherwise."""
STEPS = 3
RANDOM_PLANS = 3
SEED = 20


# -- models


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        b, s, w = x.shape
        y = self.norm1(x)
        q, k, v = (
            f(y).view(b, s, self.heads, w // self.heads).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, w))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):  # type: ignore[misc]
    """A decoder of tokens that returns its loss."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, steps: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(steps, width))
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Any, targets: Any) -> Any:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class CNN(nn.Module):  # type: ignore[misc]
    """A residual network of images that returns its loss."""

    def __init__(self, width: int, blocks: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(blocks))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Any, targets: Any) -> Any:
        x = functional.relu(self.stem(images))
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + functional.relu(norm(convolution(x)))
        x = functional.max_pool2d(x, 2).mean(dim=(2, 3))
        return functional.cross_entropy(self.head(x), targets)


Batch = dict[str, Any]


def small_gpt() -> tuple[nn.Module, Batch]:
    """Return a decoder that takes moments, and a batch."""
    return GPT(vocabulary=64, width=32, heads=4, layers=2, steps=16), tokens(8, 16, 64)


def large_gpt() -> tuple[nn.Module, Batch]:
    """Return one of 124 million weights, as GPT-2's smallest, and a batch."""
    return GPT(vocabulary=50304, width=768, heads=12, layers=12, steps=512), tokens(8, 512, 50304)


def small_cnn() -> tuple[nn.Module, Batch]:
    """Return a residual network that takes moments, and a batch."""
    return CNN(width=16, blocks=2, classes=8), images(8, 16, 8)


def large_cnn() -> tuple[nn.Module, Batch]:
    """Return a wider and deeper one, and a batch."""
    return CNN(width=128, blocks=8, classes=1000), images(64, 128, 1000)


def tokens(batch: int, steps: int, vocabulary: int) -> Batch:
    """Return random tokens and what follows each."""
    drawn = torch.randint(vocabulary, (batch, steps + 1))
    return {"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}


def images(batch: int, size: int, classes: int) -> Batch:
    """Return random images and their classes."""
    return {"images": torch.randn(batch, 3, size, size), "targets": torch.randint(classes, (batch,))}


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "GPT": small_gpt, "CNN": small_cnn, "GPT, 124 million weights": large_gpt, "CNN, wide": large_cnn
}  # fmt: skip

SMALL, LARGE = ("GPT", "CNN"), ("GPT, 124 million weights", "CNN, wide")


def made(name: str, device: Any, dtype: Any = torch.float32) -> tuple[nn.Module, Batch]:
    """Return a model, its weights the same wherever it is made, and a batch, on a device."""
    torch.manual_seed(SEED)
    model, batch = MODELS[name]()
    given = {key: value.to(device, dtype if value.is_floating_point() else value.dtype) for key, value in batch.items()}
    return model.to(device, dtype), given


# -- what ranks do


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """The largest differences of the parallel model, relative; of losses, gradients of the first step, weights."""

    losses: float
    gradients: float
    weights: float


def compared(name: str, plan: Plan, *, compiled: bool, on_gpu: bool) -> Differences:
    """Train the parallel and the unmodified model in float64, and compare them.

    Args:
        name: of the model.
        plan: the model's.
        compiled: whether the parallel model is compiled.
        on_gpu: whether ranks compute on GPUs.
    """
    device = _device(on_gpu)
    model, batch = made(name, device, torch.float64)
    reference = copy.deepcopy(model)
    parallel = pase.parallelize((model, batch), plan)
    found = trained(parallel, compiling(parallel, device) if compiled else parallel, batch)
    expected = trained(reference, reference, batch)
    return Differences(
        losses=max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(found[0], expected[0], strict=True)),
        gradients=_largest(found[1], expected[1]),
        weights=_largest(found[2], expected[2]),
    )


def trained(module: Any, step: Any, batch: Batch) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Return the losses of some steps, the gradients of the first, and the weights after the last."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses, gradients = [], {}
    for number in range(STEPS):
        loss = step(**batch)
        loss.backward()
        losses.append(_whole(loss.detach()).item())
        if not number:
            gradients = {key: _whole(value.grad) for key, value in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, {key: _whole(value.detach()) for key, value in module.named_parameters()}


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()


def _largest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference, of each tensor relative to its largest number."""
    if found.keys() != expected.keys():
        raise ValueError(f"other names: {sorted(found.keys() ^ expected.keys())}")
    differences = {key: (found[key] - value).abs().max() for key, value in expected.items()}
    return max(float(differences[key] / value.abs().max().clamp_min(1e-9)) for key, value in expected.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a training step, medians; difference: of the losses, relative."""

    unmodified_s: float
    parallel_s: float
    difference: float


def timed(name: str, plan: Plan, *, compiled: bool, bf16: bool, on_gpu: bool, runs: int) -> Times:
    """Time training steps of the parallel and the unmodified model in turns.

    Args:
        name: of the model.
        plan: the model's.
        compiled: whether both are compiled.
        bf16: whether both compute in bfloat16, by autocast; else in float32.
        on_gpu: whether ranks compute on GPUs.
        runs: how many steps of each are timed, after 3 that are not.
    """
    device = _device(on_gpu)
    model, batch = made(name, device)
    reference = copy.deepcopy(model)
    both = [pase.parallelize((model, batch), plan), reference]
    steps: list[Any] = [compiling(module, device) if compiled else module for module in both]
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-4, fused=on_gpu) for module in both]
    times_s: list[list[float]] = [[], []]
    losses: list[list[float]] = [[], []]
    for _ in range(runs + 3):
        for which, (step, optimizer) in enumerate(zip(steps, optimizers, strict=True)):
            _wait_for(device)
            start_s = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
                loss = step(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            _wait_for(device)
            times_s[which].append(time.perf_counter() - start_s)
            losses[which].append(_whole(loss.detach()).item())
    ours_s, theirs_s = (median(each[3:]) for each in times_s)
    difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(*losses, strict=True))
    return Times(unmodified_s=theirs_s, parallel_s=ours_s, difference=difference)


def compiling(module: Any, device: Any) -> Any:
    """Return a module that is compiled when it is first called; on CPUs it is traced, and no code is made for it."""
    return torch.compile(module, backend="inductor" if device.type == "cuda" else "aot_eager")


def _device(on_gpu: bool) -> Any:
    gpus = torch.cuda.device_count() if on_gpu else 0
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    return device


def _wait_for(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What is tried: function: of this module, on so many ranks. plan: which one of the model's."""

    what: str
    model: str
    plan: str
    ranks: int
    function: Callable[..., Any]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a check: the ranks' worst answer, or why there is none."""

    check: Check
    answer: Differences | Times | None
    error: str
    time_s: float

    @property
    def is_good(self) -> bool:
        """Whether the parallel model computed what the unmodified one did."""
        if isinstance(self.answer, Differences):
            return max(self.answer.losses, self.answer.gradients, self.answer.weights) <= TOLERANCE
        if isinstance(self.answer, Times):
            return self.answer.difference <= (BF16_TOLERANCE if self.check.options["bf16"] else 1e-3)
        return False


def checks(*, on_gpu: bool, gpus: int) -> list[Check]:
    """Return all checks, the most telling first; sizes are smaller on CPUs."""
    ranks = 4
    plans = ["searched", "data_parallel", *(f"random {seed}" for seed in range(RANDOM_PLANS))]

    def equality(model: str, plan: str, ranks: int, *, compiled: bool = False) -> Check:
        what = "float64" + (", torch.compile" if compiled else "")
        options = {"compiled": compiled, "on_gpu": on_gpu}
        return Check(what=what, model=model, plan=plan, ranks=ranks, function=compared, options=options)

    def speed(model: str, plan: str, ranks: int, *, bf16: bool, compiled: bool = False) -> Check:
        what = ("bf16" if bf16 else "float32") + (", torch.compile" if compiled else "")
        options = {"compiled": compiled, "bf16": bf16, "on_gpu": on_gpu, "runs": 20 if on_gpu else 5}
        return Check(what=what, model=model, plan=plan, ranks=ranks, function=timed, options=options)

    large = LARGE if on_gpu else SMALL
    found = [equality(model, "searched", 1) for model in SMALL]
    found += [equality(model, plan, ranks) for plan in plans for model in SMALL]
    found += [speed(model, "searched", 1, bf16=bf16) for model in large for bf16 in (True, False)]
    found += [
        equality(model, "searched", count, compiled=True) for model, count in (("GPT", 1), ("GPT", 4), ("CNN", 1))
    ]
    found += [speed("GPT", "searched", ranks, bf16=True), speed(large[0], "data_parallel", ranks, bf16=True)]
    found.append(speed(large[0], "searched", 1, bf16=True, compiled=True))
    if gpus > 1 and gpus != ranks:
        found += [equality(model, plan, gpus) for plan in plans[:3] for model in SMALL]
        found.append(speed(large[0], "searched", gpus, bf16=True))
    return found


def plan_of(model: str, rule: str, ranks: int) -> Plan:
    """Return the plan of a model on a number of ranks: the searched one, one by a rule, or a random one."""
    # Shapes are what a plan is of; weights and numbers are made on the ranks.
    source = made(model, "cpu")
    kind, _, seed = rule.partition(" ")
    machine = load_machine("h100")
    if model in SMALL:
        # Devices this slow are worth using for layers this small.
        machine = override_machine(machine, flop_per_s=1e9, bandwidth_bytes_per_s=None)
    if kind == "data_parallel":
        found = pase.compare(source, ranks, machine=machine, baselines=[EXPERTS[kind]])
        return next(each.plan for each in found.contenders if each.name == kind)
    plan = pase.search(source, ranks, machine=machine)
    return random_strategy(plan, int(seed)) if kind == "random" else plan


def attempt(check: Check, limit_s: float) -> Result:
    """Run a check on ranks of its own, for some seconds at most."""
    start_s = time.monotonic()
    answer, error = None, ""
    try:
        plan = plan_of(check.model, check.plan, check.ranks)
        answers = call(
            _called, check.function.__name__, check.model, plan, check.options, ranks=check.ranks, timeout_s=limit_s
        )
        answer = max(answers, key=_badness)
    # Whatever fails is told on the page, and the other checks go on.
    except Exception as failure:  # noqa: BLE001
        error = f"{type(failure).__name__}: {failure}"
    return Result(check=check, answer=answer, error=error, time_s=time.monotonic() - start_s)


def _called(function: str, model: str, plan: Plan, options: dict[str, Any]) -> Differences | Times:
    return compared(model, plan, **options) if function == "compared" else timed(model, plan, **options)


def _badness(answer: Differences | Times) -> float:
    """Return by how much an answer differs, infinite for what is no number."""
    found = (answer.parallel_s,) if isinstance(answer, Times) else (answer.losses, answer.gradients, answer.weights)
    return inf if any(map(isnan, found)) else max(found)


# -- kernels


def with_kernels(on_gpu: bool) -> Machine:
    """Return the machine of one device, its kernels timed; of a GPU with a preset, with that one's peaks and links."""
    try:
        base = load_machine(AUTO) if on_gpu else None
    except MachineError:
        base = None
    return calibrated(base, "cuda" if on_gpu else "cpu", name="gpu" if on_gpu else "cpu")


def predicted_steps(machine: Machine, names: Sequence[str], *, on_gpu: bool, runs: int) -> list[list[str]]:
    """Return rows: forward and backward passes of unmodified models on one device beside what its kernels say."""
    device, rows = _device(on_gpu), []
    for name, policy in ((name, policy) for name in names for policy in ("float32", "bf16-mixed")[: 1 + on_gpu]):
        model, batch = made(name, device)
        times_s = []
        for _ in range(runs + 3):
            model.zero_grad()
            _wait_for(device)
            start_s = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16) if policy != "float32" else nullcontext():
                loss = model(**batch)
            loss.backward()
            _wait_for(device)
            times_s.append(time.perf_counter() - start_s)
        graph = pase.load(made(name, "cpu")).in_precision(precision_of(policy))
        measured_s, found_s = median(times_s[3:]), sum(passes_s(graph, machine))
        rows.append([name, policy, f"{measured_s:.4f}", f"{found_s:.4f}", f"{found_s / measured_s - 1:+.0%}"])
    return rows


def kernels_text(machine: Machine, rows: Sequence[Sequence[str]]) -> str:
    """Return what is told of kernels, in Markdown."""
    assert machine.kernels is not None
    return "\n\n".join(
        [
            f"Kernels, timed and fitted ([kernels.md](kernels.md)), on {machine.device.name}:",
            fit_table(machine.kernels),
            "Passes of the unmodified models on one device, forward and backward, beside what these figures say:",
            markdown(["model", "types", "measured, s", "predicted, s", "error"], rows),
        ]
    )


# -- the page


def machine_facts() -> list[tuple[str, str]]:
    """Return what this machine is and has, by name."""
    facts = [("date", f"{datetime.now(UTC):%Y-%m-%d}"), ("PaSE", pase.__version__), ("PyTorch", torch.__version__)]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        facts += [("GPUs", f"{len(names)} × {names[0]}"), ("CUDA", str(torch.version.cuda))]
        facts.append(("NCCL", ".".join(map(str, torch.cuda.nccl.version()))))
        try:
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            driver = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()
            facts += [("driver", driver[0])] if driver else []
        except (OSError, subprocess.SubprocessError):
            pass
    else:
        facts.append(("GPUs", "none"))
    return [*facts, ("Python", platform.python_version()), ("CPU cores", str(os.cpu_count()))]


def page(facts: Sequence[tuple[str, str]], results: Sequence[Result], *, backend_of: Callable[[int], str]) -> str:
    """Return the text about a run, in Markdown."""
    good = sum(result.is_good for result in results)
    equal = [result for result in results if result.check.function is compared]
    quick = [result for result in results if result.check.function is timed]
    heads = ["model", "plan", "ranks", ""]
    of_values = (
        "Losses of 3 steps, gradients of the first and weights after 3 AdamW steps, in float64, beside those of the "
        f"unmodified model on the same device; relative to the largest number of each tensor, at most {TOLERANCE:g}:"
    )
    of_times = (
        "Seconds of a training step, medians of steps of both in turns, AdamW; the largest difference of a loss, at "
        f"most {BF16_TOLERANCE:g} in bf16 and 0.001 in float32. Ranks that share a GPU share its time:"
    )
    parts = [
        f"**{good} of {len(results)} checks passed.**",
        markdown(["", ""], [[name, text] for name, text in facts]),
        of_values,
        markdown([*heads, "losses", "gradients", "weights", ""], [_row(each, backend_of) for each in equal]),
        of_times,
        markdown([*heads, "unmodified, s", "parallel, s", "ratio", "losses", ""], [_row(e, backend_of) for e in quick]),
    ]
    failures = [result for result in results if result.error]
    if failures:
        parts.append("What failed:")
        parts.append("\n".join(f"- {', '.join(_named(each, backend_of))}: `{_plain(each.error)}`" for each in failures))
    return "\n\n".join(parts)


def _plain(text: str) -> str:
    return " ".join(text.replace("`", "'").split())[:600]


def _row(result: Result, backend_of: Callable[[int], str]) -> list[str]:
    return [*_named(result, backend_of), *_figures(result)]


def _named(result: Result, backend_of: Callable[[int], str]) -> list[str]:
    check = result.check
    return [check.model, check.plan, f"{check.ranks}, {backend_of(check.ranks)}", check.what]


def _figures(result: Result) -> list[str]:
    verdict = "ok" if result.is_good else "**failed**"
    if isinstance(result.answer, Differences):
        found = (result.answer.losses, result.answer.gradients, result.answer.weights)
        return [*(f"{value:.1e}" for value in found), verdict]
    if isinstance(result.answer, Times):
        ratio = result.answer.parallel_s / result.answer.unmodified_s
        seconds = [f"{value:.4f}" for value in (result.answer.unmodified_s, result.answer.parallel_s)]
        return [*seconds, f"{ratio:.2f}", f"{result.answer.difference:.1e}", verdict]
    return [*([""] * (3 if result.check.function is compared else 4)), verdict]


def replaced(whole: str, text: str) -> str:
    """Return a document with the text about a run in its place."""
    pattern = re.compile(r"(<!-- gpu-check -->\n).*?(<!-- /gpu-check -->)", re.DOTALL)
    found, count = pattern.subn(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", whole)
    if count != 1:
        raise SystemExit(f"{PAGE} has {count} places for gpu-check; expected 1")
    return found


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(prog="scripts/gpu-check", description=main.__doc__)
    found.add_argument("--cpu", action="store_true", help="run on CPUs, although there is a GPU; nothing is written")
    found.add_argument("--only", metavar="TEXT", default="", help="the checks with this text in their name")
    found.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="for all checks (%(default)s)")
    return found


def main() -> None:
    """Run the checks, print the page, and put it into docs/gpu.md where there is a GPU."""
    arguments = parser().parse_args()
    on_gpu = torch.cuda.is_available() and not arguments.cpu
    gpus = torch.cuda.device_count() if on_gpu else 0

    def backend_of(ranks: int) -> str:
        return "NCCL" if gpus >= ranks else f"gloo on {'one GPU' if gpus == 1 else f'{gpus} GPUs' if gpus else 'CPUs'}"

    results = list(_run(checks(on_gpu=on_gpu, gpus=gpus), arguments.only, arguments.limit, backend_of))
    text = page(machine_facts(), results, backend_of=backend_of)
    machine = None
    if not arguments.only:
        machine = with_kernels(on_gpu)
        rows = predicted_steps(machine, LARGE if on_gpu else SMALL, on_gpu=on_gpu, runs=20 if on_gpu else 5)
        text = f"{text}\n\n{kernels_text(machine, rows)}"
    print(f"\n{text}")
    if on_gpu and machine is not None:
        write_atomically(PAGE, replaced(PAGE.read_text(encoding="utf-8"), text))
        write_atomically(MACHINE, machine_text(machine))
        print(f"\nwritten to {PAGE.relative_to(ROOT)} and {MACHINE.relative_to(ROOT)}")
    raise SystemExit(0 if results and all(result.is_good for result in results) else 1)


def _run(wanted: Sequence[Check], only: str, limit_s: float, backend_of: Callable[[int], str]) -> Iterator[Result]:
    end_s = time.monotonic() + limit_s
    for check in wanted:
        name = f"{check.model}, {check.plan}, {check.ranks} ranks, {check.what}"
        if only not in name:
            continue
        left_s = end_s - time.monotonic()
        if left_s < 5:
            result = Result(check=check, answer=None, error=f"not run: {limit_s:g} s were over", time_s=0.0)
        else:
            result = attempt(check, min(left_s, 90.0))
        shown = " ".join(_figures(result)) if result.answer else result.error
        print(f"{result.time_s:6.1f} s  {name}: {shown}", flush=True)
        yield result
