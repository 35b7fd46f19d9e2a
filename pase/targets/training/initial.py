"""Initial weights: drawn on the host, a function of the seed and the parameter's name, whatever the strategy."""

import zlib
from collections.abc import Mapping
from math import prod, sqrt
from typing import Any

import numpy as np

from pase.errors import GraphError, ProgramError
from pase.graph import Access, Graph, Operator
from pase.graph.access import access_dims, named_dims
from pase.sharding.traffic import parameter_name


def weight_name(graph: Graph, operator: Operator, access: Access) -> str:
    """Return the name of a parameter of an imported model: that which its first reader's weights have in a file."""
    name = parameter_name(operator, access)
    owner, first = next((o, a) for o in graph.operators for a in o.parameters if parameter_name(o, a) == name)
    return f"{owner.name}/{first.tensor}"


def shared_order(graph: Graph, operator: Operator, access: Access) -> tuple[int, ...]:
    """Return [rank] for each dim of a parameter, which dim of the layer that declares it that is.

    A layer may use another one's weight transposed (a projection tied to an embedding): dims are told by their
    names. Raises GraphError where two layers share a name but neither names nor shape.
    """
    name = parameter_name(operator, access)
    owner, first = next((o, a) for o in graph.operators for a in o.parameters if parameter_name(o, a) == name)
    same = tuple(range(len(access.shape)))
    if first.index_map == access.index_map and first.shape == access.shape:
        return same
    if set(first.index_map) == set(access.index_map):
        order = tuple(first.index_map.index(axis) for axis in access.index_map)
        if tuple(first.shape[i] for i in order) == access.shape:
            return order
    elif first.shape == access.shape:
        return same
    raise GraphError(
        f"layers {owner.name!r} and {operator.name!r} share weight {name!r} with shapes {first.shape} and "
        f"{access.shape}; shared weights have the same dims"
    )


def initial_deviation(operator: Operator, access: Access) -> float:
    """Return the standard deviation of a parameter's initial values, rounded to be written in a program.

    A contraction's weight: 1 / sqrt(points that are summed for one output) (LeCun et al. 1998). A table: 1 / sqrt(its
    columns). What is added: 0. All of a recurrent layer: 1 / sqrt(3 units), that of PyTorch's uniform values.
    """
    if operator.kind == "recurrent":
        return float(f"{sqrt(1 / (3 * operator.extents['e'])):.4g}")
    produced = frozenset[str]().union(*(access_dims(write) for write in operator.writes))
    summed = [dim for dim in operator.dims if dim.name in named_dims(access) and dim.name not in produced]
    if not summed:
        return 0.0
    looked_up = all(dim.name not in named_dims(read) for dim in summed for read in operator.reads if read is not access)
    fan = access.shape[-1] if looked_up else prod(dim.extent for dim in summed)
    return float(f"{sqrt(1 / fan):.4g}")


def initial_moments(operator: Operator, access: Access) -> tuple[float, float]:
    """Return the mean and the standard deviation of a parameter's initial values: what scales begins with ones."""
    deviation = initial_deviation(operator, access)
    steps = operator.body.steps if operator.body else ()
    products = ("multiply", "batch_norm", "normalise")
    scales = any(step.function in products and access.tensor in step.operands[:2] for step in steps)
    return (1.0 if scales and not deviation else 0.0), deviation


def initial_value(
    name: str, shape: tuple[int, ...], deviation: float, seed: int, mean: float = 0.0
) -> np.ndarray[Any, Any]:
    """Return float32 values of the normal distribution with that mean and standard deviation; all alike for 0."""
    if deviation == 0:
        return np.full(shape, mean, np.float32)
    values = generator(name, seed).standard_normal(shape, np.float32)
    values *= np.float32(deviation)
    return values + np.float32(mean) if mean else values


def given_value(name: str, shape: tuple[int, ...], values: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the value of a weight or a constant that a file of weights holds; ProgramError where it does not."""
    if name not in values:
        raise ProgramError(
            f"the weights have no array {name!r}; write them from the model with: pase weights MODEL -o weights.npz"
        )
    array = values[name]
    if array.size != prod(shape):
        raise ProgramError(
            f"weight {name!r} has shape {list(array.shape)}; expected as many values as {list(shape)} has: the weights "
            "are of another model"
        )
    if not np.issubdtype(array.dtype, np.floating):
        raise ProgramError(f"weight {name!r} is of type {array.dtype}; expected floating-point numbers")
    return array.reshape(shape)


def generator(name: str, seed: int) -> np.random.Generator:
    """Return the random numbers that belong to a name."""
    return np.random.default_rng([seed, zlib.crc32(name.encode("utf-8", "surrogatepass"))])
