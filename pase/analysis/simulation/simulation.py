"""`simulate`: one training step of a placed plan on a machine, and what there is to say of it."""

from dataclasses import dataclass
from functools import cached_property

from pase.analysis.simulation.collectives import COLLECTIVES, DEFAULT_COLLECTIVES, Network
from pase.analysis.simulation.critical import Activity, PathStep, critical_path
from pase.analysis.simulation.engine import Schedule, run
from pase.analysis.simulation.fabric import Fabric
from pase.analysis.simulation.step import build_step
from pase.analysis.simulation.tasks import TaskGraph
from pase.analysis.simulation.usage import DeviceTime, LevelUse, PhaseTime, device_times, level_uses, phase_times
from pase.analysis.simulation.work import layer_work
from pase.common.documents import StrPath
from pase.errors import SimulationError, unknown_name
from pase.machine import Machine, load_machine
from pase.planning.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A simulated training step.

    collectives: how sums travelled, by name. overlaps: whether gradients of weights were summed while the backward
    pass went on. fabric: the links. tasks, schedule: what was done, and when.
    """

    plan: Plan
    machine: Machine
    collectives: str
    overlaps: bool
    fabric: Fabric
    tasks: TaskGraph
    schedule: Schedule

    @property
    def step_time_s(self) -> float:
        """From the first task's start to the last one's end."""
        return self.schedule.step_time_s

    @cached_property
    def critical_path(self) -> tuple[PathStep, ...]:
        """What the step's time consists of, in order, without gaps."""
        return critical_path(self.tasks, self.schedule)

    @cached_property
    def activities(self) -> dict[Activity, float]:
        """Seconds of the critical path by what they are spent on; together the step's time."""
        total = dict.fromkeys(Activity, 0.0)
        for step in self.critical_path:
            total[step.activity] += step.duration_s
        return total

    @cached_property
    def devices(self) -> tuple[DeviceTime, ...]:
        """How each device spends the step."""
        return device_times(self.tasks, self.schedule, self.fabric)

    @cached_property
    def phases(self) -> tuple[PhaseTime, ...]:
        """What each phase takes."""
        return phase_times(self.tasks, self.schedule, self.fabric)

    @cached_property
    def levels(self) -> tuple[LevelUse, ...]:
        """How the links of each level are used, the innermost first."""
        return level_uses(self.tasks, self.schedule, self.fabric)


def simulate(
    plan: Plan,
    *,
    machine: Machine | StrPath | None = None,
    collectives: str = DEFAULT_COLLECTIVES,
    overlaps: bool = True,
) -> Simulation:
    """Return one training step of a placed plan, task by task; the same arguments always give the same step.

    machine: a `Machine`, the name of a preset or a machine file; by default the plan's own. collectives: a name in
    `COLLECTIVES`. overlaps: whether gradients of weights are summed while the backward pass goes on. Raises
    SimulationError for an unknown name, MachineError where the plan's devices do not fill the machine's groups,
    RuntimeFailure or EmitError where a layer's splits fit no mesh.
    """
    if collectives not in COLLECTIVES:
        raise SimulationError(unknown_name("way of collectives", collectives, COLLECTIVES))
    if machine is None:
        machine = plan.machine
    machine = machine if isinstance(machine, Machine) else load_machine(machine)
    fabric = Fabric.of(machine, plan.num_devices)
    network = Network(TaskGraph(), fabric)
    tasks = build_step(plan, layer_work(plan, machine), network, COLLECTIVES[collectives], overlaps=overlaps)
    return Simulation(
        plan=plan,
        machine=machine,
        collectives=collectives,
        overlaps=overlaps,
        fabric=fabric,
        tasks=tasks,
        schedule=run(tasks, fabric.links, plan.num_devices),
    )
