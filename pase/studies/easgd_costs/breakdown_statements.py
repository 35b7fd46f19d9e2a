"""Table 3 and its text in You et al. 2017, beside what six of its cells predict."""

from collections.abc import Iterator

from pase.studies.easgd_costs.algorithms import ALGORITHMS
from pase.studies.easgd_costs.calibration import PredictedRow, message_s, predicted, row_of, table_3
from pase.studies.easgd_costs.judgement import NO, UNTOLD, YES, Statement, judged
from pase.studies.easgd_costs.paper import TABLE_3_WORKERS, Printed


def breakdown_statements() -> Iterator[Statement]:
    """Yield times, ratios and speed-ups, then what they imply, and what section 5 says of the other algorithms."""
    yield from _times()
    yield from _ratios()
    yield from _speedups()
    yield _composition()
    yield _one_gpu_at_a_time()
    yield from _exchanges()
    yield from _other_algorithms()


def _named(name: str) -> PredictedRow:
    return next(row for row in table_3() if row.measured.algorithm == name)


def _times() -> Iterator[Statement]:
    for row in table_3():
        measured = row.measured
        calibrates = measured.algorithm == "original-easgd-star"
        yield Statement(
            where="Table 3",
            what=f"{row.iteration.algorithm.title}: {measured.num_iterations:,} iterations",
            paper=f"{measured.time.text} s",
            ours=f"{row.time_s:.1f} s",
            verdict="calibrates the model" if calibrates else judged(row.time_s, measured.time),
        )


def _ratios() -> Iterator[Statement]:
    for row in table_3()[1:]:
        ratio = 100 * row.iteration.breakdown.communication_ratio
        yield Statement(
            where="Table 3",
            what=f"{row.iteration.algorithm.title}: communication ratio",
            paper=f"{row.measured.ratio.text} %",
            ours=f"{ratio:.0f} %",
            verdict=judged(ratio, row.measured.ratio),
        )


def _speedups() -> Iterator[Statement]:
    for before, after, printed, where in (
        ("original-easgd", "sync-easgd1", "3.7", "6.1.1"),
        ("sync-easgd1", "sync-easgd2", "1.3", "6.1.2"),
        ("sync-easgd2", "sync-easgd3", "1.1", "6.1.3"),
        ("original-easgd", "sync-easgd3", "5.3", "6.1.3"),
    ):
        first, second = _named(before), _named(after)
        ratio = first.time_s / second.time_s
        yield Statement(
            where=f"section {where}",
            what=f"{second.iteration.algorithm.title} over {first.iteration.algorithm.title}, in time",
            paper=f"{printed}×",
            ours=f"{ratio:.2f}× (the table's own times: {first.measured.time.value / second.measured.time.value:.2f}×)",
            verdict=judged(ratio, Printed(printed)),
        )


def _composition() -> Statement:
    original, sync = row_of("original-easgd"), row_of("sync-easgd3")
    an_iteration = original.iteration_s / sync.iteration_s
    iterations = original.num_iterations / sync.num_iterations
    batches = iterations / TABLE_3_WORKERS
    return Statement(
        where="section 6.1.3",
        what="the 5.3×: time of an iteration, times number of iterations",
        paper="“for the same accuracy”",
        ours=f"{an_iteration:.2f}× an iteration, {iterations:.0f}× the iterations; as one of Original's is one batch, "
        f"one of Sync's four: {TABLE_3_WORKERS * an_iteration:.2f}× a batch, {batches:.2f}× the batches",
        verdict="it mixes the two; the second is no matter of cost",
    )


def _one_gpu_at_a_time() -> Statement:
    star, sync = row_of("original-easgd-star"), row_of("sync-easgd1")
    return Statement(
        where="Table 3",
        what="for/backward takes 30 s, not 6 s, because only one GPU works at each iteration",
        paper="5×",
        ours=f"an iteration: {1e3 * star.part_s('compute_s'):.2f} ms and {1e3 * sync.part_s('compute_s'):.2f} ms",
        verdict=f"{NO}: there are five times as many iterations, each as long",
    )


def _exchanges() -> Iterator[Statement]:
    """The tree against the messages that the rows themselves imply."""
    alone = message_s(row_of("original-easgd"))["host_exchange_s"]
    tree = message_s(row_of("sync-easgd1"))["host_exchange_s"]
    between = [message_s(row_of(name))["worker_exchange_s"] for name in ("sync-easgd2", "sync-easgd3")]
    rounds = TABLE_3_WORKERS * 2 * alone / row_of("sync-easgd1").part_s("host_exchange_s")
    yield Statement(
        where="section 6.1.1",
        what="a tree instead of P messages: weights of 4 GPUs exchanged once",
        paper="P ÷ log P = 2×",
        ours=f"the table's own times: {rounds:.1f}×",
        verdict=f"{NO}: {1e3 * alone:.2f} ms a message in Original EASGD, {1e3 * tree:.2f} ms in Sync EASGD1",
    )
    yield Statement(
        where="section 6.1.3",
        what="Sync EASGD3 hides the exchange between GPUs behind steps 7 to 10, which last longer",
        paper=f"{row_of('sync-easgd3').percent['worker_exchange_s'].text} % is still seen",
        ours=f"0 %; of {4e3 * between[0]:.2f} ms they hid {4e3 * (between[0] - between[1]):.2f} ms",
        verdict=f"{NO}: {1 - between[1] / between[0]:.0%} of it was hidden",
    )


def _other_algorithms() -> Iterator[Statement]:
    """Section 5.1 and Fig. 8, of which the text has no number; times of a batch."""
    batch_s = {name: found.round_s / found.num_workers for name in ALGORITHMS for found in [predicted(name)]}
    gain = batch_s["original-easgd"] / batch_s["async-easgd"]
    yield Statement(
        where="section 1, Fig. 8",
        what="Async EASGD is not significantly faster than Original EASGD",
        paper="not significantly",
        ours=f"{gain:.2f}× the batches a second: both wait for the master's link",
        verdict=YES if gain < 1.1 else NO,
    )
    gain = batch_s["original-easgd"] / batch_s["hogwild-easgd"]
    yield Statement(
        where="section 1, Fig. 8",
        what="Hogwild EASGD is much faster than Original EASGD",
        paper="much",
        ours=f"{gain:.2f}× the batches a second",
        verdict=YES if gain > 1.5 else NO,
    )
    gain = batch_s["hogwild-easgd"] / batch_s["sync-easgd3"]
    yield Statement(
        where="section 5.1, Fig. 8",
        what="Sync EASGD and Hogwild EASGD are tied for fastest",
        paper="tied",
        ours=f"Sync EASGD3 has {gain:.2f}× the batches a second; to the same accuracy the model says nothing",
        verdict=UNTOLD,
    )
