from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase.errors import ProgramError
from pase.graph import Builder
from pase.graph.operators import dense, elementwise, softmax_loss
from pase.targets.training.data import (
    Batches,
    DataInput,
    GeneratedBatches,
    data_inputs,
    load_function,
    read_arrays,
)
from tests.runtime.networks import small, tied

INPUTS = (DataInput(name="inputs", shape=(2, 3)), DataInput(name="labels", shape=(2,), below=5))


def test_names_of_inputs() -> None:
    assert {key: item.name for key, item in data_inputs(small("mlp")).items()} == {
        ("fc1", 0): "inputs",
        ("softmax", 1): "labels",
    }
    assert data_inputs(small("rnnlm"))["embedding", 0] == DataInput(name="inputs", shape=(24, 4), below=24)
    assert data_inputs(small("rnnlm"))["softmax", 1] == DataInput(name="labels", shape=(24, 4), below=24)
    # Two of them are named by their layers.
    assert {item.name for item in data_inputs(tied()).values()} == {"first", "second", "labels"}


def test_a_layer_with_two_inputs_names_them_by_tensor() -> None:
    net = Builder("net")
    x = net.add(elementwise, "sum", net.input((2, 3)), net.input((2, 3)), dims=("b", "c"))
    net.add(softmax_loss, "loss", net.add(dense, "fc", x, out=(("n", 4),)))
    assert {item.name for item in data_inputs(net.build()).values()} == {"sum/x0", "sum/x1", "labels"}


def test_made_up_data_depend_on_the_seed_and_the_name_alone() -> None:
    first, again, other = (Batches(INPUTS, seed=seed).batch(0) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first["inputs"], again["inputs"])
    np.testing.assert_array_equal(Batches(INPUTS[:1], seed=1).batch(7)["inputs"], first["inputs"])
    assert (first["inputs"] != other["inputs"]).all()
    assert first["labels"].dtype == np.int32
    assert set(Batches([DataInput(name="x", shape=(999,), below=5)], seed=0).batch(0)["x"]) == {0, 1, 2, 3, 4}


def test_rows_are_taken_in_a_cycle_of_whole_batches() -> None:
    arrays = {"inputs": np.arange(15.0).reshape(5, 3), "labels": np.array([0, 1, 2, 3, 4], np.int64)}
    batches = Batches(INPUTS, seed=0, arrays=arrays)
    assert [list(batches.batch(step)["labels"]) for step in range(3)] == [[0, 1], [2, 3], [0, 1]]
    np.testing.assert_array_equal(batches.batch(1)["inputs"], [[6, 7, 8], [9, 10, 11]])
    assert batches.batch(0)["labels"].dtype == np.int32


GOOD = {"inputs": np.zeros((4, 3)), "labels": np.zeros(4, int)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, r"no array 'labels'; the file holds inputs; the program needs 'labels' of shape \[N"),
        ({"inputs": np.zeros((4, 2))}, r"'inputs' of the data has shape \[4, 2\]; expected \[N, 3\] with N at least 2"),
        ({"inputs": np.zeros((1, 3))}, r"has shape \[1, 3\]; expected \[N, 3\] with N at least 2, the batch"),
        ({"labels": np.array(0)}, r"has shape \[\]; expected \[N\]"),
        ({"labels": np.zeros(4)}, r"'labels' of the data has type float64; expected whole numbers from 0 to 4"),
        ({"labels": np.array([0, 1, 5, 2])}, r"holds 5; expected whole numbers from 0 to 4"),
        ({"labels": np.array([0, 1, -1, 2])}, r"holds -1; expected whole numbers from 0 to 4"),
        ({"inputs": np.full((4, 3), np.nan)}, r"'inputs' of the data holds values that are not finite"),
        ({"inputs": np.full((4, 3), "a")}, r"'inputs' of the data has type <U1; expected numbers"),
    ],
)
def test_data_that_do_not_fit_are_refused(changes: dict[str, np.ndarray | None], message: str) -> None:
    arrays = {name: array for name, array in {**GOOD, **changes}.items() if array is not None}
    with pytest.raises(ProgramError, match=message):
        Batches(INPUTS, seed=0, arrays=arrays)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    good = tmp_path / "good.npz"
    np.savez(good, **GOOD)
    assert set(read_arrays(good)) == {"inputs", "labels"}
    whole = good.read_bytes()
    bad = {
        "missing.npz": None,
        "empty.npz": b"",
        "text.npz": b"no archive at all",
        "truncated.npz": whole[:-40],
        "flipped.npz": whole[:250] + bytes([whole[250] ^ 1]) + whole[251:],
    }
    for name, content in bad.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(
            ProgramError, match=rf"cannot read data from .*{name}: .*; expected an .npz file written by numpy.savez"
        ):
            read_arrays(tmp_path / name)
    np.save(tmp_path / "single.npy", GOOD["inputs"])
    with pytest.raises(ProgramError, match=r"holds a single array; expected an .npz file"):
        read_arrays(tmp_path / "single.npy")
    np.savez(tmp_path / "objects.npz", inputs=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ProgramError, match=r"cannot read data from .*objects.npz"):
        read_arrays(tmp_path / "objects.npz")


# -- a directory of arrays


def test_a_directory_of_arrays_is_left_on_disk(tmp_path: Path) -> None:
    (tmp_path / "block").mkdir()
    np.save(tmp_path / "inputs.npy", np.arange(15.0).reshape(5, 3))
    np.save(tmp_path / "labels.npy", np.arange(5))
    np.save(tmp_path / "block" / "x.npy", np.zeros(4))
    arrays = read_arrays(tmp_path)
    assert set(arrays) == {"inputs", "labels", "block/x"}
    assert all(isinstance(array, np.memmap) for array in arrays.values())
    batches = Batches(INPUTS, seed=0, arrays=arrays)
    np.testing.assert_array_equal(batches.batch(1)["inputs"], [[6, 7, 8], [9, 10, 11]])
    assert batches.batch(1)["labels"].tolist() == [2, 3]
    assert batches.description == {
        "source": "arrays",
        "batch": {"inputs": [2, 3], "labels": [2]},
        "rows": {"inputs": 5, "labels": 5},
    }


def test_a_wrong_number_far_into_an_array_is_found(tmp_path: Path) -> None:
    inputs = np.zeros((1001, 3))
    inputs[1000, 2] = np.inf
    np.save(tmp_path / "inputs.npy", inputs)
    np.save(tmp_path / "labels.npy", np.zeros(1001, int))
    with pytest.raises(ProgramError, match=r"'inputs' of the data holds values that are not finite"):
        Batches(INPUTS, seed=0, arrays=read_arrays(tmp_path))


def test_directories_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"holds no .npy files; expected one for each input, such as inputs.npy"):
        read_arrays(tmp_path)
    bad: dict[str, bytes | None] = {"text": b"no array at all", "empty": b"", "objects": None}
    for name, content in bad.items():
        path = tmp_path / name / f"{name}.npy"
        path.parent.mkdir()
        if content is None:
            np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
        else:
            path.write_bytes(content)
        with pytest.raises(ProgramError, match=rf"cannot read data from .*{name}.npy: "):
            read_arrays(path.parent)


# -- a generator


def counting(start: int = 0) -> Iterator[dict[str, Any]]:
    for step in range(start, 6):
        yield {"inputs": np.full((2, 3), step), "labels": [step % 5, 0], "more": "unused"}


def counting_from_zero() -> Iterator[dict[str, Any]]:
    yield from counting()


@pytest.mark.parametrize("function", [counting, counting_from_zero])
@pytest.mark.parametrize("start", [0, 3])
def test_a_generator_goes_on_where_it_was(function: Any, start: int) -> None:
    batches = GeneratedBatches(INPUTS, function, name="tests:f", start=start)
    for step in range(start, 6):
        for _ in range(2):
            batch = batches.batch(step)
            assert batch["inputs"].tolist() == [[step] * 3] * 2
        assert batch["labels"].dtype == np.int32
        assert set(batch) == {"inputs", "labels"}
    with pytest.raises(ProgramError, match=r"tests:f ended before the batch of step 7; train fewer steps"):
        batches.batch(6)


@pytest.mark.parametrize(
    ("yielded", "message"),
    [
        ({"inputs": np.zeros((2, 3))}, r"step 1 of data generator m:f has no array 'labels'; it holds inputs"),
        (
            {**GOOD, "inputs": np.zeros((3, 3))},
            r"'inputs' of the batch of step 1 .* has shape \[3, 3\]; expected \[",
        ),
        ({"inputs": np.zeros((2, 3)), "labels": [0, 5]}, r"'labels' of .* holds 5; expected whole numbers from 0 to 4"),
        ({"inputs": np.full((2, 3), np.nan), "labels": [0, 1]}, r"'inputs' of .* holds values that are not finite"),
        ({"inputs": [[1, 2], [3]], "labels": [0, 1]}, r"'inputs' of .* is not an array: "),
        ([1, 2], r"the batch of step 1 of data generator m:f is of type list; expected package.module:function"),
    ],
)
def test_what_a_generator_yields_is_checked_at_once(yielded: Any, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        GeneratedBatches(INPUTS, lambda: iter([yielded]), name="m:f")


def test_a_generator_that_raises_is_told() -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield {"inputs": np.zeros((2, 3)), "labels": [0, 1]}
        raise KeyError("x")

    batches = GeneratedBatches(INPUTS, broken, name="m:f")
    batches.batch(0)
    with pytest.raises(ProgramError, match=r"data generator m:f raised KeyError: 'x'"):
        batches.batch(1)
    with pytest.raises(ProgramError, match=r"data generator m:f raised TypeError: "):
        GeneratedBatches(INPUTS, lambda: 3, name="m:f")


def test_functions_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_batches.py").write_text("def f(): yield {}\nnumber = 3\n", encoding="utf-8")
    (tmp_path / "my_broken.py").write_text("import no_such_module_at_all\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert next(load_function("my_batches:f")()) == {}
    for name, message in (
        ("my_batches", r"'my_batches' names no function; expected package.module:function"),
        ("my batches:f", r"'my batches:f' names no function"),
        ("no_such_module_at_all:f", r"cannot import no_such_module_at_all for the data: .*; is it on PYTHONPATH"),
        ("my_broken:f", r"cannot import my_broken for the data: No module named 'no_such_module_at_all'"),
        ("my_batches:g", r"module my_batches has no function 'g'"),
        ("my_batches:number", r"module my_batches has no function 'number'"),
    ):
        with pytest.raises(ProgramError, match=message):
            load_function(name)
