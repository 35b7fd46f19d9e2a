"""What `pase integrated` prints of a study: JSON, and tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pase.cli.output import print_table, quantity, say
from pase.studies.integrated.chain import CONVENTIONS, Options, WeightedLayer
from pase.studies.integrated.equations import Network, crossover_batch, equal_volume_batch, largest_model_batch
from pase.studies.integrated.study import (
    SAME_GRID,
    Candidate,
    ComputeTimes,
    Study,
    held,
    held_2d,
    moved,
    moved_stationary_a,
    step_time,
)

VARIANTS: Mapping[str, str] = MappingProxyType(
    {
        "same_grid": "weights of every layer (Eq. 8)",
        "dense_only": "weights of dense layers; batch over all in convolutions",
        "domain": "rows in convolutions, weights in dense layers (Eq. 9)",
        "per_layer": "rows or weights, as is cheaper, in each layer (Eq. 9)",
        "own_grids": "weights of dense layers; rows in convolutions, on a grid of their own (Fig. 10)",
    }
)
"""What the P_r processes share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """compute: of a step, one time for all grids or by the batch; None where only communication is of interest.

    overlap: of the two. num_steps: of an epoch, None where that is of no interest.
    """

    compute: float | ComputeTimes | None
    overlap: bool
    num_steps: float | None

    def compute_s(self, study: Study, candidate: Candidate | None) -> float | None:
        """Return for how long a candidate computes, None for pure batch parallelism; None where it is not known."""
        if not isinstance(self.compute, ComputeTimes):
            return self.compute
        if candidate is None:
            return self.compute.of_batch(study.batch / study.num_processes)
        return self.compute.on_grid(study.chain, study.batch, candidate.grid, candidate.roles)

    def step_s(self, study: Study, candidate: Candidate | None) -> float | None:
        """Return the time of a candidate's step, or of pure batch parallelism's; None where it is not known."""
        compute_s = self.compute_s(study, candidate)
        terms = study.pure_batch if candidate is None else candidate.terms
        return None if compute_s is None else step_time(terms.time_s, compute_s, overlap=self.overlap)


def study_document(study: Study, network: Network, options: Options, timing: Timing) -> dict[str, Any]:
    """Return the JSON form of a study: `grids` and `best` are of the 1.5D algorithm, the others under `variants`."""

    def entry(candidate: Candidate | None) -> dict[str, Any] | None:
        return None if candidate is None else _entry(study, candidate, timing)

    variants = {
        name: {"grids": [entry(candidate) for candidate in candidates], "best": entry(study.best(name))}
        for name, candidates in study.candidates.items()
    }
    same = variants.pop(SAME_GRID)
    best = study.best()
    pure_domain_s = None if study.pure_domain is None else study.pure_domain.time_s
    return {
        "model": study.chain.model,
        "processes": study.num_processes,
        "batch": study.batch,
        "version": study.version,
        "latency_s": network.latency_s,
        "bandwidth_bytes_per_s": 1 / network.s_per_byte,
        "num_weights": study.chain.num_weights,
        "pure_model_s": study.pure_model.time_s,
        "pure_batch_s": study.pure_batch.time_s,
        "pure_batch_possible": study.is_pure_batch_possible,
        "pure_domain_convolutions_s": pure_domain_s,
        **same,
        "variants": variants,
        "best_of_all": None if best is None else {"variant": best.variant, **_entry(study, best, timing)},
        "layers": [_layer_document(study, layer, options) for layer in study.chain.layers],
        "conventions": {name: getattr(options, name) for name in CONVENTIONS} | {"word_bytes": options.word_bytes},
    }


def _entry(study: Study, candidate: Candidate, timing: Timing) -> dict[str, Any]:
    document: dict[str, Any] = {
        "pr": candidate.grid.num_rows,
        "pc": candidate.grid.num_columns,
        "time_s": candidate.time_s,
        "speedup_over_pure_batch": study.speedup(candidate.time_s),
        "terms_s": candidate.terms.as_dict(),
    }
    if timing.num_steps is not None:
        document["epoch_time_s"] = candidate.time_s * timing.num_steps
    words = held(study.chain, study.batch, candidate.grid, candidate.roles)
    document["held_words"] = {"weights": words.weights, "data": words.data}
    if candidate.convolutions is not None:
        document["convolutions"] = {"pr": candidate.convolutions.num_rows, "pc": candidate.convolutions.num_columns}
    step_s, pure_s = timing.step_s(study, candidate), timing.step_s(study, None)
    if step_s is not None and pure_s is not None:
        document["compute_time_s"] = timing.compute_s(study, candidate)
        document |= {"step_time_s": step_s, "step_speedup_over_pure_batch": pure_s / step_s if step_s else 1.0}
    return document


def _layer_document(study: Study, layer: WeightedLayer, options: Options) -> dict[str, Any]:
    best = study.best("per_layer")
    role = None if best is None else best.roles[layer.name].value
    return {
        "name": layer.name,
        "is_convolution": layer.is_convolution,
        "input_words": layer.input_words,
        "output_words": layer.output_words,
        "num_weights": layer.num_weights,
        "kernel": list(layer.kernel),
        "stride": list(layer.stride),
        "groups": layer.num_groups,
        "crossover_batch": crossover_batch(layer, options),
        "equal_volume_batch": equal_volume_batch(layer, options),
        "largest_model_batch": largest_model_batch(layer, options),
        "best_role": role,
    }


def print_study(
    study: Study, network: Network, options: Options, timing: Timing, *, per_layer: bool, memory: bool
) -> None:
    """Print a study as tables."""
    chain = study.chain
    say(
        f"{chain.model}: {len(chain.layers)} weighted layers, {chain.num_weights:,} weights"
        + (f" ({chain.num_unweighed:,} biases and the like are not counted)" if chain.num_unweighed else "")
    )
    say(
        f"{study.num_processes} processes, batch {study.batch}; α {quantity(network.latency_s, 's')}, "
        f"1/β {quantity(1 / network.s_per_byte, 'B/s')}; communication of one step, version {study.version}"
    )
    say()
    say(f"pure model parallelism    {quantity(study.pure_model.time_s, 's')}")
    say(f"pure batch parallelism    {quantity(study.pure_batch.time_s, 's')}")
    if study.pure_domain is not None:
        say(f"pure domain parallelism   {quantity(study.pure_domain.time_s, 's')}, of the convolutions alone")
    for name, candidates in study.candidates.items():
        say()
        if not candidates:
            say(f"{name}: on none of these grids")
            continue
        where = candidates[0].convolutions
        say(f"{name}: Pr processes share {VARIANTS[name]}" + (f", {where}" if where else ""))
        _print_grids(study, candidates, timing)
    best = study.best()
    if best is not None:
        say()
        say(
            f"best: {best.variant} on {best.grid}, {quantity(best.time_s, 's')}, "
            f"{study.speedup(best.time_s):.2f} times as fast as pure batch parallelism"
        )
    if memory:
        say()
        _print_memory(study, options)
    if per_layer:
        say()
        _print_layers(study, options)


def _print_memory(study: Study, options: Options) -> None:
    """Print what each process holds with the weights of every layer shared, and what a 2D algorithm would move."""
    chain, size = study.chain, options.word_bytes
    rows = []
    for candidate in study.candidates[SAME_GRID]:
        words = held(chain, study.batch, candidate.grid, candidate.roles)
        told = [x for x in chain.layers if moved_stationary_a(x, study.batch, candidate.grid) is not None]
        ours = sum(moved(x, study.batch, candidate.grid) for x in told) * size
        theirs = sum(moved_stationary_a(x, study.batch, candidate.grid) or 0.0 for x in told) * size
        row = [str(candidate.grid), *(quantity(x * size, "B") for x in (words.weights, words.data, words.total))]
        rows.append([*row, quantity(ours, "B"), quantity(theirs, "B"), f"{len(told)} of {len(chain.layers)}"])
    headers = ["grid", "weights", "data", "both", "moved forward", "by a 2D algorithm", "layers"]
    print_table([(headers[0], "left"), *((header, "right") for header in headers[1:])], rows)
    least = quantity(held_2d(chain, study.batch, study.num_processes).total * size, "B")
    say()
    say(f"each process holds W, and X and Y of all layers (section 2.3); with a 2D algorithm {least}")
    say("moved: by Y = W X where there are more weights than B d(i), in 1.5D and by stationary-A SUMMA (section 4)")


def _print_grids(study: Study, candidates: tuple[Candidate, ...], timing: Timing) -> None:
    has_halo = any(c.terms.halo_forward + c.terms.halo_backward + c.terms.redistribution for c in candidates)
    headers = ["grid", "time", "speed-up", "outputs", "ΔX", "ΔW", *(["halos, moves"] if has_halo else [])]
    rows = []
    for candidate in candidates:
        terms = candidate.terms
        times = [terms.activation_all_gather, terms.input_gradient_all_reduce, terms.weight_gradient_all_reduce]
        if has_halo:
            times.append(terms.halo_forward + terms.halo_backward + terms.redistribution)
        row = [str(candidate.grid), quantity(candidate.time_s, "s"), f"{study.speedup(candidate.time_s):.2f}"]
        row += [quantity(time_s, "s") for time_s in times]
        if timing.num_steps is not None:
            row.append(quantity(candidate.time_s * timing.num_steps, "s"))
        step_s, pure_s = timing.step_s(study, candidate), timing.step_s(study, None)
        if step_s is not None and pure_s is not None:
            row += [quantity(step_s, "s"), f"{pure_s / step_s if step_s else 1:.2f}"]
        rows.append(row)
    headers += ["epoch"] if timing.num_steps is not None else []
    headers += ["step", "speed-up"] if timing.compute is not None else []
    print_table([(headers[0], "left"), *((header, "right") for header in headers[1:])], rows)


def _print_layers(study: Study, options: Options) -> None:
    """Print the layers; the last column is the role in the best grid of the variant per_layer."""
    best = study.best("per_layer")
    headers = ["layer", "d(i-1)", "d(i)", "weights", "Eq. 5", "model wins to", "equal at"]
    headers += [f"role on {best.grid}"] if best else []
    rows = []
    for layer in study.chain.layers:
        row = [layer.name, f"{layer.input_words:,}", f"{layer.output_words:,}", f"{layer.num_weights:,}"]
        row += [f"{crossover_batch(layer, options):.2f}", str(largest_model_batch(layer, options))]
        row.append(f"{equal_volume_batch(layer, options):.2f}")
        rows.append(row + ([best.roles[layer.name].value] if best else []))
    print_table([(headers[0], "left"), *((header, "right") for header in headers[1:])], rows)
    say()
    say("Eq. 5: the batch above which a layer moves less in batch parallelism, if d(i-1) is d(i)")
    say("equal at: the batch at which it moves the same under Eqs. 3 and 4, each size as it is")
