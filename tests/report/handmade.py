"""Documents for the page, written by hand: a small network, a long synthetic one, and variations of both."""

from collections.abc import Sequence
from copy import deepcopy
from math import prod
from typing import Any

from pase import __version__

Document = dict[str, Any]

CLASSES = [
    {"dims": [], "label": "not split", "light": "#8d99a6", "dark": "#8d99a6"},
    {"dims": ["b"], "label": "b", "light": "#0072b2", "dark": "#56b4e9"},
    {"dims": ["b", "n"], "label": "b n", "light": "#d55e00", "dark": "#f0945a"},
    {"dims": ["n", "c"], "label": "n c", "light": "#009e73", "dark": "#4fd0aa"},
]

CONVOLUTION = [["b", 128], ["n", 256], ["h", 13], ["w", 13], ["c", 384], ["r", 3], ["s", 3]]
DENSE = [["b", 128], ["n", 4096], ["c", 9216]]
PARTS = ["compute", "all-reduce", "halo", "re-sharding"]

NETWORK = (
    ("conv1", "conv2d", CONVOLUTION, (32, 1, 1, 1, 1, 1, 1), 1, (1.13e9, 1.64e8, 0.0, 0.0)),
    ("pool1", "max_pool", CONVOLUTION, (32, 1, 1, 1, 1, 1, 1), 1, (3.36e6, 0.0, 0.0, 0.0)),
    ("conv2", "conv2d", CONVOLUTION, (16, 2, 1, 1, 1, 1, 1), 2, (5.38e9, 2.16e9, 1e8, 4.71e8)),
    ("fc1", "dense", DENSE, (1, 4, 8), 3, (9.06e8, 1.63e9, 0.0, 6.02e8)),
    ("fc2", "dense", DENSE, (1, 8, 4), 3, (4.03e8, 1.19e9, 0.0, 0.0)),
    ("softmax", "softmax", [["b", 128], ["n", 1000]], (1, 4), 3, (2.56e5, 2.09e6, 0.0, 0.0)),
)
"""Name, kind, iteration space, splits, class, costs."""

EDGES = ((0, 1, 0, 0), (1, 2, 9_600_000, 7_000_000), (2, 3, 17_700_000, 3_500_000), (3, 4, 0, 0), (4, 5, 40_000, 0))

TOTAL = sum(sum(costs) for *_, costs in NETWORK)


def small(name: str = "alexnet") -> Document:
    """Return a document of one plan of six layers on 32 devices."""
    layers = [_layer(*given) for given in NETWORK]
    edges = [
        {
            "from": a,
            "to": b,
            "tensor": "y",
            "is_weight": False,
            "forward_bytes": forward,
            "backward_bytes": backward,
            "cost": 1e6 * forward,
        }
        for a, b, forward, backward in EDGES
    ]
    return _document(name, layers, edges, column(len(layers), [(a, b) for a, b, *_ in EDGES]))


def beside() -> Document:
    """Return a document of three plans, the last under names of its own, and a sweep over device counts."""
    document, other, third = small("ours"), small("data parallel"), small("third")
    plan = other["plans"][0]
    for layer in plan["layers"]:
        layer |= {"splits": [32] + [1] * (len(layer["dims"]) - 1), "replicas": 1, "class": 1}
        layer["costs"] = [layer["costs"][0], 40 * layer["costs"][1], 0.0, 0.0]
    plan |= {"total_cost": 13.1 * TOTAL, "exact": False, "gap": 0.9, "lower_bound": TOTAL}
    plan |= {"certificate": "gap 90.00%, lower bound 14.1 GFLOP", "step_parts": _parts(plan["layers"])}
    third["plans"][0]["layers"][1]["name"] = "its own"
    sizes = [1, 2, 4, 8, 16, 32]
    document["plans"] += [plan, third["plans"][0]]
    document["sweep"] = {
        "devices": sizes,
        "strategies": [
            {"name": "PaSE", "total_cost": [TOTAL * 32 / n**0.9 for n in sizes]},
            {"name": "data parallelism", "total_cost": [None, *(TOTAL * 32 / n**0.4 for n in sizes[1:])]},
        ],
        "memory_bytes": [2_000_000_000 // n for n in sizes],
        "exact": [True] * 5 + [False],
        "search_time_s": [0.01 * n for n in sizes],
        "cost_unit": "FLOP",
        "problems": [""] * len(sizes),
        "model": "alexnet",
    }
    return document


def bare() -> Document:
    """Return a document with as little in it as there can be: one layer, in seconds, and nothing known besides."""
    document = small("bare")
    plan = document["plans"][0]
    plan["layers"] = plan["layers"][:1]
    plan["layers"][0] |= {
        "why": None,
        "why_of": None,
        "runner_up": None,
        "num_configurations": None,
        "tensors": [],
        "parts": [],
    }
    plan |= {"edges": [], "traffic": None, "baselines": {}, "arguments": {}, "why_note": "nothing is known of why"}
    plan |= {"cost_unit": "s", "total_cost": 0.0123, "exact": False, "gap": 0.0, "lower_bound": 0.0}
    plan |= {"certificate": "gap 100.00%, lower bound 0 s", "moved_bytes": 0}
    plan["machine"] |= {"memory_bytes": None}
    plan["drawings"] = {"folded": column(1, []), "full": column(1, [])}
    document["sweep"] = {
        "devices": [32],
        "strategies": [{"name": "PaSE", "total_cost": [None]}],
        "memory_bytes": [None],
        "exact": [None],
        "search_time_s": [None],
        "cost_unit": "s",
        "problems": ["nothing fits"],
        "model": "bare",
    }
    return document


def repeated(blocks: int = 24) -> Document:
    """Return a document whose middle two layers stand `blocks` times, drawn once when folded."""
    names = ["first", *(f"{part}_{i}" for i in range(blocks) for part in ("attention", "mlp")), "last"]
    layers = [_layer(name, *NETWORK[3 if name.startswith("mlp") else 2][1:]) for name in names]
    pairs = [(i, i + 1) for i in range(len(names) - 1)]
    document = _document("gpt", layers, _edges(pairs), column(len(names), pairs))
    count = len(names)
    folded = column(4, [(0, 1), (1, 2), (2, 3)])
    for vertex, members in zip(
        folded["vertices"],
        ([0], list(range(1, count - 1, 2)), list(range(2, count - 1, 2)), [count - 1]),
        strict=True,
    ):
        vertex |= {"layer": members[0], "members": members, "count": len(members)}
    folded["edges"][0]["edges"] = [0]
    folded["edges"][1]["edges"] = list(range(1, count - 2, 2))
    folded["edges"][2]["edges"] = [count - 2]
    folded["edges"].append(
        {"edges": list(range(2, count - 2, 2)), "points": [[110, 214], [230, 160], [110, 106]], "back": True}
    )
    folded["blocks"] = [{"x": 4, "y": 88, "w": 240, "h": 160, "count": blocks, "label": f"×{blocks}"}]
    folded["width"] = 260
    document["plans"][0]["drawings"]["folded"] = folded
    return document


def long(count: int = 5000, across: int = 5) -> Document:
    """Return a document of very many layers that nothing folds: a ladder with rungs."""
    layers = [_layer(f"block{i // across}/layer{i}", *NETWORK[i % len(NETWORK)][1:]) for i in range(count)]
    pairs = [(i, i + across) for i in range(count - across)] + [(i, i + 1) for i in range(count - 1) if i % across < 3]
    return _document("long", layers, _edges(pairs), column(count, pairs, across))


def hostile(names: Sequence[str]) -> Document:
    """Return a document in which every text that comes from outside is one of some names."""
    document = small(names[0])
    plan = document["plans"][0]
    template = plan["layers"][2]
    plan["layers"] = [deepcopy(template) for _ in names]
    for i, (layer, name) in enumerate(zip(plan["layers"], names, strict=True)):
        after = names[(i + 1) % len(names)]
        layer |= {"name": name, "kind": after, "why": name, "class": i % 2}
        layer["dims"] = [[names[(i + d) % len(names)], extent] for d, (_, extent) in enumerate(layer["dims"])]
        layer["parts"] = [{"name": name, "cost": 1e6, "overlapped": 0.0, "bytes": 8, "group": 2}]
        for tensor in layer["tensors"]:
            tensor |= {"name": name, "role": after}
            for dim in tensor["dims"]:
                dim["label"] = name
    pairs = [(i, i + 1) for i in range(len(names) - 1)]
    plan["edges"] = _edges(pairs)
    for edge, name in zip(plan["edges"], names, strict=False):
        edge["tensor"] = name
    plan["drawings"] = {"folded": column(len(names), pairs), "full": column(len(names), pairs)}
    plan["split_classes"] = [CLASSES[0], CLASSES[1] | {"label": names[1], "dims": [names[1]]}]
    plan["cost_parts"] = [names[0], names[1], names[2], names[3]]
    plan["step_parts"] = [[name, cost] for name, (_, cost) in zip(names[:4], plan["step_parts"], strict=True)]
    plan["certificate"] = plan["scope"] = names[2]
    plan |= {"model": names[0], "cost_model": names[2], "moved_are": names[3], "arguments": {n: n for n in names}}
    plan["machine"] |= {"name": names[1], "device": names[3]}
    plan["memory"]["optimiser"] = plan["search"]["ordering"] = names[0]
    plan["traffic"]["label"] = names[0]
    second = deepcopy(plan) | {"name": names[1]}
    second["layers"][0]["splits"] = [32, 1, 1, 1, 1, 1, 1]
    document["plans"].append(second)
    document["title"] = names[1]
    document["sweep"] = {
        "devices": [1, 2],
        "strategies": [{"name": name, "total_cost": [2.0, 1.0]} for name in names[:4]],
        "memory_bytes": [1, 1],
        "exact": [True, True],
        "search_time_s": [0.1, 0.1],
        "cost_unit": "FLOP",
        "problems": list(names[:2]),
        "model": names[0],
    }
    return document


def column(count: int, pairs: Sequence[tuple[int, int]], across: int = 1) -> Document:
    """Return a drawing of boxes in rows, top to bottom."""
    at = [(110 + 220 * (i % across), 44 + 80 * (i // across)) for i in range(count)]
    return {
        "width": 220 * across,
        "height": 80 * ((count - 1) // across) + 88,
        "vertices": [
            {"layer": i, "x": x, "y": y, "w": 180, "h": 44, "count": 1, "members": [i]} for i, (x, y) in enumerate(at)
        ],
        "edges": [
            {"edges": [e], "points": [list(at[a]), list(at[b])], "back": False} for e, (a, b) in enumerate(pairs)
        ],
        "blocks": [],
    }


def _edges(pairs: Sequence[tuple[int, int]]) -> list[Document]:
    return [
        {
            "from": a,
            "to": b,
            "tensor": "x",
            "is_weight": False,
            "forward_bytes": 1000 * (a % 7),
            "backward_bytes": 0,
            "cost": 0.0,
        }
        for a, b in pairs
    ]


def _layer(
    name: str, kind: str, dims: Any, splits: tuple[int, ...], split_class: int, costs: tuple[float, ...]
) -> Document:
    return {
        "name": name,
        "kind": kind,
        "dims": deepcopy(dims),
        "splits": list(splits),
        "replicas": 32 // prod(splits),
        "class": split_class,
        "costs": list(costs),
        "overlapped": 0.0,
        "share": sum(costs) / TOTAL,
        "memory_bytes": 6_380_000.0,
        "moved_bytes": 76_200_000,
        "devices": 0,
        "tensors": [
            _tensor("x", "activation", dims, splits, (0, len(dims) - 1)),
            _tensor("w", "parameter", dims, splits, (1, -1)),
        ],
        "why": f"{name}: because the next best would cost more",
        "parts": [{"name": "compute", "cost": costs[0], "overlapped": 0.0, "bytes": 0, "group": 1}],
        "runner_up": {
            "splits": [16, 2] + [1] * (len(dims) - 2),
            "difference": 5.8e8,
            "relative": 0.017,
            "is_tie": False,
            "changes": 2,
            "exact": True,
        },
        "num_configurations": 126,
    }


def _tensor(name: str, role: str, dims: Any, splits: Sequence[int], used: Sequence[int]) -> Document:
    used = [i % len(dims) for i in used]
    return {
        "name": name,
        "role": role,
        "dims": [{"label": dims[i][0], "extent": dims[i][1], "parts": splits[i], "by": [i]} for i in used],
    }


def _parts(layers: list[Document]) -> list[list[Any]]:
    return [[name, sum(layer["costs"][n] for layer in layers)] for n, name in enumerate(PARTS)]


def _document(name: str, layers: list[Document], edges: list[Document], drawing: Document) -> Document:
    total = sum(sum(layer["costs"]) for layer in layers)
    plan = {
        "name": name,
        "model": name,
        "arguments": {"batch": 128, "image": 224},
        "num_devices": 32,
        "cost_model": "paper",
        "cost_unit": "FLOP",
        "machine": {
            "name": "1080ti",
            "device": "GeForce GTX 1080 Ti",
            "flop_per_s": 1.134e13,
            "memory_bytes": 11_811_160_064,
            "levels": [{"name": "node", "devices": 8, "latency_s": 5e-6, "bandwidth_bytes_per_s": 12e9}],
        },
        "total_cost": total,
        "lower_bound": total,
        "gap": 0.0,
        "exact": True,
        "certificate": "proven optimal",
        "scope": "",
        "baselines": {"data_parallel": 13.08 * total},
        "search": {
            "ordering": "generate_seq",
            "largest_dependent_set": 1,
            "time_s": 0.049,
            "peak_memory_bytes": 59_636,
        },
        "memory": {
            "weights_bytes": 12_936_168,
            "gradients_bytes": 12_936_168,
            "optimiser_bytes": 0,
            "activations_bytes": 21_559_296,
            "buffers_bytes": 28_725_168,
            "total_bytes": 76_156_800,
            "limit_bytes": None,
            "optimiser": "sgd",
        },
        "cost_parts": list(PARTS),
        "step_parts": _parts(layers),
        "overlapped": 0.0,
        "split_classes": deepcopy(CLASSES),
        "layers": layers,
        "device_orders": [list(range(32))],
        "edges": edges,
        "moved_bytes": sum(layer["moved_bytes"] for layer in layers)
        + sum(edge["forward_bytes"] + edge["backward_bytes"] for edge in edges),
        "moved_are": "between all devices",
        "traffic": {
            "groups": 32,
            "group_size": 1,
            "label": "device",
            "bytes": [
                [a, b, 1000 * (1 + abs(a - b) ** 2)] for a in range(32) for b in range(32) if a != b and (a ^ b) < 8
            ],
        },
        "drawings": {"folded": drawing, "full": deepcopy(drawing)},
    }
    return {
        "schema_version": 1,
        "tool_version": __version__,
        "title": f"{name} on 32 devices",
        "plans": [plan],
        "sweep": None,
    }
