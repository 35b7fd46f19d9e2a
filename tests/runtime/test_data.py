from pathlib import Path

import numpy as np
import pytest

from pase.errors import RuntimeFailure
from pase.graph import Builder
from pase.graph.operators import dense, elementwise, softmax_loss
from pase.runtime.data import Batches, DataInput, data_inputs, read_arrays
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
    with pytest.raises(RuntimeFailure, match=message):
        Batches(INPUTS, seed=0, arrays=arrays)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    good = tmp_path / "good.npz"
    np.savez(good, **GOOD)
    assert set(read_arrays(good)) == {"inputs", "labels"}
    bad = {
        "missing.npz": None,
        "empty.npz": b"",
        "text.npz": b"no archive at all",
        "truncated.npz": good.read_bytes()[:-40],
    }
    for name, content in bad.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(RuntimeFailure, match=rf"cannot read data from .*{name}"):
            read_arrays(tmp_path / name)
    np.save(tmp_path / "single.npy", GOOD["inputs"])
    with pytest.raises(RuntimeFailure, match=r"holds a single array; expected an .npz file"):
        read_arrays(tmp_path / "single.npy")
    np.savez(tmp_path / "objects.npz", inputs=np.array([{"a": 1}], dtype=object))
    with pytest.raises(RuntimeFailure, match=r"cannot read data from .*objects.npz"):
        read_arrays(tmp_path / "objects.npz")
