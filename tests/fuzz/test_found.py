"""What was found by changed files, each as a case of its own."""

import os
import pickle
import re
import shlex
import signal
import struct
import time
import zipfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from onnx import helper

from pase import Builder, emit, load, search
from pase.cli.main import cli
from pase.common.documents import DocumentSource
from pase.errors import EmitError, GraphError, ModelError, PlanError, ProgramError, TablesError
from pase.graph import Role, graph_document, graph_from_document
from pase.graph.operators import dense, softmax_loss
from pase.importers.isolated import Native, NativeError, native
from pase.importers.lower.builder import BodyBuilder
from pase.importers.weights import read_weights
from pase.planning.plan_file import plan_document, plan_from_document, write_plan
from pase.tables.files import read_problem
from pase.targets.training.counted import initial_deviation
from pase.targets.training.data import Batches, DataInput, read_arrays
from pase.targets.training.script import MetricsFile
from tests.importers.onnx_models import feed, model, node, number, saved, weight, whole
from tests.networks import tiny_plan

# -- messages

LONG = ("x" * 100_000, "long " * 20_000, "a'b\"" * 25_000, "'" * 50_000, "\\'" * 50_000, "' x" * 30_000)


@pytest.mark.parametrize("name", LONG, ids=range(len(LONG)))
def test_a_message_is_short_however_long_names_are(name: str) -> None:
    for text in (f"layer {name!r} is not known; expected another", f"layer {name} is not known; expected another"):
        error = PlanError(text)
        assert len(str(error)) <= 1000
        assert str(error).startswith("layer ")
        assert str(error).endswith("is not known; expected another")
        assert len(str(pickle.loads(pickle.dumps(error)))) <= 1000


def test_what_is_long_in_a_message_is_shortened_and_the_rest_is_not() -> None:
    name, path = "n" * 5000 + "'", "/".join(["folder"] * 25)
    error = PlanError(f"{path!r}: Keras' layer {name!r} of files' code is not 'x' but {name!r}")
    shown = f"{chr(34)}{'n' * 132}…{'n' * 64}'{chr(34)}"
    assert str(error) == f"{path!r}: Keras' layer {shown} of files' code is not 'x' but {shown}"


def test_a_message_is_one_line_of_printable_characters() -> None:
    assert str(PlanError("a\nb\r\nc \x1b[31m\x00 \ud800 \u2028")) == "a b c \\x1b[31m\\x00 \\ud800 "
    # A whole document of such names.
    document = plan_document(tiny_plan())
    document["layers"][0]["dims"] = {"\x00\x07\x1b[31m\n" + "x" * 100_000: False}
    with pytest.raises(
        PlanError, match=r"layers\[0\]\.dims\.\\x00\\x07\\x1b\[31m x+…x+ is False; expected a whole"
    ) as found:
        plan_from_document(document, DocumentSource(PlanError, "plan file p.json"))
    assert len(str(found.value)) < 400


def test_indices_that_may_look_up_several_dims_are_refused_where_a_program_is_written() -> None:
    document = graph_document(load("lenet5"))
    document["operators"][0]["reads"][1]["role"] = "index"
    graph = graph_from_document(document, DocumentSource(PlanError, "graph"))
    with pytest.raises(EmitError, match=r"indices w of layer conv1 \(conv2d\) may look up any of its dims \(b, h, w\)"):
        emit(search(graph, devices=2))


# -- arrays


def _npz(path: Path, name: str, data: bytes, method: int = zipfile.ZIP_STORED, **others: np.ndarray[Any, Any]) -> Path:
    np.savez(path, **others)
    with zipfile.ZipFile(path, "a", method) as archive:
        archive.writestr(f"{name}.npy", data)
    return path


def _npy(header: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header.encode() + b"\n" + data


HEADERS = {
    "an open bracket": "{'descr': '<f8', 'fortran_order': False, 'shape': (1,)",
    "brackets": "(" * 3000,
    "an open quote": "'" * 201,
    "keys that cannot be": "{[]: 1}",
    "more keys": "{'descr': '<f8', 'fortran_order': False, 'shape': (1,), 'more': 1}",
    "fields": "{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,)}",
    "objects": "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    "a huge extent": "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",)}",
    "many dims": "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "1," * 200 + ")}",
    "nothing, often": f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({2**62}, 0, {2**62})}}",
    "an extent below 0": "{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}",
    "long text": "{'descr': '<U2000000000', 'fortran_order': False, 'shape': (1,)}",
    "escapes": "{'descr': '\\d', 'fortran_order': False, 'shape': (1,)}",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_is_none_is_one_line(header: str, tmp_path: Path) -> None:
    data = _npy(header, bytes(8))
    for path in (_npz(tmp_path / "data.npz", "inputs", data), tmp_path / "folder"):
        if path.suffix == "":
            path.mkdir()
            (path / "inputs.npy").write_bytes(data)
        with pytest.raises(
            ProgramError, match=r"cannot read data from .*expected an \.np[yz] file written by numpy"
        ) as found:
            read_arrays(path)
        assert len(str(found.value)) < 700
    vertex_costs = _npz(tmp_path / "problem.npz", "vertex_offsets", data, **dict.fromkeys(_PROBLEM, np.zeros(1)))
    with pytest.raises(TablesError, match=r"the array 'vertex_offsets' (has|claims)"):
        read_problem(vertex_costs)


_PROBLEM = ("vertex_costs", "edges", "edge_table", "table_shape", "table_offsets", "table_values", "vertex_names")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_that_are_compressed_otherwise_are_refused_unread(method: int, tmp_path: Path) -> None:
    # Python unpacks these in one piece: few bytes can stand for all the memory that there is.
    path = _npz(tmp_path / "data.npz", "inputs", _npy("{}", bytes(1 << 24)), method)
    with pytest.raises(ProgramError, match="the array 'inputs' is compressed in another way than numpy's"):
        read_arrays(path)


def test_damaged_members_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez_compressed(path, inputs=np.arange(1000.0))
    whole_file = path.read_bytes()
    for at in range(0, len(whole_file), 7):
        path.write_bytes(whole_file[:at] + bytes([whole_file[at] ^ 0x55]) + whole_file[at + 1 :])
        with suppress(ProgramError):
            found = read_arrays(path)
            np.testing.assert_array_equal(found.get("inputs", np.arange(1000.0)), np.arange(1000.0))


def test_arrays_are_read_as_numpy_wrote_them(tmp_path: Path) -> None:
    made = {
        "plain": np.arange(6.0).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "swapped": np.arange(5, dtype=">i4"),
        "nothing": np.zeros((0, 3), np.float16),
        "number": np.array(7),
        "truth": np.array([True, False]),
        "text": np.array(["a", "слой"]),
        "complex": np.array([1j]),
    }
    np.savez(tmp_path / "a.npz", **made)
    np.savez_compressed(tmp_path / "b.npz", **made)
    (tmp_path / "c").mkdir()
    for name, array in made.items():
        np.save(tmp_path / "c" / f"{name}.npy", array)
    for path in (tmp_path / "a.npz", tmp_path / "b.npz", tmp_path / "c"):
        found = read_arrays(path)
        assert found.keys() == made.keys()
        for name, array in made.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)


def test_millions_of_labels_are_checked_a_million_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = []
    monkeypatch.setattr(
        "pase.targets.training.data.check_values", lambda _item, array, _where: pieces.append(len(array))
    )
    Batches([DataInput(name="labels", shape=(4,), below=2)], seed=0, arrays={"labels": np.zeros(3_000_000, np.uint8)})
    assert pieces == [1 << 20, 1 << 20, 3_000_000 - (2 << 20)]


def test_metrics_that_lie_deep_in_themselves_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("[" * 200_000 + "\n", encoding="utf-8")
    with pytest.raises(ProgramError, match="line 1, is not a line of this training's metrics"):
        MetricsFile(path, num_steps=1, resume=True)


# -- graphs


def test_an_activation_cannot_be_shared() -> None:
    net = Builder("net")
    x = net.add(dense, "fc", net.input((8, 8)), lead=("b",), reduce=("c",), out=(("n", 8),))
    net.add(softmax_loss, "loss", x, dims=("b", "n"))
    document = graph_document(net.build({}))
    document["operators"][0]["reads"][0]["shared"] = "w"
    with pytest.raises(GraphError, match="tensor 'x' is shared as 'w'; only a parameter can be shared"):
        graph_from_document(document, DocumentSource(GraphError, "graph"))


@pytest.mark.parametrize("value", [3, -1, 0, 2.5, False, "[" * 100_000, "7", '{"steps":[[1]]}'])
def test_how_a_layer_is_computed_is_a_body_of_steps(value: Any) -> None:
    document = plan_document(tiny_plan())["graph"]
    document["operators"][0]["body"] = value
    with pytest.raises(GraphError, match=r"graph: operators\[0\]\.body is .*; expected an object"):
        graph_from_document(document, DocumentSource(GraphError, "graph"))
    del document["operators"][0]["body"]
    document["operators"][0]["attributes"]["forward"] = value
    with pytest.raises(GraphError, match="an older version's, which described as text what layers compute"):
        graph_from_document(document, DocumentSource(GraphError, "graph"))


def test_an_operand_that_no_number_of_the_machine_holds_is_refused() -> None:
    document = graph_document(load((torch.nn.ReLU(), torch.zeros(4, 4))))
    (step,) = [step for operator in document["operators"] for step in operator["body"]["steps"]][:1]
    step["operands"][0] = 10**400
    with pytest.raises(GraphError, match=r"is .* bits; expected the name of a tensor, or a number"):
        graph_from_document(document, DocumentSource(GraphError, "graph"))


# -- ONNX


def test_an_operator_that_aborts_onnx_is_one_line(tmp_path: Path) -> None:
    nodes = [node("Split", ["x"], ["a", "b", "c"], name="cut", num_outputs=2, axis=0)]
    nodes += [node("MatMul", ["a", "w"], ["y"], name="product")]
    proto = model(nodes, [feed("x", (6, 4))], ["y"], [weight("w", 4, 3)], opset=18)
    for source in (saved(proto, tmp_path), proto):
        with pytest.raises(ModelError, match=r"^operator Split 'cut' cannot take tensors of shapes \[6, 4\]: "):
            load(source)


# The second is what its limit of time sends.
@pytest.mark.parametrize(
    ("sent", "told"),
    [(signal.SIGKILL, r"ends its process at it \(SIGKILL\)"), (signal.SIGPROF, "took more than 10 s")],
)
def test_a_process_that_ends_is_told(sent: int, told: str) -> None:
    with native() as process:
        os.kill(process._process.pid, sent)
        with pytest.raises(NativeError, match=told):
            process.ask("inline", b"")


def test_no_process_is_left() -> None:
    with native() as process:
        pid = process._process.pid
    assert isinstance(process, Native)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


UNUSUAL = {
    "Shape of a text": [node("Shape", ["x"], ["s"], name="op", start="a"), node("Reshape", ["x", "s"], ["y"])],
    "ConstantOfShape of nothing": [
        node("ConstantOfShape", [""], ["s"], name="op"), node("Add", ["x", "s"], ["y"])
    ],
    "Concat without an axis": [node("Concat", ["n", "n"], ["s"], name="op"), node("Reshape", ["x", "s"], ["y"])],
    "Gather along a float": [node("Gather", ["n", "n"], ["s"], name="op", axis=1.5), node("Reshape", ["x", "s"],
    ["y"])],
    "Cast to a text": [node("Cast", ["n"], ["s"], name="op", to="float"), node("Reshape", ["x", "s"], ["y"])],
    "Cast to numbers": [node("Cast", ["n"], ["s"], name="op", to=[1, 2]), node("Reshape", ["x", "s"], ["y"])],
    "Transpose by texts": [node("Transpose", ["n"], ["s"], name="op", perm=["a"]), node("Reshape", ["x", "s"], ["y"])],
}  # fmt: skip


@pytest.mark.parametrize("nodes", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_attributes_name_their_operator(nodes: list[Any], tmp_path: Path) -> None:
    proto = model(nodes, [feed("x", (2, 3))], ["y"], [whole("n", 3, 2)], opset=17)
    with pytest.raises(ModelError, match=r"operator [A-Za-z]+ 'op'"):
        load(saved(proto, tmp_path))


def test_a_bias_of_another_shape_is_not_written(tmp_path: Path) -> None:
    nodes = [node("Conv", ["x", "w", "bias"], ["y"], name="conv")]
    proto = model(nodes, [feed("x", (4, 3, 8, 8))], ["y"], [weight("w", 6, 3, 3, 3), weight("bias", 6, 2)])
    plan = search(load(saved(proto, tmp_path)), devices=2)
    with pytest.raises(
        EmitError,
        match=r"^layer 'conv' \(conv2d\) cannot be written as a program: Conv: a tensor of more dims is broadcast; ",
    ):
        emit(plan)


def test_channels_that_a_tensor_has_not_are_refused(tmp_path: Path) -> None:
    nodes = [node("BatchNormalization", ["x", "s", "s", "s", "s"], ["n"], name="norm"), node("Relu", ["n"], ["y"])]
    proto = model(nodes, [feed("x", (4,))], ["y"], [weight("s", 1)])
    with pytest.raises(ModelError, match="operator 'norm' is over dim 1 of tensors of 1 dims"):
        load(saved(proto, tmp_path))


def test_values_that_cannot_be_computed_are_one_line(tmp_path: Path) -> None:
    # "k" is too large to be worked out as the file is imported, and ONNX itself does not know the operator.
    nodes = [
        node("Expand", ["c", "shape"], ["e"], name="wide"),
        node("FastGelu", ["e"], ["k"], name="gelu", domain="com.microsoft"),
        node("Add", ["x", "k"], ["z"], name="sum"),
        node("MatMul", ["z", "w"], ["y"], name="product"),
    ]
    stored = [number("c", 2.0), whole("shape", 300, 300), weight("w", 300, 3)]
    proto = model(nodes, [feed("x", (300, 300))], ["y"], stored, more=[helper.make_opsetid("com.microsoft", 1)])
    with pytest.raises(ModelError, match="'k' cannot be computed of the stored tensors: "):
        read_weights(saved(proto, tmp_path))


def test_values_that_are_computed_of_few_take_no_more_than_these(tmp_path: Path) -> None:
    nodes = [
        node("Resize", ["one", "", "", "sizes"], ["wide"], name="resize"),
        node("ReduceSum", ["wide"], ["k"], name="sum", keepdims=0),
        node("MatMul", ["x", "w"], ["p"], name="product"),
        node("Add", ["p", "k"], ["y"], name="add"),
    ]
    stored = [weight("one", 1, 1, 1, 1), whole("sizes", 1, 1, 10**6, 10**7), weight("w", 4, 4)]
    with pytest.raises(ModelError, match=r"'k' cannot be computed .* takes 10,000,000,000,000 elements, many more"):
        read_weights(saved(model(nodes, [feed("x", (2, 4))], ["y"], stored), tmp_path))


def test_one_value_that_is_repeated_is_no_weight_of_64_gib(tmp_path: Path) -> None:
    nodes = [node("ConstantOfShape", ["shape"], ["w"], name="fill", value=helper.make_tensor("v", 1, [1], [0.5]))]
    nodes += [node("MatMul", ["x", "w"], ["y"], name="product")]
    proto = model(nodes, [feed("x", (4, 131_072))], ["y"], [whole("shape", 131_072, 131_072)])
    with pytest.raises(ModelError, match=r"have 17,179,869,184 elements, many more than the 1 that are stored"):
        read_weights(saved(proto, tmp_path))


class _Counted(set[str]):
    """Names, and how often they were looked up."""

    lookups = 0

    def __contains__(self, item: object) -> bool:
        self.lookups += 1
        return super().__contains__(item)


def test_names_of_a_long_body_are_found_at_once() -> None:
    names = _Counted({"t3", "x"})
    sheet = BodyBuilder(taken=names)
    found = [sheet.step("add", ["x", 1.0]) for _ in range(1000)]
    assert found[:4] == ["t1", "t2", "t4", "t5"]
    assert len({*found}) == 1000
    assert names.lookups < 2100


@pytest.mark.full
def test_a_chain_of_sums_is_imported_in_time_in_proportion(tmp_path: Path) -> None:
    """20,000 took more memory and time than there were: each of their steps copied all of them before it."""
    times_s = []
    for length in (1000, 8000):
        nodes = [node("Add", [f"x{i}", f"x{i}"], [f"x{i + 1}"], name=f"add{i}") for i in range(length)]
        begin_s = time.process_time()
        assert len(load(model(nodes, [feed("x0", (4, 8))], [f"x{length}"], [])).operators) == 1
        times_s.append(time.process_time() - begin_s)
    assert times_s[1] < 16 * times_s[0]


# -- programs


def test_a_kind_that_lacks_its_dims_has_initial_values() -> None:
    first = tiny_plan().graph.operators[0]
    weight = next(access for access in first.reads if access.role is Role.PARAMETER)
    expected = initial_deviation(first, weight)
    assert initial_deviation(replace(first, kind="recurrent"), weight) == expected > 0


@pytest.mark.parametrize("target", ["torch", "mesh_tensorflow"])
def test_a_command_that_is_proposed_can_be_pasted(target: str, tmp_path: Path) -> None:
    write_plan(tiny_plan(), tmp_path / "plan.json")
    program = tmp_path / "my train.py"
    finished = CliRunner().invoke(cli, ["emit", str(tmp_path / "plan.json"), "--target", target, "-o", str(program)])
    assert finished.exit_code == 0, finished.output
    (proposed,) = re.findall(r"try: (.*)", finished.output)
    assert str(program) in shlex.split(proposed)
