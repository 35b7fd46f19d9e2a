"""Gradient buckets: which weights' gradients are reduced together, and in which order the reductions are launched.

The runtime for PyTorch and the memory model both form their buckets here. Buckets depend only on the order and the
sizes of the weights, which all ranks know, and not on anything at run time: all ranks of a process group launch its
reductions in the same order.
"""

from collections.abc import Hashable, Sequence

BUCKET_BYTES, SMALL_BUCKET_BYTES, BUCKETS = 25 * 2**20, 2**18, 8
"""Largest and smallest bucket size, and number of buckets. A bucket holds up to `BUCKET_BYTES`, as in
`DistributedDataParallel`. If all gradients fit in a few such buckets, the limit is an eighth of their bytes, but at
least `SMALL_BUCKET_BYTES`: with one bucket for all, nothing would overlap with the backward pass."""


def gradient_buckets(keys: Sequence[Hashable], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the buckets of weights' gradients in the order in which their reductions are launched.

    The backward pass finishes gradients in the reverse order of the weights, and a bucket is complete when the gradient
    of its first weight is finished. Buckets are ordered by completion, so that a bucket whose weights are far apart
    does not delay those between them.

    Args:
        keys: Key of each weight, in the order in which the forward pass first uses them. Only gradients with equal keys
            (process group, element type) can be reduced together.
        sizes: Bytes of each weight's gradient on a rank, the same numbers on all ranks.

    Returns:
        For each bucket the positions of its weights, in the order in which the backward pass finishes their gradients.
    """
    limit = min(BUCKET_BYTES, max(SMALL_BUCKET_BYTES, sum(sizes) // BUCKETS))
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    buckets: list[list[int]] = []
    for position in reversed(range(len(sizes))):
        key = keys[position]
        if key not in open_buckets or filled[key] + sizes[position] > limit:
            open_buckets[key], filled[key] = [], 0
            buckets.append(open_buckets[key])
        open_buckets[key].append(position)
        filled[key] += sizes[position]
    return tuple(tuple(bucket) for bucket in sorted(buckets, key=lambda bucket: -bucket[-1]))
