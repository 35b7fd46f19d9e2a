"""`Traffic`: what a program's operations were planned to move between devices, and for which layer or edge."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pase.sharding.traffic import Movement, Phase


@dataclass(slots=True)
class Traffic:
    """Bytes that a program's operations were planned to move between devices in one step.

    bytes_by_operation, movements: by the TensorFlow name scope of the operations that move something.
    phase: of what is being lowered. keeps_alive: whether everything that is planned is moved, also what nobody uses,
    and nothing on behalf of two; kept: then, the operations to run for that.
    """

    keeps_alive: bool = False
    bytes_by_operation: dict[str, int] = field(default_factory=dict)
    movements: dict[str, Movement] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    phase: Phase = Phase.FORWARD

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Lower what belongs to another phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @property
    def bytes_by_movement(self) -> dict[Movement, int]:
        """Bytes of each edge and each layer, by phase."""
        found: dict[Movement, int] = {}
        for operation, movement in self.movements.items():
            found[movement] = found.get(movement, 0) + self.bytes_by_operation[operation]
        return found

    @property
    def total_bytes(self) -> int:
        """Bytes of one step."""
        return sum(self.bytes_by_operation.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Counts what goes from a layer's devices to another's (or its own); both as of now, gradients go back."""

    traffic: Traffic
    source: str
    target: str

    def coming_from(self, layer: str) -> "Account":
        """Return the account of what another layer sends to this one."""
        return replace(self, source=layer)

    def add(self, operation: str, moved_bytes: int) -> None:
        """Count bytes of an operation, the name scope in which whatever is moved is first used."""
        phase = self.traffic.phase
        ends = (self.target, self.source) if phase is Phase.BACKWARD else (self.source, self.target)
        movement = Movement(producer=ends[0], consumer=ends[1], phase=phase)
        self.traffic.movements[operation] = movement
        self.traffic.bytes_by_operation[operation] = self.traffic.bytes_by_operation.get(operation, 0) + moved_bytes

    @property
    def keeps_alive(self) -> bool:
        """Whether what nobody uses is moved too."""
        return self.traffic.keeps_alive

    def keep(self, tensors: list[Any]) -> None:
        """Have tensors computed where they are whether they are used or not, if that is asked for."""
        if self.keeps_alive:
            self.traffic.kept.extend(tensor.op for tensor in tensors)
