"""`LayerMesh`: the mesh of one layer; `MeshImplementation`: how Mesh-TensorFlow lays tensors out on it.

`ProgramGraph`: the TensorFlow graph that they are lowered to. `Traffic`: what a program's operations were planned to
move between devices, and for which layer or edge.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pase.errors import ProgramError
from pase.sharding.layouts import DeviceMesh
from pase.sharding.reshard import SMALL_POINTS
from pase.sharding.traffic import Movement, Phase
from pase.targets.mesh_tensorflow.primitives.compat import mtf, placement, tf


@dataclass(slots=True)
class Traffic:
    """Bytes that a program's operations were planned to move between devices in one step.

    bytes_by_operation, movements: by the TensorFlow name scope of the operations that move something.
    phase: of what is being lowered. keeps_alive: whether everything that is planned is moved, also what nobody uses,
    and nothing on behalf of two; kept: then, the operations to run for that.
    """

    keeps_alive: bool = False
    bytes_by_operation: dict[str, int] = field(default_factory=dict)
    movements: dict[str, Movement] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    phase: Phase = Phase.FORWARD

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Lower what belongs to another phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @property
    def bytes_by_movement(self) -> dict[Movement, int]:
        """Bytes of each edge and each layer, by phase."""
        found: dict[Movement, int] = {}
        for operation, movement in self.movements.items():
            found[movement] = found.get(movement, 0) + self.bytes_by_operation[operation]
        return found

    @property
    def total_bytes(self) -> int:
        """Bytes of one step."""
        return sum(self.bytes_by_operation.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Counts what goes from a layer's devices to another's (or its own); both as of now, gradients go back."""

    traffic: Traffic
    source: str
    target: str

    def coming_from(self, layer: str) -> "Account":
        """Return the account of what another layer sends to this one."""
        return replace(self, source=layer)

    def add(self, operation: str, moved_bytes: int) -> None:
        """Count bytes of an operation, the name scope in which whatever is moved is first used."""
        phase = self.traffic.phase
        ends = (self.target, self.source) if phase is Phase.BACKWARD else (self.source, self.target)
        movement = Movement(producer=ends[0], consumer=ends[1], phase=phase)
        self.traffic.movements[operation] = movement
        self.traffic.bytes_by_operation[operation] = self.traffic.bytes_by_operation.get(operation, 0) + moved_bytes

    @property
    def keeps_alive(self) -> bool:
        """Whether what nobody uses is moved too."""
        return self.traffic.keeps_alive

    def keep(self, tensors: list[Any]) -> None:
        """Have tensors computed where they are whether they are used or not, if that is asked for."""
        if self.keeps_alive:
            self.traffic.kept.extend(tensor.op for tensor in tensors)


class ProgramGraph(tf.Graph):
    """A graph that has each constant once on each device.

    Layers name the same shapes, orders of dims and numbers again and again: with a constant for each time, these were
    a third of a program's operations. Initial values of variables, which are fed, stay apart: they belong to the host,
    and no device is named for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._device_names: tuple[str, ...] = ()
        self._shared: dict[tuple[Any, ...], Any] = {}
        self._numbers: dict[tuple[Any, ...], Any] = {}

    def numbers(self, values: tuple[int, ...]) -> Any:
        """Return the constant of some whole numbers that the present device has."""
        key = (self._device_names, values)
        if key not in self._numbers:
            with self.control_dependencies(None):
                self._numbers[key] = tf.constant(values, tf.int32, [len(values)])
        return self._numbers[key]

    @contextmanager
    def device(self, device_name_or_function: Any) -> Iterator[None]:
        """Place operations, as `tf.device` asks for it."""
        outer = self._device_names
        if isinstance(device_name_or_function, str):
            self._device_names = (*outer, device_name_or_function)
        else:
            self._device_names = ()
        try:
            with super().device(device_name_or_function):
                yield
        finally:
            self._device_names = outer

    def _create_op_internal(self, op_type: str, *arguments: Any, **options: Any) -> Any:
        """Return a new operation, or the constant of that value that the device has."""
        names = self._device_names
        attributes = options.get("attrs") or {}
        if op_type != "Const" or not names or "/device:" not in names[-1] or {*attributes} != {"dtype", "value"}:
            return super()._create_op_internal(op_type, *arguments, **options)
        key = (names, attributes["value"].SerializeToString())
        if key not in self._shared:
            # Others use it too: it waits for nothing.
            with self.control_dependencies(None):
                self._shared[key] = super()._create_op_internal(op_type, *arguments, **options)
        return self._shared[key]


def numbers(values: Sequence[int]) -> Any:
    """Return a constant of whole numbers: a shape, an order of dims.

    Operations take lists, too, but make a message of each before it is found to be one that there is: twice the time.
    """
    graph = tf.get_default_graph()
    return graph.numbers(tuple(values)) if isinstance(graph, ProgramGraph) else tf.constant(values, tf.int32)


class LayerMesh(mtf.Mesh):
    """The devices of one layer in a grid whose axes are named like the dims that they split.

    name: TensorFlow's. layer: its name, for messages. devices: the grid. device_names: [positions] TensorFlow's names.
    """

    def __init__(
        self, graph: Any, *, name: str, layer: str, devices: DeviceMesh, device_name: Callable[[int], str]
    ) -> None:
        super().__init__(graph, name)
        self.name = name
        self.layer = layer
        self.devices = devices
        self.device_names = [device_name(device) for device in devices.devices]

    def implementation(self, traffic: Traffic) -> "MeshImplementation":
        """Return what lowers this mesh's tensors: a dim is split by the axis of its name."""
        shape = mtf.Shape([mtf.Dimension(name, size) for name, size in self.devices.axes])
        layout = mtf.LayoutRules([(name, name) for name, _ in self.devices.axes])
        return MeshImplementation(shape, layout, self.device_names, self.layer, traffic, name=self.name)


class MeshImplementation(placement.PlacementMeshImpl):
    """Explicit placement that checks its devices, adds in a fixed order and reads every variable slice once."""

    def __init__(
        self, shape: Any, layout: Any, device_names: Sequence[str], layer: str, traffic: Traffic, *, name: str = "mesh"
    ) -> None:
        super().__init__(shape, layout, list(device_names))
        if len(set(device_names)) != self.size or len(device_names) != self.size:
            raise ProgramError(
                f"layer {layer!r}: a mesh of {self.size} positions needs as many different devices, "
                f"found {', '.join(device_names)}"
            )
        self.traffic = Account(traffic=traffic, source=layer, target=layer)
        self._name = name

    class LaidOutVariable:
        """The slices of a variable on their devices, and the copies from and to the master."""

        def __init__(self, variable: Any, mesh_impl: "MeshImplementation") -> None:
            self._variable = variable
            self._implementation = mesh_impl
            shape = variable.outputs[0].shape
            slice_shape = mesh_impl.slice_shape(shape)
            self._slices = []
            reads = []
            for position, device in enumerate(mesh_impl.devices):
                with tf.device(device):
                    name = f"{variable.name}_slice_{position}"
                    self._slices.append(_SliceVariable(name, slice_shape, variable.slice_dtype))
                    # One read for all uses: another one could happen after the update of the same step.
                    reads.append(self._slices[-1].read_value())
            self.laid_out_tensor = mesh_impl.LaidOutTensor(reads)
            master = variable.get_master()
            with tf.device(master.device):
                # Read once: made into a tensor for each slice, it would be read for each.
                whole = tf.raw_ops.ReadVariableOp(resource=master.handle, dtype=master.dtype)
                whole.set_shape(master.shape)
            self.copy_master_to_slices = self.assigned(mesh_impl.make_slices(whole, shape))
            self._shape = shape

        @property
        def copy_slices_to_master(self) -> Any:
            """The operation that gathers the slices in the master, made when it is asked for."""
            slices = [slice_.read_value() for slice_ in self._slices]
            return self._variable.assign_to_master(self._implementation.combine_slices(slices, self._shape))

        def assigned(self, values: Sequence[Any]) -> list[Any]:
            """Return the operations that give each slice a value, on its device; they do not read it back."""
            operations = []
            for device, slice_, value in zip(self._implementation.devices, self._slices, values, strict=True):
                with tf.device(device):
                    operations.append(slice_.assign(value))
            return operations

    def slicewise(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        """Call a function of tensors, that returns one, for the slices of each position on its device.

        Backward it begins when all of them are there: TensorFlow would compute what depends on the forward pass alone
        as soon as it can, and hold it until the gradient arrives.
        """
        columns = [self._slices_of(item) for item in inputs]
        results = []
        for position, device in enumerate(self.devices):
            own = [column[position] for column in columns]
            with tf.device(device), tf.control_dependencies(self._awaited(own, device)):
                results.append(fn(*own))
        return self.LaidOutTensor(results)

    def _awaited(self, slices: Sequence[Any], device: str) -> list[Any]:
        """Return the tensors of one device that a gradient waits for."""
        if self.traffic.traffic.phase is not Phase.BACKWARD:
            return []
        place = tf.DeviceSpec.from_string(device)
        found = [x for x in slices if isinstance(x, tf.Tensor) and tf.DeviceSpec.from_string(x.device) == place]
        return found if len(found) > 1 else []

    def _slices_of(self, item: Any) -> list[Any]:
        if hasattr(item, "to_laid_out_tensor"):
            return list(item.to_laid_out_tensor().tensor_list)
        return [item] * self.size

    def allreduce(self, x: Any, mesh_axes: Sequence[int], reduction_fn_string: str) -> Any:
        """Add up (or take the maximum of) the slices along some axes, in the order of the positions.

        Each of k devices reduces a k-th of the n bytes and the others gather it: 2 (k-1)/k · n for each device.
        """
        slices = list(x.to_laid_out_tensor().tensor_list)
        result: list[Any] = [None] * self.size
        reduce = _REDUCTIONS[reduction_fn_string]
        # Sums are made where they are first needed, in the midst of another operation, perhaps another layer's.
        scope = "/".join(filter(None, [tf.get_default_graph().get_name_scope(), self._name, "all_reduce"]))
        with tf.name_scope(f"{scope}/"):
            for group in mtf.ops.processor_groups(self.shape, mesh_axes):
                own = [slices[i] for i in group]
                self.traffic.add(scope, 2 * (len(group) - 1) * own[0].shape.num_elements() * own[0].dtype.size)
                for position, value in zip(
                    group, _reduce_group(own, [self.devices[i] for i in group], reduce), strict=True
                ):
                    result[position] = value
            self.traffic.keep(result)
        return self.LaidOutTensor(result)


def _reduce_group(slices: list[Any], devices: list[str], reduce: Callable[[list[Any]], Any]) -> list[Any]:
    count = len(slices)
    if count == 1:
        return slices
    shape = slices[0].shape.as_list()
    num_points = slices[0].shape.num_elements()
    if num_points < max(SMALL_POINTS, count):
        with tf.device(devices[0]):
            total = reduce(slices)
        results = [total]
        for device in devices[1:]:
            with tf.device(device):
                # Brought here once, whoever uses it.
                results.append(tf.identity(total))
        return results
    sizes = [num_points // count + (i < num_points % count) for i in range(count)]
    shares = []
    for device, slice_ in zip(devices, slices, strict=True):
        with tf.device(device):
            shares.append(tf.split(tf.reshape(slice_, [-1]), sizes))
    sums = []
    for i, device in enumerate(devices):
        with tf.device(device):
            sums.append(reduce([share[i] for share in shares]))
    gathered = []
    for device in devices:
        with tf.device(device):
            gathered.append(tf.reshape(tf.concat(sums, 0), shape))
    return gathered


class _SliceVariable:
    """A part of a variable on the device in whose scope it is made: a handle alone.

    TensorFlow's own variables come with an initial value, its assignment and a check of it. A slice gets its first
    value from the master, and building those operations for every slice took a fifth of the time to build a program.
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: Any) -> None:
        self._shape, self._dtype = shape, dtype
        self._handle = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name, name=name)

    def read_value(self) -> Any:
        """Return a tensor of what it holds."""
        value = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype)
        value.set_shape(self._shape)
        return value

    def assign(self, value: Any) -> Any:
        """Return the operation that gives it a value."""
        return tf.raw_ops.AssignVariableOp(resource=self._handle, value=value, validate_shape=True)


class PhaseMark(mtf.Operation):
    """Computes nothing: what is lowered after it belongs to another phase of the step."""

    def __init__(self, mesh: LayerMesh, phase: Phase) -> None:
        super().__init__([], mesh=mesh, name=f"begin_{phase}")
        self._phase = phase

    def lower(self, lowering: Any) -> None:
        """Say so."""
        lowering.mesh_impl(self).traffic.traffic.phase = self._phase


class Assign(mtf.Operation):
    """Gives a variable a value; lowered to the operations of its slices.

    They are not put together variable by variable: each device would wait for all others once for each of them.
    """

    def __init__(self, variable: Any, value: Any) -> None:
        super().__init__([value], mesh=variable.mesh, name="assign")
        self._variable = variable.operation
        self._outputs: list[Any] = []

    def lower(self, lowering: Any) -> None:
        """Assign each slice on its device."""
        slices = lowering.tensors[self.inputs[0]].to_laid_out_tensor().tensor_list
        lowering.operations[self] = lowering.variables[self._variable].assigned(slices)


def _maximum(values: list[Any]) -> Any:
    result = values[0]
    for value in values[1:]:
        result = tf.maximum(result, value)
    return result


_REDUCTIONS: dict[str, Callable[[list[Any]], Any]] = {"SUM": tf.add_n, "MAX": _maximum}
