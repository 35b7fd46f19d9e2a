"""Peaks of allocators: records made by hand, and a real step."""

from types import SimpleNamespace

from pase.costs.memory import device_memory
from pase.targets.emitter import emit
from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.devices import virtual_cpus
from pase.targets.mesh_tensorflow.runtime.measure import peak_bytes
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.training import Training
from pase.targets.training.data import Batches
from tests.runtime.networks import small
from tests.runtime.plans import data_parallel_plan
from tests.runtime.training import builder_of


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


def test_a_step_holds_its_weights_and_no_more_than_predicted() -> None:
    plan = data_parallel_plan(small("lenet5"), 4)
    with tf.Graph().as_default() as graph:
        program = Program(num_devices=4)
        training = Training.start(program, builder_of(emit(plan))(program), learning_rate=0.1, seed=0)
        step = training.step(Batches(program.inputs, seed=0).batch(0), with_record=True)
        peaks = peak_bytes(step.record, graph, virtual_cpus(4))
        training.close()
    predicted = device_memory(plan)
    assert len(peaks) == 4
    # Weights, and the gradients that are added up before they are used.
    assert all(predicted.weights_bytes + predicted.gradients_bytes < peak for peak in peaks)
    # Sums bring the others' shares to a device: no more than the gradients once again.
    assert all(peak <= predicted.total_bytes + predicted.gradients_bytes for peak in peaks)
