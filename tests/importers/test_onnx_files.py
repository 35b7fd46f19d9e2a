"""ONNX files: read without their weights, and refused in words where they are damaged, hostile or no models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

import onnx
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from pase.errors import ModelError
from pase.importers.onnx.file import OnnxFrontEnd
from pase.importers.onnx.model import MAX_READ_BYTES, read_weights
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


def _relu(**options: Any) -> Any:
    return model([node("Relu", ["x"], ["y"], name="abc")], [feed("x", (2,))], ["y"], **options)


def _deep_file() -> bytes:
    """Return graphs within operators within graphs, of which no protocol buffer is made."""

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
    return b"\x08\x08" + field(7, graph)


def _deep_model() -> Any:
    proto = _relu()
    graph = proto.graph
    for _ in range(2000):
        graph = graph.node.add(op_type="If").attribute.add(name="then_branch").g
    return proto


def _absurd(*, is_filled: bool) -> Any:
    if is_filled:
        nodes = [node("ConstantOfShape", ["s"], ["c"], name="fill"), node("Add", ["x", "c"], ["y"])]
        return model(nodes, [feed("x", (2, 4))], ["y"], [whole("s", 2**61, 2**61)])
    huge = TensorProto(name="w", dims=[2**62, 4], data_type=FLOAT)
    return model([node("MatMul", ["x", "w"], ["y"])], [feed("x", (2, 4))], ["y"], [huge])


def _calling(name: str, *functions: tuple[str, list[Any]]) -> Any:
    made = [helper.make_function("own", own, ["a"], ["b"], nodes, []) for own, nodes in functions]
    return model([node(name, ["x"], ["y"], domain="own")], [feed("x", (2,))], ["y"], functions=made)


def _calls(*names: str) -> list[Any]:
    """Return calls of functions, one of what the other gives, from a to b."""
    values = ["a", *(f"t{i}" for i in range(1, len(names))), "b"]
    return [node(own, [values[i]], [values[i + 1]], domain="own") for i, own in enumerate(names)]


# Long nodes take the memory that the process may have sooner.
_MANY = [("F0", [node("Relu", ["a"], ["b"], doc_string="x" * 50_000)])]
_MANY += [(f"F{i}", _calls(f"F{i - 1}", f"F{i - 1}")) for i in range(1, 41)]

_DAMAGED = "is not an ONNX model, or is truncated or damaged"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: b"", "is empty; expected an ONNX model"),
        (lambda: b"hello, world", _DAMAGED),
        (lambda: b"\x80\x02}q\x00.", _DAMAGED),
        (lambda: b"\x3a\xff\xff\xff\xff\x0f", _DAMAGED),
        (lambda: b"\x08\x08", "has no operators; expected a model"),
        (lambda: b"\x08\x08\x3a\x00", "has no operators; expected a model"),
        (_deep_file, _DAMAGED),
        (_deep_model, "messages are nested more than 100 deep"),
        (lambda: _relu().SerializeToString().replace(b"abc", b"a\xffc"), f"{_DAMAGED}: a name in it is not text"),
        (lambda: _absurd(is_filled=False), r"tensor 'w' has shape \(4611686018427387904, 4\); the file is damaged"),
        (lambda: _absurd(is_filled=True), r"tensor 'c' has shape"),
        (lambda: _relu(opset=1), "operators of opset 1; expected 7 or newer: .*version_converter"),
        (lambda: _relu(opset=6), "operators of opset 6; expected 7 or newer: .*version_converter"),
        (lambda: _calling("F", ("F", _calls("F"))), "functions cannot be written out .*Cycle detected"),
        (lambda: _calling("F40", *_MANY), "functions cannot be written out .*(bad_alloc|ends its process at it)"),
    ],
)
def test_what_is_no_model_is_refused(make: Callable[[], Any], message: str, tmp_path: Path) -> None:
    source = make()
    if isinstance(source, bytes):
        path = tmp_path / "model.onnx"
        path.write_bytes(source)
        source = path
    with pytest.raises(ModelError, match=message):
        traced(source)


def test_a_file_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none.onnx' cannot be read: No such file"):
        traced(tmp_path / "none.onnx")
    with pytest.raises(ModelError, match=r"cannot be read: Is a directory"):
        traced(tmp_path)


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
