"""`pase halo`: what every worker owns and needs of a dim that a kernel slides along."""

from typing import Any

import click

from pase.cli.options import WholeNumber, json_option
from pase.cli.output import print_json, print_table, say
from pase.sharding.boxes import Range
from pase.sharding.halos import Kernel, Region, regions


@click.command("halo", epilog="Example: pase halo --extent 11 --kernel 5 --padding 2 --workers 3")
@click.option("--extent", type=WholeNumber(min=1), required=True, help="Points of the input.")
@click.option("--kernel", type=WholeNumber(min=1), required=True, help="Points of the kernel.")
@click.option("--stride", type=WholeNumber(min=1), default=1, show_default=True, help="Points from output to output.")
@click.option("--dilation", type=WholeNumber(min=1), default=1, show_default=True, help="Between the kernel's points.")
@click.option("--padding", type=WholeNumber(min=0), default=0, show_default=True, help="Points added at each end.")
@click.option("--workers", type=WholeNumber(min=1), required=True, help="Workers that share the input and the output.")
@json_option
def command(extent: int, kernel: int, stride: int, dilation: int, padding: int, workers: int, as_json: bool) -> None:
    """Show the halos of a convolution or pooling along one dim, for each worker.

    Ranges begin at 0 and leave out their end; they are clipped to the tensor, and padding is counted apart. Input and
    output are both balanced: of n points on P workers, the first n mod P own one more.
    """
    slid = Kernel(extent=kernel, stride=stride, dilation=dilation, padding=(padding, padding))
    found = regions(extent, slid, workers)
    if as_json:
        print_json(
            {
                "extent": extent,
                "kernel": kernel,
                "stride": stride,
                "dilation": dilation,
                "padding": padding,
                "output_extent": slid.num_outputs(extent),
                "workers": [_document(region) for region in found],
            }
        )
        return
    say(
        f"input {extent}, output {slid.num_outputs(extent)}: kernel {kernel}, stride {stride}, dilation {dilation}, "
        f"padding {padding}"
    )
    say()
    print_table(
        [("worker", "right"), *((name, "right") for name in ("output", "owns", "needs", "halo", "unused", "padding"))],
        [
            [
                str(i),
                *map(_range, (region.output, region.owned, region.needed)),
                f"{region.halo_left} | {region.halo_right}",
                f"{region.unused_left} | {region.unused_right}",
                f"{region.padding_left} | {region.padding_right}",
            ]
            for i, region in enumerate(found)
        ],
    )
    say()
    say("left | right; halo: needed, owned by others; unused: owned, not needed")


def _document(region: Region) -> dict[str, Any]:
    return {
        "output": list(region.output),
        "owned_input": list(region.owned),
        "needed_input": list(region.needed),
        "halo_left": region.halo_left,
        "halo_right": region.halo_right,
        "unused_left": region.unused_left,
        "unused_right": region.unused_right,
        "padding_left": region.padding_left,
        "padding_right": region.padding_right,
    }


def _range(limits: Range) -> str:
    low, high = limits
    return f"[{low}, {high})" if low < high else "none"
