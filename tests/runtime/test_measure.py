"""What is counted of a step: bytes that cross devices, records of allocators; beside what was predicted."""

from collections.abc import Callable, Mapping
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pase.graph import Graph
from pase.graph.operators import with_fan_outs
from pase.models import build
from pase.planning.plan import Plan
from pase.sharding.traffic import Phase, edge_bytes, flows
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.primitives.mesh import ProgramGraph, Traffic
from pase.targets.mesh_tensorflow.runtime.devices import virtual_cpus
from pase.targets.mesh_tensorflow.runtime.measure import crossed, peak_bytes
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.training import Training
from pase.targets.programs import emit
from pase.targets.training.data import Array, Batches
from pase.targets.training.script import tabulated
from tests.runtime.networks import deep, lstms, small
from tests.runtime.plans import data_parallel_plan, make_plan, placed_plan
from tests.runtime.training import builder_of, trained


def test_tensors_count_and_control_edges_and_the_host_do_not() -> None:
    first, second, host = ("/device:CPU:1", "/device:CPU:2", "/device:CPU:0")
    with tf.Graph().as_default() as graph:
        with tf.device(host):
            fed = tf.placeholder(tf.float32, [100])
        with tf.device(first):
            x = fed * 2.0
            parts = tf.split(x, [40, 60])
        with tf.device(second):
            # 60 words once, though two operations read them, and a control edge.
            y = parts[1] + 1.0
            z = parts[1] * 3.0
            with tf.control_dependencies([x]):
                waits = tf.zeros([7]) + 1.0
        with tf.device(host):
            total = tf.reduce_sum(y) + tf.reduce_sum(z) + tf.reduce_sum(waits)
        config = tf.ConfigProto(device_count={"CPU": 3})
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        metadata = tf.RunMetadata()
        with tf.Session(config=config) as session:
            options = tf.RunOptions(output_partition_graphs=True)
            session.run(total, {fed: [0.0] * 100}, options=options, run_metadata=metadata)
    sends = [node for part in metadata.partition_graphs for node in part.node if node.op == "_Send"]
    assert len(sends) > 1
    assert crossed(metadata, graph, Traffic()).total_bytes == 60 * 4


def test_bytes_of_a_layer_are_told_apart_by_phase() -> None:
    """fc1 of 12 x 24 points, b = 2 c = 2: y [12, 24] is added up over c, its weight's gradient [6, 24] over b."""
    plan = make_plan(small("mlp"), 4, {"fc1": {"b": 2, "c": 2}, "fc2": {"b": 2, "n": 2}, "fc3": {"b": 2}})
    found = trained(plan, steps=1, dtype="float32", keep_alive=True)
    table = tabulated(found.traffic.bytes_by_movement, found.measured.by_movement)
    (row,) = (row for row in table["layers"] if row["name"] == "fc1")
    # Twice (k - 1) · n for each of two groups, 4 bytes a word; the bias [24] is on all 4 devices, added over b.
    assert row["forward"] == {"predicted_bytes": 2 * 2 * 12 * 24 * 4, "measured_bytes": 2 * 2 * 12 * 24 * 4}
    assert row["update"]["measured_bytes"] == 2 * 2 * (6 * 24 + 24) * 4
    # The data have no gradient.
    assert row["backward"] == {"predicted_bytes": 0, "measured_bytes": 0}
    assert row["measured_bytes"] == sum(row[phase.value]["measured_bytes"] for phase in Phase)
    moved = sum(edge["measured_bytes"] for edge in table["edges"])
    assert moved == sum(sum(edge_bytes(plan, edge)) for edge in plan.graph.edges)


def test_what_the_host_sends_is_apart() -> None:
    measured = trained(data_parallel_plan(small("mlp"), 4), steps=1, dtype="float32").measured
    # Of the inputs [24, 12] and the labels [24] each device gets its rows, and the rate; it says how many were right.
    data = (24 * 12 + 24) * 4
    loss = 4
    assert data < measured.host_bytes <= data + 2 * 4 * 4 + loss


# -- an LSTM, written out: B, S, UNITS and LAYERS of the network `lstms`

B, S, UNITS, LAYERS, ITEMSIZE = 6, 4, 12, 2, 4


def tensors(**splits: int) -> dict[str, int]:
    """Bytes within the layer by tensor, without those of the weights' gradients."""
    found: dict[str, int] = {}
    for flow in flows(make_plan(lstms(), prod(splits.values()), {"lstm": splits})):
        if flow.movement.producer == flow.movement.consumer == "lstm" and flow.tensor[-2:] not in (" w", " u", "as"):
            found[flow.tensor] = found.get(flow.tensor, 0) + flow.total_bytes
    return found


def test_a_wavefront() -> None:
    """Two groups of one layer, two parts of two steps: what goes on across each of the two boundaries."""
    hidden, state = B * S * UNITS * ITEMSIZE, B * UNITS * ITEMSIZE
    assert tensors(l=2, s=2) == {
        # To the second layer, and back.
        "hidden": hidden,
        "hidden_gradient": hidden,
        # Each layer's, to the second half of the sequence, and back.
        "state": 2 * LAYERS * state,
        "cell": 2 * LAYERS * state,
        # Programs hold input and output with both groups: one sends, and the other's gradient is added.
        "y": hidden,
        "gradient of x": 2 * hidden,
    }


def test_units_that_are_split() -> None:
    """d = 2 and e = 3: device (d, e) has units 4e to 4e + 4 of a state and reads units 6d to 6d + 6 of it."""
    written = [set(range(4 * e, 4 * e + 4)) for e in range(3)]
    read = [set(range(6 * d, 6 * d + 6)) for d in range(2)]
    times = LAYERS * S * B * ITEMSIZE
    assert tensors(d=2, e=3) == {
        "gates": 2 * (2 - 1) * 4 * UNITS * times,
        "hidden": times * sum(len(read[d] - written[e]) for d, e in np.ndindex(2, 3)),
        # Added up along e, then brought back.
        "hidden_gradient": times * (2 * (3 - 1) * UNITS + sum(len(written[e] - read[d]) for d, e in np.ndindex(2, 3))),
        "gradient of x": 2 * (3 - 1) * S * B * UNITS * ITEMSIZE,
    }


# -- memory: records made by hand, and what allocators gave out in a step


def recorded(device: str, *changes: tuple[int, int]) -> SimpleNamespace:
    """What is recorded of an operation that began and ended at time 1, by two allocators."""
    records = [SimpleNamespace(alloc_micros=time, alloc_bytes=size) for time, size in changes]
    halves = [SimpleNamespace(allocation_records=half) for half in (records[::2], records[1::2])]
    return SimpleNamespace(device=device, node_stats=[operation(1, 1, memory=halves)])


def operation(start: int, end: int, memory: list[SimpleNamespace]) -> SimpleNamespace:
    return SimpleNamespace(all_start_micros=start, op_end_rel_micros=end - start, memory=memory)


def test_the_peak_is_the_most_at_a_time() -> None:
    with tf.Graph().as_default() as graph, tf.device("/device:CPU:2"):
        tf.get_variable("w", [5, 4], tf.float64, use_resource=True)
    prefix = "/job:localhost/replica:0/task:0"
    # 10, then 10 + 30, then 30 + 5 with the first freed, then 5.
    changes = (1, 10), (2, 30), (3, -10), (3, 5), (4, -30)
    devices = [
        recorded(f"{prefix}/device:CPU:0", (1, 1000)),
        recorded(f"{prefix}/device:CPU:1", *changes),
        recorded(f"{prefix}/device:CPU:2", (1, 7)),
    ]
    metadata = SimpleNamespace(step_stats=SimpleNamespace(dev_stats=devices))
    assert peak_bytes(metadata, graph, virtual_cpus(3)) == [40, 5 * 4 * 8 + 7, 0]


def test_what_an_operation_frees_before_it_ends_is_not_held() -> None:
    """From 10 to 20, an output of 8 bytes and a workspace of 1,000; then, freed after its end, another 1,000."""
    changes = (11, 8), (12, 1000), (19, -1000), (15, 1000), (30, -1000)
    records = [SimpleNamespace(alloc_micros=time, alloc_bytes=size) for time, size in changes]
    kernel = operation(10, 20, [SimpleNamespace(allocation_records=records)])
    device = SimpleNamespace(device="/job:localhost/replica:0/task:0/device:CPU:1", node_stats=[kernel])
    metadata = SimpleNamespace(step_stats=SimpleNamespace(dev_stats=[device]))
    assert peak_bytes(metadata, tf.Graph(), virtual_cpus(1)) == [1008]


class InTurn(Training):
    """A training in whose steps each device runs one operation after the other, in the order of the program.

    TensorFlow runs whatever is ready, in an order that is another one in every session. So the gradient of a layer's
    weights, which no other layer waits for, may be left while the layers before that have their turn, and what it is
    made of is held beside what these work with: more than is predicted, now and then.
    """

    def initialise(self, seed: int, values: Mapping[str, Array] | None = None) -> None:
        """Give the operations of a step their order before there is a session that knows them."""
        of_step, left = set[Any](), [self._loss.op, self._update, *(tensor.op for tensor in self._accuracy)]
        while left:
            operation = left.pop()
            if operation not in of_step:
                of_step.add(operation)
                left += [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
        last: dict[str, Any] = {}
        for operation in self.session.graph.get_operations():
            if operation in of_step and operation.type not in ("Const", "NoOp", "Placeholder", "VarHandleOp"):
                if operation.device in last:
                    operation._add_control_input(last[operation.device])
                last[operation.device] = operation
        Training.initialise(self, seed, values)


def peak(plan: Plan) -> int:
    """Return the most that any device held at a time in a step."""
    with ProgramGraph().as_default() as graph:
        program = Program(num_devices=plan.num_devices)
        training = InTurn.start(program, builder_of(emit(plan))(program), learning_rate=0.1, seed=0)
        step = training.step(Batches(program.inputs, seed=0).batch(0), with_record=True)
        found = max(peak_bytes(step.record, graph, virtual_cpus(plan.num_devices)))
        training.close()
    return found


def gpt(steps: int) -> Graph:
    return build(
        "gpt", batch=4, arguments={"vocabulary": 24, "steps": steps, "layers": 2, "model_width": 8, "heads": 2}
    )


def lstm(steps: int) -> Graph:
    return build("rnnlm", batch=8, arguments={"vocabulary": 24, "units": 12, "steps": steps, "layers": 2})


def language(name: str) -> Graph:
    """A built-in network of which most is activations: a sum of gradients is small."""
    sizes = {"vocabulary": 24, "steps": 64, "layers": 1, "model_width": 8, "heads": 2, "hidden": 16}
    return build(name, batch=4, arguments=sizes)


MEASURED: dict[str, Callable[[], Graph]] = {
    "alexnet": lambda: small("alexnet"),
    "gpt with fan-outs": lambda: with_fan_outs(gpt(64)),
    "lenet5": lambda: build("lenet5", batch=96, arguments={"classes": 12}),
    "lstm": lambda: lstm(16),
    "mlp": lambda: build("mlp", batch=480, arguments={"inputs": 12, "hidden": 24, "layers": 3, "classes": 12}),
    "all of inception_v3": lambda: deep("inception_v3"),
    "bert_large": lambda: language("bert_large"),
    "densenet121": lambda: small("densenet121"),
    "gpt": lambda: gpt(64),
    "inception_v3": lambda: small("inception_v3"),
    "resnet101": lambda: small("resnet101"),
    "transformer": lambda: language("transformer"),
    "vgg16": lambda: build("vgg16", batch=16, arguments={"image": 64, "width": 16, "classes": 8}),
}


STRATEGIES = {"data parallel": lambda graph: data_parallel_plan(graph, 4)}
STRATEGIES |= {f"{p} {seed}": lambda graph, p=p, seed=seed: placed_plan(graph, p, seed) for p, seed in ((4, 0), (2, 1))}
QUICK = [("alexnet", "2 1"), ("gpt with fan-outs", "2 1"), ("lenet5", "data parallel"), ("lstm", "4 0"), ("mlp", "4 0")]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.full) for case in product(MEASURED, STRATEGIES) if case not in QUICK),
    ],
)
def test_a_program_takes_about_what_pytorch_does(name: str, how: str) -> None:
    plan = STRATEGIES[how](MEASURED[name]())
    measured, predicted = peak(plan), plan.peak.bytes
    assert 0.4 * measured <= predicted < 2.5 * measured


@pytest.mark.parametrize(
    ("network", "few", "many", "most"),
    [pytest.param(gpt, 64, 128, 1.5, marks=pytest.mark.full), (lstm, 8, 16, 2.0)],
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (None, 1))])
def test_it_grows_as_the_program_does(
    network: Callable[[int], Graph], few: int, many: int, most: float, seed: int | None
) -> None:
    """Attention's softmax and an LSTM's gates are tensors of no edge."""
    plans = [
        data_parallel_plan(network(steps), 2) if seed is None else placed_plan(network(steps), 2, seed)
        for steps in (few, many)
    ]
    measured = peak(plans[1]) - peak(plans[0])
    predicted = plans[1].peak.bytes - plans[0].peak.bytes
    assert measured / most <= predicted < most * measured
