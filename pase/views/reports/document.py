"""Reports: the description of plans as one JSON object, and the HTML file that shows it; the page computes no costs."""

import html
import json
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from importlib.resources import files
from math import prod
from typing import Any, Unpack

from pase._version import __version__
from pase.analysis.explanation import CostParts, LayerOverview, Overview, Part, PartKind, every_choice, overview
from pase.analysis.figures import (
    BETWEEN_ALL,
    COMMUNICATION,
    COMPUTE,
    RECOMPUTE,
    REDISTRIBUTION,
    LayerFigures,
    StepBytes,
    cost_figures,
    step_bytes_of,
)
from pase.analysis.simulation.pipeline import StagedSimulation, simulate_stages
from pase.common.documents import StrPath, attributes, write_or_fail
from pase.costs import Problem, cost_model
from pase.errors import ConfigurationError, PaseError, PlanError
from pase.graph import DimIndex, Graph, Operator, SliceOf, Window
from pase.planning.passes import Work
from pase.planning.plan import Plan
from pase.planning.planner import MAX_DEVICES, Progress, SearchSettings, search, settings_of, whole_graph
from pase.planning.steps import TrainingStep
from pase.views.drawing.folding import arranged
from pase.views.drawing.plans import DrawnPlan, drawn_plan, split_classes

MOST_PASSES = 6_000
"""Maximum number of passes that the page draws, the first ones of a step."""


def simulated(plan: Plan) -> tuple[StagedSimulation | None, str]:
    """Simulate a step of a plan with stages or modes; None, and the reason, where that is impossible or not needed."""
    try:
        return simulate_stages(plan) if plan.has_parts else None, ""
    except PlanError as error:  # of several stages in one group of devices
        return None, str(error)


def stages_document(found: StagedSimulation) -> dict[str, Any]:
    """Return how the stages of a plan spend a step.

    works: kinds of work of a stage, by name. stages: for each `layers`, its first and last layer, `devices`, first and
    last, `times_s` of the works for one micro-batch. passes: [stage, work, micro-batch or null, begin, end] in seconds,
    by their begin; `num_passes`: their total number.
    """
    works = [*Work]
    passes = sorted(found.passes, key=lambda each: (each.begin_s, each.stage))
    return {
        "step_time_s": found.step_time_s,
        "closed_form_s": found.closed_form_s,
        "waiting_share": found.bubble,
        "works": [str(work) for work in works],
        "stages": [
            {
                **asdict(use),
                "layers": [found.plan.index[name] for name in use.layers],
                "devices": [use.devices[0], use.devices[1] - 1],
                "times_s": [use.times_s[work] for work in works],
                "micro_batch_s": use.micro_batch_s,
            }
            for use in found.stages
        ],
        "num_passes": len(passes),
        "passes": [
            [each.stage, works.index(each.work), each.micro_batch, each.begin_s, each.end_s]
            for each in passes[:MOST_PASSES]
        ],
    }


# -- costs of other configurations; text shared by several layers is stored once

_DIGITS = 9
"""Digits of differences relative to the plan's cost: costs that differ by less are equal."""


def choices_document(
    plan: Plan, *, time_limit_s: float | None = None, on_progress: Progress | None = None
) -> tuple[dict[str, Any] | None, str]:
    """Return the cost of each layer's other configurations and the accompanying changes, and a note on missing ones.

    The result is None where nothing is known.

    splits: all configurations that occur. changes: changes of other layers, [distance from this layer in the plan's
    order, row of splits, …]. lists: for each, `entries` of [row of splits, relative difference to the plan's cost, row
    of changes], `num_configurations`, and `beyond`, the least difference of those without an entry. layers: index of
    each layer's list, null for those that were not reached within the time limit.
    """
    try:
        found = every_choice(plan, time_limit_s=time_limit_s, on_progress=on_progress)
    except PlanError as error:
        return None, str(error)

    splits: dict[tuple[int, ...], int] = {}
    changes: dict[tuple[int, ...], int] = {}
    lists: dict[Hashable, tuple[int, dict[str, Any]]] = {}

    def relative(difference: float) -> float:
        return round(difference / plan.total_cost, _DIGITS) if plan.total_cost else 0.0

    def numbered(row: tuple[int, ...]) -> int:
        return splits.setdefault(row, len(splits))

    layers: list[int | None] = []
    for number, layer in enumerate(found):
        if layer is None:
            layers.append(None)
            continue
        entries = []
        for choice in layer.choices:
            changed = tuple(part for other, row in choice.changes for part in (other - number, numbered(row)))
            entries.append(
                (numbered(choice.splits), relative(choice.difference), changes.setdefault(changed, len(changes)))
            )
        key = tuple(entries), layer.num_configurations, relative(layer.beyond)
        whole = {"entries": entries, "num_configurations": layer.num_configurations, "beyond": relative(layer.beyond)}
        layers.append(lists.setdefault(key, (len(lists), whole))[0])
    missing = layers.count(None)
    note = ""
    if missing:
        note = (
            f"what other configurations would cost is not known of {missing} of {len(layers)} layers, which were not "
            f"reached within the time limit of {time_limit_s:g} s; give more time (--time-limit)"
        )
    return {
        "splits": list(splits),
        "changes": list(changes),
        "lists": [whole for _, whole in lists.values()],
        "layers": layers,
    }, note


# -- cost as a function of the number of devices: the same network searched on each number

OURS, DATA_PARALLEL = "PaSE", "data parallelism"


def sweep(
    plan: Plan,
    numbers: Sequence[int],
    *,
    reload: Callable[[int], Graph] | None = None,
    on_progress: Progress | None = None,
    **changes: Unpack[SearchSettings],
) -> dict[str, Any]:
    """Return the costs of a plan's network on other numbers of devices, with its machine and settings.

    A number that cannot be searched gets a reason.

    Args:
        plan: Plan whose network is searched, without its constraints.
        numbers: Numbers of devices.
        reload: As for `search`.
        on_progress: Called with the current activity and the fraction that is complete.
        **changes: Settings of the searches that differ from those of the plan.

    Returns:
        As JSON: model; cost_unit, of the costs of a step; devices; strategies, each with its name and total_cost;
        memory_bytes, of a device; stages, micro_batches, of a step; exact, whether the cost is proven to be least;
        search_time_s; problems, why a strategy is missing, or "". All have an entry for each number, null where a
        strategy is missing.
    """
    settings: SearchSettings = {**settings_of(plan), "constraints": (), **changes}
    whole = whole_graph(plan, reload)
    found: list[Plan | None] = []
    problems: list[str] = []
    for number, devices in enumerate(numbers):
        if on_progress:
            on_progress(f"searching for {devices} devices", number / len(numbers))
        try:
            found.append(search(whole, devices, machine=plan.machine, reload=reload, **settings))
            problems.append("")
        except PaseError as error:
            found.append(None)
            problems.append(str(error))
    return {
        "model": plan.graph.name,
        "cost_unit": plan.cost_unit,
        "devices": list(numbers),
        "strategies": [
            {"name": OURS, "total_cost": [one and one.total_cost for one in found]},
            {"name": DATA_PARALLEL, "total_cost": [one and one.baselines["data_parallel"] for one in found]},
        ],
        "memory_bytes": [one and one.memory.total_bytes for one in found],
        "stages": [one and one.num_groups for one in found],
        "micro_batches": [one and one.micro_batches for one in found],
        "exact": [one and one.exact for one in found],
        "search_time_s": [one and one.search.time_s for one in found],
        "problems": problems,
    }


def device_numbers(text: str) -> tuple[int, ...]:
    """Parse "1..64" (1, 2, 4, … 64) or "8,12,16" to numbers of devices; ConfigurationError for other text."""
    first, dots, last = text.partition("..")
    numbers: tuple[int, ...] = ()
    with suppress(ValueError):
        if not dots:
            numbers = tuple(map(int, text.split(",")))
        elif 0 < int(first) <= int(last):  # the first, twice that, and so on, and the last
            powers = (int(first) << power for power in range(MAX_DEVICES.bit_length()))
            numbers = (*(number for number in powers if number < int(last)), int(last))
    if not numbers or min(numbers) < 1 or max(numbers) > MAX_DEVICES or list(numbers) != sorted(set(numbers)):
        raise ConfigurationError(
            f"{text!r} says no numbers of devices; expected 1..64 (which doubles: 1, 2, 4, … 64) or a list that "
            f"grows, as 4,8,12, of numbers up to {MAX_DEVICES}"
        )
    return numbers


# -- the report


def cost_parts(plan: Plan) -> tuple[tuple[Part, ...], ...]:
    """Return [layers] the parts of each layer cost t_l; those of repeated layers are computed once."""
    model = cost_model(plan.cost_model, plan.machine, plan.group_size, plan.precision)
    found = []
    for stage, choice in TrainingStep.of(plan).problems:
        parts = CostParts(Problem.of(stage.tables, plan.micro_batches), model)
        found += [parts.own(vertex, own) for vertex, own in enumerate(choice)]
    return tuple(found)


BOX = (168.0, 44.0)
"""Width and height of a layer's box, in CSS pixels at scale 1."""


def _place(x: float, y: float, width: float, height: float) -> dict[str, float]:
    return {"x": round(x, 1), "y": round(y, 1), "w": width, "h": height}


def _drawing(shown: DrawnPlan) -> dict[str, Any]:
    """Return the positions of boxes and lines on the page."""
    graph = shown.graph
    drawn = arranged(graph, shown.repeats, [BOX] * len(graph.vertices))
    return {
        "width": round(drawn.width, 1),
        "height": round(drawn.height, 1),
        "vertices": [
            {
                "layer": layer,
                **_place(x, y, *BOX),
                "count": len(graph.members[layer]),
                "members": list(graph.members[layer]),
            }
            for layer, (x, y) in zip(graph.vertices, drawn.positions, strict=True)
        ],
        "edges": [
            {
                "edges": list(edge.edges),
                "points": [[round(x, 1), round(y, 1)] for x, y in route],
                "back": edge.is_loop_back,
            }
            for edge, route in zip(graph.edges, drawn.routes, strict=True)
        ],
        "blocks": [
            {
                **_place(frame.x, frame.y, round(frame.width, 1), round(frame.height, 1)),
                "count": frame.repeat.count,
                "label": f"×{frame.repeat.count}",
            }
            for frame in drawn.frames
        ],
    }


def layer_tensors(operator: Operator, splits: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the tensors that an operator reads and writes, with the parts into which its splits divide each dim.

    A dim has `parts` parts, numbered by the digits of the iteration dims in `by` (their positions), row-major.
    """
    position = {name: number for number, name in enumerate(operator.extents)}
    named = [*((read, str(read.role)) for read in operator.reads), *((write, "output") for write in operator.writes)]
    return [
        {
            "name": access.tensor,
            "role": role,
            "dims": [
                _tensor_dim(axis, extent, splits, position)
                for axis, extent in zip(access.index_map, access.shape, strict=True)
            ],
        }
        for access, role in named
    ]


def _tensor_dim(axis: DimIndex, extent: int, splits: Mapping[str, int], position: Mapping[str, int]) -> dict[str, Any]:
    label, dims = _indexed_by(axis)
    by = [dim for dim in dims if splits[dim] > 1]
    return {
        "label": label,
        "extent": extent,
        "parts": prod(splits[dim] for dim in by),
        "by": [position[dim] for dim in by],
    }


def _indexed_by(axis: DimIndex) -> tuple[str, tuple[str, ...]]:
    """Return the name of a tensor dim, and the iteration dims whose splits divide it."""
    match axis:
        case None:
            return "", ()
        case str():
            return axis, (axis,)
        case Window():
            return f"{axis.out} (window {axis.kernel})", (axis.out,)
        case SliceOf():
            return f"{axis.dim} [{axis.offset}:{axis.offset + axis.extent}]", (axis.dim,)
        case _:
            return "·".join(axis), axis


MOST_GROUPS = 64
"""Maximum rows of the table of devices; with more devices, each row is a group of them."""


def _matrix(plan: Plan, transferred: StepBytes) -> dict[str, Any] | None:
    """Return the bytes between groups of devices, zeros omitted; None where they are unknown.

    Bytes from a group to itself are those between its devices. A group is a device, or, for many devices, a group of a
    level of the machine, if there is a suitable level.
    """
    if transferred.what != BETWEEN_ALL:
        return None
    size, label = 1, "device"
    if plan.num_devices > MOST_GROUPS:
        size, label = -(-plan.num_devices // MOST_GROUPS), "group"
        for level in plan.machine.levels_spanned(plan.num_devices)[:-1]:
            if level.num_devices and plan.num_devices <= MOST_GROUPS * level.num_devices:
                size, label = level.num_devices, level.name
                break
    # Flows of repeated layers share one table of bytes, which is evaluated once.
    times = Counter(id(flow.bytes_by_pair) for flow in transferred.flows)
    tables = {id(flow.bytes_by_pair): flow.bytes_by_pair for flow in transferred.flows}
    moved: Counter[tuple[int, int]] = Counter()
    for key, table in tables.items():
        for (sender, receiver), size_bytes in table.items():
            moved[sender // size, receiver // size] += times[key] * size_bytes
    return {
        "groups": -(-plan.num_devices // size),
        "group_size": size,
        "label": label,
        "bytes": [[*ends, size_bytes] for ends, size_bytes in sorted(moved.items())],
    }


SCHEMA_VERSION = 1

COST_PARTS = {
    COMPUTE: (PartKind.COMPUTE,),
    "all-reduce": (PartKind.GRADIENTS, PartKind.PARTIAL_SUMS, PartKind.INPUT_GRADIENTS),
    "halo": (PartKind.HALO,),
    "exchange": (PartKind.EXCHANGE,),
    REDISTRIBUTION: (),
}
"""Parts of a layer's cost; redistribution is that of its incoming edges and of the weights that it shares."""

STEP_PARTS = (COMPUTE, RECOMPUTE, COMMUNICATION, REDISTRIBUTION)
"""Likewise, for steps with micro-batches, stages or modes; communication includes that of stages and of weights."""


def report_document(
    plans: Mapping[str, Plan],
    *,
    sweep: dict[str, Any] | None = None,
    explains: bool = True,
    interactive: bool = False,
    time_limit_s: float | None = None,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Return the JSON form of a report of one or more plans, by the names that it uses for them.

    The same plans give the same object, unless time runs out; missing parts are then noted in it.

    Args:
        plans: Plans by name.
        sweep: Costs on other numbers of devices.
        explains: Whether to include why each layer is as it is.
        interactive: Whether to include the costs of each layer's other configurations.
        time_limit_s: Limit for either, over all plans.
        on_progress: Called with the current activity and the fraction that is complete.
    """
    share_s = None if time_limit_s is None else time_limit_s / len(plans)
    return {
        "schema_version": SCHEMA_VERSION,
        "tool_version": __version__,
        "title": ", ".join(dict.fromkeys(plan.graph.name for plan in plans.values())),
        "plans": [
            _plan(
                name,
                plan,
                *(_explained(plan, share_s, on_progress) if explains else (None, "")),
                choices_document(plan, time_limit_s=share_s, on_progress=on_progress) if interactive else (None, ""),
            )
            for name, plan in plans.items()
        ],
        "sweep": sweep,
    }


def _explained(plan: Plan, time_limit_s: float | None, on_progress: Progress | None) -> tuple[Overview | None, str]:
    """Return the explanation of a plan, or why there is none."""
    try:
        return overview(plan, time_limit_s=time_limit_s, on_progress=on_progress), ""
    except PlanError as error:  # configurations that no search considers
        return None, str(error)


def _plan(
    name: str,
    plan: Plan,
    why: Overview | None,
    why_note: str,
    choices: tuple[dict[str, Any] | None, str],
) -> dict[str, Any]:
    classes = split_classes(plan.layers)
    figures, transferred = cost_figures(plan), step_bytes_of(plan)
    parts: Sequence[Sequence[Part]] = [layer.parts for layer in why.layers] if why else cost_parts(plan)
    names = list(STEP_PARTS if plan.has_parts else COST_PARTS)
    costs = [_costs(plan, own, of) for own, of in zip(figures.layers, parts, strict=True)]
    means = {name: sum(row[n] for row in costs) / plan.num_groups for n, name in enumerate(names)}
    staged, stages_note = simulated(plan)
    orders: dict[tuple[int, ...], int] = {}
    shown = "model=graph.name num_devices cost_model cost_unit precision=precision.name total_cost lower_bound gap"
    of_memory = "memory.total_bytes peak_bytes=peak.bytes peak_layer=peak.layer peak_phase=peak.phase"
    return {
        "name": name,
        **attributes(plan, f"{shown} exact certificate scope micro_batches schedule num_groups"),
        "arguments": _arguments(plan),
        "machine": {
            **attributes(plan.machine, "name device=device.name memory_bytes=device.memory_bytes"),
            "flop_per_s": plan.machine.peak_flop_per_s(),
            "levels": [
                attributes(level, "name devices=num_devices latency_s bandwidth_bytes_per_s")
                for level in plan.machine.levels
            ],
        },
        "baselines": dict(plan.baselines),
        "search": asdict(plan.search),
        "memory": asdict(plan.memory) | attributes(plan, f"{of_memory} limit_bytes=device_memory_bytes optimiser"),
        "stages": stages_document(staged) if staged else None,
        "stages_note": stages_note,
        "why_note": why_note,
        "choices": choices[0],
        "choices_note": choices[1],
        "cost_parts": names,
        "step_parts": [[part, cost] for part, cost in (figures.parts if plan.has_parts else means).items()],
        "overlapped": figures.overlapped,
        "split_classes": [attributes(found, "dims label light dark") for found in classes.classes],
        "layers": [
            {
                **_layer(plan, number, parts[number], figures.layers[number]),
                "class": classes.of_layer[number],
                "costs": costs[number],
                "moved_bytes": None if transferred.layers is None else transferred.layers.get(layer.name, 0),
                "devices": orders.setdefault(layer.devices, len(orders)),
                **_why(why.layers[number] if why else None, plan.total_cost),
            }
            for number, layer in enumerate(plan.layers)
        ],
        "device_orders": [list(order) for order in orders],
        "edges": _edges(plan, transferred),
        "moved_bytes": transferred.total,
        "moved_are": transferred.what,
        "traffic": _matrix(plan, transferred),
        "drawings": {
            name: _drawing(drawn_plan(plan, is_folded=is_folded, costs=figures, transferred=transferred))
            for name, is_folded in (("folded", True), ("full", False))
        },
    }


def _arguments(plan: Plan) -> dict[str, Any]:
    """Return the arguments that the network was built with; the batch is that of a step."""
    found = dict(plan.graph.arguments)
    batch, count = found.get("batch"), plan.micro_batches
    if count > 1 and isinstance(batch, int):
        found["batch"] = f"{batch * count} ({count} micro-batches of {batch})"
    return found


def _costs(plan: Plan, figures: LayerFigures, parts: Sequence[Part]) -> list[float]:
    """Return the exposed cost of each part of a layer's cost, without what is overlapped."""
    if plan.has_parts:
        return [figures.compute, figures.recompute, figures.exposed_communication, figures.exposed_transfer]
    exposed = [(part.kind, part.cost - figures.overlapped_share * part.hideable) for part in parts]
    own = [sum(cost for kind, cost in exposed if kind in kinds) for kinds in COST_PARTS.values()]
    return [*own[:-1], figures.exposed_transfer]


def _edges(plan: Plan, transferred: StepBytes) -> list[dict[str, Any]]:
    """Return the graph's edges, in its order, then shared weights, with their transfers and costs."""
    costs = {(layer.name, transfer.input): transfer.cost for layer in plan.layers for transfer in layer.transfers}
    sides = "forward_bytes", "backward_bytes"
    edges = [
        {
            "from": plan.index[edge.producer],
            "to": plan.index[edge.consumer],
            "tensor": plan.graph[edge.consumer].reads[edge.input].tensor,
            **dict(zip(sides, sizes, strict=True)),
            "cost": costs[edge.consumer, edge.input],
            "is_weight": False,
        }
        for edge, sizes in zip(plan.graph.edges, transferred.edges, strict=True)
    ]
    for of_weight in transferred.weights:
        reads = enumerate(plan.graph[of_weight.consumer].reads)
        positions = [position for position, read in reads if read.shared == of_weight.weight]
        edges.append(
            {
                "from": plan.index[of_weight.producer],
                "to": plan.index[of_weight.consumer],
                "tensor": of_weight.weight,
                **attributes(of_weight, "forward_bytes backward_bytes"),
                "cost": sum(costs.get((of_weight.consumer, position), 0.0) for position in positions),
                "is_weight": True,
            }
        )
    return edges


def _layer(plan: Plan, number: int, parts: Sequence[Part], figures: LayerFigures) -> dict[str, Any]:
    layer = plan.layers[number]
    return {
        **attributes(layer, "name kind replicas=num_replicas state is_recomputed stage memory_bytes"),
        "dims": [list(dim) for dim in layer.dims.items()],
        "splits": list(layer.splits.values()),
        **attributes(figures, "overlapped share"),
        "tensors": layer_tensors(plan.graph.operators[number], layer.splits),
        "parts": [
            attributes(part, "name cost bytes=size_bytes group")
            | {"overlapped": figures.overlapped_share * part.hideable}
            for part in parts
        ],
    }


def _why(why: LayerOverview | None, total_cost: float) -> dict[str, Any]:
    if why is None:
        return dict.fromkeys(("why", "why_of", "num_configurations", "runner_up"))
    runner_up = why.runner_up
    found = attributes(why, "why=reason why_of=like num_configurations")
    return found | {
        "runner_up": runner_up
        and {
            **attributes(runner_up, "difference is_tie exact=is_exact"),
            **attributes(runner_up, "state=choice.state is_recomputed=choice.is_recomputed"),
            "splits": list(runner_up.choice.splits.values()),
            "relative": runner_up.difference / total_cost if total_cost else 0.0,
            "changes": None if runner_up.changes is None else len(runner_up.changes),
        }
    }


MODULES = (
    *("elements", "quantities", "report", "theme", "tables", "marks", "summary", "drawing", "viewport", "paint"),
    *("overview", "pointer", "journey", "legend", "finder", "shards", "panel", "panel_parts", "choices", "charts"),
    *("stages", "costs", "memory", "traffic", "beside", "sweep", "help", "paper", "main"),
)
"""Modules of the page's program, in the order in which they are joined: each may use the functions of all others."""

CHARTS = "vendor/echarts.min.js"
LICENCES = ("vendor/NOTICE.txt", "vendor/LICENSE.txt", "vendor/LICENSE-d3.txt")


def report(
    plans: Plan | Mapping[str, Plan],
    path: StrPath | None = None,
    *,
    explains: bool = True,
    interactive: bool = False,
    time_limit_s: float = 30.0,
) -> str:
    """Return a page that shows a plan, or several side by side by name, as self-contained HTML.

    Args:
        plans: A plan, or several by name.
        path: File to write it to as well.
        explains: Whether it says why each layer is as it is.
        interactive: Whether a click on another configuration of a layer shows its cost and the accompanying changes.
        time_limit_s: Limit for either.

    Raises:
        PlanError: The file cannot be written.
    """
    by_name = plans if isinstance(plans, Mapping) else {plans.graph.name: plans}
    page = render(report_document(by_name, explains=explains, interactive=interactive, time_limit_s=time_limit_s))
    if path is not None:
        write_or_fail(path, page, PlanError)
    return page


def render(document: Mapping[str, Any]) -> str:
    """Return the report as the text of one HTML file; the same document gives the same bytes.

    `document` is the contents of the page, as JSON values; docs/report.md names its fields. Names in it are data: they
    are escaped here and become text nodes there. Scripts and styles are only allowed by their hashes, so that injected
    code could not run. Raises ValueError where a number is not finite.
    """
    style = page_text("style.css")
    # One function around all modules keeps their names private, also from the charts' library.
    modules = "\n".join(page_text(f"{name}.js").strip() for name in MODULES)
    program = f'\n(() => {{\n"use strict";\n{modules}\n}})();\n'
    charts = page_text(CHARTS)
    pieces = {
        "title": html.escape(str(document["title"])).encode("ascii", "xmlcharrefreplace").decode("ascii"),
        "policy": _policy(scripts=(program, charts), styles=(style,)),
        "style": style,
        "data": embedded(document),
        "licences": embedded("\n\n".join(page_text(name).strip() for name in LICENCES)),
        "program": program,
        "charts": charts,
    }
    # In one pass: inserted text is not substituted again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: pieces[found[1]], page_text("index.html"))


def embedded(value: object) -> str:
    r"""Return a value as JSON that is safe in a script element: ASCII without `<`, `>` and `&`."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _policy(*, scripts: Iterable[str], styles: Iterable[str]) -> str:
    directives = {
        "default-src": ("'none'",),
        "script-src": tuple(map(_hash, scripts)),
        "style-src": tuple(map(_hash, styles)),
        "img-src": ("data:",),
        "base-uri": ("'none'",),
        "form-action": ("'none'",),
    }
    return "; ".join(f"{name} {' '.join(sources)}" for name, sources in directives.items())


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def page_text(name: str) -> str:
    """Return the contents of a file of the page."""
    return files("pase.views.reports").joinpath("page", *name.split("/")).read_text(encoding="utf-8")
