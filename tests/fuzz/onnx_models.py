"""The reader of ONNX files: models that stand for common ones with attributes, shapes and operators changed."""

import ast
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from pase import search
from pase.errors import PaseError
from pase.graph import graph_document, verify
from pase.targets.programs import emit
from tests.fuzz.harness import Reader, Target
from tests.fuzz.mutations import change_bytes, word

_SMALL = (0, 1, 1, 2, 2, 3, -1, -1, -2, 4)
_EXTENTS = (0, 1, 1, 2, 2, 3, 4, 5, 7, 16, -1, -2, 1000, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
_TEXTS = ("", "SAME_UPPER", "SAME_LOWER", "VALID", "linear", "bk,kn", "->", "...ij,...jk->...ik", "x" * 5000)
_ATTRIBUTES = ["axis", "axes", "perm", "kernel_shape", "pads", "strides", "group", "num_outputs", "to", "value"]
_FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-5, 1e38, float("inf"), float("nan"))


def _onnx_files() -> Reader:
    import onnx
    from onnx import AttributeProto, helper

    from pase.importers.frameworks import import_model
    from pase.importers.onnx import file
    from pase.importers.weights import read_weights
    from tests.importers import onnx_models as small

    bases = [small.convolutional(17).SerializeToString(), small.convolutional(9).SerializeToString()]
    bases += [small.transformer(2).SerializeToString(), _various(helper).SerializeToString()]
    file.native = small.kept_native  # type: ignore[attr-defined]
    schemas = [schema for schema in onnx.defs.get_all_schemas() if schema.domain in ("", "ai.onnx.ml")]

    def read(rng: Random, folder: Path) -> None:
        if rng.random() < 0.35:
            proto = _single(helper, AttributeProto, rng.choice(schemas), rng)
        else:
            proto = onnx.ModelProto.FromString(rng.choice(bases))
            for _ in range(rng.choice((0, 1, 1, 2, 3))):
                _change(helper, AttributeProto, proto, schemas, rng)
        data = proto.SerializeToString()
        if rng.random() < 0.1:
            data = change_bytes(data, rng)
        path = folder / "model.onnx"
        path.write_bytes(data)
        batch = rng.choice((None, None, None, 1, 4, 2**31 - 1))
        model = import_model(str(path), batch=batch)
        graph_document(verify(model.graph))
        if rng.random() < 0.3:
            with suppress(PaseError):
                ast.parse(emit(search(model.graph, 2)))
        if rng.random() < 0.3:
            for name, array in read_weights(str(path), batch=batch).items():
                assert array.shape is not None, name

    return read


def _various(helper: Any) -> Any:
    """Return a model of pieces, lookups, recurrences, reductions and windows."""
    from tests.importers.onnx_models import INT64, feed, model, node, number, weight, whole

    nodes = [
        node("Gather", ["table", "ids"], ["e"], name="embedding"),
        node("LSTM", ["e_t", "lw", "lr", "lb"], ["h", "hn", "cn"], name="lstm", hidden_size=4),
        node("Squeeze", ["h", "one"], ["hs"], name="squeeze"),
        node("Transpose", ["hs"], ["ht"], name="back", perm=[1, 0, 2]),
        node("Split", ["ht"], ["s1", "s2"], name="split", axis=2, num_outputs=2),
        node("Concat", ["s1", "s2"], ["c"], name="concat", axis=-1),
        node("LayerNormalization", ["c", "scale", "shift"], ["n"], name="norm", axis=-1),
        node("Slice", ["n", "starts", "ends", "axes"], ["sl"], name="slice"),
        node("ReduceMean", ["sl", "one"], ["m"], name="mean", keepdims=0),
        node("Pad", ["m", "pads"], ["p"], name="pad"),
        node("Pow", ["p", "two"], ["q"], name="pow"),
        node("Einsum", ["q", "ew"], ["z"], name="einsum", equation="bk,kn->bn"),
        node("Shape", ["z"], ["zs"], name="shape"),
        node("Reshape", ["z", "zs"], ["y"], name="reshape"),
    ]
    nodes.insert(1, node("Transpose", ["e"], ["e_t"], name="turn", perm=[1, 0, 2]))
    shapes = {"table": (9, 3), "lw": (1, 16, 3), "lr": (1, 16, 4), "lb": (1, 32), "scale": (4,), "shift": (4,)}
    wholes = {"one": [1], "starts": [0], "ends": [3], "axes": [1], "pads": [0, 1, 0, 1]}
    weights = [*(weight(n, *shape) for n, shape in shapes.items()), *(whole(n, *v) for n, v in wholes.items())]
    weights += [weight("ew", 6, 5), number("two", 2.0)]
    return model(nodes, [feed("ids", (2, 5), INT64)], ["y"], weights, opset=18)


def _whole(rng: Random) -> int:
    return rng.choice(_SMALL if rng.random() < 0.8 else _EXTENTS)


def _name(rng: Random) -> str:
    """Return a text that a protocol buffer holds."""
    return word(rng).replace("\ud800", "")


def _text(rng: Random) -> bytes:
    return rng.choice((*_TEXTS, word(rng))).encode("utf-8", "surrogatepass")


def _attribute(helper: Any, kinds: Any, name: str, rng: Random, kind: int | None = None) -> Any:
    """Return an attribute of a type, or of any."""
    values: dict[int, Callable[[], Any]] = {
        kinds.FLOAT: lambda: rng.choice(_FLOATS),
        kinds.INT: lambda: _whole(rng),
        kinds.STRING: lambda: _text(rng),
        kinds.FLOATS: lambda: [rng.choice(_FLOATS) for _ in range(rng.randrange(1, 4))],
        kinds.INTS: lambda: [_whole(rng) for _ in range(rng.choice((1, 2, 2, 3, 4, 4, 6)))],
        kinds.STRINGS: lambda: [_text(rng) for _ in range(rng.randrange(1, 3))],
        kinds.TENSOR: lambda: _tensor(helper, "t", rng),
    }
    kind = kind if kind in values and rng.random() < 0.8 else rng.choice([*values])
    return helper.make_attribute(name, values[kind](), attr_type=kind)


def _tensor(helper: Any, name: str, rng: Random) -> Any:
    """Return a stored tensor that may not hold what it says."""
    from onnx import TensorProto

    made = TensorProto()
    made.name = name
    made.data_type = rng.choice((1, 1, 1, 7, 7, 6, 9, 10, 11, 8, 0, 14, 16, 17, 21, 22, 99))
    made.dims.extend(rng.choice(_EXTENTS[:14]) for _ in range(rng.choice((0, 1, 1, 2, 3))))
    kind = rng.random()
    if kind < 0.4:
        made.raw_data = bytes(rng.randrange(256) for _ in range(rng.choice((0, 1, 4, 8, 16, 24))))
    elif kind < 0.6:
        made.int64_data.extend(rng.choice(_EXTENTS) for _ in range(rng.randrange(5)))
    elif kind < 0.8:
        made.float_data.extend(rng.choice(_FLOATS) for _ in range(rng.randrange(5)))
    elif kind < 0.9:
        made.string_data.extend(word(rng).encode("utf-8", "surrogatepass") for _ in range(2))
    else:
        made.data_location = 1
        for key, value in (
            ("location", rng.choice(("x.bin", "../../etc/passwd", "/etc/passwd", "", "model.onnx", "a\x00b"))),
            ("offset", rng.choice(("0", "-1", "x", "9" * 30))),
            ("length", rng.choice(("4", "", "-4", "9" * 5000))),
        ):
            entry = made.external_data.add()
            entry.key, entry.value = key, value
    return made


def _single(helper: Any, kinds: Any, schema: Any, rng: Random) -> Any:
    """Return a model of one operator of any kind, and a product after it."""
    from tests.importers.onnx_models import feed, model, weight

    count = rng.choice((schema.min_input, max(schema.min_input, min(schema.max_input, 6)), rng.randrange(5)))
    inputs, initialisers, names = [], [], list[str]()
    rank = rng.choice((0, 1, 2, 3, 4, 4, 4, 5))
    extents = [4] * 5 if rng.random() < 0.5 else [rng.choice((1, 2, 3, 4, 6, 8)) for _ in range(5)]
    for i in range(min(count, 8)):
        names.append("" if rng.random() < 0.1 else f"x{i}")
        if not names[-1]:
            continue
        if rng.random() < 0.6:
            shape = extents[: rank if rng.random() < 0.85 else rng.randrange(5)]
            inputs.append(feed(names[-1], shape, rng.choice((1, 1, 1, 1, 7, 9, 6))))
        elif rng.random() < 0.5:
            initialisers.append(_tensor(helper, names[-1], rng))
        else:
            initialisers.append(weight(names[-1], *extents[: rank if rng.random() < 0.6 else 1]))
    outputs = [f"y{i}" for i in range(rng.choice((1, 1, 1, 2, 3, max(1, min(5, schema.max_output)))))]
    name = rng.choice(("op", "op", _name(rng)))
    node = helper.make_node(schema.name, names, outputs, name=name, domain=schema.domain)
    for name, described in schema.attributes.items():
        if described.required or rng.random() < 0.4:
            kind = int(getattr(described.type, "value", described.type))
            node.attribute.append(_attribute(helper, kinds, name, rng, kind))
    return model(
        [node, helper.make_node("MatMul", [outputs[0], "w"], ["z"], name="product")],
        inputs or [feed("x", [2, 3])],
        ["z" if rng.random() < 0.7 else outputs[0]],
        [*initialisers, weight("w", rng.choice((2, 3, 4)), 5)],
        opset=rng.choice((7, 9, 11, 12, 13, 16, 18, 21, 23, 99)),
        more=[helper.make_opsetid("ai.onnx.ml", rng.choice((1, 3, 5)))],
    )


def _change(helper: Any, kinds: Any, proto: Any, schemas: Sequence[Any], rng: Random) -> None:
    graph, kind = proto.graph, rng.random()
    if not graph.node:
        return
    node = rng.choice(graph.node)
    if kind < 0.35:
        name = rng.choice([*(a.name for a in node.attribute), *_ATTRIBUTES])
        old = next((a for a in node.attribute if a.name == name), None)
        made = _attribute(helper, kinds, name, rng, old.type if old is not None else None)
        (node.attribute.add() if old is None else old).CopyFrom(made)
    elif kind < 0.45:
        node.op_type = rng.choice(schemas).name if rng.random() < 0.9 else _name(rng)
    elif kind < 0.55:
        where = node.input if rng.random() < 0.6 else node.output
        names = [*(o for n in graph.node for o in (*n.output, *n.input)), "", "nothing", _name(rng)]
        if where and rng.random() < 0.7:
            where[rng.randrange(len(where))] = rng.choice(names)
        elif where and rng.random() < 0.5:
            del where[rng.randrange(len(where))]
        else:
            where.append(rng.choice(names))
    elif kind < 0.7 and graph.initializer:
        _change_tensor(helper, rng.choice(graph.initializer), rng)
    elif kind < 0.8:
        _change_info(rng.choice([*graph.input, *graph.output]), rng)
    elif kind < 0.85:
        for entry in proto.opset_import:
            entry.version = rng.choice((0, 1, 6, 7, 8, 10, 11, 13, 17, 18, 19, 22, 25, 1000, -1, 2**62))
    elif kind < 0.9:
        nodes = list(graph.node)
        rng.shuffle(nodes)
        del graph.node[:]
        graph.node.extend(nodes)
    elif kind < 0.95:
        graph.node.append(node)
    else:
        domain = node.domain or rng.choice(("", "own"))
        inner = helper.make_node(rng.choice(("Relu", node.op_type)), ["a"], [rng.choice(("b", "c"))])
        function = helper.make_function(domain, node.op_type, ["a"], ["b"], [inner], [*proto.opset_import])
        proto.functions.append(function)
        if rng.random() < 0.5:
            node.domain = domain
            proto.opset_import.append(helper.make_opsetid("own", 1))


def _change_tensor(helper: Any, tensor: Any, rng: Random) -> None:
    choice = rng.random()
    if choice < 0.5 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(_EXTENTS)
    elif choice < 0.6:
        tensor.dims.append(rng.choice(_EXTENTS))
    elif choice < 0.8:
        tensor.data_type = rng.choice((0, 1, 6, 7, 9, 10, 11, 16, 8, 99))
    else:
        tensor.CopyFrom(_tensor(helper, tensor.name, rng))


def _change_info(info: Any, rng: Random) -> None:
    dims = info.type.tensor_type.shape.dim
    if dims and rng.random() < 0.7:
        dim = rng.choice(dims)
        if rng.random() < 0.7:
            dim.dim_value = rng.choice(_EXTENTS)
        else:
            dim.dim_param = _name(rng)
    elif rng.random() < 0.5:
        info.type.tensor_type.elem_type = rng.choice((0, 1, 7, 8, 9, 16, 99))
    else:
        info.type.sequence_type.elem_type.tensor_type.elem_type = 1


TARGETS = (Target(name="onnx", prepare=_onnx_files, share=2),)
