"""The binomial tree over workers: ⌈log2 P⌉ rounds in place of P (Section 6.1.1), and sums that are added as it adds.

In round k, worker i with i mod 2^(k+1) = 0 takes what worker i + 2^k has. So the order of additions follows from the
workers' numbers alone: whoever adds, in however many processes, gets the same bits.
"""

from collections.abc import Iterable

from pase.easgd.equations import Array


def num_rounds(num_workers: int) -> int:
    """Return ⌈log2 P⌉."""
    return (num_workers - 1).bit_length()


def children(worker: int, num_workers: int) -> tuple[int, ...]:
    """Return whose sums a worker takes, in the order of the rounds; a broadcast goes to them in the reverse order."""
    found = []
    for round_ in range(num_rounds(num_workers)):
        distance = 1 << round_
        if worker & distance:
            break
        if worker + distance < num_workers:
            found.append(worker + distance)
    return tuple(found)


def parent(worker: int) -> int:
    """Return to whom a worker gives its sum; worker 0 has none."""
    assert worker > 0
    return worker & (worker - 1)


def tree_sum(vectors: Iterable[Array]) -> Array:
    """Return the sum of the workers' vectors, [n], taken in their order and added as the tree adds them.

    Holds ⌈log2 P⌉ + 1 of them at a time.
    """
    partial: list[tuple[int, Array]] = []
    for vector in vectors:
        count, total = 1, vector
        while partial and partial[-1][0] == count:
            earlier = partial.pop()
            count, total = count + earlier[0], earlier[1] + total
        partial.append((count, total))
    _, total = partial.pop()
    while partial:
        total = partial.pop()[1] + total
    return total
