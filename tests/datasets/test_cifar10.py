"""CIFAR-10's binary version from a folder and from its archive; nothing is unpacked to disk and no pickle is read."""

import gzip
import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pase.datasets import load_dataset
from pase.datasets.registry import read_cifar10_files
from pase.errors import DatasetError
from tests.datasets.written import cifar_files, outcome, tar, write

FILES = cifar_files()
INNER = {f"cifar-10-batches-bin/{name}": data for name, data in FILES.items()}


def _expected(names: list[str]) -> tuple[np.ndarray, list[int]]:
    """Pixels [N, 3, 32, 32] and labels of records, each number looked up where the format has it."""
    pixels, labels = [], []
    for name in names:
        for start in range(0, len(FILES[name]), 3073):
            record = FILES[name][start : start + 3073]
            labels.append(record[0])
            colours = [[[record[1 + 1024 * c + 32 * y + x] for x in range(32)] for y in range(32)] for c in range(3)]
            pixels.append(colours)
    return np.array(pixels, float), labels


@pytest.fixture(params=["folder", "outer folder", "archive", "unpacked archive", "archive without folder"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "data"
    make = {
        "folder": lambda: write(path, FILES),
        "outer folder": lambda: write(path / "cifar-10-batches-bin", FILES).parent,
        "archive": lambda: path.write_bytes(tar({**INNER, "cifar-10-batches-bin/readme.html": b"<html>"})),
        "unpacked archive": lambda: path.write_bytes(tar(INNER, "w:")),
        "archive without folder": lambda: path.write_bytes(tar({f"./{name}": FILES[name] for name in FILES})),
    }
    make[request.param]()
    return path


def test_every_source_gives_the_records_in_order(source: Path) -> None:
    before = sorted(source.parent.rglob("*"))
    names = list(FILES)
    pixels, labels = _expected(names[:5])
    test_pixels, test_labels = _expected(names[5:])
    train, test = load_dataset(f"cifar10:{source}"), load_dataset(f"cifar10:{source}", part="test")
    assert train.arrays["inputs"].shape == (10, 3, 32, 32)
    assert (train.arrays["labels"].tolist(), test.arrays["labels"].tolist()) == (labels, test_labels)
    np.testing.assert_allclose(train.arrays["inputs"], (pixels - pixels.mean()) / pixels.std(), atol=1e-6)
    np.testing.assert_allclose(test.arrays["inputs"], (test_pixels - pixels.mean()) / pixels.std(), atol=1e-6)
    assert train.arrays["inputs"].dtype == np.float32
    assert train.description["normalisation"] == test.description["normalisation"]
    assert train.num_classes == 10
    assert sorted(source.parent.rglob("*")) == before


# -- what is wrong


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"data_batch_2.bin.* has 0 bytes; expected 1 to 10000 records of 3073 bytes each"),
        (bytes(3072), r"data_batch_2.bin.* has 3072 bytes; expected 1 to 10000 records of 3073 bytes"),
        (bytes(2 * 3073 + 1), r"data_batch_2.bin.* has 6147 bytes; expected"),
        (bytes(10_001 * 3073), r"data_batch_2.bin.* has 30733073 bytes; expected 1 to 10000 records"),
        (
            bytes(3073) + b"\x0a" + bytes(3072),
            r"data_batch_2.bin of .* has label 10 at example 1; expected labels from",
        ),
        (None, r"has no data_batch_2.bin; "),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_files_that_are_no_batches_are_refused(tmp_path: Path, data: bytes | None, message: str, packed: bool) -> None:
    path = tmp_path / "data"
    files = {name: content for name, content in {**FILES, "data_batch_2.bin": data}.items() if content is not None}
    if packed:
        path.write_bytes(tar(files))
    else:
        write(path, files)
    with pytest.raises(DatasetError, match=message):
        load_dataset(f"cifar10:{path}")


class Touches:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("form", ["folder", "outer folder", "archive", "file"])
def test_pickles_are_refused_and_not_executed(tmp_path: Path, form: str) -> None:
    pickled = pickle.dumps(Touches(tmp_path / "executed"))
    path = tmp_path / "data"
    files = {**{f"data_batch_{i}": pickled for i in range(1, 6)}, "test_batch": pickled}
    make = {
        "folder": lambda: write(path, files),
        "outer folder": lambda: write(path / "cifar-10-batches-py", files),
        "archive": lambda: path.write_bytes(tar({f"cifar-10-batches-py/{name}": files[name] for name in files})),
        "file": lambda: path.write_bytes(pickled),
    }
    make[form]()
    with pytest.raises(DatasetError, match=r"Python version, which is pickles; .* download .* cifar-10-binary.tar.gz"):
        load_dataset(f"cifar10:{path}")
    assert not (tmp_path / "executed").exists()


def _member(name: str, **changes: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    for key, value in changes.items():
        setattr(member, key, value)
    return member


REST = {name: data for name, data in FILES.items() if name != "test_batch.bin"}
LINK = _member("test_batch.bin", type=tarfile.SYMTYPE, linkname="/etc/passwd")
NUL_DEVICE = _member("test_batch.bin", type=tarfile.CHRTYPE)
FOLDER = _member("test_batch.bin", type=tarfile.DIRTYPE)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tar(REST, extra=(LINK,)), r"test_batch.bin in .*data is a link or no plain file; expected a file of records"),
        (tar(REST, extra=(NUL_DEVICE,)), r"test_batch.bin in .* is a link or no plain file"),
        (tar(REST, extra=(FOLDER,)), r"test_batch.bin in .* is a link or no plain file"),
        (tar({**FILES, "./test_batch.bin": FILES["test_batch.bin"]}), r"test_batch.bin in .* is there a second time"),
        (tar({**REST, "../test_batch.bin": bytes(3073)}), r"has no test_batch.bin; it holds data_batch_1.bin, "),
        (tar({**REST, "/test_batch.bin": bytes(3073)}), r"has no test_batch.bin; it holds data_batch_1.bin, "),
        (tar({}), r"has no data_batch_1.bin, .*; it holds nothing: expected the binary version"),
        (tar({f"other{i}": b"" for i in range(101)}), r"holds more than 100 other files; expected the binary version"),
        (tar({}, "w:", extra=(_member("other", size=2**80),)), r"data ends within a file; expected the binary version"),
        (tar(FILES)[:-30], r"is damaged: .*: download it again"),
        (tar(FILES, "w:")[:7000], r"cannot be read as an archive: .*expected the binary version"),
        (gzip.compress(b"no archive"), r"cannot be read as an archive: "),
        (b"no archive", r"cannot be read as an archive: "),
        (b"", r"cannot be read as an archive: empty file"),
    ],
    # Not the bytes: they hold the time, and every process that runs tests must find the same ones.
    ids=(
        *("link", "device", "folder", "twice", "outside", "at-the-root", "empty-archive", "many-files", "endless"),
        *("cut-off", "cut-off-plain", "gzip", "no-archive", "empty-file"),
    ),
)
def test_archives_that_are_not_what_was_published_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=message):
        load_dataset(f"cifar10:{path}", part="test")


def test_an_archive_is_not_read_beyond_what_was_published(tmp_path: Path) -> None:
    """A member of zeros of 400 MB, between others, takes half a megabyte of archive."""
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1) as packed:
        packed.write(_member("padding", size=400_000_000).tobuf())
        for _ in range(400):
            packed.write(bytes(1_000_000))
    path = tmp_path / "data"
    path.write_bytes(out.getvalue())
    assert path.stat().st_size < 3_000_000
    with pytest.raises(DatasetError, match=r"unpacks to more than 185428576 bytes, more than CIFAR-10 has"):
        load_dataset(f"cifar10:{path}")


def test_a_path_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"nothing does not exist; expected a folder of CIFAR-10, or the binary"):
        load_dataset(f"cifar10:{tmp_path / 'nothing'}")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DatasetError, match=r"pipe is no plain file; expected a folder of CIFAR-10"):
        load_dataset(f"cifar10:{tmp_path / 'pipe'}")


SMALL = {name: data[:3073] for name, data in FILES.items()}
HEADERS = range(0, 6 * (512 + 3584), 512 + 3584)
"""Where the members of an archive of SMALL begin."""


@given(st.data())
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_archives_give_our_error_or_whole_records(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(tar(SMALL, "w:"))
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.sampled_from(HEADERS)) + data.draw(st.integers(0, 511))
        content[where : where + data.draw(st.integers(0, 12))] = data.draw(st.binary(max_size=12))
        # The checksum is made good, or it would stop everything that comes behind it.
        for start in HEADERS:
            block = bytearray(content[start : start + 512])
            block[148:156] = b" " * 8
            content[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    packed = data.draw(st.booleans())
    (tmp_path / "data").write_bytes(gzip.compress(content) if packed else content)
    found = outcome(lambda: read_cifar10_files(tmp_path / "data", list(FILES)))
    if isinstance(found, DatasetError):
        assert str(tmp_path) in str(found)
    else:
        assert list(found) == list(FILES)
        assert all(records.shape[1] == 3073 for records in found.values())


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_packed_archive_that_was_damaged_is_not_taken(tmp_path: Path, data: st.DataObject) -> None:
    """Its checksum is looked at, so that not one pixel of it can be another."""
    whole = tar(SMALL)
    content = bytearray(whole)
    # Behind the header, of which some bytes mean nothing.
    where = data.draw(st.integers(10, len(content) - 1))
    content[where] ^= data.draw(st.integers(1, 255))
    (tmp_path / "data").write_bytes(content)
    with pytest.raises(DatasetError, match=r"is damaged|cannot be read as an archive|has no |expected "):
        read_cifar10_files(tmp_path / "data", list(FILES))
