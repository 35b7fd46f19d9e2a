"""Which weights of a torch module are one and the same: they are told by what holds their values."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """storage: name of the weight that holds the values. rows: first of its rows that this one is; None: it is it."""

    storage: str
    rows: int | None = None


def tied_weights(torch: Any, module: Any) -> dict[str, Tied]:
    """Return for each weight, by its name, whose values it has: the first of that storage, or rows of a larger one."""
    named = [(name, weight) for name, weight in module.named_parameters(remove_duplicate=False)]
    by_storage: dict[int, list[tuple[str, Any]]] = {}
    for name, weight in named:
        by_storage.setdefault(_storage(torch, weight), []).append((name, weight))
    found: dict[str, Tied] = {}
    for group in by_storage.values():
        first_name, first = max(group, key=lambda item: item[1].numel())
        for name, weight in group:
            found[name] = _tied(name, weight, first_name, first)
    return found


def _tied(name: str, weight: Any, other: str, first: Any) -> Tied:
    if weight is first or _is_same(weight, first):
        return Tied(storage=other)
    row = first.stride(0) if first.dim() else 0
    offset = weight.storage_offset() - first.storage_offset()
    is_rows = (
        weight.dim() == first.dim() > 0
        and weight.shape[1:] == first.shape[1:]
        and weight.stride() == first.stride()
        and row > 0
        and offset >= 0
        and offset % row == 0
        and offset // row + weight.shape[0] <= first.shape[0]
    )
    return Tied(storage=other, rows=offset // row) if is_rows else Tied(storage=name)


def _is_same(weight: Any, other: Any) -> bool:
    return bool(
        weight.shape == other.shape
        and weight.stride() == other.stride()
        and weight.storage_offset() == other.storage_offset()
    )


def _storage(torch: Any, weight: Any) -> int:
    """Return what tells the storage of a tensor from all others, which tensors without values have as well."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return int(StorageWeakRef(weight.untyped_storage()).cdata)
