"""Steps of every algorithm that were taken by hand, in exact fractions: what rules and runtimes must come to.

Worker i has f_i(w) = a_i (w − c_i)² / 2, so ΔW^i = a_i (w − c_i):

    ΔW^0 = w − 1,  ΔW^1 = 2 (w + 1),  ΔW^2 = 3 (w + 1).

The workings beside the figures follow the paper's text, not the code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction as Q
from typing import Any

from pase.easgd.algorithms import Rates

GRADIENTS: tuple[Callable[[Any], Any], ...] = (lambda w: w - 1, lambda w: 2 * (w + 1), lambda w: 3 * (w + 1))


@dataclass(frozen=True, kw_only=True)
class Worked:
    """Steps from workers' weights (or their copies of the master's) and a centre; velocities begin with 0.

    order: whom each event serves, () for rounds of all. left: what each event or round leaves: the weights of the
    worker that was served, or of all; the centre; and of methods with momentum the velocity that moved either.
    """

    names: tuple[str, ...]
    rates: Rates
    workers: tuple[int, ...]
    centre: int
    order: tuple[int, ...] = (0, 1, 0, 1)
    left: tuple[tuple[Q | int, ...], ...]


# η = 1/2, ρ = 1/3, ηρ = 1/6; from W^0 = 3, W^1 = 0, W̄ = 1. Each event: ΔW at W^j, Eq. 1, and Algorithm 1's line 15.
ELASTIC = Worked(
    names=("original-easgd", "async-easgd", "hogwild-easgd"),
    rates=Rates(learning_rate=Q(1, 2), rho=Q(1, 3)),
    workers=(3, 0),
    centre=1,
    left=(
        # worker 0: ΔW = 3 − 1 = 2;      W = 3 − 1/2 (2 + 1/3 · 2) = 3 − 4/3;           W̄ = 1 + 1/6 · 2
        (Q(5, 3), Q(4, 3)),
        # worker 1: ΔW = 2 (0 + 1) = 2;  W = 0 − 1/2 (2 + 1/3 · (−4/3)) = −1/2 · 14/9;  W̄ = 4/3 + 1/6 · (−4/3)
        (Q(-7, 9), Q(10, 9)),
        # worker 0: ΔW = 2/3, W − W̄ = 5/9; W = 5/3 − 1/2 (2/3 + 5/27) = 90/54 − 23/54;  W̄ = 10/9 + 5/54
        (Q(67, 54), Q(65, 54)),
        # worker 1: ΔW = 4/9, W − W̄ = −42/54 − 65/54 = −107/54;
        #           W = −7/9 − 1/2 (72/162 − 107/162) = −252/324 + 35/324;  W̄ = 390/324 − 107/324
        (Q(-217, 324), Q(283, 324)),
    ),
)

# η = 1/2, ρ = 1/3, μ = 3/4. Each event: Eq. 5, then Eq. 6 with the new V; the centre by Eq. 2, without momentum.
ELASTIC_MOMENTUM = Worked(
    names=("async-measgd",),
    rates=Rates(learning_rate=Q(1, 2), rho=Q(1, 3), momentum=Q(3, 4)),
    workers=(3, 0),
    centre=1,
    left=(
        # ΔW = 2: V = −1;                       W = 3 − 1 − 1/6 · 2;                            W̄ = 1 + 1/6 · 2
        (Q(5, 3), Q(4, 3), -1),
        # ΔW = 2: V = −1;                       W = 0 − 1 + 1/6 · 4/3;                          W̄ = 4/3 − 2/9
        (Q(-7, 9), Q(10, 9), -1),
        # ΔW = 2/3: V = −3/4 − 1/3 = −13/12;    W = 5/3 − 13/12 − 1/6 · 5/9 = 63/108 − 10/108;  W̄ = 10/9 + 5/54
        (Q(53, 108), Q(65, 54), Q(-13, 12)),
        # ΔW = 4/9: V = −3/4 − 2/9 = −35/36;    W = −28/36 − 35/36 + 107/324 = −460/324;        W̄ = 390/324 − 107/324
        (Q(-115, 81), Q(283, 324), Q(-35, 36)),
    ),
)

# η = 1/3; the copies are 3 and 0 already, W = 1. Each event: W − η ΔW(copy), and the copy is the W after it.
COPIES = Worked(
    names=("async-sgd", "hogwild-sgd"),
    rates=Rates(learning_rate=Q(1, 3)),
    workers=(3, 0),
    centre=1,
    left=(
        # worker 0: ΔW(3) = 2;            W = 1 − 2/3
        (Q(1, 3), Q(1, 3)),
        # worker 1: ΔW(0) = 2;            W = 1/3 − 2/3
        (Q(-1, 3), Q(-1, 3)),
        # worker 0: ΔW(1/3) = −2/3;       W = −1/3 + 2/9
        (Q(-1, 9), Q(-1, 9)),
        # worker 1: ΔW(−1/3) = 4/3;       W = −1/9 − 4/9
        (Q(-5, 9), Q(-5, 9)),
    ),
)

# η = 1/3, μ = 3/4; copies 3 and 0, W = 1. Eq. 3 and 4, with one V, the master's, for all workers.
COPIES_MOMENTUM = Worked(
    names=("async-msgd",),
    rates=Rates(learning_rate=Q(1, 3), momentum=Q(3, 4)),
    workers=(3, 0),
    centre=1,
    left=(
        # worker 0: ΔW(3) = 2;       V = −2/3;                                 W = 1 − 2/3
        (Q(1, 3), Q(1, 3), Q(-2, 3)),
        # worker 1: ΔW(0) = 2;       V = −1/2 − 2/3;                           W = 1/3 − 7/6
        (Q(-5, 6), Q(-5, 6), Q(-7, 6)),
        # worker 0: ΔW(1/3) = −2/3;  V = −7/8 + 2/9 = −63/72 + 16/72;          W = −60/72 − 47/72
        (Q(-107, 72), Q(-107, 72), Q(-47, 72)),
        # worker 1: ΔW(−5/6) = 1/3;  V = −47/96 − 1/9 = −141/288 − 32/288;     W = −428/288 − 173/288
        (Q(-601, 288), Q(-601, 288), Q(-173, 288)),
    ),
)

# η = 1/2, ρ = 1/3, ηρ = 1/6; W^0 = 3, W^1 = 0, W^2 = −2, W̄ = 1. Everything on the right is before the round.
ELASTIC_ROUNDS = Worked(
    names=("sync-easgd1", "sync-easgd2", "sync-easgd3"),
    rates=Rates(learning_rate=Q(1, 2), rho=Q(1, 3)),
    workers=(3, 0, -2),
    centre=1,
    order=(),
    left=(
        # ΔW = 2, 2, −3; W − W̄ = 2, −1, −3:
        # W^0 = 3 − 1/2 (2 + 2/3); W^1 = 0 − 1/2 (2 − 1/3); W^2 = −2 − 1/2 (−3 − 1); W̄ = 1 + 1/6 (2 − 1 − 3)
        (Q(5, 3), Q(-5, 6), 0, Q(2, 3)),
        # ΔW = 2/3, 1/3, 3; W − W̄ = 1, −3/2, −2/3:
        # W^0 = 5/3 − 1/2 (2/3 + 1/3); W^1 = −5/6 − 1/2 (1/3 − 1/2); W^2 = 0 − 1/2 (3 − 2/9);
        # W̄ = 2/3 + 1/6 (1 − 3/2 − 2/3) = 2/3 − 7/36
        (Q(7, 6), Q(-3, 4), Q(-25, 18), Q(17, 36)),
    ),
)

# η = 1/5, all at 2.
SUMS = Worked(
    names=("sync-sgd",),
    rates=Rates(learning_rate=Q(1, 5)),
    workers=(2, 2, 2),
    centre=2,
    order=(),
    left=(
        # ΔW = 1, 6, 9: W = 2 − 16/5
        (Q(-6, 5),) * 4,
        # ΔW = −11/5, −2/5, −3/5: W = −6/5 + 16/25
        (Q(-14, 25),) * 4,
    ),
)
MEANS = Worked(
    names=("sync-sgd",),
    rates=Rates(learning_rate=Q(1, 5), averages=True),
    workers=(2, 2, 2),
    centre=2,
    order=(),
    left=(
        # ΔW = 1, 6, 9: W = 2 − 1/5 · 16/3
        (Q(14, 15),) * 4,
        # ΔW = −1/15, 58/15, 87/15: W = 14/15 − 1/5 · 48/15 = 70/75 − 48/75
        (Q(22, 75),) * 4,
    ),
)

WORKED = {
    f"{name}{', average' if worked.rates.averages else ''}": (name, worked)
    for worked in (ELASTIC, ELASTIC_MOMENTUM, COPIES, COPIES_MOMENTUM, ELASTIC_ROUNDS, SUMS, MEANS)
    for name in worked.names
}
"""(the algorithm, the steps), by what a test calls them."""
