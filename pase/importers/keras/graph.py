"""`Reader`: walks a Keras model, layer by layer, and has each of them translated; no value of a weight is looked at.

A layer that has no translation is looked into: its own code is called with tensors without values, as which `Symbols`
stand in for those of the trace.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pase.errors import ModelError, PaseError
from pase.importers.front_end import first_line
from pase.importers.ir import Value
from pase.importers.ir.call import Translation, values_of
from pase.importers.keras.call import KerasCall, UntranslatableError, Writer, is_keras, trained_of, unknown
from pase.importers.keras.elementwise import ELEMENTWISE_LAYERS, ELEMENTWISE_OPERATIONS
from pase.importers.keras.movement import MOVEMENT_LAYERS, MOVEMENT_OPERATIONS
from pase.importers.keras.products import PRODUCT_LAYERS, PRODUCT_OPERATIONS, WINDOW_LAYERS, WINDOW_OPERATIONS

LAYERS: dict[str, Translation] = ELEMENTWISE_LAYERS | MOVEMENT_LAYERS | PRODUCT_LAYERS | WINDOW_LAYERS
"""Translations of layers, by the class's name. What is not here is looked into, or treated generically."""

OPERATIONS: dict[str, Translation] = (
    ELEMENTWISE_OPERATIONS | MOVEMENT_OPERATIONS | PRODUCT_OPERATIONS | WINDOW_OPERATIONS
)
"""Translations of `keras.ops`, by the class's name."""


class Symbols:
    """Keras' tensors without values and the values that they stand for, in both directions."""

    def __init__(self, keras: Any, writer: Writer, trained: set[int]) -> None:
        self._keras = keras
        self._writer = writer
        self._trained = trained
        self._tensors: dict[str, Any] = {}
        self._values: dict[int, Value] = {}
        # Tensors that nothing computes, by identity: variables, and arrays that the code makes. Kept so that no other
        # object takes their identity.
        self._sources: dict[int, tuple[Any, Any]] = {}

    def with_leaves(self, structure: Any, scope: str) -> Any:
        """Return nested arguments with variables and arrays as leaves of the trace."""

        def leaf(item: Any) -> Any:
            return self._leaf(item, scope) if self._is_variable(item) or self._is_array(item) else item

        return self._keras.tree.map_structure(leaf, structure)

    def symbolic(self, structure: Any) -> Any:
        """Return nested arguments with tensors without values in place of values."""
        return self._keras.tree.map_structure(
            lambda item: self._of(item) if isinstance(item, Value) else item, structure
        )

    def knows(self, tensor: Any) -> bool:
        """Return whether a tensor was not computed but given."""
        return id(tensor) in self._values or id(tensor) in self._sources

    def read(self) -> list[Any]:
        """Return the given tensors that something has read."""
        tensors = [*self._tensors.values(), *(tensor for tensor, _ in self._sources.values())]
        return [tensor for tensor in tensors if hasattr(tensor, "_keras_history")]

    def value(self, tensor: Any, scope: str) -> Value:
        """Return the value that a tensor stands for."""
        if id(tensor) not in self._values:
            self._values[id(tensor)] = self._leaf(self._sources[id(tensor)][1], scope)
        return self._values[id(tensor)]

    def define(self, tensor: Any, value: Value) -> None:
        """Say which value a tensor that was computed stands for."""
        self._values[id(tensor)] = value

    @contextmanager
    def recorded(self, owner: Any, scope: str) -> Iterator[None]:
        """Have what is called recorded: the owner's variables and arrays that layers are given have no values.

        Keras records what is done to tensors without values alone, so a layer that is called with an array (positions)
        has to be given one of those; the nodes that it leaves with layers are taken off them again.
        """
        keras = self._keras
        called = keras.Layer.__call__

        def call(layer: Any, *arguments: Any, **keywords: Any) -> Any:
            if not self._is_computing():
                arguments, keywords = keras.tree.map_structure(self._without_values, (arguments, keywords))
            return called(layer, *arguments, **keywords)

        layers = owner._flatten_layers() if hasattr(owner, "_flatten_layers") else []
        counts = [(layer, len(layer._inbound_nodes), len(layer._outbound_nodes)) for layer in layers]
        # Its own variables are attributes, and may be read as arrays are; those of layers in it by their value.
        own = {name: item for name, item in vars(owner).items() if self._is_variable(item)} if layers else {}
        with keras.StatelessScope(initialize_variables=False) as values:
            sources: dict[int, Any] = {}
            for variable in (v for layer in layers for v in layer._trainable_variables):
                sources[id(variable)] = sources.get(id(variable)) or self._source(variable)
                values.add_update((variable, sources[id(variable)]))
            keras.Layer.__call__ = call
            if own:
                vars(owner).update({name: sources.get(id(item), item) for name, item in own.items()})
            try:
                yield
            finally:
                keras.Layer.__call__ = called
                if own:
                    vars(owner).update(own)
                for layer, inbound, outbound in counts:
                    del layer._inbound_nodes[inbound:], layer._outbound_nodes[outbound:]

    def _of(self, value: Value) -> Any:
        if value.name not in self._tensors:
            tensor = self._keras.KerasTensor(value.shape, dtype=value.dtype)
            self._tensors[value.name] = tensor
            self._values[id(tensor)] = value
        return self._tensors[value.name]

    def _source(self, source: Any) -> Any:
        """Return a tensor without values in place of a variable or an array."""
        dtype = self._keras.backend.standardize_dtype(source.dtype)
        tensor = self._keras.KerasTensor(tuple(source.shape), dtype=dtype)
        self._sources[id(tensor)] = (tensor, source)
        return tensor

    def _without_values(self, item: Any) -> Any:
        return self._source(item) if self._is_array(item) and not self._is_variable(item) else item

    def _leaf(self, source: Any, scope: str) -> Value:
        if self._is_variable(source):
            return self._writer.weight(source, is_trained=id(source) in self._trained)
        dtype = self._keras.backend.standardize_dtype(source.dtype)
        return self._writer.leaf(f"{scope}:constant", tuple(source.shape), dtype, "constant")

    def _is_variable(self, item: Any) -> bool:
        return isinstance(item, self._keras.Variable)

    def _is_array(self, item: Any) -> bool:
        """Whether an item is an array of at least one dim; numbers stay what they are."""
        if isinstance(item, Value | self._keras.KerasTensor) or not hasattr(item, "dtype"):
            return False
        return len(getattr(item, "shape", ())) > 0

    def _is_computing(self) -> bool:
        """Whether Keras is working out the shape of a result by running code of the backend."""
        from keras.src.backend.common.symbolic_scope import in_symbolic_scope

        return bool(in_symbolic_scope())


class Reader:
    """Translates operations that are applied to values. notes: what could not be looked into, and why."""

    def __init__(self, keras: Any, model: Any) -> None:
        self.writer = Writer()
        self.num_operations = 0
        self.notes: list[str] = []
        self._keras = keras
        self._trained = {id(variable) for variable in trained_of(model)}
        # At 0 an operation is one of the source's own, above it is a part of one.
        self._level = 0

    def model(self, model: Any, inputs: Any) -> list[Value]:
        """Return the results of a model that is applied to inputs; ModelError where it cannot be followed."""
        try:
            if _is_graph(model) or _is_chain(model):
                return values_of(self.apply(model, (inputs,), {}, ""))
            # Its layers are told from those of the source: what it calls counts.
            return values_of(self._looked_into(_call_of(model), (inputs,), {}, "", model))
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"Keras model {model.name!r} cannot be followed: {_told(error)}; what its layers do has to be written "
                "with keras.layers and keras.ops"
            ) from error

    def apply(self, operation: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any], scope: str) -> Any:
        """Translate an operation; return its results, values in the structure that it returns."""
        if _is_chain(operation):
            found: Any = arguments[0]
            for layer in operation.layers:
                found = self.apply(layer, (found,), {}, _below(scope, layer.name))
            return found
        if _is_graph(operation):
            return self._walk(operation, values_of((arguments, dict(keywords))), scope)
        self.num_operations += self._level == 0
        self._level += 1
        try:
            return self._operation(operation, arguments, keywords, scope)
        finally:
            self._level -= 1

    def trace(self, function: Callable[..., Any], values: Sequence[Value], scope: str) -> list[Value]:
        """Translate what a function does with tensors; UntranslatableError where it cannot be followed."""
        return values_of(self._followed(function, tuple(values), {}, scope, None))

    def _operation(self, operation: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any], scope: str) -> Any:
        """Translate an operation, or what it calls, or take it as generic, in this order."""
        # A layer may have been built only when it was called.
        self._trained.update(map(id, trained_of(operation)))
        symbols = Symbols(self._keras, self.writer, self._trained)
        arguments, named = symbols.with_leaves((arguments, dict(keywords)), scope)
        is_layer = isinstance(operation, self._keras.Layer)
        known = (LAYERS if is_layer else OPERATIONS).get(type(operation).__name__) if is_keras(operation) else None
        mark = self.writer.mark()
        if known is not None:
            try:
                return self._results(known, operation, arguments, named, scope)
            except UntranslatableError:
                self.writer.restore(mark)
        if is_layer:
            found = self._inside(operation, arguments, named, scope)
            if found is not None:
                return found
            self.writer.restore(mark)
        return self._results(unknown, operation, arguments, named, scope)

    def _results(
        self,
        translation: Translation,
        operation: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        scope: str,
    ) -> Any:
        """Return the results of an operation, whose nodes a translation writes."""
        tree = self._keras.tree
        symbols = Symbols(self._keras, self.writer, self._trained)
        given, named = symbols.symbolic((arguments, keywords))
        spec = self._specification(operation, given, named)
        results: list[Value] = []

        def value(item: Any) -> Any:
            if not isinstance(item, self._keras.KerasTensor):
                return item
            name = self.writer.name(scope)
            shape = _whole(item.shape, scope)
            results.append(Value(name=name, shape=shape, dtype=self._keras.backend.standardize_dtype(item.dtype)))
            return results[-1]

        structure = tree.map_structure(value, spec)
        call = KerasCall(
            name=type(operation).__name__,
            operation=operation,
            positional=arguments,
            arguments=keywords,
            inputs=tuple(values_of((arguments, keywords))),
            outputs=tuple(results),
            scope=scope,
            writer=self.writer,
            reader=self,
        )
        translation(call)
        return structure

    def _specification(self, operation: Any, given: Any, named: Any) -> Any:
        """Return tensors without values as an operation gives them."""
        spec = operation.compute_output_spec(*given, **named)
        tensors = [item for item in self._keras.tree.flatten(spec) if isinstance(item, self._keras.KerasTensor)]
        if any(extent is None for tensor in tensors for extent in tensor.shape):
            # A layer that tells dims from its own configuration, where they need not be: the backend knows them.
            spec = self._keras.Operation.compute_output_spec(operation, *given, **named)
        return spec

    def _inside(self, layer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], scope: str) -> Any:
        """Return what a layer's own code gives, each operation in it translated; None where it cannot be followed."""
        try:
            found = self._followed(_call_of(layer), arguments, keywords, scope, layer)
        except UntranslatableError:
            return None
        missing = [variable.path for variable in trained_of(layer) if not self.writer.reads(variable)]
        if missing:
            self.notes.append(f"{scope} is not taken apart: what was found in it does not read {missing[0]!r}")
            return None
        return found

    def _followed(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any], scope: str, owner: Any
    ) -> Any:
        """Return what a function gives, as `_looked_into`; UntranslatableError, and a note, where that fails."""
        try:
            return self._looked_into(function, arguments, keywords, scope, owner)
        except Exception as error:
            self.notes.append(f"{scope} is not taken apart: {_told(error)}")
            raise UntranslatableError from error

    def _looked_into(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any], scope: str, owner: Any
    ) -> Any:
        """Return what a function gives that is called with tensors without values, its operations translated."""
        keras = self._keras
        symbols = Symbols(keras, self.writer, self._trained)
        given, named = symbols.symbolic((arguments, keywords))
        with symbols.recorded(owner, scope):
            outputs = function(*given, **named)
            tensors = [item for item in keras.tree.flatten(outputs) if isinstance(item, keras.KerasTensor)]
            computed = [tensor for tensor in tensors if not symbols.knows(tensor)]
            graph = keras.Function(symbols.read(), computed) if computed else None
        if graph is not None:
            values = [symbols.value(tensor, scope) for tensor in graph.inputs]
            for tensor, result in zip(computed, self._walk(graph, values, scope, is_inside=True), strict=True):
                symbols.define(tensor, result)

        def found(item: Any) -> Any:
            return symbols.value(item, scope) if isinstance(item, keras.KerasTensor) else item

        return keras.tree.map_structure(found, outputs)

    def _walk(self, graph: Any, values: list[Value], scope: str, *, is_inside: bool = False) -> list[Value]:
        """Return the results of a functional graph, node by node."""
        if len(values) != len(graph.inputs):
            raise ModelError(f"model {graph.name!r} has {len(graph.inputs)} inputs; it is given {len(values)}")
        known = {id(tensor): value for tensor, value in zip(graph.inputs, values, strict=True)}
        for depth in sorted(graph._nodes_by_depth, reverse=True):
            for node in graph._nodes_by_depth[depth]:
                operation = node.operation
                if not operation or node.is_input or any(id(tensor) not in known for tensor in node.input_tensors):
                    continue
                arguments, keywords = node.arguments.fill_in(known)
                is_named = isinstance(operation, self._keras.Layer) or not is_inside
                own = operation.name if is_named else type(operation).__name__.lower()
                found = self.apply(operation, arguments, keywords, _below(scope, own))
                known.update((id(t), v) for t, v in zip(node.outputs, values_of(found), strict=True))
        return [known[id(tensor)] for tensor in graph.outputs]


def _is_graph(operation: Any) -> bool:
    """Whether an operation is a functional model, or a function, whose code is Keras' own."""
    return hasattr(operation, "_nodes_by_depth") and is_keras(type(operation).call)


def _is_chain(operation: Any) -> bool:
    """Whether an operation is a sequential model that has been built, whose code is Keras' own."""
    is_sequential = hasattr(operation, "pop") and hasattr(operation, "layers")
    return is_sequential and operation.built and is_keras(type(operation).call)


def _call_of(layer: Any) -> Callable[..., Any]:
    """Return what a layer does outside training."""
    if not getattr(layer, "_call_has_training_arg", False):
        return layer.call  # type: ignore[no-any-return]

    def call(*arguments: Any, **keywords: Any) -> Any:
        return layer.call(*arguments, **(keywords | {"training": False}))

    return call


def _whole(shape: Sequence[int | None], scope: str) -> tuple[int, ...]:
    if any(extent is None for extent in shape):
        raise ModelError(
            f"layer {scope!r} gives a tensor of shape {tuple(shape)}; expected whole numbers: its extents depend on "
            "values, or the model was made with dims of unknown size that a layer has taken over"
        )
    return tuple(int(extent) for extent in shape if extent is not None)


def _below(scope: str, name: str) -> str:
    return f"{scope}/{name}" if scope else str(name)


def _told(error: Exception) -> str:
    """Return the first sentence of a message."""
    first = first_line(error).partition(". ")[0].rstrip(".")
    return first.removeprefix(f"{type(error).__name__}: ") if isinstance(error, PaseError) else first
