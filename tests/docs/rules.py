"""What of the pages is not run as it stands, and why: all exceptions are here, and each of them must be needed."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from re import Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Commands that are parsed alone: their options, their values."""

    command: Pattern[str]
    reason: str


def rule_of(command: str) -> Rule | None:
    """The rule for a command line; pase of a checkout is pase."""
    text = command.removeprefix("./").removeprefix("scripts/") if "scripts/pase " in command else command
    return next((rule for rule in PARSED if rule.command.match(text)), None)


def _rules(*rows: tuple[str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(command=re.compile(pattern), reason=reason) for pattern, reason in rows)


PARSED = _rules(
    (r"pase run (?!example:)", "trains in processes of its own; tests/cli/test_run_emit.py runs it"),
    (r"\.venv/bin/python train\.py", "AlexNet takes a minute on virtual devices; docs/training.md runs such programs"),
    (
        r"torchrun .*(--steps|-m) ",
        "tests/targets/torch/test_script.py and tests/calibration/test_links.py run such programs",
    ),
    (r"torchrun --nproc-per-node 8 (?!infer)", "needs eight GPUs"),
    (r"pase serve ", "serves until it is interrupted; tests/served/test_served.py runs it"),
    (r"pase \w+ .*--machine auto", "needs GPUs; tests/machine/test_local.py has a driver that lists some"),
    (r"pase calibrate ", "takes a minute, or a GPU; tests/cli/test_calibrate.py runs it"),
    (r"pase train .*--processes", "trains in several processes; tests/cli/test_processes.py runs it"),
    (r"pase \w+ (package\.module:factory|model\.keras)", "a model of the reader's own"),
    (r"pase \w+ my_llama:llama", "loads transformers, which takes ten seconds; tests/importers imports such models"),
    (r"\S+ \S+ .*--device GPU", "needs a GPU"),
    (r"(\./)?scripts/(bench|test|docs|fuzz)", "takes minutes to hours"),
    (r"(\./)?scripts/gpu-check", "takes minutes, or a GPU; tests/scripts/test_gpu_check.py runs parts of it"),
)

FILES: Mapping[tuple[str, str], str] = {
    ("docs/export-jax-torch.md", "with_jax.py"): "needs eight devices; run with tests/exports/example.py",
    (
        "docs/export-jax-torch.md",
        "with_torch.py",
    ): "needs eight processes; tests/exports runs such in four",
    ("docs/how-to/parallelize-jax.md", "train_jax.py"): "tests/docs/test_how_to.py runs it on eight virtual devices",
}
"""Programs that a page neither runs nor imports."""

READERS = {"dot": "Graphviz"}
"""Programs that read what a command prints: they are not run."""

SHOWN: Mapping[tuple[str, str], str] = {
    ("docs/method.md", "T = S − min(A, ω B) = max(S − A, S − ω B)"): "an equation",
    ("docs/method.md", "T = Σ t + (m - 1) · max t + max o"): "an equation",
    ("docs/method.md", "F(G, φ) = Σ_v t_l(v, φ, r) + Σ_(u,v) r · t_x(u, v, φ)"): "Eq. 1 of the paper",
    (
        "docs/how-to/torchtitan.md",
        "--parallelism.tensor_parallel_degree N --parallelism.spmd_backend partial_dtensor",
    ): "flags of torchtitan",
    (
        "docs/how-to/check-torch.md",
        "training in float64 on 1 device: 27 of 32 tensors differ",
    ): "of a command that ends with status 1; tests/targets/torch/test_check.py runs such",
    ("docs/index.md", ". .venv/bin/activate"): "of the shell",
    ("docs/machines.md", "[[levels]]                              [[levels]]"): "two files beside one another",
    (
        "docs/how-to/own-operator.md",
        "# -- join   c=2 d=4                                 y[b,n] = x[b,c] z[b,d] w[c,d,n]",
    ): "compared in test_how_to.py",
}
"""Blocks that nothing runs and nothing is compared with, by page and first line, and what they are."""
