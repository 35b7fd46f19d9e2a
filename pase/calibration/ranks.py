"""The processes that measure links: `torchrun --nproc-per-node N -m pase.calibration.ranks -o machine.toml`.

All do everything at once, and a run takes as long as it does on the slowest of them. The fastest of several runs
counts: whatever else the machine does makes runs slower.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pase.calibration.links import RankSamples, level_sizes, measured_links, sent_to
from pase.calibration.measured import (
    KIB,
    MIB,
    Convolution,
    Rate,
    TransferSample,
    binary,
    memory_share_bytes,
    processor_name,
)
from pase.common.documents import write_atomically
from pase.errors import PaseError
from pase.machine import machine_text

_PASSES = 3
"""Forward, and backward twice: gradients of both operands."""
_MATMUL_EXTENTS = (128, 256, 512)
_CONVOLUTIONS = (Convolution(batch=8, extent=28, channels=32), Convolution(batch=8, extent=14, channels=64))
_STREAM_BYTES = 16 * MIB
_SMALLEST_BYTES, _LARGEST_BYTES = KIB, 16 * MIB
_RATE_S = 0.25
"""How long a kernel is repeated."""
_CHAIN_S = 0.05
"""How long a chain of messages is, about; a single one may be longer."""
_LONGEST_CHAIN = 30
_LONGEST_MESSAGE_S = 0.15
"""No message beyond the first that takes so long is measured."""
_CHAINS, _CHAINS_S = 3, 0.15
"""So many chains at least, and for so long."""


def main() -> None:
    """Measure, and have the first rank write the machine file; status 1 and one line where that is not possible."""
    parser = argparse.ArgumentParser(description="Measure processes and the links between them.")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the machine file")
    output: Path = parser.parse_args().output
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        samples = measure(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if dist.get_rank() == 0:
            found = measured_links(samples, date=datetime.now(UTC).date().isoformat(), name=output.stem)
            write_atomically(output, machine_text(found.machine))
    except PaseError as error:
        sys.exit(f"error: {error}")
    finally:
        dist.destroy_process_group()


def measure(ranks_per_node: int) -> RankSamples:
    """Return what was measured, the same on every rank of the process group."""
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
        exchanges=tuple(_transfers(_exchange(level, sizes)) for level in range(len(sizes))),
        all_reduces=_transfers(_all_reduce),
        all_to_alls=_transfers(_all_to_all),
    )


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
    """Return what does a kernel forward and backward, as a step of training does."""
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


def _kernel_s(kernel: Callable[[], object]) -> float:
    """Return the seconds of a kernel while all ranks repeat it: the mean over ranks."""
    kernel()
    dist.barrier()
    begin, runs = time.perf_counter(), 0
    while time.perf_counter() - begin < _RATE_S:
        kernel()
        runs += 1
    seconds = torch.tensor([(time.perf_counter() - begin) / runs], dtype=torch.float64)
    dist.all_reduce(seconds)
    mean_s: float = seconds.item() / dist.get_world_size()
    return mean_s


Transfer = Callable[[torch.Tensor, torch.Tensor], object]
"""Moves one tensor, into the other where it needs one; both have one size."""


def _exchange(level: int, sizes: Sequence[int]) -> Transfer:
    rank = dist.get_rank()
    receiver = sent_to(rank, level, sizes)
    sender = next(other for other in range(sizes[-1]) if sent_to(other, level, sizes) == rank)

    def exchange(sent: torch.Tensor, received: torch.Tensor) -> None:
        # With the receive first: gloo otherwise sends one way after the other between two ranks.
        operations = [dist.P2POp(dist.irecv, received, sender), dist.P2POp(dist.isend, sent, receiver)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    return exchange


def _all_reduce(sent: torch.Tensor, _received: torch.Tensor) -> None:
    dist.all_reduce(sent)


def _all_to_all(sent: torch.Tensor, received: torch.Tensor) -> None:
    dist.all_to_all_single(received, sent)


def _transfers(transfer: Transfer) -> tuple[TransferSample, ...]:
    """Return the times of ever longer messages, the same on every rank."""
    found: list[TransferSample] = []
    size_bytes, time_s = _SMALLEST_BYTES, 0.0
    while size_bytes <= _LARGEST_BYTES and time_s < _LONGEST_MESSAGE_S:
        time_s = _transfer_s(transfer, size_bytes)
        found.append(TransferSample(size_bytes=size_bytes, time_s=time_s))
        size_bytes *= 4
    return tuple(found)


def _transfer_s(transfer: Transfer, size_bytes: int) -> float:
    sent, received = (torch.zeros(size_bytes // 4) for _ in range(2))
    # The first one connects; the second says how many make a chain.
    _chain_s(transfer, sent, received, 1)
    length = int(min(max(_CHAIN_S / _chain_s(transfer, sent, received, 1), 1), _LONGEST_CHAIN))
    found: list[float] = []
    # Figures of all ranks together, so that all of them stop alike.
    while len(found) < _CHAINS or sum(found) * length < _CHAINS_S:
        found.append(_chain_s(transfer, sent, received, length))
    return min(found)


def _chain_s(transfer: Transfer, sent: torch.Tensor, received: torch.Tensor, length: int) -> float:
    """Return the seconds of one of several transfers, on the rank where they take longest."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(length):
        transfer(sent, received)
    seconds = torch.tensor([(time.perf_counter() - begin) / length], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    longest_s: float = seconds.item()
    return longest_s


if __name__ == "__main__":
    main()
