"""ONNX files: read without their weights, and refused in words where they are damaged, hostile or no models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

import onnx
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from pase.errors import ModelError
from pase.importers.onnx.file import OnnxFrontEnd
from pase.importers.onnx.model import MAX_READ_BYTES, open_model, read_weights
from tests.importers.onnx_models import (  # noqa: F401
    FLOAT,
    convolutional,
    feed,
    model,
    node,
    number,
    one_process,
    saved,
    traced,
    transformer,
    weight,
    whole,
)

pytestmark = pytest.mark.usefixtures("one_process")


def test_a_weight_of_terabytes_in_another_file_is_a_shape(tmp_path: Path) -> None:
    proto = model([node("MatMul", ["x", "w"], ["y"])], [feed("x", (2, 1 << 20))], ["y"])
    proto.graph.initializer.append(TensorProto(name="w", dims=[1 << 20, 1 << 23], data_type=FLOAT, data_location=1))
    assert traced(saved(proto, tmp_path)).num_parameters == 1 << 43
    assert traced(proto).num_parameters == 1 << 43


def test_a_file_that_is_too_large_for_a_model_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match=r"has 1,099,511,627,776 bytes; .* at most 2 GiB: .*save_as_external_data"):
        traced(path)


@pytest.mark.parametrize("proto", [convolutional(9), transformer(2), convolutional(22)], ids=["cnn9", "block", "cnn22"])
def test_a_file_that_is_cut_anywhere_is_refused_or_is_another_model(proto: Any, tmp_path: Path) -> None:
    data = proto.SerializeToString()
    path = tmp_path / "cut.onnx"
    steps = np.unique(np.linspace(0, len(data) - 1, 150, dtype=int))
    for end in steps:
        path.write_bytes(data[:end])
        _refused_or_read(path)


@pytest.mark.parametrize("proto", [convolutional(9), transformer(2)], ids=["cnn9", "block"])
def test_a_file_of_which_a_byte_is_wrong_is_refused_or_is_another_model(proto: Any, tmp_path: Path) -> None:
    data = proto.SerializeToString()
    values = [tensor.raw_data for tensor in proto.graph.initializer if len(tensor.raw_data) > 64]
    of_weights = set[int]()
    for raw in values:
        start = data.index(raw)
        of_weights.update(range(start, start + len(raw)))
    rng = np.random.default_rng(0)
    places = [i for i in range(len(data)) if i not in of_weights]
    path = tmp_path / "wrong.onnx"
    for at in rng.choice(places, 150):
        changed = bytearray(data)
        changed[at] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(changed))
        _refused_or_read(path)


def _refused_or_read(path: Path) -> None:
    try:
        trace = traced(path)
    except ModelError as error:
        text = str(error)
        assert text
        assert "Traceback" not in text
    else:
        assert trace.nodes


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"is empty; expected an ONNX model"),
        (b"hello, world", r"is no ONNX model, or is truncated or damaged"),
        (b"\x80\x02}q\x00.", r"is no ONNX model, or is truncated or damaged"),
        (b"\x3a\xff\xff\xff\xff\x0f", r"is no ONNX model, or is truncated or damaged"),
        (b"\x08\x08", r"has no operators; expected a model"),
        (b"\x08\x08\x3a\x00", r"has no operators; expected a model"),
    ],
)
def test_what_is_no_model_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message):
        traced(path)


def test_a_file_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none.onnx' cannot be read: No such file"):
        traced(tmp_path / "none.onnx")
    with pytest.raises(ModelError, match=r"cannot be read: Is a directory"):
        traced(tmp_path)


def test_graphs_within_graphs_have_an_end(tmp_path: Path) -> None:
    def field(number: int, content: bytes) -> bytes:
        length, size = b"", len(content)
        while size >= 0x80:
            length += bytes([size & 0x7F | 0x80])
            size >>= 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + content

    graph = b""
    for _ in range(4000):
        # A graph's operator's attribute's graph.
        graph = field(1, field(5, field(6, graph)))
    path = tmp_path / "deep.onnx"
    path.write_bytes(b"\x08\x08" + field(7, graph))
    with pytest.raises(ModelError, match="is no ONNX model, or is truncated or damaged"):
        traced(path)


def test_a_model_in_memory_has_an_end_too() -> None:
    proto = model([node("Relu", ["x"], ["y"])], [feed("x", (2,))], ["y"])
    graph = proto.graph
    for _ in range(2000):
        graph = graph.node.add(op_type="If").attribute.add(name="then_branch").g
    with pytest.raises(ModelError, match="messages lie more than 100 deep in one another"):
        open_model(proto)


def test_absurd_shapes_are_refused() -> None:
    huge = TensorProto(name="w", dims=[2**62, 4], data_type=FLOAT)
    proto = model([node("MatMul", ["x", "w"], ["y"])], [feed("x", (2, 4))], ["y"], [huge])
    with pytest.raises(ModelError, match=r"tensor 'w' has shape \(4611686018427387904, 4\); the file is damaged"):
        traced(proto)
    fill = node("ConstantOfShape", ["s"], ["c"], name="fill")
    proto = model([fill, node("Add", ["x", "c"], ["y"])], [feed("x", (2, 4))], ["y"], [whole("s", 2**61, 2**61)])
    with pytest.raises(ModelError, match=r"tensor 'c' has shape"):
        traced(proto)


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    data = model([node("Relu", ["x"], ["y"], name="abc")], [feed("x", (2,))], ["y"]).SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(data.replace(b"abc", b"a\xffc"))
    with pytest.raises(ModelError, match="is no ONNX model, or is truncated or damaged: a name in it is no text"):
        traced(path)


@pytest.mark.parametrize("opset", [1, 6])
def test_operators_that_are_too_old_are_refused(opset: int) -> None:
    with pytest.raises(ModelError, match=rf"operators of opset {opset}; expected 7 or newer: .*version_converter"):
        open_model(model([node("Relu", ["x"], ["y"])], [feed("x", (2,))], ["y"], opset=opset))


def test_functions_that_call_themselves_are_refused() -> None:
    inner = helper.make_function("own", "F", ["a"], ["b"], [node("F", ["a"], ["b"], domain="own")], [])
    proto = model([node("F", ["x"], ["y"], domain="own")], [feed("x", (2,))], ["y"], functions=[inner])
    with pytest.raises(ModelError, match=r"functions cannot be written out .*Cycle detected"):
        open_model(proto)


def test_functions_that_call_each_other_again_and_again_are_refused() -> None:
    # Long nodes take the memory that the process may have sooner.
    functions = [
        helper.make_function("own", "F0", ["a"], ["b"], [node("Relu", ["a"], ["b"], doc_string="x" * 50_000)], [])
    ]
    for i in range(1, 41):
        calls = [node(f"F{i - 1}", ["a"], ["t"], domain="own"), node(f"F{i - 1}", ["t"], ["b"], domain="own")]
        functions.append(helper.make_function("own", f"F{i}", ["a"], ["b"], calls, []))
    proto = model([node("F40", ["x"], ["y"], domain="own")], [feed("x", (2,))], ["y"], functions=functions)
    with pytest.raises(ModelError, match=r"functions cannot be written out .*(bad_alloc|ends its process at it)"):
        open_model(proto)


def test_a_function_is_what_it_is_made_of() -> None:
    imports = [helper.make_opsetid("", 20)]
    twice = helper.make_function("own", "Twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], imports)
    proto = model(
        [node("Twice", ["x"], ["t"], domain="own"), node("Twice", ["t"], ["y"], domain="own")],
        [feed("x", (2, 3))],
        ["y"],
        functions=[twice],
        more=[helper.make_opsetid("own", 1)],
        opset=20,
    )
    trace = traced(proto)
    assert [each.origin.operator for each in trace.nodes] == ["Add", "Add"]


# -- values


def test_values_are_read_one_by_one(tmp_path: Path) -> None:
    proto = convolutional(13)
    path = saved(proto, tmp_path)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    assert stored["dense"].nbytes < MAX_READ_BYTES < 90 * 70 * 4
    weights = read_weights(str(path))
    assert set(weights) == set(stored)
    assert len(weights) == len(stored)
    for name, array in stored.items():
        np.testing.assert_array_equal(weights[name], array)
        np.testing.assert_array_equal(read_weights(proto)[name], array)
    big = model([node("MatMul", ["x", "w"], ["y"])], [feed("x", (2, 90))], ["y"], [weight("w", 90, 70)])
    np.testing.assert_array_equal(
        read_weights(str(saved(big, tmp_path)))["w"], numpy_helper.to_array(big.graph.initializer[0])
    )
    assert "v" not in weights


def _external(folder: Path) -> tuple[Path, Any]:
    proto = model([node("MatMul", ["x", "w"], ["y"])], [feed("x", (2, 90))], ["y"], [weight("w", 90, 70)])
    array = numpy_helper.to_array(proto.graph.initializer[0])
    external_data_helper.convert_model_to_external_data(proto, location="w.bin", size_threshold=0)
    onnx.save(proto, folder / "model.onnx")
    return folder / "model.onnx", array


def test_values_beside_the_file_are_not_needed_and_are_read_when_asked_for(tmp_path: Path) -> None:
    path, array = _external(tmp_path)
    np.testing.assert_array_equal(read_weights(str(path))["w"], array)
    (tmp_path / "w.bin").unlink()
    assert traced(path).num_parameters == 90 * 70
    with pytest.raises(ModelError, match=r"values of 'w' cannot be read: .*w.bin, but it is not regular file"):
        read_weights(str(path))["w"]


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "a/../../secret.bin", ""])
def test_values_outside_of_the_models_folder_are_not_read(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(b"\0" * 90 * 70 * 4)
    path, _ = _external(folder)
    proto = onnx.load(path, load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = location
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match=r"values of 'w' cannot .* (outside the directory|absolute path|not be empty)"):
        read_weights(str(path))["w"]


def test_values_that_are_fewer_than_told_are_refused(tmp_path: Path) -> None:
    path, _ = _external(tmp_path)
    (tmp_path / "w.bin").write_bytes(b"\0" * 100)
    with pytest.raises(ModelError, match=r"values of 'w' cannot .* length \(25200\) exceeds available data \(100 "):
        read_weights(str(path))["w"]


def test_a_model_in_memory_is_taken_as_a_file_is(tmp_path: Path) -> None:
    proto = convolutional(13)
    front_end = OnnxFrontEnd()
    assert front_end.takes(proto)
    assert front_end.takes("a/MODEL.ONNX")
    assert not front_end.takes("model.keras")
    assert not front_end.takes(None)
    path = Path(saved(proto, tmp_path)).rename(tmp_path / "small.onnx")
    assert traced(proto) == traced(path)
    assert traced(path).name == "small"
    assert number("n", 1.0).dims == []
