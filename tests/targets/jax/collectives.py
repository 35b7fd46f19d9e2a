"""What a program that XLA has compiled moves between devices, read off its text."""

import re
from collections.abc import Iterator
from math import prod

_SIZES = {"f64": 8, "f32": 4, "s64": 8, "s32": 4, "u32": 4, "pred": 1}
_OPERATION = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(.*?\))? \{(.*?)\}")


def moved_bytes(text: str) -> dict[str, int]:
    """Return the bytes that arrive at all devices together, by the kind of the operation.

    An all-reduce is a reduce-scatter and an all-gather, as rings and trees of libraries have it.
    """
    found: dict[str, int] = {}
    for kind, size, line in _operations(text):
        if kind == "collective-permute":
            (listed,) = re.findall(r"source_target_pairs=\{(\{.*?\})\}", line)
            moved = size * sum(a != b for a, b in re.findall(r"\{(\d+),(\d+)\}", listed))
        else:
            groups, members = _groups(line)
            times = {"all-reduce": 2, "all-gather": 1, "all-to-all": 1, "reduce-scatter": members}[kind]
            moved = groups * (members - 1) * size * times
        found[kind] = found.get(kind, 0) + moved
    return found


def _operations(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, bytes of what it gives on each device, its line)."""
    for line in text.splitlines():
        found = _OPERATION.search(line)
        if found is not None:
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", re.sub(r"/\*.*?\*/", "", found[1]))
            yield found[2], sum(_SIZES[t] * prod(int(d) for d in dims.split(",") if d) for t, dims in shapes), line


def _groups(line: str) -> tuple[int, int]:
    """Return how many groups of devices there are, and of how many each is."""
    mesh = _MESH.search(line)
    if mesh is not None:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        members = prod(sizes[name] for name in re.findall(r"'(\w+)'", mesh[2]))
        return prod(sizes.values()) // members, members
    shaped = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
    if shaped is not None:
        return int(shaped[1]), int(shaped[2])
    listed = re.findall(r"\{([\d,]+)\}", re.findall(r"replica_groups=\{(.*?\})\}", line)[0])
    return len(listed), len(listed[0].split(","))
