"""The ranks whose parts of a dim differ, which send each other parts of tensors as values tell."""

from typing import Any

from torch import nn

from pase.sharding.boxes import even_part
from pase.sharding.reshard import sum_groups
from pase.sharding.traffic import Movement, Phase
from pase.targets.torch.program import Program
from pase.targets.torch.tensor import Dim, LayerMesh


class Along(nn.Module):
    """The ranks that differ along a dim alone.

    parts: the points of the dim that each of these has, in their order along it. place: which of them is this rank's.
    order: of each rank of the group, its place.
    """

    def __init__(self, mesh: LayerMesh, dim: Dim) -> None:
        super().__init__()
        program = mesh.program
        assert isinstance(program, Program)
        count = mesh.devices.size(dim.name)
        self.place = mesh.point.get(dim.name, 0)
        self.parts = [even_part(dim.size, count, number) for number in range(count)]
        self.traffic, self.movement = program.traffic, Movement.within(mesh.layer, Phase.FORWARD)
        self.group = program.groups.of(sum_groups(mesh.devices, mesh.split([dim.name])))
        along = dict(zip(mesh.devices.devices, mesh.devices.coordinates, strict=True))
        self.order = [along[rank].get(dim.name, 0) for rank in self.group.ranks]

    def count(self, sent: Any) -> None:
        """Count what this rank sends, in whatever pass, as all that a layer exchanges as it computes: as forward."""
        if self.traffic.is_counted:
            self.traffic.add(self.movement, sent.numel() * sent.element_size())

    def extra_repr(self) -> str:
        """Return what is printed of it."""
        return f"{self.movement.consumer}, ranks {list(self.group.ranks)}"
