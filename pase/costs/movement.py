"""`Fetch`: a tensor that goes from one layout to another, one way, as arrays over pairs of layouts."""

from dataclasses import dataclass

import numpy as np

from pase.costs.layouts import FloatArray, IntArray
from pase.costs.overlap import Volumes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fetch:
    """What the device that fetches most needs, for each pair of layouts [L_u, L_v].

    needed_bytes: its part in the layout that is wanted. kept_bytes: what it holds of that part already. held_bytes: the
    largest part in the layout that is there. sum_members: [L_u, L_v, levels] or what broadcasts to it; how the devices
    that have just added this tensor up lie over the machine, for models that leave the gathering of a sum to its edge.
    Without columns, or with ones alone, nothing is left to gather.
    """

    needed_bytes: FloatArray
    kept_bytes: FloatArray
    held_bytes: FloatArray
    sum_members: IntArray

    @property
    def moved_bytes(self) -> FloatArray:
        """What is fetched."""
        return np.maximum(self.needed_bytes - self.kept_bytes, 0.0)


def fetches(
    common: Volumes, word_bytes: int, *, forward_sums: IntArray | None = None, backward_sums: IntArray | None = None
) -> tuple[Fetch, Fetch]:
    """Return what moves forward, to the consumer's layout, and back, to the producer's.

    forward_sums: [L_u, levels] of the producer's sum; backward_sums: [L_v, levels] of the consumer's gradient's.
    """
    nothing = np.empty((1, 1, 0), dtype=np.int64)
    return (
        Fetch(
            needed_bytes=common.needed_forward * word_bytes,
            kept_bytes=common.kept_forward * word_bytes,
            held_bytes=common.produced * word_bytes,
            sum_members=nothing if forward_sums is None else forward_sums[:, None, :],
        ),
        Fetch(
            needed_bytes=common.needed_backward * word_bytes,
            kept_bytes=common.kept_backward * word_bytes,
            held_bytes=common.consumed * word_bytes,
            sum_members=nothing if backward_sums is None else backward_sums[None, :, :],
        ),
    )
