"""Processes that measure links: `torchrun --nproc-per-node N -m pase.calibration.ranks -o machine.toml`.

All ranks run each measurement at the same time, and its duration is that on the slowest rank. The median of several
runs counts. Before each message a process computes, since in a training step the receiver has to be woken, too.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist

from pase.calibration.kernels import fit_kernels, measure_kernels
from pase.calibration.measured import (
    KIB,
    MIB,
    Convolution,
    OverlapSample,
    RankSamples,
    Rate,
    TransferSample,
    level_sizes,
    measured_links,
    memory_share_bytes,
    processor_name,
    rounded,
    sent_to,
)
from pase.common.documents import write_atomically
from pase.common.options import PATH, ProgramCommand, option
from pase.common.words import binary
from pase.errors import PaseError
from pase.machine import Machine, machine_text

_PASSES = 3
"""Forward, and twice backward: gradients of both operands."""
_MATMUL_EXTENTS = (128, 256, 512)
_CONVOLUTIONS = (Convolution(batch=8, extent=28, channels=32), Convolution(batch=8, extent=14, channels=64))
_STREAM_BYTES = 16 * MIB
_SMALLEST_BYTES, _LARGEST_BYTES = KIB, 16 * MIB
_LAYERS, _WIDTH, _LAUNCHES = 16, 8, 10
"""A chain of layers dominated by launch overhead: number of layers, their width, and launches of each layer."""
_DISPLACED_BYTES = 8 * MIB
"""Bytes that a rank touches before each run of a kernel: in a step, other layers have evicted its data from caches."""
_RATE_S, _KERNEL_S = 0.25, 0.15
"""How long a kernel is repeated, for device rates and for kernel figures."""
_BESIDE_EXTENT, _BESIDE_SHARE, _BESIDE_PARTS, _BESIDE_RUNS = 256, 0.5, 4, 5
"""Products computed while an all-reduce runs: their extent, their duration relative to it, the number of parts that
both are divided into, like a backward pass and its buckets, and the number of repetitions."""
_CHAIN_S = 0.05
"""Approximate duration of a chain of messages; a single message may take longer."""
_LONGEST_CHAIN = 30
_LONGEST_MESSAGE_S = 0.15
"""The first message that takes this long is the longest to be measured."""
_SHORTEST_S = 1e-6
_CHAINS, _CHAINS_S = 5, 0.3
"""Minimum number of chains, and minimum total duration."""


@click.command(cls=ProgramCommand, help="Measure processes and the links between them.")
@option("--output", "-o", type=PATH, required=True, metavar="FILE", help="The machine file.")
def _command(**values: Any) -> None:
    """Declare the command line, which `main` reads."""


def main() -> None:
    """Measure, and write the machine file on the first rank; exit with status 1 and one line if it fails."""
    output: Path = _command.read()["output"]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        samples = measure(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if dist.get_rank() == 0:
            found = measured_links(samples, date=datetime.now(UTC).date().isoformat(), name=output.stem)
            kernels = fit_kernels(samples.kernels, found.machine.device, _kernels_source(samples, found.machine))
            kernels = replace(kernels, launch_s=rounded(samples.launch_s))
            write_atomically(output, machine_text(replace(found.machine, kernels=kernels)))
    except PaseError as error:
        sys.exit(f"error: {error}")
    finally:
        dist.destroy_process_group()


def measure(ranks_per_node: int) -> RankSamples:
    """Return the measurements, the same on every rank of the process group."""
    count = dist.get_world_size()
    sizes = level_sizes(count, ranks_per_node)
    return RankSamples(
        backend=dist.get_backend(),
        torch_version=torch.__version__,
        device_name=f"{processor_name()} (one of {count} processes)",
        memory_bytes=memory_share_bytes(count),
        level_sizes=sizes,
        matmul=tuple(map(_matmul_rate, _MATMUL_EXTENTS)),
        convolution=tuple(map(_convolution_rate, _CONVOLUTIONS)),
        stream=(_stream_rate(_STREAM_BYTES),),
        kernels=measure_kernels(seconds=lambda kernel: _kernel_s(kernel, _KERNEL_S, _DISPLACED_BYTES)),
        launch_s=_kernel_s(_chain_of_layers()) / (_LAYERS * _LAUNCHES),
        exchanges=tuple(_transfers(_exchange(level, sizes)) for level in range(len(sizes))),
        all_reduces=(sums := _transfers(_all_reduce)),
        overlap=_overlap_sample(sums[-1]),
    )


def _kernels_source(samples: RankSamples, machine: Machine) -> str:
    return (
        f"least deviations of {len(samples.kernels)} kernels, {machine.description}, {binary(_DISPLACED_BYTES)} of "
        "other data touched before each; shares are of the peaks in this file. A launch is that of "
        f"{_LAYERS} layers of {_WIDTH} numbers, forward and backward through autograd"
    )


def _chain_of_layers() -> Callable[[], object]:
    """Return a function that trains layers of a normalisation, a product with bias, a function and a sum.

    These are `_LAUNCHES` launches per layer: four kernels forward; backward six, one for each gradient of a factor, and
    the bias's.
    """
    layers = [(torch.nn.LayerNorm(_WIDTH), torch.nn.Linear(_WIDTH, _WIDTH)) for _ in range(_LAYERS)]
    weights = [weight for pair in layers for layer in pair for weight in layer.parameters()]
    x = torch.ones(_WIDTH, _WIDTH, requires_grad=True)

    def run() -> None:
        y = x
        for norm, product in layers:
            y = y + torch.relu(product(norm(y)))
        y.sum().backward()
        for weight in weights:
            weight.grad = None

    return run


def _overlap_sample(alone: TransferSample) -> OverlapSample:
    """Return the times of products, of an all-reduce and of both together, on the rank where they take longest."""
    left, right = (torch.ones(_BESIDE_EXTENT, _BESIDE_EXTENT) for _ in range(2))
    product_s = _kernel_s(lambda: torch.mm(left, right), _KERNEL_S)
    number = max(int(_BESIDE_SHARE * alone.time_s / product_s / _BESIDE_PARTS), 1)
    summed = torch.zeros(alone.size_bytes // 4)

    def compute(parts: int = _BESIDE_PARTS) -> None:
        for _ in range(parts * number):
            torch.mm(left, right)

    def both() -> None:
        works = []
        for part in summed.chunk(_BESIDE_PARTS):
            works.append(dist.all_reduce(part, async_op=True))
            compute(1)
        for work in works:
            work.wait()

    runs = [
        (_longest_s(compute), _longest_s(lambda: dist.all_reduce(summed)), _longest_s(both))
        for _ in range(_BESIDE_RUNS)
    ]
    computing_s, summing_s, both_s = map(median, zip(*runs, strict=True))
    return OverlapSample(computing_s=computing_s, summing_s=summing_s, both_s=both_s)


def _matmul_rate(extent: int) -> Rate:
    left, right = (torch.ones(extent, extent, requires_grad=True) for _ in range(2))
    seconds = _kernel_s(_trained(lambda: torch.mm(left, right), left, right))
    return Rate(shape=f"{extent} × {extent}", amount=_PASSES * 2.0 * extent**3, time_s=seconds)


def _convolution_rate(shape: Convolution) -> Rate:
    images = torch.ones(shape.batch, shape.channels, shape.extent, shape.extent, requires_grad=True)
    weights = torch.ones(shape.channels, shape.channels, 3, 3, requires_grad=True)
    seconds = _kernel_s(_trained(lambda: torch.conv2d(images, weights, padding=1), images, weights))
    return Rate(shape=shape.shape, amount=_PASSES * shape.flop, time_s=seconds)


def _trained(kernel: Callable[[], torch.Tensor], *operands: torch.Tensor) -> Callable[[], object]:
    """Return a function that runs a kernel forward and backward, as in a training step."""
    gradient = torch.ones_like(kernel())

    def run() -> None:
        for operand in operands:
            operand.grad = None
        kernel().backward(gradient)

    return run


def _stream_rate(size_bytes: int) -> Rate:
    left, right, result = (torch.ones(size_bytes // 4) for _ in range(3))
    seconds = _kernel_s(lambda: torch.add(left, right, out=result))
    return Rate(shape=binary(size_bytes), amount=3.0 * size_bytes, time_s=seconds)


def _kernel_s(kernel: Callable[[], object], repeated_s: float = _RATE_S, displaced_bytes: int = 0) -> float:
    """Return the seconds of a kernel while all ranks repeat it: the mean over ranks.

    Args:
        kernel: The kernel.
        repeated_s: How long to repeat it.
        displaced_bytes: Bytes of other data to touch before each run, which evict its operands from caches.
    """
    others = torch.zeros(displaced_bytes // 4)
    kernel()
    dist.barrier()
    end, taken_s, runs = time.perf_counter() + repeated_s, 0.0, 0
    while not runs or time.perf_counter() < end:
        others += 1
        begin = time.perf_counter()
        kernel()
        taken_s += time.perf_counter() - begin
        runs += 1
    seconds = torch.tensor([taken_s / runs], dtype=torch.float64)
    dist.all_reduce(seconds)
    mean_s: float = seconds.item() / dist.get_world_size()
    return mean_s


Transfer = Callable[[torch.Tensor, torch.Tensor], object]
"""Sends one tensor, and receives into the other if needed; both have the same size."""


def _exchange(level: int, sizes: Sequence[int]) -> Transfer:
    rank = dist.get_rank()
    receiver = sent_to(rank, level, sizes)
    sender = next(other for other in range(sizes[-1]) if sent_to(other, level, sizes) == rank)

    def exchange(sent: torch.Tensor, received: torch.Tensor) -> None:
        # Receive first: otherwise gloo sends in one direction after the other between two ranks.
        operations = [dist.P2POp(dist.irecv, received, sender), dist.P2POp(dist.isend, sent, receiver)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    return exchange


def _all_reduce(sent: torch.Tensor, _received: torch.Tensor) -> None:
    dist.all_reduce(sent)


def _transfers(transfer: Transfer) -> tuple[TransferSample, ...]:
    """Return the times of increasingly long messages, the same on every rank."""
    found: list[TransferSample] = []
    size_bytes, time_s = _SMALLEST_BYTES, 0.0
    while size_bytes <= _LARGEST_BYTES and time_s < _LONGEST_MESSAGE_S:
        time_s = _transfer_s(transfer, size_bytes)
        found.append(TransferSample(size_bytes=size_bytes, time_s=time_s))
        size_bytes *= 4
    return tuple(found)


def _transfer_s(transfer: Transfer, size_bytes: int) -> float:
    sent, received = (torch.zeros(size_bytes // 4) for _ in range(2))
    left, right = (torch.ones(_BESIDE_EXTENT, _BESIDE_EXTENT) for _ in range(2))

    def chain_s(length: int) -> float:
        def run(*, sends: bool) -> None:
            for _ in range(length):
                torch.mm(left, right)
                if sends:
                    transfer(sent, received)

        computing_s = _longest_s(partial(run, sends=False))
        return max(_longest_s(partial(run, sends=True)) - computing_s, _SHORTEST_S) / length

    # The first run connects; the second determines the number of messages in a chain.
    chain_s(1)
    length = int(min(max(_CHAIN_S / chain_s(1), 1), _LONGEST_CHAIN))
    found: list[float] = []
    # Figures of all ranks together, so that all ranks stop at the same time.
    while len(found) < _CHAINS or sum(found) * length < _CHAINS_S:
        found.append(chain_s(length))
    return median(found)


def _longest_s(run: Callable[[], object]) -> float:
    """Return the time of an operation that all ranks start together, on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    run()
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    longest_s: float = seconds.item()
    return longest_s


if __name__ == "__main__":
    main()
