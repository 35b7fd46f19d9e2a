"""IDX files, plain and packed, against a reader of single numbers; whatever is wrong with one is said."""

import gzip
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pase.datasets import Dataset, load_dataset
from pase.datasets.dataset import read_idx
from pase.errors import DatasetError
from tests.datasets.written import digits_of, idx, mnist_files, outcome, plain_idx, write

SHAPES = arrays.array_shapes(min_dims=1, max_dims=4, max_side=6)
FUZZ = settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(arrays.arrays(np.uint8, SHAPES), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(tmp_path: Path, array: np.ndarray, packed: bool) -> None:
    data = idx(array)
    (tmp_path / "file").write_bytes(gzip.compress(data) if packed else data)
    found = read_idx(tmp_path / "file", num_dims=array.ndim)
    assert found.dtype == np.uint8
    assert found.tolist() == plain_idx(data) == array.tolist()


def _loaded(folder: Path) -> tuple[Dataset, Dataset]:
    return load_dataset(f"mnist:{folder}"), load_dataset(f"mnist:{folder}", part="test")


def test_both_parts_are_on_the_scale_of_what_is_trained_on(tmp_path: Path) -> None:
    files = mnist_files()
    train, test = _loaded(write(tmp_path, files))
    pixels = np.array(plain_idx(files["train-images-idx3-ubyte"]), float)
    for dataset, stem in ((train, "train"), (test, "t10k")):
        inputs, labels = dataset.arrays["inputs"], dataset.arrays["labels"]
        assert (inputs.dtype, labels.dtype) == (np.float32, np.int32)
        assert labels.tolist() == plain_idx(files[f"{stem}-labels-idx1-ubyte"])
        expected = (np.array(plain_idx(files[f"{stem}-images-idx3-ubyte"]), float) - pixels.mean()) / pixels.std()
        np.testing.assert_allclose(inputs[:, 0], expected, atol=1e-6)
        assert inputs.shape == (len(labels), 1, 28, 28)
        assert not inputs.flags.writeable
        assert not labels.flags.writeable
    assert (train.num_classes, train.called) == (10, f"mnist:{tmp_path}")
    assert train.description == {
        "source": "mnist",
        "part": "train",
        "shapes": {"inputs": [7, 1, 28, 28], "labels": [7]},
        "normalisation": {"mean": pytest.approx(pixels.mean()), "deviation": pytest.approx(pixels.std())},
    }
    assert test.description["normalisation"] == train.description["normalisation"]


@pytest.mark.parametrize("name", [lambda n: n, lambda n: n + ".gz", lambda n: n.replace("-idx", ".idx")])
@pytest.mark.parametrize("packed", [True, False])
def test_every_spelling_is_found_and_the_content_says_whether_it_is_packed(
    tmp_path: Path, name: Callable[[str], str], packed: bool
) -> None:
    files = mnist_files()
    spelled = {name(key): gzip.compress(data) if packed else data for key, data in files.items()}
    for found, expected in zip(
        _loaded(write(tmp_path / "spelled", spelled)), _loaded(write(tmp_path / "plain", files)), strict=True
    ):
        np.testing.assert_array_equal(found.arrays["inputs"], expected.arrays["inputs"])
        np.testing.assert_array_equal(found.arrays["labels"], expected.arrays["labels"])


def test_sixty_thousand_images_are_read_as_a_whole(tmp_path: Path) -> None:
    """No loop over images: that would be as many allocations. Twice the numbers in float32 is room enough."""
    num = 60_000
    images, labels = digits_of(num, 0, (7, 7))
    shape = struct.pack(">BBBBIII", 0, 0, 8, 3, num, 7, 7)
    files = {"train-images-idx3-ubyte": shape + images.tobytes(), "train-labels-idx1-ubyte": idx(labels)}
    write(tmp_path, files)
    tracemalloc.start()
    dataset = load_dataset(f"mnist:{tmp_path}")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(dataset.arrays["inputs"]) == num
    assert peak_bytes < 2 * dataset.arrays["inputs"].nbytes


# -- what is wrong with a file


IMAGES = idx(digits_of(4, 0)[0])
CLAIMS = struct.pack(">BBBBIII", 0, 0, 8, 3, 2**30, 2**10, 2**10)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"file begins with bytes \(none\); expected 00 00 08 03, an IDX file of unsigned bytes in 3 dims"),
        (b"\0\0\x08", r"begins with bytes 00 00 08; expected 00 00 08 03"),
        (idx(np.zeros(5, np.uint8)), r"begins with bytes 00 00 08 01; expected 00 00 08 03"),
        (b"\0\0\x0d\x03" + IMAGES[4:], r"begins with bytes 00 00 0d 03; expected 00 00 08 03"),
        (IMAGES[:10], r"ends within its header, after 10 bytes; expected 16"),
        (IMAGES[:4] + bytes(12), r"holds nothing: its header says 0×0×0; expected at least one example"),
        (IMAGES + b"x", r"its header says 4×28×28, 3136 bytes, but more bytes follow; expected the end of the file"),
        (CLAIMS, r"its header says 1073741824×1024×1024, 1125899906842624 bytes, but a file of its size holds no more"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused(
    tmp_path: Path, data: bytes, message: str, packed: bool
) -> None:
    (tmp_path / "file").write_bytes(gzip.compress(data) if packed else data)
    with pytest.raises(DatasetError, match=rf"{re.escape(str(tmp_path))}/.*{message.removeprefix('file ')}"):
        read_idx(tmp_path / "file", num_dims=3)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(IMAGES[:-5]))
    with pytest.raises(DatasetError, match=r"says 4×28×28, 3136 bytes, but only 3131 follow; the file is incomplete"):
        read_idx(path, num_dims=3)
    path.write_bytes(IMAGES[:-20])
    with pytest.raises(DatasetError, match=r"3136 bytes, but a file of its size holds no more than 3132; the file is"):
        read_idx(path, num_dims=3)
    path.write_bytes(gzip.compress(IMAGES)[:-9])
    with pytest.raises(DatasetError, match=r"is damaged: Compressed file ended .*: download it again"):
        read_idx(path, num_dims=3)
    packed = bytearray(gzip.compress(IMAGES))
    packed[-6] ^= 1  # in the checksum, which lies behind all numbers
    path.write_bytes(packed)
    with pytest.raises(DatasetError, match=r"is damaged: CRC check failed"):
        read_idx(path, num_dims=3)


def test_a_file_that_unpacks_to_more_than_it_says_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(IMAGES + bytes(200_000_000), 1))
    tracemalloc.start()
    with pytest.raises(DatasetError, match=r"3136 bytes, but more bytes follow"):
        read_idx(path, num_dims=3)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 5_000_000


@given(st.data())
@FUZZ
def test_damaged_files_give_our_error_or_other_numbers(tmp_path: Path, data: st.DataObject) -> None:
    """A flipped pixel of a plain file cannot be told; everything else is refused, and nothing else is raised."""
    packed = data.draw(st.booleans())
    content = bytearray(gzip.compress(IMAGES) if packed else IMAGES)
    for _ in range(data.draw(st.integers(1, 3))):
        # Most of it is pixels: headers and checksums are where it matters.
        end = data.draw(st.sampled_from([min(24, len(content)), len(content)]))
        where = data.draw(st.integers(0, end - 1))
        content[where : where + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    (tmp_path / "file").write_bytes(content)
    found = outcome(lambda: read_idx(tmp_path / "file", num_dims=3))
    if isinstance(found, DatasetError):
        assert str(tmp_path) in str(found)
    else:
        assert found.size == 4 * 28 * 28
        assert not packed or found.tolist() == plain_idx(IMAGES)


# -- what is wrong with a folder


@pytest.mark.parametrize(
    ("changes", "part", "message"),
    [
        (
            {"train-labels-idx1-ubyte": None},
            "train",
            (
                r"has no train-labels-idx1-ubyte or train-labels-idx1-ubyte.gz or train-labels.idx1-ubyte or .*; the "
                r"folder holds t10k-images-idx3-ubyte, .*, train-images-idx3-ubyte: expected the four MNIST files"
            ),
        ),
        ({"train-images-idx3-ubyte": None}, "test", r"has no train-images-idx3-ubyte or"),
        (
            {"train-labels-idx1-ubyte": idx(np.zeros(6, np.uint8))},
            "train",
            r"7 images to train with and 6 labels; expected one label for each image",
        ),
        (
            {"t10k-labels-idx1-ubyte": idx(np.array([9, 10, 255], np.uint8))},
            "test",
            r"t10k-labels-idx1-ubyte has label 10 at example 1; expected labels from 0 to 9",
        ),
        (
            {"t10k-images-idx3-ubyte": idx(np.zeros((3, 28, 20), np.uint8))},
            "test",
            r"images to test with are 28×20, those to train on 28×28; expected one size",
        ),
        ({"train-images-idx3-ubyte": idx(np.zeros((7, 28, 28), np.uint8))}, "train", r"are all 0, so that they cannot"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    tmp_path: Path, changes: dict[str, bytes | None], part: str, message: str
) -> None:
    files = {name: data for name, data in {**mnist_files(), **changes}.items() if data is not None}
    write(tmp_path, files)
    with pytest.raises(DatasetError, match=message):
        load_dataset(f"mnist:{tmp_path}", part=part)  # type: ignore[arg-type]


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"nothing does not exist; expected the folder of the MNIST files"):
        load_dataset(f"mnist:{tmp_path / 'nothing'}")
    (tmp_path / "file").write_bytes(IMAGES)
    with pytest.raises(DatasetError, match=r"file is a file; expected the folder of the MNIST files"):
        load_dataset(f"mnist:{tmp_path / 'file'}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match=r"has no train-images-idx3-ubyte or .*; the folder is empty"):
        load_dataset(f"mnist:{tmp_path / 'empty'}")


def test_more_than_any_of_these_data_sets_is_not_unpacked(tmp_path: Path) -> None:
    header = bytes((0, 0, 8, 3)) + struct.pack(">3I", 1_000_000, 28, 28)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(header, 1) + gzip.compress(np.random.default_rng(0).bytes(800_000), 1))
    tracemalloc.start()
    with pytest.raises(DatasetError, match=r"784000000 bytes, more than the 196000000 of the largest file"):
        read_idx(path, num_dims=3)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
