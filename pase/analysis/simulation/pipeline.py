"""`simulate_stages`: a step of micro-batches and stages, pass by pass: when a stage works on what, and when it waits.

A group of devices does what `pase.planning.stages.actions` says, one action after the other, each as soon as what it
needs of other stages is there. A pass takes what the search counts for it, between the plan's devices: what hides
within a micro-batch is hidden here, too, and a stage that receives a tensor has nothing else to do meanwhile. So closed
form and simulation differ in the order of passes alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from pase.analysis.simulation.simulation import trace_event, trace_text
from pase.common.documents import StrPath
from pase.machine import Machine, load_machine
from pase.planning.passes import NONE, Pass, Work, run_passes, stage_times
from pase.planning.plan import Plan
from pase.planning.stages import ONE_FORWARD_ONE_BACKWARD, actions, check_stages, group_devices, step_s
from pase.planning.steps import TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """How a stage spends the step.

    layers: its first and its last. devices: first and one past the last. times_s: of one micro-batch, and of what is
    done once. busy_s: of the step. waiting_s: of its devices, which do not wait while they have another stage's turn.
    in_flight: micro-batches whose backward pass is to come, at most. memory_bytes: of each device, for this stage.
    """

    stage: int
    layers: tuple[str, str]
    num_layers: int
    devices: tuple[int, int]
    times_s: Mapping[Work, float]
    busy_s: float
    waiting_s: float
    in_flight: int
    memory_bytes: float

    @property
    def micro_batch_s(self) -> float:
        """What a micro-batch takes, both ways."""
        return sum(time_s for work, time_s in self.times_s.items() if work != Work.ONCE)


@dataclass(frozen=True, kw_only=True)
class StagedSimulation:
    """A simulated step. hides: whether communication hides as the plan's cost model has it. passes: as they were begun.

    step: what was simulated. times_s: [stages] what a micro-batch takes of each, and what is done once.
    """

    plan: Plan
    step: TrainingStep
    hides: bool
    times_s: tuple[Mapping[Work, float], ...]
    passes: tuple[Pass, ...]

    @property
    def machine(self) -> Machine:
        return self.step.machine

    @property
    def step_time_s(self) -> float:
        """Until the last stage is through."""
        return max(each.end_s for each in self.passes)

    @cached_property
    def closed_form_s(self) -> float:
        """What the search's closed form says of the same passes (`pase.planning.stages.step_s`)."""
        groups = [self.times_s[group :: self.plan.num_groups] for group in range(self.plan.num_groups)]
        once = [sum(times[Work.ONCE] for times in chunks) for chunks in groups]
        often = [sum(sum(times.values()) for times in chunks) - own for chunks, own in zip(groups, once, strict=True)]
        return step_s(often, once, self.plan.micro_batches, chunks=max(map(len, groups)))

    @cached_property
    def stages(self) -> tuple[StageUse, ...]:
        """How each stage spends the step."""
        plan, found = self.plan, []
        busy_s = [0.0] * plan.num_stages
        for each in self.passes:
            busy_s[each.stage] += each.duration_s
        for number, ((first, beyond), times_s) in enumerate(zip(self.step.bounds, self.times_s, strict=True)):
            devices = group_devices(plan, number)
            in_flight = self._in_flight(number)
            found.append(
                StageUse(
                    stage=number,
                    layers=(plan.layers[first].name, plan.layers[beyond - 1].name),
                    num_layers=beyond - first,
                    devices=(devices.start, devices.stop),
                    times_s=times_s,
                    busy_s=busy_s[number],
                    waiting_s=max(0.0, self.step_time_s - sum(busy_s[number % plan.num_groups :: plan.num_groups])),
                    in_flight=in_flight,
                    memory_bytes=self.step.peaks[number].bytes,
                )
            )
        return tuple(found)

    def _in_flight(self, number: int) -> int:
        own = [each.work for each in self.passes if each.stage == number]
        last = Work.WEIGHTS if Work.WEIGHTS in own else Work.BACKWARD
        under_way = most = 0
        for work in own:
            under_way += (work == Work.FORWARD) - (work == last)
            most = max(most, under_way)
        return most

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they wait."""
        groups = self.stages[: self.plan.num_groups]
        whole_s = self.step_time_s * len(groups)
        return sum(stage.waiting_s for stage in groups) / whole_s if whole_s else 0.0

    @property
    def slowest(self) -> int:
        """The stage that the others wait for."""
        return max(range(len(self.stages)), key=lambda number: self.stages[number].micro_batch_s)

    @property
    def fill(self) -> float:
        """The share of the time that filling and draining the pipeline would take with stages of one length."""
        fill = (self.plan.num_groups - 1) / self.step.chunks
        return fill / (self.plan.micro_batches + fill)

    @cached_property
    def critical_path(self) -> tuple[Pass, ...]:
        """What the step waited for, in order: each pass begins where the one before it ends; they fill the step."""
        number = max(range(len(self.passes)), key=lambda each: (self.passes[each].end_s, -each))
        path = []
        while number != NONE:
            path.append(self.passes[number])
            number = path[-1].awaited
        return tuple(reversed(path))


def simulate_stages(plan: Plan, *, machine: Machine | StrPath | None = None, overlaps: bool = True) -> StagedSimulation:
    """Return a step of a plan with micro-batches, stages or modes of layers, pass by pass.

    Args:
        plan: any plan; one without parts is one stage with one micro-batch.
        machine: a `Machine`, the name of a preset or a machine file; by default the plan's own.
        overlaps: whether communication hides as the plan's cost model has it; else all of it is waited for.

    Raises:
        MachineError: the plan's devices do not fill the machine's groups.
        PlanError: groups of devices cannot have the stages in turns.
    """
    if plan.num_stages != plan.num_groups:
        check_stages(plan)
    step = TrainingStep.of(plan, as_placed=True)
    if machine is not None:
        step = replace(step, machine=machine if isinstance(machine, Machine) else load_machine(machine))
    if step.cost_model == "paper":
        step = replace(step, cost_model="alpha_beta")
    times_s = tuple(
        stage_times(problem, choice, overlaps=overlaps, splits_backward=plan.schedule == "zero_bubble")
        for problem, choice in step.problems
    )
    orders = [
        actions(
            plan.schedule or ONE_FORWARD_ONE_BACKWARD,
            group=group,
            num_groups=plan.num_groups,
            num_stages=plan.num_stages,
            micro_batches=plan.micro_batches,
        )
        for group in range(plan.num_groups)
    ]
    return StagedSimulation(plan=plan, step=step, hides=overlaps, times_s=times_s, passes=run_passes(orders, times_s))


def chrome_trace(simulation: StagedSimulation) -> str:
    """Return the passes in the format of chrome://tracing and Perfetto: a process for each stage, times in µs."""
    events: list[dict[str, object]] = []
    for stage in simulation.stages:
        first, beyond = stage.devices
        name = f"stage {stage.stage}: devices {first} to {beyond - 1}"
        events.append({"ph": "M", "name": "process_name", "pid": stage.stage, "args": {"name": name}})
    for each in simulation.passes:
        is_whole = each.micro_batch is None
        events.append(
            trace_event(
                each.work if is_whole else f"{each.work} {each.micro_batch}",
                each.work,
                each.stage,
                0,
                each.begin_s,
                each.end_s,
                {} if is_whole else {"micro_batch": each.micro_batch},
            )
        )
    return trace_text(simulation.plan, events, {"machine": simulation.machine.name})
