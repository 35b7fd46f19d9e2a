"""`read_weights`: the values of a Keras model's weights, by the names that its trace has for them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pase.errors import ModelError
from pase.graph import Scalar
from pase.importers.keras.file import clean_copy, read_model
from pase.importers.keras.model import KerasFrontEnd, keras_module, read_trace


def read_weights(
    source: Any, *, batch: int | None = None, arguments: Mapping[str, Scalar] | None = None
) -> dict[str, NDArray[Any]]:
    """Return the values of all variables that the trace of a model has as leaves: weights and moving statistics.

    source: a model, (model, inputs), or a `.keras` file; with the other arguments as for its trace. Raises ModelError
    where the file's weights are damaged or not those of its configuration, or where a model has none.
    """
    keras = keras_module()
    with KerasFrontEnd().without_weights():
        model, inputs = source if isinstance(source, tuple) else (source, None)
        if isinstance(source, str):
            model = read_model(keras, source)
        _, variables = read_trace(keras, model, inputs, batch=batch, arguments=arguments or {})
        if isinstance(source, str):
            return _of_file(keras, model, source, variables)
    for variable in variables.values():
        if variable._value is None:
            raise ModelError(f"model {model.name!r} was made without weights: {variable.path!r} has no values")
    return {name: np.asarray(keras.ops.convert_to_numpy(variable)) for name, variable in variables.items()}


def _of_file(keras: Any, model: Any, path: str, variables: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    # In a scope of its own, what is assigned to variables is kept by the scope.
    with keras.StatelessScope(initialize_variables=False) as scope:
        try:
            with clean_copy(keras, path) as clean:
                model.load_weights(clean)
        except ModelError:
            raise
        except Exception as error:
            first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
            raise ModelError(f"the weights in {path!r} cannot be read: {type(error).__name__}: {first}") from error
        found = {name: scope.get_current_value(variable) for name, variable in variables.items()}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise ModelError(f"{path!r} holds no values for {missing[0]!r}")
    return {name: np.asarray(keras.ops.convert_to_numpy(value)) for name, value in found.items()}
