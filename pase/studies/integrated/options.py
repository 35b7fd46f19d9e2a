"""What the papers' text leaves open, each as an option with a default: how sizes are read, and what the sums hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pase.errors import IntegratedError, unknown_name


def _convention(text: str, *, default: bool) -> Any:
    return field(default=default, metadata={"text": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Readings of Gholami et al. 2018, Eqs. 2 to 9; `CONVENTIONS` says what each one means.

    word_bytes: of an element of every tensor.
    """

    output_before_pooling: bool = _convention(
        "d_i is a layer's own output; no: what the next layer reads of it, after pooling", default=True
    )
    input_after_pooling: bool = _convention(
        "d_(i-1) is a layer's real input; no: the output of the layer before, before pooling", default=True
    )
    real_extents: bool = _convention(
        "Y_H, Y_W are those of the model, floor((X+2p-k)/s)+1; no: ceil(X/s), as in Eq. 2", default=True
    )
    grouped: bool = _convention("a grouped convolution holds its groups' weights; no: all X_C·Y_C", default=True)
    biases: bool = _convention("biases are weights too; no: they are left out", default=False)
    rounded_log: bool = _convention("a tree has ceil(log2 P) levels; no: log2 P", default=True)
    terms_from_zero: bool = _convention(
        "a sum printed from i = 0 has a term for it, of latency alone (in version 1 with d_0); no: it starts at 1",
        default=False,
    )
    input_gradient: bool = _convention(
        "Eqs. 3, 8 and 9 hold the all-reduce of ΔX; no: outputs are gathered, and that is all", default=True
    )
    first_gradient: bool = _convention(
        "Eq. 9's sum of input gradients holds a layer that reads the data; no: it starts at 2, as in Eq. 8",
        default=False,
    )
    crossover_per_group: bool = _convention("X_C of Eq. 5 is that of one group; no: of the whole input", default=True)
    strict_crossover: bool = _convention(
        "at Eq. 5's batch itself, model parallelism does not win; no: it does", default=True
    )
    first_dense_gradient: bool = _convention(
        "model parallelism in the dense layers alone all-reduces the first one's input gradient; no: it does not",
        default=True,
    )
    redistribution: bool = _convention(
        "changing to the dense layers' grid costs Eq. 6 for what the first one reads; no: it is free", default=False
    )
    halo_at_one: bool = _convention("Eq. 9 has its halo terms at Pr = 1 too; no: there is no neighbour", default=True)
    pointwise_halo: bool = _convention(
        "a 1x1 convolution sends halos of no words, α each, as Eq. 7 is printed; no: none, as the text says",
        default=False,
    )
    next_input_is_output: bool = _convention(
        "X^(i+1) of Eq. 9 is the layer's output Y^i; no: what the next layer reads, after pooling", default=True
    )
    rows_bound_domain: bool = _convention(
        "a convolution's rows are shared by as many processes as it has rows at most; no: by any number", default=True
    )
    whole_iterations: bool = _convention("an epoch has ceil(N/B) steps; no: N/B", default=False)
    word_bytes: int = 4


CONVENTIONS: Mapping[str, str] = {f.name: f.metadata["text"] for f in fields(Options) if "text" in f.metadata}
"""What each convention means, and what its opposite does, by name."""


def with_conventions(values: Mapping[str, bool], options: Options | None = None) -> Options:
    """Return options in which some conventions are changed; IntegratedError for one that does not exist."""
    for name in values:
        if name not in CONVENTIONS:
            raise IntegratedError(unknown_name("convention", name, CONVENTIONS))
    return replace(options or Options(), **dict(values))
