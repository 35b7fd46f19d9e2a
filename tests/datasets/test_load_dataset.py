"""What a user types for data, and whether a model reads them."""

import sys
from pathlib import Path

import numpy as np
import pytest

from pase.datasets import SOURCES, Dataset, fit_to, has_parts, load_dataset
from pase.datasets.registry import digits
from pase.errors import DatasetError, MissingExtraError
from pase.models import build
from pase.targets.training.data import DataInput, data_inputs
from tests.datasets.written import cifar_files, mnist_files, write

# -- sources


def test_the_sources_are_these() -> None:
    forms = {name: (source.form, source.has_parts) for name, source in SOURCES.items()}
    assert forms == {
        "digits": ("digits", True),
        "mnist": ("mnist:FOLDER", True),
        "cifar10": ("cifar10:PATH", True),
        "arrays": ("arrays:PATH", False),
    }


def test_the_digits_keep_their_values() -> None:
    """Every third pixel of an enlarged image is one of the original, whose grey values go from 0 to 16."""
    from sklearn.datasets import load_digits

    shipped = load_digits()
    train, test = load_dataset("digits"), load_dataset("digits", part="test")
    inputs = np.concatenate([train.arrays["inputs"], test.arrays["inputs"]])
    labels = np.concatenate([train.arrays["labels"], test.arrays["labels"]])
    assert (inputs.shape, inputs.dtype, labels.dtype) == ((1797, 1, 28, 28), np.float32, np.int32)
    small = (inputs[:, 0, 2:-2:3, 2:-2:3] + 1) * 8

    def as_set(images: np.ndarray, classes: np.ndarray) -> set[tuple[bytes, int]]:
        return {(image.astype(np.uint8).tobytes(), int(label)) for image, label in zip(images, classes, strict=True)}

    assert as_set(small, labels) == as_set(shipped.images, shipped.target)
    assert len(train.arrays["labels"]) == 1440
    assert train.description["normalisation"] is None
    for part, arrays in digits().items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(load_dataset("digits", part=part).arrays[name], array)


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"scikit-learn, which is not installed; PaSE's extra 'data'"):
        load_dataset("digits")


def test_arrays_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.arange(12).reshape(4, 3)
    np.savez(tmp_path / "own.npz", tokens=tokens, labels=np.arange(4))
    (tmp_path / "mnist").mkdir()
    np.save(tmp_path / "mnist" / "tokens.npy", tokens)
    monkeypatch.chdir(tmp_path)
    for text in ("own.npz", "./own.npz", f"arrays:{tmp_path}/own.npz", "./mnist"):
        dataset = load_dataset(text)
        np.testing.assert_array_equal(dataset.arrays["tokens"], tokens)
        assert dataset.num_classes is None
        assert not has_parts(text)
    assert load_dataset("own.npz", part="test").description == {
        "source": "arrays",
        "part": "test",
        "shapes": {"tokens": [4, 3], "labels": [4]},
        "normalisation": None,
    }
    assert has_parts("mnist:somewhere")


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "digits", mnist_files())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(load_dataset("mnist:~/digits").arrays["labels"]) == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"there are no data ''; expected digits, mnist:FOLDER, cifar10:PATH, arrays:PATH, or the path of an .npz"),
        ("nothing.npz", r"there are no data 'nothing.npz'; expected digits, "),
        ("mnits:data", r"no data 'mnits:data'; expected digits, mnist:FOLDER, "),
        ("mnist", r"data 'mnist': mnist needs a path; expected mnist:FOLDER \(for a file of that name: ./mnist\)"),
        ("cifar10:", r"data 'cifar10:': cifar10 needs a path; expected cifar10:PATH"),
        ("digits:data", r"data 'digits:data': digits takes no path; expected digits"),
        ("a" * 5000, r"there are no data 'aaa"),
        ("x\0y", r"there are no data 'x\\x00y'"),
        ("mnist:x\0y", r"does not exist; expected the folder of the MNIST files"),
        ("mnist:" + "a" * 5000, r"cannot read mnist:aa.*: File name too long"),
        ("mnist:~nobody-of-this-name/x", r"path '~nobody-of-this-name/x': .*; write it out"),
    ],
)
def test_what_names_no_data_is_refused(text: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        load_dataset(text)


def test_parts_have_names() -> None:
    with pytest.raises(DatasetError, match=r"unknown part 'tset': did you mean 'test'"):
        load_dataset("digits", part="tset")  # type: ignore[arg-type]


def test_arrays_that_cannot_be_read_are_refused_with_the_same_error(tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_bytes(b"no archive at all")
    with pytest.raises(DatasetError, match=r"cannot read data from .*bad.npz: .*; expected an .npz file"):
        load_dataset(str(tmp_path / "bad.npz"))


# -- models


def _inputs(model: str, **arguments: int) -> tuple[DataInput, ...]:
    batch = arguments.pop("batch", 2)
    return tuple(data_inputs(build(model, batch=batch, arguments=arguments)).values())


@pytest.fixture
def mnist(tmp_path: Path) -> Dataset:
    return load_dataset(f"mnist:{write(tmp_path / 'm', mnist_files())}")


@pytest.fixture
def cifar10(tmp_path: Path) -> Dataset:
    return load_dataset(f"cifar10:{write(tmp_path / 'c', cifar_files())}")


def test_models_read_images_of_their_size(mnist: Dataset, cifar10: Dataset) -> None:
    assert fit_to(mnist, _inputs("lenet5")) == mnist
    assert fit_to(cifar10, _inputs("vgg16", image=32, classes=10)) == cifar10
    assert fit_to(load_dataset("digits"), _inputs("lenet5")).arrays["inputs"].shape == (1440, 1, 28, 28)
    # More classes than there are is no error: some are never seen.
    assert fit_to(cifar10, _inputs("vgg16", image=32, classes=100)) == cifar10


def test_rows_are_laid_out_for_models_that_read_rows(mnist: Dataset) -> None:
    rows = fit_to(mnist, _inputs("mlp", inputs=784)).arrays["inputs"]
    assert rows.shape == (7, 784)
    assert [rows[3, 28 * y + x] for y in range(28) for x in range(28)] == [
        mnist.arrays["inputs"][3, 0, y, x] for y in range(28) for x in range(28)
    ]


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (
            "lenet5",
            {"image": 32},
            (
                r"examples of 'inputs' of mnist:.* are 1×28×28; the model reads 1×32×32: images .* of another size. "
                r"Choose a model for these, where it takes that with --arg image=28, or write .*; nothing is resized"
            ),
        ),
        (
            "vgg16",
            {"image": 32},
            r"1×28×28; the model reads 3×32×32: images .* of another number of channels. Choose a",
        ),
        ("mlp", {"inputs": 783}, r"1×28×28; the model reads 783: train another model on them, or write arrays of that"),
        ("lenet5", {"batch": 8}, r"mnist:.* has 7 examples; expected at least 8, one batch: give a smaller --batch"),
        ("lenet5", {"classes": 5}, r"has 10 classes; the model tells 5 apart: .* --arg classes=10"),
        ("rnnlm", {}, r"mnist:.* has no array .*; it has inputs, labels; the model reads|are 1×28×28; the model reads"),
    ],
)
def test_models_that_read_something_else_are_told(
    mnist: Dataset, model: str, arguments: dict[str, int], message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        fit_to(mnist, _inputs(model, **arguments))


def test_names_and_single_numbers_are_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", inputs=np.float64(3), targets=np.zeros(4))
    dataset = load_dataset(str(tmp_path / "own.npz"))
    with pytest.raises(DatasetError, match=r"own.npz has no array 'labels'; it has inputs, targets; the model reads"):
        fit_to(dataset, [DataInput(name="labels", shape=(2,), below=10)])
    with pytest.raises(DatasetError, match=r"examples of 'inputs' of .* are single numbers; the model reads 5: train"):
        fit_to(dataset, [DataInput(name="inputs", shape=(2, 5))])
    assert fit_to(dataset, [DataInput(name="targets", shape=(4,))]).arrays["targets"].shape == (4,)
