"""Readers of arrays: problem files, data, checkpoints, the files of MNIST and CIFAR-10."""

import gzip
import hashlib
import io
import json
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from pase.datasets import load_dataset
from pase.datasets.registry import CIFAR10_FILES, RECORD_BYTES
from pase.easgd.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from pase.solver import solve
from pase.solver.ordering import ORDERINGS
from pase.tables.files import export_cfn, read_problem, write_problem
from pase.targets.training.data import Batches, DataInput, read_arrays
from tests.fuzz.harness import Reader, Target
from tests.fuzz.mutations import NUMBERS, WORDS, change_bytes, change_document, word

Array = np.ndarray[Any, Any]

# -- NumPy's files


def _npy(array: Array, rng: Random | None) -> bytes:
    """Return an array as a file; with random numbers, perhaps with a header that says other things."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=True)
    data = stream.getvalue()
    if rng is None or rng.random() < 0.5:
        return data
    start = data.index(b"{")
    body = data[data.index(b"\n", start) + 1 :]
    header = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
    key = rng.choice(("descr", "fortran_order", "shape", "more"))
    header[key] = rng.choice(_HEADERS[key])
    text = repr(header) if rng.random() < 0.85 else rng.choice(_TEXTS)
    version = rng.choice((b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x09"))
    encoded = text.encode("utf-8", "surrogatepass") + b"\n"
    length = struct.pack("<H" if version == b"\x01\x00" else "<I", len(encoded) % (1 << 16))
    data = b"\x93NUMPY" + version + length + encoded + body
    return change_bytes(data, rng) if rng.random() < 0.2 else data


_HEADERS: Mapping[str, tuple[Any, ...]] = {
    "descr": (
        "<f8", ">f8", "<i8", ">i4", "<f4", "|b1", "|O", "<U8", "|S4", "<c16", "|V8", "<M8[D]", "<m8[s]", "<f2",
        "<U0", "|V0", "|u1", "x",
        "", 7, None, [("a", "<f8")], [("a", "|O")], [("a", "<f8", (2**40,))], "<U2000000000", "<f16", ("<f8",
        (3,)), "<U1000000",
    ),
    "fortran_order": (True, False, None, 1, "no"),
    "shape": (
        (), (0,), (1,), (3, 2), (2, 3), (-1,), (-1, -1), (2**31,), (2**62, 4), (2**64,), (10**30,), (1,) * 40, (0,
        2**63), (True,), ("a",),
        (1.5,), [2], 3, None, (2**40, 0), (-(2**63), 0),
    ),
    "more": (1, "x" * 9000, [[]]),
}  # fmt: skip

_TEXTS = (
    "{", "[1]", "__import__('os')", "{'descr': '<f8', 'fortran_order': False, 'shape': (1,)", "(" * 3000, "{}", "",
    "-" * 20000, "\x00" * 50, "{1: 2}",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",)}", "'" * 200, "{[]: 1}", "\ud800",
)  # fmt: skip


def _archive(members: Mapping[str, bytes], rng: Random) -> bytes:
    """Return a zip file of members, compressed or not, some of its own fields changed now and then."""
    stream = io.BytesIO()
    method = rng.choice(
        (zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    )
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, method)
    data = stream.getvalue()
    kind = rng.random()
    if kind < 0.65:
        return data
    if kind < 0.85:
        return change_bytes(data, rng)
    # A field of a header: sizes, method, flags (encryption), offsets.
    found = bytearray(data)
    mark = rng.choice((b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"))
    at = found.find(mark)
    if at >= 0:
        place = at + 4 + rng.randrange(26)
        width = rng.choice((1, 2, 4))
        value = rng.choice((0, 1, 8, 9, 12, 14, 93, 99, 2**15, 2**31 - 1, 2**32 - 1)) % (1 << (8 * width))
        found[place : place + width] = value.to_bytes(width, "little")
    return bytes(found)


def _values(array: Array, rng: Random) -> Array:
    """Return an array with other values, shape or type."""
    kind = rng.random()
    flat = array.copy()
    with np.errstate(all="ignore"):
        if kind < 0.4 and flat.size and flat.dtype.kind in "if":
            value = rng.choice((-1, 0, 1, 2, 3, 7, 1000, -(2**31), 2**31 - 1, 1e300, float("nan"), float("inf"), -0.5))
            at = rng.randrange(flat.size)
            flat.reshape(-1)[at] = (
                value if flat.dtype.kind == "f" else int(np.clip(np.nan_to_num(value), -(2**31), 2**31 - 1))
            )
            return flat
        if kind < 0.6:
            dtype = rng.choice(
                ("f8", "f4", "f2", "i8", "i4", "u1", "u8", "?", "U3", "S3", "c16", "O", "M8[D]", ">i8", ">f8")
            )
            with warnings.catch_warnings(), suppress(TypeError, ValueError, RuntimeError, OverflowError):
                warnings.simplefilter("ignore")
                return flat.astype(dtype)
            return flat
    return rng.choice(
        (
            lambda: flat[:-1] if flat.ndim else flat,
            lambda: np.concatenate([flat, flat]) if flat.ndim else flat,
            lambda: flat.reshape(-1),
            lambda: flat[None],
            lambda: np.zeros((0,), flat.dtype),
            lambda: np.array(3),
            lambda: np.array([object()], dtype=object),
            lambda: np.array([{"a": _Touches()}], dtype=object),
            lambda: np.asfortranarray(flat),
            lambda: np.array(WORDS),
            lambda: np.zeros((1 << 22,), np.uint8),
        )
    )()


class _Touches:
    """What a pickle would run: the harness sees it, as no process may end so."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import os; os._exit(77)",))


# -- problem files


def _problems() -> Reader:
    arrays = {
        "vertex_offsets": np.array([0, 2, 5, 7]),
        "vertex_costs": np.array([1.0, 2, 3, 4, 5, 6, 7.5]),
        "edges": np.array([[0, 1], [1, 2]], np.int32),
        "edge_table": np.array([0, 1], np.int32),
        "table_shape": np.array([[2, 3], [3, 2]], np.int32),
        "table_offsets": np.array([0, 6, 12]),
        "table_values": np.arange(12.0),
        "vertex_names": np.array(["a", "b", "c"]),
        "configs": np.ones((7, 2), np.int32),
    }

    def read(rng: Random, folder: Path) -> None:
        changed = dict(arrays)
        for _ in range(rng.choice((0, 1, 1, 2))):
            name = rng.choice(list(changed))
            kind = rng.random()
            if kind < 0.85:
                changed[name] = _values(changed[name], rng)
            elif kind < 0.95 and len(changed) > 1:
                del changed[name]
            else:
                changed["more"] = np.zeros(3)
        plain = rng.random() < 0.6
        members = {f"{name}.npy": _npy(array, None if plain else rng) for name, array in changed.items()}
        path = folder / "problem.npz"
        path.write_bytes(_archive(members, rng))
        tables = read_problem(path)
        sizes = tables.domain_sizes
        solution = solve(tables, ordering=rng.choice(("auto", *ORDERINGS)))
        if (
            all(len(tables.layer_costs(v)) for v in range(tables.num_vertices))
            and np.prod([float(s) for s in sizes]) < 3000
        ):
            best = min(_cost(tables, choice) for choice in product(*map(range, sizes)))
            assert solution.cost == best or abs(solution.cost - best) <= 1e-9 * abs(best), (solution.cost, best)
        write_problem(tables, folder / "again.npz")
        export_cfn(tables, folder / "again.cfn")

    return read


def _cost(tables: Any, choice: tuple[int, ...]) -> float:
    own = sum(float(tables.layer_costs(v)[c]) for v, c in enumerate(choice))
    moved = 0.0
    for (u, v), t in zip(tables.edges, tables.edge_table, strict=True):
        moved += float(tables.edge_tables[t].dense()[choice[u], choice[v]])
    return own + moved


# -- data


def _data() -> Reader:
    arrays = {"inputs": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32), "labels": np.arange(8) % 4}
    inputs = (DataInput(name="inputs", shape=(4, 3)), DataInput(name="labels", shape=(4,), below=4))

    def read(rng: Random, folder: Path) -> None:
        changed = dict(arrays)
        for _ in range(rng.choice((0, 1, 1, 2))):
            name = rng.choice(list(changed))
            changed[name] = _values(changed[name], rng)
        if rng.random() < 0.1:
            changed[rng.choice(("inputs", "labels", "x/y", "../z", "", "a" * 70_000))] = np.zeros(2)
        plain = rng.random() < 0.6
        files = {f"{name}.npy": _npy(array, None if plain else rng) for name, array in changed.items()}
        if rng.random() < 0.7:
            path = folder / "data.npz"
            path.write_bytes(_archive({k[:60_000]: v for k, v in files.items()}, rng))
        else:
            path = folder / "data"
            path.mkdir(exist_ok=True)
            for old in path.iterdir():
                old.unlink()
            for name in ("inputs.npy", "labels.npy"):
                if name in files:
                    (path / name).write_bytes(files[name])
        found = read_arrays(path)
        batches = Batches(inputs, seed=0, arrays=found, called=str(path))
        for step in range(batches.num_batches + 1):
            batch = batches.batch(step)
            assert batch["inputs"].shape == (4, 3)
            assert np.isfinite(batch["inputs"]).all()
            assert ((batch["labels"] >= 0) & (batch["labels"] < 4)).all()

    return read


# -- checkpoints


def _checkpoints() -> Reader:
    weights = {"fc/weights": np.ones((3, 2), np.float32), "fc/bias": np.zeros(2, np.float32)}
    plain = Checkpoint(
        step=3,
        dtype="float32",
        seed=0,
        optimiser="momentum",
        options={"learning_rate": 0.1},
        data={"source": "made up", "batch": {"inputs": [4, 3]}},
        weights=weights,
        slots={"fc/weights": {"momentum": np.ones((3, 2), np.float32)}},
    )
    cache: list[bytes] = []

    def read(rng: Random, folder: Path) -> None:
        if not cache:
            cache.append(write_checkpoint(folder, plain).read_bytes())
        data = cache[0]
        length = int.from_bytes(data[:8], "little")
        header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
        kept = change_document(json.loads(header["__metadata__"]["pase"]), rng, rng.choice((0, 1, 1)))
        header["__metadata__"]["pase"] = json.dumps(kept)
        if rng.random() < 0.8:
            # What it says may be wrong though its checksum is right.
            sums = json.loads(header["__metadata__"]["sha256"])
            sums["pase"] = hashlib.sha256(header["__metadata__"]["pase"].encode()).hexdigest()
            header["__metadata__"]["sha256"] = json.dumps(sums, sort_keys=True)
        if rng.random() < 0.4:
            header = change_document(header, rng, 1)
        text = json.dumps(header).encode()
        if rng.random() < 0.1:
            text = change_bytes(text, rng)
        if rng.random() < 0.15:
            body = change_bytes(body, rng)
        length = rng.choice(NUMBERS[:18]) if rng.random() < 0.05 else len(text)
        data = (int(length) % (1 << 64)).to_bytes(8, "little") + text + body
        if rng.random() < 0.1:
            data = change_bytes(data, rng)
        path = folder / "step-0000000003.safetensors"
        path.write_bytes(data)
        found = read_checkpoint(path)
        again = read_checkpoint(write_checkpoint(folder, found))
        assert {name: array.tobytes() for name, array in again.weights.items()} == {
            name: array.tobytes() for name, array in found.weights.items()
        }

    return read


# -- MNIST and CIFAR-10


def _idx(shape: tuple[int, ...], rng: Random) -> bytes:
    header = bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape)
    data = header + bytes(rng.randrange(10) for _ in range(int(np.prod(shape))))
    kind = rng.random()
    if kind < 0.5:
        data = change_bytes(data, rng)
    return gzip.compress(data, 1) if rng.random() < 0.4 else data


def _mnist() -> Reader:
    def read(rng: Random, folder: Path) -> None:
        count = rng.choice((1, 2, 3))
        for name, shape in (("images-idx3-ubyte", (count, 28, 28)), ("labels-idx1-ubyte", (count,))):
            for part in ("train", "t10k"):
                data = _idx(shape, rng)
                (folder / f"{part}-{name}").write_bytes(change_bytes(data, rng) if rng.random() < 0.2 else data)
        found = load_dataset(f"mnist:{folder}", part=rng.choice(("train", "test")))
        for array in found.arrays.values():
            assert np.isfinite(array).all()

    return read


def _cifar() -> Reader:
    records = (b"\x03" + bytes(i * 7 % 256 for i in range(RECORD_BYTES - 1))) * 2

    def read(rng: Random, folder: Path) -> None:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for name in CIFAR10_FILES:
                if rng.random() < 0.02:
                    continue
                info = tarfile.TarInfo(
                    rng.choice((f"cifar-10-batches-bin/{name}",) * 50 + (word(rng)[:90].replace("\ud800", ""),))
                )
                info.size = len(records)
                if rng.random() < 0.02:
                    info.type = rng.choice(
                        (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE)
                    )
                    info.linkname = "/etc/passwd"
                archive.addfile(info, io.BytesIO(records))
        data = stream.getvalue()
        if rng.random() < 0.6:
            data = change_bytes(data[: rng.choice((600, 1100, len(data)))], rng) + data[600:]
        if rng.random() < 0.6:
            data = gzip.compress(data, 1)
            if rng.random() < 0.4:
                data = change_bytes(data, rng)
        path = folder / "cifar.tar.gz"
        path.write_bytes(data)
        found = load_dataset(f"cifar10:{path}", part=rng.choice(("train", "test")))
        for array in found.arrays.values():
            assert np.isfinite(array).all()

    return read


def _named(name: str, prepare: Callable[[], Reader], share: float) -> Target:
    return Target(name=name, prepare=prepare, share=share)


TARGETS = (
    _named("problem", _problems, 3),
    _named("data", _data, 3),
    _named("checkpoint", _checkpoints, 3),
    _named("mnist", _mnist, 1),
    _named("cifar10", _cifar, 0.5),
)
