"""`Samples`: what was measured, as the measuring process reports it and the report and the machine file show it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pase.common.documents import Field


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
class Message:
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
    copies: tuple[Message, ...]
    all_reduces: tuple[Message, ...]

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


def _messages(document: Field) -> tuple[Message, ...]:
    return tuple(
        Message(size_bytes=field["size_bytes"].integer(1), time_s=field["time_s"].number(above=0))
        for field in document.items()
    )
