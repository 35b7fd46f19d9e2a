"""Buckets of gradients: which weights' gradients are reduced together, and in which order the reductions begin.

A program for PyTorch and the prediction of its memory both form their buckets here. Everything follows from the order
of the weights and their sizes, which all ranks know, and from nothing that happens at run time: ranks that share a
group launch its reductions in one order.
"""

from collections.abc import Hashable, Sequence

BUCKET_BYTES, SMALL_BUCKET_BYTES, BUCKETS = 25 * 2**20, 2**18, 8
"""A bucket has up to the first, as in `DistributedDataParallel`; where all gradients fill few such buckets, an eighth
of their bytes, but no less than the second. If all were in one bucket, none would overlap with the backward pass."""


def gradient_buckets(keys: Sequence[Hashable], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the buckets of weights' gradients in the order in which their reductions begin.

    The backward pass finishes gradients in the reverse order of the weights, and a bucket is full when it has finished
    that of its first weight. Buckets are in the order in which they are full, so that one whose weights are far apart
    does not hold up those between them.

    Args:
        keys: Of each weight, in the order in which the forward pass first uses them: only gradients of equal keys can
            be reduced together (their group of ranks, their type).
        sizes: Bytes of each weight's gradient on a rank, the same numbers on all ranks.

    Returns:
        For each bucket the positions of its weights, in the order in which the backward pass finishes their gradients.
    """
    limit = min(BUCKET_BYTES, max(SMALL_BUCKET_BYTES, sum(sizes) // BUCKETS))
    open_buckets: dict[Hashable, list[int]] = {}
    buckets: list[list[int]] = []
    for position in reversed(range(len(sizes))):
        bucket = open_buckets.get(keys[position])
        if bucket is None or sum(sizes[other] for other in bucket) + sizes[position] > limit:
            bucket = open_buckets[keys[position]] = []
            buckets.append(bucket)
        bucket.append(position)
    return tuple(tuple(bucket) for bucket in sorted(buckets, key=lambda bucket: -bucket[-1]))
