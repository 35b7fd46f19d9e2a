"""Carrying out a movement whose pieces need not form a grid, with the runtime's pieces, cuts and joins."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from pase.sharding.boxes import Box, extents, intersection
from pase.sharding.layouts import Layout
from pase.sharding.reshard import ReshardStep, pieces
from pase.targets.mesh_tensorflow.runtime.assemble import run_hop
from pase.targets.mesh_tensorflow.runtime.compat import tf
from pase.targets.mesh_tensorflow.runtime.traffic import Account


def forms_grid(boxes: Sequence[Box]) -> bool:
    """Return whether boxes are all products of some ranges of each dim, each one the same number of times."""
    if not boxes:
        return True
    counts = Counter(boxes)
    ranges = [set(column) for column in zip(*boxes, strict=True)]
    return prod(map(len, ranges)) == len(counts) and len(set(counts.values())) == 1


def run_map(
    parts: Sequence[Any],
    step: ReshardStep,
    *,
    source_names: Sequence[str],
    target_names: Sequence[str],
    traffic: Account,
) -> list[Any]:
    """Return [target workers] what a movement delivers: the sum of all parts that overlap a target's box.

    parts: [source workers]. Zeros stand where no part overlaps.
    """
    if all(forms_grid([piece.box for piece in taken]) for taken in pieces(step)):
        return run_hop(parts, step, source_names=source_names, target_names=target_names, fill=0.0, traffic=traffic)
    # One source at a time, each giving one piece to a target, and then the sum.
    terms: list[list[Any]] = [[] for _ in step.target.boxes]
    for i, held in enumerate(step.source.boxes):
        to = [j for j, box in enumerate(step.target.boxes) if intersection(held, box) is not None]
        if not to:
            continue
        delivered = run_hop(
            [parts[i]],
            ReshardStep(_only(step.source, [i]), _only(step.target, to)),
            source_names=[source_names[i]],
            target_names=[target_names[j] for j in to],
            fill=0.0,
            traffic=traffic,
        )
        for j, tensor in zip(to, delivered, strict=True):
            terms[j].append(tensor)
    results = []
    for box, name, tensors in zip(step.target.boxes, target_names, terms, strict=True):
        with tf.device(name):
            results.append(tf.add_n(tensors) if tensors else tf.zeros(extents(box), parts[0].dtype))
    return results


def _only(layout: Layout, positions: Sequence[int]) -> Layout:
    return replace(
        layout,
        devices=tuple(layout.devices[i] for i in positions),
        parts=tuple(layout.parts[i] for i in positions),
        boxes=tuple(layout.boxes[i] for i in positions),
    )
