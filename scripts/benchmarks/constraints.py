"""A Llama of 8 billion weights on one mesh: searches within constraints beside an integer program of their tables."""

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from pase import load, load_machine
from pase.graph.operators import with_fan_outs
from pase.planning.constraints import constraints_of
from pase.planning.problems import problem_of
from scripts.benchmarks.peers import PEERS, num_pairs
from scripts.benchmarks.tables import markdown, publish

DEVICES = 64
MESH = {"data": 8, "tensor": 8}
LIMIT_S = 600.0
CASES: Mapping[str, Mapping[str, Any]] = {
    "mesh": {"mesh": MESH},
    "mesh, the last product pinned to b=8": {"mesh": MESH, "pin": {"lm_head": "b=8 *"}},
    "mesh, all blocks alike": {
        "mesh": MESH,
        "tie": [
            f"model.layers.*.{part}"
            for part in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.o_proj")
        ],
    },
    "none": {},
}
COST_MODELS = ("paper", "alpha_beta")


def main(*, write: bool) -> None:
    """Print the table, or put it into docs/benchmarks.md."""
    start_s = perf_counter()
    graph = with_fan_outs(load(llama3_8b()))
    print(f"imported in {perf_counter() - start_s:.1f} s: {len(graph.operators)} layers")
    machine = load_machine("h100")
    rows = []
    for model in COST_MODELS:
        for name, document in CASES.items():
            start_s = perf_counter()
            problem = problem_of(graph, DEVICES, machine, model, constraints=constraints_of(document))
            tables_s = perf_counter() - start_s
            ours, theirs = (PEERS[solver](problem.tables, LIMIT_S) for solver in ("ours", "HiGHS"))
            assert ours.exact
            assert not theirs.exact or ours.cost is not None
            agrees = theirs.cost is not None and ours.cost is not None and abs(theirs.cost / ours.cost - 1) < 1e-6
            rows.append(
                [
                    *(model, name, f"{sum(problem.tables.domain_sizes):,}", f"{num_pairs(problem.tables):,}"),
                    *(f"{tables_s:.2f}", f"{ours.time_s:.3f}"),
                    theirs.note or f"{theirs.time_s:.1f}",
                    "" if theirs.note else f"{theirs.time_s / ours.time_s:.0f} ×",
                    "the same" if agrees else "" if theirs.note else "dearer" if theirs.cost else "nothing found",
                ]
            )
            print(" | ".join(rows[-1]), flush=True)
    headers = [
        *("costs", "constraints", "configurations", "pairs of layouts", "tables, s", "ours, s", "HiGHS, s", "ratio"),
        "HiGHS' strategy costs",
    ]
    publish("benchmarks.md", {"constraints": markdown(headers, rows)}, write=write)


def llama3_8b() -> tuple[Any, dict[str, Any]]:
    """Return a model of Llama 3 8B's sizes on the meta device, and what it reads."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.zeros(64, 2048, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}
