"""Every figure that the text of Gholami et al. states, beside what its printed equations give."""

from collections.abc import Iterator

from pase.studies.easgd_paper import Statement
from pase.studies.integrated.chain import Chain, Options
from pase.studies.integrated.equations import (
    Grid,
    Role,
    crossover_batch,
    largest_model_batch,
    pure_batch,
    pure_domain,
    pure_model,
    redistribution,
)
from pase.studies.integrated.study import Candidate, Study, step_time
from scripts.benchmarks.integrated_figures import (
    BEYOND_PROCESSES,
    STRONG_BATCH,
    STRONG_PROCESSES,
    alexnet,
    beyond,
    convolutions_beyond,
    cori,
    halves,
    studied,
)


def statements() -> Iterator[Statement]:
    """Yield the statements in the paper's order, version 1's last."""
    yield _weights()
    yield from _crossover()
    yield _redistribution()
    yield _domain_overhead()
    yield from _figure_6()
    yield from _figure_7()
    yield _figure_8()
    yield _figure_9()
    yield from _figure_10()
    yield from _version_1()


def _weights() -> Statement:
    return Statement(
        where="Table 1",
        what="parameters of AlexNet",
        paper="61M",
        ours=f"{alexnet().num_weights:,} weights, without biases",
        verdict=_verdict(holds=round(alexnet().num_weights / 1e6) == 61),
    )


def _crossover() -> Iterator[Statement]:
    (layer,) = (x for x in alexnet().layers if x.name == "conv4")
    for text, options in (
        ("X_C = 384", Options(crossover_per_group=False)),
        ("X_C = 192, as the network of 2012 groups it", Options()),
    ):
        last = largest_model_batch(layer, options)
        verdict = f"holds, and up to {last}" if last >= 12 else f"no: to B = {last} only"
        yield Statement(
            where="after Eq. 5",
            what=f"3×3 filters on 13×13×384: model parallelism moves less ({text})",
            paper="B ≤ 12",
            ours=f"B < {crossover_batch(layer, options):.2f}",
            verdict=verdict,
        )


def _redistribution() -> Statement:
    """A layer whose input and output have one size, as the statement takes it."""
    (layer,) = (x for x in alexnet().layers if x.name == "fc2")
    alone = Chain(model="fc2", batch=1, layers=(layer,))
    step = pure_model(alone, STRONG_BATCH, 512, cori(), Options()).time_s
    moved = redistribution(layer.input_words, STRONG_BATCH, 512, cori(), Options())
    return Statement(
        where="after Eq. 6",
        what="the model-parallel step costs so many times the redistribution before it",
        paper="3",
        ours=f"{step / moved:.2f} (fc2, d_i = d_(i-1))",
        verdict=_verdict(holds=abs(step / moved - 3) < 1e-9),
    )


def _domain_overhead() -> Statement:
    first, _ = halves(alexnet())
    domain = pure_domain(first, STRONG_BATCH, 8, cori(), Options()).time_s
    batch = pure_batch(first, 8, cori(), Options()).time_s
    return Statement(
        where="section 3",
        what="where B ≥ P, domain parallelism (Eq. 7) costs more than batch parallelism (convolutions, P = 8)",
        paper="more",
        ours=f"{domain * 1e3:.1f} ms, {batch * 1e3:.1f} ms",
        verdict=_verdict(holds=domain > batch),
    )


def _figure_6() -> Iterator[Statement]:
    small, large = studied(8, STRONG_BATCH), studied(512, STRONG_BATCH)
    best = _best(large, "same_grid")
    named = next(c for c in large.candidates["same_grid"] if c.grid == Grid(16, 32))
    yield Statement(
        where="Fig. 6(a)",
        what="P = 8: integrated does not pay; the best grid",
        paper="1x8",
        ours=str(_best(small, "same_grid").grid),
        verdict=_verdict(holds=_best(small, "same_grid").grid == Grid(1, 8)),
    )
    gains = [found.speedup(_best(found, "same_grid").time_s) for found in _strong()]
    yield Statement(
        where="Fig. 6",
        what="the gain grows with P (8, 32, 128, 512)",
        paper="grows",
        ours=", ".join(f"{gain:.2f}×" for gain in gains),
        verdict=_verdict(holds=gains == sorted(gains) and gains[-1] > gains[0]),
    )
    yield Statement(
        where="Fig. 6(d)",
        what="P = 512: the best grid",
        paper="16x32",
        ours=str(best.grid),
        verdict=_verdict(holds=best.grid == Grid(16, 32)),
    )
    ours = f"{large.speedup(named.time_s):.2f}× on 16x32; {large.speedup(best.time_s):.2f}× on {best.grid}, the best"
    yield Statement(
        where="Fig. 6(d)",
        what="P = 512: speed-up of communication",
        paper="5.0×",
        ours=ours,
        verdict=_verdict(holds=abs(large.speedup(named.time_s) - 5.0) < 0.05),
    )
    yield Statement(
        where="Fig. 6(d)",
        what="P = 512: speed-up of the whole step",
        paper="2.1×",
        ours=f"on 16x32 {_needed(large, named, 2.1)}; on {best.grid} {_needed(large, best, 2.1)}",
        verdict="**no** on 16x32",
    )


def _figure_7() -> Iterator[Statement]:
    large = studied(512, STRONG_BATCH)
    best = _best(large, "dense_only")
    yield Statement(
        where="Fig. 7",
        what="model parallelism in the dense layers alone is better than everywhere, at every P",
        paper="better",
        ours=", ".join(f"{found.speedup(_best(found, 'dense_only').time_s):.2f}×" for found in _strong()),
        verdict=_verdict(
            holds=all(_best(found, "dense_only").time_s < _best(found, "same_grid").time_s for found in _strong())
        ),
    )
    yield Statement(
        where="Fig. 7(d)",
        what="P = 512: speed-up of communication",
        paper="9.7×",
        ours=f"{large.speedup(best.time_s):.2f}× on {best.grid}, the best",
        verdict=_verdict(holds=abs(large.speedup(best.time_s) - 9.7) < 0.05),
    )
    yield Statement(
        where="Fig. 7(d)",
        what="P = 512: speed-up of the whole step",
        paper="2.5×",
        ours=_needed(large, best, 2.5),
        verdict="cannot be told: the text has no computation time",
    )


def _figure_8() -> Statement:
    large = studied(512, STRONG_BATCH)
    best = _best(large, "dense_only")
    return Statement(
        where="Fig. 8",
        what="the same with perfect overlap",
        paper="2.0×",
        ours=_needed(large, best, 2.0, overlap=True),
        verdict="cannot be told: the text has no computation time",
    )


def _figure_9() -> Statement:
    return Statement(
        where="Fig. 9",
        what="weak scaling",
        paper="no figure in the text, nor P and B",
        ours="drawn for four samples a process",
        verdict="nothing to compare",
    )


def _figure_10() -> Iterator[Statement]:
    last = BEYOND_PROCESSES[-1]
    domain, model = (convolutions_beyond(last, role) for role in (Role.DOMAIN, Role.MODEL))
    what = f"convolutions, P = {last}, B = 512, on 8x512: sharing rows moves much less than sharing weights"
    for of, times in (
        ("activations and their gradients alone", [x.time_s - x.weight_gradient_all_reduce for x in (domain, model)]),
        ("with the all-reduce of ΔW, which sharing weights makes smaller", [domain.time_s, model.time_s]),
    ):
        yield Statement(
            where="section 2.4, Fig. 10",
            what=f"{what} ({of})",
            paper="much less",
            ours=f"{times[0] * 1e3:.2f} ms, {times[1] * 1e3:.2f} ms",
            verdict=_verdict(holds=times[0] < times[1] / 2),
        )
    beyond_s = [min(c.terms.time_s for c in beyond(p)) for p in BEYOND_PROCESSES]
    yield Statement(
        where="Fig. 10",
        what="scaling continues beyond P = 512 = B, to 4096: communication does not grow",
        paper="continues",
        ours=", ".join(f"{time_s * 1e3:.2f}" for time_s in beyond_s) + " ms",
        verdict=_verdict(holds=beyond_s == sorted(beyond_s, reverse=True)),
    )


def _version_1() -> Iterator[Statement]:
    for num_processes, grid in ((8, Grid(1, 8)), (512, Grid(4, 128))):
        best = _best(studied(num_processes, STRONG_BATCH, version=1), "same_grid")
        yield Statement(
            where=f"version 1, Fig. 5({'a' if num_processes == 8 else 'd'})",
            what=f"P = {num_processes}: the best grid",
            paper=str(grid),
            ours=str(best.grid),
            verdict=_verdict(holds=best.grid == grid),
        )


def implied_computation() -> Iterator[tuple[str, str, str]]:
    """Yield (speed-ups of communication and of the step that the paper prints, where, the computation they imply)."""
    pure_s = studied(512, STRONG_BATCH).pure_batch.time_s
    for where, communication, step, overlap in (
        ("Fig. 6(d)", 5.0, 2.1, False),
        ("Fig. 7(d)", 9.7, 2.5, False),
        ("Fig. 8", 9.7, 2.0, True),
    ):
        compute_s = compute_for(pure_s, pure_s / communication, step, overlap=overlap)
        assert compute_s is not None
        yield where, f"{communication}×, {step}×", f"{compute_s * 1e3:.1f} ms"


def compute_for(pure_s: float, time_s: float, speedup: float, *, overlap: bool = False) -> float | None:
    """Return the computation of a step, s, with which less communication makes the whole step so many times faster.

    pure_s, time_s: communication under pure batch parallelism, and now. None where no computation does. Found by
    halving: the more both steps compute, the smaller the gain.
    """

    def reached(compute_s: float) -> float:
        return step_time(pure_s, compute_s, overlap=overlap) / step_time(time_s, compute_s, overlap=overlap)

    low, high = 0.0, 1e3
    if reached(low) < speedup:
        return None
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) > speedup else (low, middle)
    return low


def _needed(study: Study, candidate: Candidate, speedup: float, *, overlap: bool = False) -> str:
    compute_s = compute_for(study.pure_batch.time_s, candidate.time_s, speedup, overlap=overlap)
    if compute_s is None:
        return f"whatever a step computes, less: {study.speedup(candidate.time_s):.2f}× of communication alone"
    return f"{speedup}× if a step computes for {compute_s * 1e3:.1f} ms"


def _strong() -> list[Study]:
    return [studied(num_processes, STRONG_BATCH) for num_processes in STRONG_PROCESSES]


def _best(study: Study, variant: str) -> Candidate:
    best = study.best(variant)
    assert best is not None
    return best


def _verdict(*, holds: bool) -> str:
    return "yes" if holds else "**no**"
