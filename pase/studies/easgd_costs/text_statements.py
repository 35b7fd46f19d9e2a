"""Sizes and units in the text of You et al. 2017, and where it disagrees with itself."""

from collections.abc import Iterator

from pase.importers import load
from pase.studies.easgd_costs.judgement import NO, UNTOLD, YES, Statement
from pase.studies.easgd_costs.paper import TABLE_2, TABLE_4
from pase.studies.easgd_costs.platform import step_flop, weights_of
from pase.studies.easgd_costs.scaling_statements import machine, node, weights


def text_statements() -> Iterator[Statement]:
    """Yield sizes of weights and data, units, then what cannot be told."""
    yield from _sizes()
    yield from _units()
    yield from _inconsistencies()


def _sizes() -> Iterator[Statement]:
    size = weights("vgg19").num_bytes
    yield Statement(
        where="section 6.1.2",
        what="weights of VGG-19",
        paper="575 MB",
        ours=f"{size / 4:,.0f} · 4 B = {size / 1e6:.1f} MB",
        verdict=YES if round(size / 1e6) == 575 else NO,
    )
    size = weights_of(load("alexnet", arguments={"grouped": True})).num_bytes
    ungrouped = 4 * _UNGROUPED_ALEXNET
    yield Statement(
        where="section 6.1.1",
        what="weights of AlexNet",
        paper="249 MB",
        ours=f"{size / 1e6:.1f} MB; {ungrouped / 1e6:.1f} MB if no convolution had groups",
        verdict=f"{NO} with the groups of 2012, {YES} without",
    )
    yield Statement(
        where="section 6.1.1",
        what="64 Cifar samples",
        paper="768 KB",
        ours=f"{64 * 3 * 32 * 32 * 4:,} B = {64 * 3 * 32 * 32 * 4 // 1024} KiB",
        verdict=f"{YES}, in units of 1024, where VGG's and AlexNet's are of 1000",
    )


_UNGROUPED_ALEXNET = sum(
    out * (inputs + 1)
    for out, inputs in (
        *((96, 3 * 121), (256, 96 * 25), (384, 256 * 9), (384, 384 * 9), (256, 384 * 9)),
        *((4096, 256 * 36), (4096, 4096), (1000, 4096)),
    )
)
"""Parameters with the channels of 2012's two towers, and kernels over all of them."""


def _units() -> Iterator[Statement]:
    bits = {name: 8 / beta for name, (_, beta) in TABLE_2.items()}
    yield Statement(
        where="section 5.2, Table 2",
        what="β is of an “n-word message”; per word of 4 B, or per byte?",
        paper="words",
        ours="; ".join(
            f"{name} {rate / 1e9:.0f} Gb/s: {bits[name] / 1e9:.1f} per byte, {4 * bits[name] / 1e9:.0f} per word"
            for name, (rate, _) in TABLE_2.items()
        ),
        verdict="per byte: per word each is faster than its own line",
    )
    fdr = node("vgg19", 2, "knl-fdr").worker_link
    yield Statement(
        where="section 5.2",
        what="latency is the major overhead, so that packing pays (FDR, VGG-19, one exchange between two)",
        paper="α ≫ β",
        ours=f"{weights('vgg19').num_arrays} · α = {1e6 * weights('vgg19').num_arrays * fdr.latency_s:.1f} µs of "
        f"{1e3 * weights('vgg19').message_s(fdr, packed=False):.0f} ms",
        verdict=f"{NO}: the bytes take {weights('vgg19').num_bytes * fdr.s_per_byte / fdr.latency_s:,.0f} times α",
    )


def _inconsistencies() -> Iterator[Statement]:
    yield Statement(
        where="section 6.1.1, Table 3",
        what="communication of Original EASGD: on how many GPUs",
        paper="87 % on 8, 87 % on 4",
        ours="round-robin: the model's ratio does not depend on P",
        verdict=UNTOLD,
    )
    yield Statement(
        where="Table 4",
        what="batch of one node",
        paper="not printed",
        ours="; ".join(f"{name} at most {_most_images(name):,.0f}" for name in TABLE_4)
        + ", at the peak of 6.1 TFLOP/s",
        verdict=UNTOLD,
    )


def _most_images(network: str) -> float:
    """Return how many images a node could train in one of Table 4's iterations at its peak."""
    return TABLE_4[network].iteration_s * machine("knl-fdr").peak_flop_per_s() / step_flop(load(network, batch=1))
