"""Convert a Keras model to a function that JAX traces, independent of the backend that Keras runs on.

While a model is traced, Keras computes with its JAX backend. Computations that JAX would decompose into many
primitives, or omit, are traced as one operator: activations, attention, batch normalisation, dropout, recurrent layers,
and layers whose own code cannot be followed.
"""

import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pase.errors import PaseError
from pase.importers.front_end import first_line
from pase.importers.ir import ops
from pase.importers.ir.call import Call, each, places
from pase.importers.ir.shared import FUNCTIONS, adaptive_pool
from pase.importers.jax.operators import stated

_MARK = re.compile(r"\bkeras(\d+)\b")
"""The scope of a call."""

_Place = tuple[Any, str, Any]
"""An owner, the name of its attribute, and the temporary replacement."""

_TRACING = threading.RLock()
"""Held while Keras computes with JAX, of which there is one in a process: other threads' models wait."""


def is_keras(thing: Any) -> bool:
    """Return whether a class, a function or an object's class is Keras' own."""
    owner = thing if hasattr(thing, "__qualname__") else type(thing)
    return str(getattr(owner, "__module__", "")).partition(".")[0] == "keras"


def trained_of(layer: Any) -> list[Any]:
    """Return the variables that training changes, of a layer and those in it, frozen or not; each once."""
    return list({id(v): v for inner in layer._flatten_layers() for v in inner._trainable_variables}.values())


@dataclass(kw_only=True)
class Following:
    """State of tracing a model's code.

    Attributes:
        keras: The module.
        jax: The module.
        model: The Keras model.
        num_operations: Number of calls of the model's own operations: its layers, not those inside of them.
        notes: Parts that could not be followed, and why.
        is_long: Whether numbers have 64 bits.
    """

    keras: Any
    jax: Any
    model: Any
    num_operations: int = 0
    notes: list[str] = field(default_factory=list)
    is_long: bool = False
    _level: int = 0
    _path: tuple[str, ...] = ()
    _paths: list[str] = field(default_factory=list)

    def scope(self, scope: str) -> str:
        """Return the path of the layer of a scope in JAX's program, and the remaining scope."""
        marks = list(_MARK.finditer(scope))
        path = self._paths[int(marks[-1].group(1))] if marks else ""
        inner = scope[marks[-1].end() :] if marks else scope
        return "/".join(part for part in (path, *inner.split(".")) if part)

    @contextmanager
    def on_jax(self) -> Iterator[None]:
        """Make Keras compute with JAX, with the replacements defined here, in all threads."""
        _leave_out_frames(
            *(str(Path(file).parent) for file in (self.keras.__file__, __file__, stated.__code__.co_filename))
        )
        config, is_short = self.keras.config, self.keras.config.is_traceback_filtering_enabled()
        config.disable_traceback_filtering()  # or errors would begin with which layer was called
        try:
            places = (*self._backend(), *self._layers(), *self._functions(), *self._calls())
            with _TRACING, _replaced(places), self.jax.enable_x64(True) if self.is_long else nullcontext():
                yield
        finally:
            if is_short:
                config.enable_traceback_filtering()

    def _backend(self) -> Iterator[_Place]:
        """Yield the replacements of the backend that Keras was imported with; nothing if that is JAX."""
        if self.keras.backend.backend() == "jax":
            return
        current, ours = import_module("keras.src.backend"), import_module("keras.src.backend.jax")
        own = f"keras.src.backend.{self.keras.backend.backend()}"
        readers = [m for name, m in sys.modules.items() if name.startswith("keras.src.") and not name.startswith(own)]
        for name, value in vars(ours).items():
            old = getattr(current, name, None)
            # Variables are not replaced: while a model is traced, their values are JAX's.
            if not name.startswith("__") and name != "Variable" and old is not None:
                yield from ((module, name, value) for module in readers if vars(module).get(name) is old)
        yield import_module("keras.src.backend.config"), "_BACKEND", "jax"
        yield ours.core, "Variable", import_module("keras.src.backend.common.variables").Variable
        yield (
            self.keras.Variable,
            "_convert_to_tensor",
            lambda _, *given, **named: ours.convert_to_tensor(*given, **named),
        )

    def _layers(self) -> Iterator[_Place]:
        """Yield what layers of the model are set to: those that prepare data have a backend of their own."""
        for layer in self.model._flatten_layers():
            if type(getattr(layer, "backend", None)).__name__ == "DynamicBackend":
                yield layer.backend, "_backend", "jax"
            if is_keras(layer) and getattr(layer, "_dropout", None) and hasattr(layer, "_inverse_sqrt_key_dim"):
                # Attention is one operator where no point is dropped, as in tests.
                yield layer, "_dropout", 0.0
            if is_keras(layer) and getattr(layer, "unroll", False):
                yield layer, "unroll", False

    def _functions(self) -> Iterator[_Place]:
        """Yield the replacements of backend functions, and of layers' calls."""
        backend, layers = import_module("keras.src.backend.jax"), self.keras.layers
        for name, numbers in _ACTIVATIONS.items():
            yield backend.nn, name, self._activation(name, numbers)
        for name in ("softmax", "log_softmax"):
            yield backend.nn, name, self._softmax(getattr(backend.nn, name), is_log=name == "log_softmax")
        yield backend.nn, "dot_product_attention", self._attention
        yield backend.nn, "sparse_categorical_crossentropy", self._sparse_cross_entropy
        yield backend.nn, "separable_conv", self._separable(backend.nn)
        for name in ("adaptive_average_pool", "adaptive_max_pool"):
            yield backend.nn, name, self._adaptive_pool(name)
        yield backend.image, "resize", self._resize
        # Nothing is drawn at inference, and neither is a seed, which other backends have in another type.
        yield backend.random, "jax_draw_seed", lambda _: self.jax.numpy.zeros(2, "uint32")
        for place in (backend.core, import_module("keras.src.backend"), import_module("keras.src.ops")):
            yield place, "cond", self._either
        yield layers.Dropout, "call", lambda layer, x, **_: self._one(ops.Identity(rate=float(layer.rate)), x)
        for name in ("Batch", "Group", "Layer", "RMS"):
            yield getattr(layers, f"{name}Normalization"), "call", _method(partial(self._normalised, name))
        yield layers.Normalization, "call", self._normalization(layers.Normalization.call)
        yield layers.RNN, "call", self._recurrent(layers.RNN.call)
        yield layers.Bidirectional, "call", self._bidirectional(layers.Bidirectional.call)
        yield layers.TimeDistributed, "call", _method(self._time_distributed)

    # -- calls of layers

    def _calls(self) -> Iterator[_Place]:
        """Yield the replacement of an operation's call: it is counted, named, and made one operator if required."""
        called = self.keras.Operation.__call__

        def call(operation: Any, *arguments: Any, **keywords: Any) -> Any:
            if not (isinstance(operation, self.keras.Layer) or operation._inbound_nodes):
                # Made when a function of `keras.ops` is called.
                return called(operation, *arguments, **keywords)
            is_part, path = not (hasattr(operation, "_nodes_by_depth") or hasattr(operation, "pop")), self._path
            self.num_operations += is_part and self._level == 0
            self._level += is_part
            self._path = (*path, str(operation.name))
            self._paths.append("/".join(self._path))
            try:
                with self.jax.named_scope(f"keras{len(self._paths) - 1}"):
                    return called(operation, *arguments, **keywords)
            except PaseError:
                raise
            except Exception as error:  # noqa: BLE001 of a stranger's code
                return self._unknown(operation, arguments, keywords, error)
            finally:
                self._level -= is_part
                self._path = path

        yield self.keras.Operation, "__call__", call

    def _unknown(self, layer: Any, arguments: Any, keywords: Any, error: Exception) -> Any:
        """Return the results of a layer of which only the shapes are known, with the weights that it has."""
        tree, tensor = self.keras.tree, self.keras.KerasTensor
        if not isinstance(layer, self.keras.Layer) or layer is self.model:
            raise error

        def symbol(item: Any) -> Any:
            return tensor(item.shape, dtype=str(item.dtype)) if self._is_tensor(item) else item

        try:
            given, named = tree.map_structure(symbol, (arguments, keywords))
            spec = layer.compute_output_spec(*given, **named)
        except Exception:  # noqa: BLE001 of a stranger's code
            raise error from None
        self.notes.append(f"{layer.path} is not taken apart: {first_line(error)}")
        tensors = [item for item in tree.flatten((arguments, keywords)) if self._is_tensor(item)]
        found = [item for item in tree.flatten(spec) if isinstance(item, tensor)]
        results = iter(
            self._stated(
                type(layer).__name__, _opaque, [*tensors, *trained_of(layer)], [(x.shape, x.dtype) for x in found]
            )
        )
        return tree.map_structure(lambda item: next(results) if isinstance(item, tensor) else item, spec)

    def _is_tensor(self, item: Any) -> bool:
        return isinstance(item, self.jax.Array | self.keras.Variable)

    # -- operations that are one operator

    def _stated(
        self,
        name: str,
        write: Callable[[Any], object],
        tensors: Iterable[Any],
        results: Sequence[tuple[Sequence[int], Any]],
    ) -> list[Any]:
        """Return the results of an operator that `write` translates; results: their shapes and types."""
        given = [x.value if isinstance(x, self.keras.Variable) else x for x in tensors if x is not None]
        return stated(self.jax, name, write, given, results)

    def _one(self, op: ops.Op, x: Any, *others: Any, shape: Sequence[int] | None = None) -> Any:
        """Return the result of an operator, by default of the first tensor's shape."""
        found = (x.shape if shape is None else shape, x.dtype)
        return self._stated(type(op).__name__, lambda call: call.give(op, *call.tensors), (x, *others), [found])[0]

    def _activation(self, name: str, numbers: Sequence[float]) -> Callable[..., Any]:
        def activation(x: Any, *given: float, **named: Any) -> Any:
            function, own = FUNCTIONS[name], (*given, *named.values())
            if name == "gelu":
                function = "gelu" if False in own else "gelu_tanh"
            known = tuple(map(float, own or numbers)) if numbers else ()
            return self._one(ops.Pointwise(functions=(function,), numbers=known), _array(x))

        return activation

    def _softmax(self, original: Callable[..., Any], *, is_log: bool) -> Callable[..., Any]:
        def softmax(x: Any, axis: int | None = -1) -> Any:
            if axis is None:
                return original(x, axis=axis)
            x = _array(x)
            return self._one(ops.Softmax(dim=axis % x.ndim, is_log=is_log), x)

        return softmax

    def _attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        scale: float | None = None,
        is_causal: bool = False,
        **_: Any,
    ) -> Any:
        """Return attention of [b, s, h, k]; queries may have more heads than keys and values."""

        def write(call: Call) -> None:
            heads = [call.transpose(x, (0, 2, 1, 3)) for x in call.tensors[:3]]
            op = ops.Attention(is_causal=is_causal, scale=scale)
            found = call.add(op, *heads, *call.tensors[3:], shape=(*heads[0].shape[:3], heads[2].shape[3]))
            call.transpose(found, (0, 2, 1, 3), out=call.result)

        shape = (*query.shape[:3], value.shape[3])
        with self.jax.named_scope("attention"):
            return self._stated("Attention", write, (query, key, value, bias, mask), [(shape, query.dtype)])[0]

    def _sparse_cross_entropy(self, target: Any, x: Any, from_logits: bool = False, axis: int = -1) -> Any:
        """Return the negative logarithm of the target's probability, which no tensor of all classes picks out."""
        numpy, nn = self.jax.numpy, self.keras.ops
        log = nn.log_softmax(x, axis) if from_logits else numpy.log(nn.clip(x / x.sum(axis, keepdims=True), *_CLIPPED))
        places = numpy.expand_dims(numpy.asarray(target).astype("int32"), axis)
        return -numpy.take_along_axis(log, places, axis).squeeze(axis)

    def _adaptive_pool(self, name: str) -> Callable[..., Any]:
        def pool(x: Any, output_size: int | Sequence[int], data_format: str | None = None) -> Any:
            spatial = self._spatial(x, data_format)
            shape = _with_extents(x.shape, spatial, each(output_size, len(spatial)))
            return self._stated(name, lambda call: adaptive_pool(call, spatial), (x,), [(shape, x.dtype)])[0]

        return pool

    def _resize(self, x: Any, size: Sequence[int], *_: Any, data_format: str | None = None, **__: Any) -> Any:
        """Return a tensor of another size whose points are weighted sums of four; batch and channels pass through."""
        x = _array(x)
        is_alone = x.ndim == 3
        spatial = [dim - is_alone for dim in self._spatial(x[None] if is_alone else x, data_format)]
        shape = _with_extents(x.shape, spatial, size)
        passes = [(i, i) for i, (old, new) in enumerate(zip(x.shape, shape, strict=True)) if old == new]
        return self._stated(
            "resize", lambda call: call.opaque(passes=passes, flop_per_point=7.0), (x,), [(shape, x.dtype)]
        )[0]

    def _spatial(self, x: Any, data_format: str | None) -> range:
        """Return the dims of a tensor that are neither the batch nor the channels."""
        is_first = (data_format or self.keras.config.image_data_format()) == "channels_first"
        return range(1 + is_first, x.ndim - 1 + is_first)

    def _separable(self, nn: Any) -> Callable[..., Any]:
        original, inner = nn.separable_conv, nn.depthwise_conv

        def depthwise(*arguments: Any, **keywords: Any) -> Any:
            with self.jax.named_scope("depthwise"):
                return inner(*arguments, **keywords)

        def separable_conv(*arguments: Any, **keywords: Any) -> Any:
            with _replaced([(nn, "depthwise_conv", depthwise)]):
                return original(*arguments, **keywords)

        return separable_conv

    def _either(self, which: Any, true: Callable[[], Any], false: Callable[[], Any]) -> Any:
        """Return the results of one of two branches, both of which are computed: data choose."""
        numpy = self.jax.numpy
        return self.keras.tree.map_structure(lambda x, y: numpy.where(which, x, y), true(), false())

    def _normalised(self, name: str, layer: Any, x: Any, **_: Any) -> Any:
        """Return a tensor normalised by its own moments, ignoring a layer's running statistics."""
        kind, rank = name.lower(), x.ndim
        channels = places(layer.axis, rank)
        over: Sequence[int] = channels
        details: dict[str, Any] = {"epsilon": float(layer.epsilon or 1e-6)}
        kept: list[Any] = []
        if kind == "batch":
            over = [dim for dim in range(rank) if dim not in channels]
            kept = [layer.moving_mean, layer.moving_variance]
            details["momentum"] = 1 - float(layer.momentum)
        elif kind == "group":
            over = [dim for dim in range(1, rank) if dim not in channels]
            if layer.groups in (-1, x.shape[channels[0]]):
                kind = "instance"
            else:
                over, details["groups"] = sorted((*over, *channels)), layer.groups
        elif getattr(layer, "rms_scaling", False):
            kind = "rms"
        # The layer that normalises by the mean square only has another name for its weight.
        weights = [getattr(layer, "gamma", layer.scale), getattr(layer, "beta", None)]
        scales, shifts = ([variable] if variable is not None else [] for variable in weights)

        def write(call: Call) -> None:
            first, last = 1 + len(scales), 1 + len(scales) + len(shifts)
            parts = {
                "scale": call.tensors[1:first],
                "shift": call.tensors[first:last],
                "statistics": call.tensors[last:],
            }
            call.normalise(kind, call.x, over, channels, **parts, **details)

        results = [(x.shape, layer.compute_dtype)]
        return self._stated(type(layer).__name__, write, (x, *scales, *shifts, *kept), results)[0]

    def _normalization(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return how data are normalised by statistics that were counted before training: of their variables."""

        def normalization(layer: Any, x: Any) -> Any:
            kept = layer.mean, layer.variance
            layer.finalize_state()
            try:
                return original(layer, x)
            finally:
                layer.mean, layer.variance = kept

        return normalization

    def _recurrent(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def recurrent(layer: Any, x: Any, initial_state: Any = None, **more: Any) -> Any:
            cells = _cells(layer)
            if not cells:
                return original(layer, x, initial_state=initial_state, **more)
            states, last = self.keras.tree.flatten(initial_state if initial_state is not None else []), list[Any]()
            for cell in cells:
                count = _STATES[_CELLS[type(cell).__name__]]
                x, found = self._run([cell], x, states[:count])
                states, last = states[count:], last + found
            x = x if layer.return_sequences else _last_step(x)
            return (x, *last) if layer.return_state else x

        return recurrent

    def _bidirectional(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return both directions as one operator if they are concatenated, otherwise as two with their merge."""

        def bidirectional(layer: Any, x: Any, initial_state: Any = None, **more: Any) -> Any:
            cells = [*_cells(layer.forward_layer), *_cells(layer.backward_layer)]
            if len(cells) != 2:
                return original(layer, x, initial_state=initial_state, **more)
            states = self.keras.tree.flatten(initial_state if initial_state is not None else [])
            one, other = cells
            if layer.merge_mode == "concat" and type(one) is type(other) and one.units == other.units:
                found, last = self._run(cells, x, states)
                both = [found]
            else:
                half = len(states) // 2
                first, last = self._run([one], x, states[:half])
                second, others = self._run([other], x, states[half:])
                both, last = [first, second], last + others
            if not layer.return_sequences:
                both = [_last_step(item) for item in both]
            merged = (tuple(both),) if layer.merge_mode is None else (self._merged(layer.merge_mode, both),)
            if not layer.return_state:
                return merged[0]
            return (*(both if layer.merge_mode is None else merged), *last)

        return bidirectional

    def _merged(self, mode: str, both: Sequence[Any]) -> Any:
        if len(both) == 1:
            return both[0]
        if mode == "concat":
            return self.jax.numpy.concatenate(both, -1)
        found = both[0] * both[1] if mode == "mul" else both[0] + both[1]
        return found / 2 if mode == "ave" else found

    def _run(self, cells: Sequence[Any], x: Any, states: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the steps and the last states of one recurrent operator, of a cell or of one in each direction."""
        kind, units = _CELLS[type(cells[0]).__name__], int(cells[0].units)
        op = ops.Recurrent(cell=kind, units=units, is_bidirectional=len(cells) == 2)  # type: ignore[arg-type]
        weights = [w for cell in cells for w in (cell.kernel, cell.recurrent_kernel, cell.bias)]
        batch, steps = x.shape[:2]
        shapes = [(batch, steps, units * len(cells)), *[(batch, units)] * (_STATES[kind] * len(cells))]
        found, *last = self._stated(
            type(cells[0]).__name__,
            lambda call: call.give(op, *call.tensors),
            (x, *weights, *states),
            [(shape, x.dtype) for shape in shapes],
        )
        return found, last

    def _time_distributed(self, layer: Any, x: Any, training: Any = None, mask: Any = None) -> Any:
        """Return the result of applying a layer to each step, with steps treated as examples."""
        inner, lead = layer.layer, x.shape[:2]
        if is_keras(inner) and type(inner).__name__ in _ALONG_LAST:
            return inner(x)
        return self.keras.tree.map_structure(
            lambda item: item.reshape((*lead, *item.shape[1:])), inner(x.reshape((-1, *x.shape[2:])))
        )


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that acts as a method when it is a class attribute."""
    return lambda *arguments, **keywords: function(*arguments, **keywords)


def _opaque(call: Call) -> None:
    leading = {value.shape[:1] for value in (*call.tensors[:1], *call.results)}
    is_index = not any(value.is_float for value in call.results)
    call.opaque(passes=[(0, 0)] if is_index and len(leading) == 1 and leading != {()} else None)


def _cells(layer: Any) -> list[Any]:
    """Return the cells of a recurrent layer; none where one of them is not known."""
    cell: Any = getattr(layer, "cell", None)
    cells = list(cell.cells) if type(cell).__name__ == "StackedRNNCells" and is_keras(cell) else [cell]
    is_known = all(type(each).__name__ in _CELLS and is_keras(each) for each in cells)
    return cells if is_known and not layer.stateful else []


def _with_extents(shape: Sequence[int], dims: Sequence[int], extents: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict(zip(dims, extents, strict=True)).get(i, extent) for i, extent in enumerate(shape))


def _last_step(x: Any) -> Any:
    return x[:, x.shape[1] - 1 :].reshape((x.shape[0], x.shape[2]))


def _array(x: Any) -> Any:
    return import_module("keras.src.backend.jax").convert_to_tensor(x)


@contextmanager
def _replaced(places: Iterable[_Place]) -> Iterator[None]:
    """Temporarily replace attributes."""
    kept: list[tuple[Any, str, bool, Any]] = []
    try:
        for owner, name, value in tuple(places):
            kept.append((owner, name, name in vars(owner), getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, is_own, value in reversed(kept):
            if is_own:
                setattr(owner, name, value)
            else:
                delattr(owner, name)


def _leave_out_frames(*files: str) -> None:
    """Have JAX take code in the folders of files for no code of the user's."""
    from jax._src import source_info_util

    for folder in (str(Path(file).parent) for file in files):
        if folder not in source_info_util._exclude_paths:
            source_info_util.register_exclusion(folder)


_CLIPPED = (1e-7, 1.0 - 1e-7)
"""Range to which Keras clips probabilities before taking their logarithm."""

_CELLS = {
    "LSTM": "lstm",
    "LSTMCell": "lstm",
    "GRU": "gru",
    "GRUCell": "gru",
    "SimpleRNN": "rnn",
    "SimpleRNNCell": "rnn",
}
_STATES = {"lstm": 2, "gru": 1, "rnn": 1}

_ALONG_LAST = frozenset({"Dense", "Activation", "Dropout", "ReLU", "LeakyReLU", "ELU", "Identity", "Embedding"})
"""Layers that treat all dims before the last one as batch dims."""

_ACTIVATIONS: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("gelu", "hard_shrink", "hard_silu", "log_sigmoid", "relu6", "selu", "silu"), ()),
    **dict.fromkeys(("soft_shrink", "softplus", "softsign", "sparse_plus", "sparse_sigmoid", "squareplus"), ()),
    "tanh_shrink": (),
    "celu": (1.0,),
    "elu": (1.0,),
    "hard_sigmoid": (1 / 6, 0.5),
    "hard_tanh": (-1.0, 1.0),
    "leaky_relu": (0.2,),
}
"""Functions of points, with the numbers that they have where none are given."""
