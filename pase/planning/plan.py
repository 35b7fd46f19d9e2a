"""`Plan`: the result of a search, everything that emitting, running and explaining it needs."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from pase._loading import method_of_plans
from pase.common.containers import FrozenDict
from pase.common.documents import StrPath
from pase.common.words import quantity, short
from pase.costs import DEFAULT_OPTIMISER, REPLICATED, DeviceMemory, Peak
from pase.errors import PlanError
from pase.graph import Graph, Precision
from pase.machine import Machine
from pase.planning.constraints import Constraints, splits_text

SCHEMA_VERSION = 3

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
"""In which order the stages of a pipeline work through the micro-batches."""

NOT_SEARCHED = "none"
"""For the ordering, of a strategy that was given."""
STAGES, STAGES_IN_TURNS = "stages", "stages, also in turns"
"""Likewise, of steps in parts: under the interleaved schedule groups of devices may have several stages in turns, of
which the search has the cuts alone that share out the work most evenly."""

CHEAPEST = "cheapest"
"""Among a plan's baselines: the cheapest strategy that is known, of which the plan's own is a more regular one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The predicted traffic of one incoming edge, or of a weight that an earlier layer, the producer, shares.

    input: position in the layer's reads. cost: in the unit of the plan's total; for a shared weight it holds the
    all-reduce of its gradient, where the layouts differ. forward_bytes, backward_bytes: that move between layouts.
    """

    producer: str
    input: int
    cost: float
    forward_bytes: float
    backward_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer's part of a strategy.

    dims: extent of each iteration dim. splits: split factor of each of them, in the same order.
    devices: [p] device of each part, row-major over the dims that are split (in order) and then the replicas.
    layer_cost: t_l, made of compute_cost and communication_cost. memory_bytes: what it keeps on each device through
    a step; layers add up to `Plan.memory.kept_bytes`, beside which `buffers_bytes` come and go. hideable_cost: of what
    the layer and its transfers cost, communication that can hide; cover_cost: computation that others can hide behind;
    None where costs add up (`Plan.hidden_cost`). state: in `STATES`, how the devices that hold the same part of a
    weight share it, its gradient and the optimizer's state. is_recomputed: whether what its backward pass needs is
    computed again instead of kept. stage: of the pipeline, from 0; its devices are those of the stage's group alone.
    """

    name: str
    kind: str
    dims: Mapping[str, int]
    splits: Mapping[str, int]
    devices: tuple[int, ...]
    layer_cost: float
    compute_cost: float
    communication_cost: float
    memory_bytes: float
    transfers: tuple[Transfer, ...]
    hideable_cost: float | None = None
    cover_cost: float | None = None
    state: str = REPLICATED
    is_recomputed: bool = False
    stage: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", FrozenDict(self.dims))
        object.__setattr__(self, "splits", FrozenDict(self.splits))

    @property
    def num_parts(self) -> int:
        """Product of the splits."""
        return prod(self.splits.values())

    @property
    def uneven_dims(self) -> tuple[str, ...]:
        """The dims that their splits do not divide: of their parts the first have a point more than the others."""
        return tuple(dim for dim, parts in self.splits.items() if self.dims[dim] % parts)

    @property
    def num_replicas(self) -> int:
        """How many devices hold each part."""
        return len(self.devices) // self.num_parts

    @property
    def transfer_cost(self) -> float:
        """Cost of all that the layer fetches from earlier ones."""
        return sum((transfer.cost for transfer in self.transfers), 0.0)


def hidden_cost(layers: Iterable[LayerPlan]) -> float:
    """Return what of the costs of layers and transfers is hidden: all that can, or all that there is to hide behind."""
    parts = [(layer.hideable_cost or 0.0, layer.cover_cost or 0.0) for layer in layers]
    return min(sum(hideable for hideable, _ in parts), sum(cover for _, cover in parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """How the strategy was found.

    Attributes:
        ordering: NOT_SEARCHED where it was given.
        largest_dependent_set: Of the ordering.
        time_s: Of all of the search.
        peak_memory_bytes: Of the solver's tables.
        simplify: Up to which share it may cost more than the cheapest one known, so that it is more regular.
        configurations: That layers at one place of repeated blocks have, over all places; 0 where it is the cheapest.
        cheapest_configurations: The same, of the cheapest one, whose cost is among the plan's baselines.
    """

    ordering: str
    largest_dependent_set: int
    time_s: float
    peak_memory_bytes: int
    simplify: float = 0.0
    configurations: int = 0
    cheapest_configurations: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A strategy with its certificate.

    total_cost: F(G, φ) (Eq. 1), less what is hidden; lower_bound: proven; exact: whether they are known to be equal.
    baselines: total cost of other strategies by name. optimiser: the name of the one whose state counts as memory.
    device_memory_bytes: what the strategy was to fit, or None; the certificate holds among those that fit. constraints:
    what it was to keep to; the certificate holds among the strategies that do; where `search.ordering` is
    STAGES_IN_TURNS, of steps with several stages for each group of devices among those of the most even cuts.
    micro_batches: that a step consists of,
    of which `graph` computes one. schedule: in `SCHEDULES`, of a pipeline; "" where there is one stage. num_groups: of
    devices, that have the stages in turns.
    Nothing in a plan can be changed: its certificate is of what it says. Notebooks show it as a table of its layers.
    """

    graph: Graph
    machine: Machine
    num_devices: int
    cost_model: str
    cost_unit: str
    layers: tuple[LayerPlan, ...]
    total_cost: float
    lower_bound: float
    exact: bool
    baselines: Mapping[str, float]
    search: SearchRecord
    tool_version: str
    optimiser: str = DEFAULT_OPTIMISER
    device_memory_bytes: int | None = None
    constraints: Constraints = ()
    micro_batches: int = 1
    schedule: str = ""
    num_groups: int = 1
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "baselines", FrozenDict(self.baselines))

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Position of each layer by name."""
        return FrozenDict({layer.name: i for i, layer in enumerate(self.layers)})

    @property
    def num_stages(self) -> int:
        """How many stages its pipeline has, chunks of one group of devices counted apart."""
        return 1 + max(layer.stage for layer in self.layers)

    @property
    def group_size(self) -> int:
        """How many devices a stage has."""
        return self.num_devices // self.num_groups

    @property
    def step_text(self) -> str:
        """How its step is made up, in words."""
        return step_text(
            micro_batches=self.micro_batches,
            num_stages=self.num_stages,
            num_groups=self.num_groups,
            num_devices=self.num_devices,
            schedule=self.schedule,
        )

    @property
    def has_parts(self) -> bool:
        """Whether it has micro-batches, stages or modes of layers, so that its cost is no sum of its layers'."""
        has_modes = any(layer.state != REPLICATED or layer.is_recomputed or layer.stage for layer in self.layers)
        return has_modes or self.micro_batches > 1

    @property
    def precision(self) -> Precision:
        """The types that the network is trained in; costs and memory are those of them."""
        return self.graph.precision

    @property
    def hidden_cost(self) -> float:
        """What of the costs of layers and transfers is not paid, because it hides behind other parts of them."""
        return hidden_cost(self.layers)

    @cached_property
    def hideable_cost(self) -> float:
        """What of the layers' communication could hide."""
        return sum(layer.hideable_cost or 0.0 for layer in self.layers)

    def modes_of(self, layer: LayerPlan) -> tuple[str, ...]:
        """Return what a layer does besides being split: its stage, the state of its weights, whether it is recomputed.

        Each only where there is something to say of it.
        """
        stage = [f"stage {layer.stage}"] if self.num_groups > 1 else []
        return (*stage, *[layer.state] * (layer.state != REPLICATED), *["recomputed"] * layer.is_recomputed)

    @cached_property
    def peak(self) -> Peak:
        """The most that lies in a device's memory at once as PyTorch runs a step, and when that is."""
        peak: Peak = method_of_plans("peak")(self)
        return peak

    @cached_property
    def placed_cost(self) -> float:
        """What a step costs between the devices that the layers are placed on, in `cost_unit`.

        `total_cost` has each layer's axes over the levels of the machine as suits it best and each edge by its best
        assignment of parts to devices, which one placement of all layers may not reach.
        """
        cost: float = method_of_plans("placed_cost")(self)
        return cost

    @property
    def memory(self) -> DeviceMemory:
        """What is in a device's memory at the peak; of stages, on the devices of the one that needs most."""
        return self.peak.memory

    @property
    def share_of_limit(self) -> float:
        """The peak as a share of the memory limit that the plan was searched under; 0.0 without a limit."""
        return self.peak.bytes / self.device_memory_bytes if self.device_memory_bytes else 0.0

    @property
    def certificate(self) -> str:
        """What is proven of the total cost, in words, and among which strategies where that is not all of them."""
        even_cuts = "; of stages in turns the most even cuts alone" * (self.search.ordering == STAGES_IN_TURNS)
        if self.exact:
            return f"proven optimal{self.scope}{even_cuts}"
        return f"gap {self.gap:.2%}, lower bound {quantity(self.lower_bound, self.cost_unit)}{even_cuts}"

    @property
    def scope(self) -> str:
        """What strategies have to keep to for the certificate to hold among them, in words; "" for nothing."""
        return scope_text(self.constraints, self.device_memory_bytes)

    def __repr__(self) -> str:
        cost = quantity(self.total_cost, self.cost_unit)
        over = self.share_of_limit - 1
        excess = f", peak {over:.1%} over the memory limit" if over > 0 else ""
        return f"<Plan of {short(self.graph.name)} on {self.num_devices} devices: {cost}, {self.certificate}{excess}>"

    def __getitem__(self, name: str) -> LayerPlan:
        """Return the layer of that name; KeyError if there is none."""
        return self.layers[self.index[name]]

    def __iter__(self) -> Iterator[LayerPlan]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __contains__(self, name: object) -> bool:
        """Return whether a layer has that name."""
        return name in self.index

    def replace(self, layer: str, *, rest: str = "optimal", **splits: int) -> "Plan":
        """Return a plan in which a layer has another configuration: ``plan.replace("fc1", n=4, c=2)``.

        Args:
            layer: its name.
            rest: "optimal" to choose all other layers anew, the cheapest beside this one; "kept" to keep them.
            splits: of its dims, those that are not named are not split.

        Returns:
            A plan with its own costs, and a gap to what this plan's certificate says no strategy can cost less than.

        Raises:
            PaseError: no such layer, dim or configuration, or what the plan's constraints or memory limit rule out.
        """
        plan: Plan = method_of_plans("replace")(self, layer, rest=rest, **splits)
        return plan

    def save(self, path: StrPath) -> None:
        """Write the plan as a JSON file, which `pase.load_plan` and all commands read; PlanError where it cannot be."""
        method_of_plans("save")(self, path)

    @property
    def gap(self) -> float:
        """(total_cost - lower_bound) / total_cost, 0 where exact."""
        return 0.0 if self.exact or self.total_cost == 0 else (self.total_cost - self.lower_bound) / self.total_cost

    def to_dataframe(self) -> Any:
        """Return a pandas.DataFrame with one row for each layer, by name; MissingExtraError where pandas is not there.

        Its columns are those of `pase export --to csv`; costs are in the plan's cost_unit, sizes in bytes.
        """
        return method_of_plans("to_dataframe")(self)

    def to_networkx(self) -> Any:
        """Return a networkx.MultiDiGraph: a node for each layer, an edge for each tensor that one has from another.

        Nodes have the columns of `to_dataframe` for attributes; edges have tensor (its name in the reading layer),
        is_shared_weight, cost, forward_bytes and backward_bytes, and the position among the layer's reads for a key.
        MissingExtraError where networkx is not there.
        """
        return method_of_plans("to_networkx")(self)

    def plot(self, *, fold: bool = True) -> Any:
        """Return the graph as a picture that notebooks show and that saves itself: ``plan.plot().save("plan.svg")``.

        fold: show blocks of layers that repeat once, with their number.
        """
        return method_of_plans("plot")(self, fold=fold)

    def _repr_html_(self) -> str:
        return str(method_of_plans("_repr_html_")(self))


def configuration_text(splits: Mapping[str, int], num_devices: int) -> str:
    """Return a configuration in words: "b=4 n=2", with "×4" where four devices hold each part, or "not split"."""
    text = splits_text(splits)
    replicas = num_devices // prod(splits.values())
    return text if replicas == 1 else f"{text} ×{replicas}"


def scope_text(constraints: Constraints, device_memory_bytes: int | None) -> str:
    """Return what strategies have to keep to, as it is said behind "proven optimal"; "" for nothing."""
    limits = ["the constraints"] * bool(constraints) + ["the limit"] * (device_memory_bytes is not None)
    return f" within {' and '.join(limits)}" if limits else ""


def step_text(*, micro_batches: int, num_stages: int, num_groups: int, num_devices: int, schedule: str) -> str:
    """Return how a step is made up, in words."""
    parts = f"{micro_batches} micro-batch{'es' * (micro_batches > 1)}"
    if num_groups == 1:
        return parts
    group = num_devices // num_groups
    if num_stages > num_groups:
        devices = f"{num_groups} groups of {group} devices with {num_stages // num_groups} stages each"
        return f"{parts} through {devices} ({schedule})"
    return f"{parts} through {num_groups} stages of {group} devices ({schedule})"


def on_one_device(plan: Plan) -> Plan:
    """Return a plan's network on one device, of as many micro-batches, without modes of layers."""
    layers = (
        replace(
            layer,
            splits=dict.fromkeys(layer.splits, 1),
            devices=(0,),
            state=REPLICATED,
            is_recomputed=False,
            stage=0,
        )
        for layer in plan.layers
    )
    return replace(plan, num_devices=1, layers=tuple(layers), num_groups=1, schedule="")


def check_even(plan: Plan, what: str) -> None:
    """Raise PlanError where a split does not divide its dim; what: needs that it does."""
    for layer in plan:
        for dim in layer.uneven_dims:
            raise PlanError(
                f"layer {short(layer.name)!r} splits {dim} = {layer.dims[dim]} in {layer.splits[dim]} parts of other "
                f"sizes; {what} needs splits that divide their dims (programs for PyTorch take others: emit, run)"
            )


def check_one_stage(plan: Plan, what: str) -> None:
    """Raise PlanError where a plan has several stages; what: has none."""
    if plan.num_stages > 1:
        raise _refused(f"has {plan.num_stages} stages", what)


def check_plain(plan: Plan, what: str) -> None:
    """Raise PlanError where a plan has micro-batches, stages or modes of layers; what: has none of these."""
    check_one_stage(plan, what)
    found = ""
    if plan.micro_batches > 1:
        found = f"has {plan.micro_batches} micro-batches in a step"
    for layer in plan:
        if layer.state != REPLICATED:
            found = found or f"holds the weights of layer {short(layer.name)!r} in pieces ({layer.state})"
        if layer.is_recomputed:
            found = found or f"recomputes layer {short(layer.name)!r}"
    if found:
        raise _refused(found, what)


def _refused(found: str, what: str) -> PlanError:
    """Return the error of a plan that is, or has, what was found, for something that takes no such plan."""
    return PlanError(
        f"the plan {found}; {what} takes no such plan: train it with PyTorch (emit and run with --target torch, "
        "pase.parallelize), or search for one without"
    )
