"""Trains models under plans on virtual CPU devices, beside the same functions on one device; see test_parallel.py."""

from typing import Any

import jax
import numpy as np
import optax

import pase
from pase.graph import Access, Graph, Operator
from pase.graph.operator import SCANNED
from pase.planning.plan import Plan
from pase.sharding.traffic import flows
from tests.exports.boxes import plan_boxes
from tests.exports.placements import mesh_plan
from tests.networks import slow_machine
from tests.runtime.plans import make_plan, random_plan
from tests.targets.jax.collectives import moved_bytes
from tests.targets.jax.models import MODELS, Model

Tree = Any

OPTIMISER = optax.sgd(1e-2, momentum=0.9)


def planned(graph: Graph, num_devices: int, kind: str) -> Plan:
    """Return the plan "searched", "random 3" (any devices), "mesh 3" (on axes of one mesh) or "alike 3".

    The last has the turns of each loop split alike. "held" is of the convolutional network: positions that are split
    together with channels, and a grouped convolution on half of the devices, both of which XLA computes wrong.
    """
    if kind == "held":
        split = {"conv1": {"n": 2, "h": num_devices // 2}, "conv2": {"g": 2}, "conv3": {"w": 2, "c": 2}}
        return make_plan(graph, num_devices, split | {"reduce_window_max": {"h": 2, "w": num_devices // 2}})
    if kind == "searched":
        return pase.search(graph, num_devices, machine=slow_machine())
    name, seed = kind.split()
    if name != "alike":
        return (mesh_plan if name == "mesh" else random_plan)(graph, num_devices, int(seed))
    plan = mesh_plan(graph, num_devices, int(seed))
    places = [operator.attribute(SCANNED, "") for operator in graph.operators]
    first = {place: layer for place, layer in reversed(list(zip(places, plan.layers, strict=True))) if place}
    layers = {op.name: first.get(place, plan[op.name]) for op, place in zip(graph.operators, places, strict=True)}
    splits = {name: layer.splits for name, layer in layers.items()}
    return make_plan(graph, num_devices, splits, {name: layer.devices for name, layer in layers.items()})


def loops(jaxpr: Any) -> int:
    """Return how many loops a program has."""
    inner = [
        getattr(program, "jaxpr", program)
        for equation in jaxpr.eqns
        for program in equation.params.values()
        if hasattr(program, "eqns") or hasattr(program, "jaxpr")
    ]
    return sum(equation.primitive.name == "scan" for equation in jaxpr.eqns) + sum(map(loops, inner))


def trained(function: Any, model: Model, weights: Tree, batch: Tree) -> tuple[list[Any], Tree, Tree, Any]:
    """Return losses, the first gradients, the weights after three steps, and what is returned besides the loss."""
    has_more = bool(model.layers)

    @jax.jit
    def step(weights: Tree, state: Tree) -> Any:
        found, gradients = jax.value_and_grad(function, has_aux=has_more)(weights, *batch)
        updates, state = OPTIMISER.update(gradients, state, weights)
        return found, gradients, optax.apply_updates(weights, updates), state

    state, losses, first, more = OPTIMISER.init(weights), [], None, None
    for _ in range(3):
        found, gradients, weights, state = step(weights, state)
        first = gradients if first is None else first
        loss, more = found if has_more and more is None else (found[0] if has_more else found, more)
        losses.append(loss)
    return losses, first, weights, more


def difference(ours: Tree, theirs: Tree) -> float:
    """Return the greatest difference of arrays, by the greatest of all numbers of each but not by less than 1e-3."""
    pairs = [
        (np.asarray(a), np.asarray(b)) for a, b in zip(*map(jax.tree_util.tree_leaves, (ours, theirs)), strict=True)
    ]
    least = 1e-3 * max(float(np.abs(b).max()) for _, b in pairs)
    return max(float(np.abs(a - b).max()) / max(least, float(np.abs(b).max())) for a, b in pairs)


def misplaced(plan: Plan, operator: Operator, access: Access, array: Any) -> list[str]:
    """Return on which devices an array lies otherwise than the plan has it."""
    if access.shape != array.shape:
        return [f"{operator.name} {access.tensor}: shape {array.shape}, in the graph {access.shape}"]
    boxes = plan_boxes(plan, operator, access)
    found = []
    for shard in array.addressable_shards:
        box = tuple(part.indices(extent)[:2] for part, extent in zip(shard.index, array.shape, strict=True))
        if box != boxes[shard.device.id]:
            found.append(
                f"{operator.name} {access.tensor} on {shard.device.id}: {box}, planned {boxes[shard.device.id]}"
            )
    return found


def parallelized(model: Model, plan: Plan) -> Any:
    devices = jax.devices()[: plan.num_devices]
    return pase.parallelize((model.loss, model.weights, *model.batch), plan, devices=devices)


def notes(name: str, num_devices: int, kind: str) -> list[str]:
    """Return what a model under a plan is noted to do otherwise than planned."""
    model = MODELS[name]()
    graph = pase.load((model.loss, model.weights, *model.batch))
    return [*parallelized(model, planned(graph, num_devices, kind)).notes]


def case(model: Model, graph: Graph, num_devices: int, kind: str, expected: Any) -> dict[str, Any]:
    """Return how a model trained under a plan differs from the model itself, and what lies elsewhere."""
    plan = planned(graph, num_devices, kind)
    parallel = parallelized(model, plan)
    weights = jax.device_put(model.weights, parallel.shardings[0])
    batch = [jax.device_put(x, lies) for x, lies in zip(model.batch, parallel.shardings[1:], strict=True)]
    found = trained(parallel, model, weights, batch)
    wrong = []
    if not kind.startswith(("random", "held")):
        # What XLA would compute wrong is not split as planned.
        unsaid = [name for note in parallel.notes if "held back" in note for name in note.partition(":")[0].split(", ")]
        for name, array in zip(model.layers, found[3] or (), strict=True):
            if name in unsaid:
                continue
            wrong += misplaced(plan, plan.graph[name], plan.graph[name].writes[0], array)
            operator = plan.graph[name]
            for access in operator.parameters:
                for tree in (weights, found[1]):
                    (held,) = [leaf for leaf in jax.tree_util.tree_leaves(tree[name]) if leaf.shape == access.shape]
                    wrong += misplaced(plan, operator, access, held)
    names = ("losses", "gradients", "weights", "returned")
    differences = {
        name: difference(ours, theirs)
        for name, ours, theirs in zip(names, found, expected, strict=True)
        if theirs is not None
    }
    return {
        "differences": differences,
        "wrong": wrong,
        "loops": loops(jax.make_jaxpr(parallel)(model.weights, *model.batch).jaxpr),
        "devices": len(found[0][0].sharding.device_set),
        "split": sum(len({str(s.index) for s in w.addressable_shards}) > 1 for w in jax.tree_util.tree_leaves(weights)),
    }


def moved(name: str, num_devices: int) -> dict[str, list[int]]:
    """Return (bytes that XLA moves in a step, bytes predicted) of plans of a model with layers fc1 and fc2."""
    model = MODELS[name]()

    def loss(*arguments: Any) -> Any:
        return model.loss(*arguments)[0]

    graph = pase.load((loss, model.weights, *model.batch))
    points = {operator.name: {"b": num_devices} for operator in graph.operators}
    split = {
        "data": points,
        "megatron": {"fc1": {"n": num_devices}, "fc2": {"c": num_devices}},
        "both": points | {"fc1": {"b": 2, "n": num_devices // 2}, "fc2": {"b": 2, "c": num_devices // 2}},
    }
    found = {}
    for kind, splits in split.items():
        plan = make_plan(graph, num_devices, splits)
        parallel = pase.parallelize((loss, model.weights, *model.batch), plan, devices=jax.devices()[:num_devices])
        lies = parallel.shardings
        step = jax.jit(jax.value_and_grad(parallel), in_shardings=lies, out_shardings=(None, lies[0]))
        text = step.lower(*jax.device_put((model.weights, *model.batch), lies)).compile().as_text()
        itemsize = 8 // graph.precision.itemsize  # numbers are of 64 bits here
        found[kind] = [sum(moved_bytes(text).values()), itemsize * sum(flow.total_bytes for flow in flows(plan))]
    return found


def train(name: str, cases: list[tuple[int, str]]) -> list[dict[str, Any]]:
    """Run a model under plans; return what was found of each."""
    model = MODELS[name]()
    graph = pase.load((model.loss, model.weights, *model.batch))
    expected = trained(model.loss, model, model.weights, model.batch)
    return [case(model, graph, num_devices, kind, expected) for num_devices, kind in cases]
