"""What is measured, and how often; `Samples`: what was, as the measuring process reports it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

from pase.common.documents import Field

KIB, MIB = 2**10, 2**20


def binary(size_bytes: int) -> str:
    """Return a size with a binary unit: 16 KiB."""
    unit, name = (MIB, "MiB") if size_bytes >= MIB else (KIB, "KiB") if size_bytes >= KIB else (1, "B")
    return f"{size_bytes / unit:.3g} {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A 3 × 3 convolution: batch, height and width of its output, channels in and out."""

    batch: int
    extent: int
    channels: int

    @property
    def flop(self) -> float:
        """A multiplication and an addition for each point."""
        return 2.0 * self.batch * self.extent**2 * self.channels**2 * 9

    @property
    def shape(self) -> str:
        """In words."""
        return f"{self.batch} × {self.extent} × {self.extent} × {self.channels}, 3 × 3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """time_s: for each size, at least num_runs runs; the fastest one counts."""

    matmul_extents: tuple[int, ...]
    convolutions: tuple[Convolution, ...]
    stream_bytes: tuple[int, ...]
    copy_bytes: tuple[int, ...]
    all_reduce_bytes: tuple[int, ...]
    time_s: float
    num_runs: int


_CONVOLUTIONS = (
    Convolution(batch=8, extent=56, channels=32),
    Convolution(batch=8, extent=28, channels=64),
    Convolution(batch=8, extent=14, channels=128),
    Convolution(batch=8, extent=28, channels=128),
)

EFFORTS: Mapping[str, Effort] = MappingProxyType(
    {
        # Whether it works at all, in a second beside the start of TensorFlow: the figures are worth little.
        "glance": Effort(
            matmul_extents=(64,),
            convolutions=(Convolution(batch=1, extent=8, channels=8),),
            stream_bytes=(MIB,),
            copy_bytes=(KIB, MIB),
            all_reduce_bytes=(64 * KIB,),
            time_s=0.01,
            num_runs=2,
        ),
        "quick": Effort(
            matmul_extents=(256, 512, 1024),
            convolutions=_CONVOLUTIONS[:2],
            stream_bytes=(32 * MIB,),
            copy_bytes=tuple(KIB * 4**i for i in range(8)),
            all_reduce_bytes=tuple(16 * KIB * 8**i for i in range(4)),
            time_s=0.1,
            num_runs=2,
        ),
        "full": Effort(
            matmul_extents=(128, 256, 512, 1024, 2048),
            convolutions=_CONVOLUTIONS,
            stream_bytes=(16 * MIB, 64 * MIB),
            copy_bytes=tuple(KIB * 2**i for i in range(16)),
            all_reduce_bytes=tuple(4 * KIB * 4**i for i in range(7)),
            time_s=0.4,
            num_runs=2,
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A kernel: its shape in words, FLOP or bytes of one device, and how long that took."""

    shape: str
    amount: float
    time_s: float

    @property
    def per_s(self) -> float:
        """FLOP or bytes a second."""
        return self.amount / self.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSample:
    """A copy to the next device, or an all-reduce among all: bytes of each device, and how long it took."""

    size_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """All that was measured, every device working at once.

    matmul, convolution: by element type. stream: memory, read and written. copies, all_reduces: from small to large.
    """

    kind: str
    device_name: str
    num_devices: int
    memory_bytes: int
    tensorflow_version: str
    matmul: Mapping[str, tuple[Rate, ...]]
    convolution: Mapping[str, tuple[Rate, ...]]
    stream: tuple[Rate, ...]
    copies: tuple[TransferSample, ...]
    all_reduces: tuple[TransferSample, ...]

    def document(self) -> dict[str, object]:
        """Return the JSON form, which `samples_from_document` reads back."""
        return asdict(self)


def samples_from_document(document: Field) -> Samples:
    """Return the samples of a JSON document; its error names what is missing or wrong."""
    return Samples(
        kind=document["kind"].text(),
        device_name=document["device_name"].text(),
        num_devices=document["num_devices"].integer(1),
        memory_bytes=document["memory_bytes"].integer(1),
        tensorflow_version=document["tensorflow_version"].text(),
        matmul={dtype: _rates(field) for dtype, field in document["matmul"].members()},
        convolution={dtype: _rates(field) for dtype, field in document["convolution"].members()},
        stream=_rates(document["stream"]),
        copies=_messages(document["copies"]),
        all_reduces=_messages(document["all_reduces"]),
    )


def _rates(document: Field) -> tuple[Rate, ...]:
    return tuple(
        Rate(
            shape=field["shape"].text(),
            amount=field["amount"].number(above=0),
            time_s=field["time_s"].number(above=0),
        )
        for field in document.items()
    )


def _messages(document: Field) -> tuple[TransferSample, ...]:
    return tuple(
        TransferSample(size_bytes=field["size_bytes"].integer(1), time_s=field["time_s"].number(above=0))
        for field in document.items()
    )
