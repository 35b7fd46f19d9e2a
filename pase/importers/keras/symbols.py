"""`Symbols`: stands in for tensors while a layer's own code is followed: shapes without values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pase.importers.ir import Value
from pase.importers.keras.layers.call import Writer


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
