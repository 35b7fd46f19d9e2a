"""Partitions of a vertex's configurations into layout classes, and their products.

A factor of the problem sees a configuration only through its class. Two partitions of the same configurations
combine into the coarsest one that refines both: its classes are the pairs of classes that occur. Class arrays are
compared by identity, so that work on tables that repeated layers share is done once.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pase.tables.cost_tables import FloatArray

ClassArray = NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """One partition of K configurations.

    of: [K] the class of each configuration, in 0 … num_classes - 1; every class occurs. With K classes, class c is
    configuration c.
    num_classes: L.
    """

    of: ClassArray
    num_classes: int


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The partition that refines two others, and how its classes map to theirs.

    joint: the refinement.
    first, second: [joint.num_classes] the class of the first and of the second partition; None where the map is
    the identity.
    """

    joint: Partition
    first: ClassArray | None
    second: ClassArray | None


@dataclass(frozen=True, slots=True, eq=False)
class ClassAlgebra:
    """Products of partitions, each made once for each distinct pair."""

    _products: dict[tuple[int, int], tuple[Partition, Partition, Product]] = field(default_factory=dict)

    def product(self, a: Partition, b: Partition) -> Product:
        """Return the product of two partitions of the same configurations."""
        if a is b:
            return Product(a, None, None)
        key = (id(a), id(b))
        known = self._products.get(key)
        if known is None:
            known = self._products[key] = (a, b, _product(a, b))  # holding a and b keeps their ids theirs
        return known[2]

    def join(self, partitions: list[Partition]) -> tuple[Partition, list[ClassArray | None]]:
        """Return the product of several partitions, and its classes' class in each of them (None: the identity)."""
        joint = partitions[0]
        maps: list[ClassArray | None] = [None]
        for p in partitions[1:]:
            product = self.product(joint, p)
            if product.first is not None:
                maps = [product.first if m is None else m[product.first] for m in maps]
            maps.append(product.second)
            joint = product.joint
        return joint, maps


def _product(a: Partition, b: Partition) -> Product:
    if a.num_classes == 1:
        return Product(b, np.zeros(b.num_classes, dtype=np.intp), None)
    if b.num_classes == 1:
        return Product(a, None, np.zeros(a.num_classes, dtype=np.intp))
    if a.num_classes == len(a.of):  # a tells every configuration apart already
        return Product(a, None, _per_class(a, b))
    if b.num_classes == len(b.of):
        return Product(b, _per_class(b, a), None)
    pair = a.of * b.num_classes + b.of
    num_pairs = a.num_classes * b.num_classes
    if num_pairs <= 64 * len(pair) + 4096:
        occurs = np.zeros(num_pairs, dtype=bool)
        occurs[pair] = True
        pairs = np.flatnonzero(occurs)
        number = np.empty(num_pairs, dtype=np.intp)
        number[pairs] = np.arange(len(pairs))
        of = number[pair]
    else:
        pairs, of = np.unique(pair, return_inverse=True)
    first, second = pairs // b.num_classes, pairs % b.num_classes
    if len(pairs) == a.num_classes:  # b is coarser: its class follows from a's
        return Product(a, None, second)
    if len(pairs) == b.num_classes:
        return Product(b, _per_class(b, a), None)
    if len(pairs) == len(of):
        return Product(Partition(np.arange(len(of)), len(of)), a.of, b.of)
    return Product(Partition(of, len(pairs)), first, second)


def _per_class(fine: Partition, coarse: Partition) -> ClassArray:
    """Return the coarse partition's class of each class of a finer one."""
    result = np.empty(fine.num_classes, dtype=np.intp)
    result[fine.of] = coarse.of
    return result


def by_configuration(values: FloatArray, of: ClassArray) -> FloatArray:
    """Return the [K] value of each configuration's class; values: [L]."""
    return values if len(values) == len(of) else values.take(of)


def class_minima(costs: FloatArray, of: ClassArray, num_classes: int) -> FloatArray:
    """Return the [L] smallest cost in each class; costs, of: [K]."""
    if num_classes == len(of):
        return costs
    result = np.full(num_classes, np.inf)
    np.minimum.at(result, of, costs)
    return result
