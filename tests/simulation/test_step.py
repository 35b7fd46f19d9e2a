"""How a step is put together: which movements follow one another, and what a sum waits for."""

from pase.analysis.simulation.engine import Collective, Compute, Fabric, Label, TaskGraph
from pase.analysis.simulation.step import COLLECTIVES, FabricTasks, Front, build_step, layer_work
from pase.planning.plan import Plan
from pase.sharding.edges import edge_steps
from pase.sharding.reshard import Stage, point_to_point
from pase.sharding.traffic import Phase
from tests.runtime.networks import mixed, tied
from tests.runtime.plans import data_parallel_plan, random_plan
from tests.simulation.machines import machine

MACHINE = machine((0, 1e-6, 1e9))


class Recording(FabricTasks):
    """Writes down what is sent."""

    def __init__(self, tasks: TaskGraph, fabric: Fabric) -> None:
        super().__init__(tasks, fabric)
        self.sent: list[tuple[Label, dict[tuple[int, int], int]]] = []

    def send(self, label: Label, stage: Stage, point_bytes: int, times: int, front: Front) -> None:
        self.sent.append((label, dict(stage)))
        super().send(label, stage, point_bytes, times, front)


def built(plan: Plan, way: str) -> Recording:
    network = Recording(TaskGraph(), Fabric.of(MACHINE, plan.num_devices))
    build_step(plan, layer_work(plan, MACHINE), network, COLLECTIVES[way], overlaps=True)
    return network


def test_gradients_take_the_hops_of_an_edge_backwards() -> None:
    found = 0
    for seed in range(20):
        plan = random_plan(mixed(), 4, seed)
        edges = [edge for edge in plan.graph.edges if len(edge_steps(plan, edge)) > 1]
        sent = built(plan, "program").sent if edges else []
        for edge in edges:
            hops = edge_steps(plan, edge)
            orders = {
                Phase.FORWARD: [point_to_point(hop) for hop in hops],
                Phase.BACKWARD: [point_to_point(hop.adjoint) for hop in reversed(hops)],
            }
            for phase, expected in orders.items():
                tensor = plan.graph[edge.consumer].reads[edge.input].tensor
                label = Label(producer=edge.producer, consumer=edge.consumer, tensor=tensor, phase=phase)
                assert [stage for own, stage in sent if own == label] == expected
                found += expected != expected[::-1]
    assert found > 10  # the order is more than a matter of form


def test_the_sum_of_a_shared_gradient_waits_for_all_that_is_added() -> None:
    """Data parallel, three layers hold the table: the one sum of its gradient awaits the backward pass of each."""
    tasks = built(data_parallel_plan(tied(), 2), "hierarchical").tasks
    (total,) = [
        task
        for task, found in enumerate(tasks.tasks)
        if isinstance(found, Collective) and found.label.producer == "first" and found.label.phase is Phase.BACKWARD
    ]
    awaited = [tasks.tasks[task] for task, followers in enumerate(tasks.followers) if total in followers]
    assert {(task.label.producer, task.label.phase, task.device) for task in awaited if isinstance(task, Compute)} == {
        (layer, Phase.BACKWARD, device) for layer in ("first", "second", "fc") for device in range(2)
    }
