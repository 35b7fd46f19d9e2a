import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import pase
from pase.analysis.explanation import explain
from pase.common.documents import DocumentSource
from pase.errors import EmitError, GraphError, PlanError
from pase.graph import Builder, Graph, Operator
from pase.graph.operators import concat, conv2d, dense, elementwise, pool2d, softmax_loss
from pase.models import build
from pase.planning.plan import Plan
from pase.planning.plan_file import plan_document, plan_from_document
from pase.sharding.layouts import tensor_dims
from pase.sharding.traffic import edge_bytes
from pase.targets.mesh_tensorflow import MESH_TENSORFLOW
from pase.targets.programs import emit
from tests.emitter.golden import GOLDEN, golden_plan
from tests.runtime.networks import EXCHANGING, dropping, lines, mixed, small, sorting, tied, volumes, weightless
from tests.runtime.options import options
from tests.runtime.plans import make_plan, random_plan

ROOT = Path(__file__).resolve().parents[2]


def test_the_golden_program() -> None:
    assert emit(golden_plan()) == GOLDEN.read_text(encoding="utf-8"), "python -m tests.emitter.golden makes it again"


def plans() -> list[Plan]:
    graphs = [mixed(), tied(), small("alexnet"), small("bert_large"), dropping(), lines(), volumes()]
    graphs += [make() for make in EXCHANGING.values()]
    found = [random_plan(graph, p, 5) for graph in graphs for p in (2, 12)]
    # Many devices: lists that must be wrapped.
    return [*found, random_plan(build("alexnet"), 64, 1), random_plan(build("mlp", arguments={"layers": 1}), 32, 2)]


def check_style(sources: Iterable[str], folder: Path) -> None:
    """Check that programs are formatted and lint-clean; they are written to a folder."""
    for i, source in enumerate(sources):
        assert max(len(line) for line in source.splitlines()) <= 120
        (folder / f"program_{i}.py").write_text(source, encoding="utf-8")
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(folder)]
    for command in (["check"], ["format", "--check", "--diff"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *config], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_programs_are_formatted_and_lint_clean(tmp_path: Path) -> None:
    check_style(map(emit, plans()), tmp_path)


@pytest.mark.parametrize(
    "graph", [weightless(), small("mlp"), mixed(), *(make() for make in EXCHANGING.values())], ids=str
)
def test_comments_tell_what_edges_move(graph: Graph) -> None:
    plan = random_plan(graph, 4, 17)
    told = sum(int(number) for number in re.findall(r"(\d+) B (?:forward|backward)", emit(plan)))
    assert told == sum(sum(edge_bytes(plan, edge)) for edge in graph.edges) > 0


def test_data_get_no_gradient() -> None:
    graph = weightless()
    assert [graph.has_gradient(graph[edge.consumer], edge.input) for edge in graph.edges] == [False, False, False, True]


def test_a_layer_is_a_block_of_few_lines() -> None:
    source = emit(random_plan(build("mlp", arguments={"layers": 3}), 8, 3))
    blocks = source.split("# -- ")[1:]
    assert len(blocks) == 4
    assert all(len(block.split("if __name__", maxsplit=1)[0].strip().splitlines()) <= 7 for block in blocks)
    assert len(source.splitlines()) < 60


def test_writing_a_program_loads_no_framework() -> None:
    code = (
        "import sys; from tests.emitter.golden import golden_plan; "
        "from pase.targets.programs import emit; emit(golden_plan()); "
        "import pase.targets.execute; "
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'tensorflow', 'mesh_tensorflow', 'torch'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_everything_that_may_be_imported_exists() -> None:
    import pase.targets.mesh_tensorflow.runtime.layers

    assert sorted(MESH_TENSORFLOW.layers) == sorted(pase.targets.mesh_tensorflow.runtime.layers.__all__)


def hostile_network(name: str) -> Graph:
    net = Builder(name)
    x = net.input((4, 6))
    for i, layer in enumerate([name, f"{name} ", "fc"]):
        x = net.add(dense, layer, x, out=((f"{name}{i}", 6),), reduce=("c",) if i == 0 else (f"{name}{i - 1}",))
    net.add(softmax_loss, "softmax", x, dims=("b", f"{name}2"))
    return net.build({"text": name})


@pytest.mark.parametrize("name", ['x"); import os; os.system("touch pwned") #', "program", "é ✓ \u2028 \x00", ""])
def test_programs_of_hostile_names_train(name: str) -> None:
    from pase.targets.execute import max_relative_difference
    from pase.targets.mesh_tensorflow.runtime.reference import reference_losses
    from tests.runtime.training import parallel_losses

    graph = hostile_network(name)
    losses = parallel_losses(make_plan(graph, 2, {"fc": {"b": 2}}), steps=2)
    reference = reference_losses(graph, options(2))
    assert max_relative_difference(losses, reference) < 1e-12


def test_layers_that_do_not_lead_to_the_loss_are_left_out() -> None:
    net = Builder("net")
    x = net.add(dense, "fc1", net.input((4, 6)), out=(("n", 6),))
    net.add(dense, "unused", x, out=(("n", 6),))
    net.add(softmax_loss, "loss", net.add(dense, "fc2", x, out=(("n", 6),)))
    source = emit(make_plan(net.build(), 2, {}))
    assert '"fc2"' in source
    assert "unused" not in source


def lossy(*losses: str) -> Builder:
    """A network of one dense layer and of some losses of it."""
    net = Builder("net")
    x = net.add(dense, "fc", net.input((4, 6)), out=(("n", 6),))
    for name in losses:
        net.add(softmax_loss, name, x)
    return net


def of_windows() -> Builder:
    net = Builder("net")
    x = net.add(conv2d, "conv", net.input((6, 2, 4, 4)), out=2, kernel=1)
    x = net.add(pool2d, "pool", x, kernel=2, stride=2)
    net.add(softmax_loss, "loss", net.reshape(x, (6, 8)))
    return net


def with_one(make: Callable[..., Operator], *shapes: tuple[int, ...], **options: Any) -> Builder:
    net = Builder("net")
    net.add(softmax_loss, "loss", net.add(make, "f", *map(net.input, shapes), **options))
    return net


def sharing() -> Builder:
    net = Builder("net")
    x = net.add(dense, "fc1", net.input((4, 6)), out=(("n", 4),), shared="w")
    net.add(softmax_loss, "loss", net.add(dense, "fc2", x, out=(("n", 6),), shared="w"))
    return net


@pytest.mark.parametrize(
    ("net", "splits", "message"),
    [
        (
            with_one(sorting, (2, 4)), {},
            r"layer 'f' is a 'sorting' that does not say how it is computed; give the operator a body, or search",
        ),
        (lossy(), {}, r"network 'net' has 0 losses; a training program needs exactly one"),
        (lossy("one", "two"), {}, r"network 'net' has 2 losses; a training program needs exactly one"),
        (
            of_windows(), {"conv": {"b": 4}},
            r"layer 'conv' splits b = 6 in 4 parts; a program for mesh_tensorflow needs splits that divide their",
        ),
        (of_windows(), {"pool": {"r": 2}}, r"layer 'pool' splits r = 2 in 2 parts; .*\(of b, c, h, w\)"),
        (
            with_one(elementwise, (4, 6), (4, 6), dims=("b", "n"), function="relu"), {},
            r"layer 'f' \(elementwise\) cannot be written .*: it applies 'relu' to 2 tensors",
        ),
        (sharing(), {}, r"layers 'fc1' and 'fc2' share weight 'w' with shapes \(6, 4\) and \(4, 6\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(net: Builder, splits: dict[str, dict[str, int]], message: str) -> None:
    with pytest.raises((EmitError, GraphError), match=message):
        emit(make_plan(net.build(), 4, splits))


def test_devices_that_are_no_permutation_are_refused() -> None:
    plan = golden_plan()
    layers = tuple(replace(layer, devices=(0, 1, 2, 2)) if layer.name == "fc2" else layer for layer in plan.layers)
    with pytest.raises(EmitError, match=r"layer 'fc2': devices \[0, 1, 2, 2\] must name each of 0 to 3 once"):
        emit(replace(plan, layers=layers))


def test_a_piece_of_a_dim_has_no_layout() -> None:
    operator = concat("join", (2, 3), (2, 4), dims=("b", "c"))
    with pytest.raises(
        EmitError, match=r"layer 'join' \(concat\): tensor 'x1' is indexed by SliceOf\(.* cannot lay out yet"
    ):
        tensor_dims(operator, operator.reads[1])


def test_a_join_is_written_once() -> None:
    net = Builder("net")
    x = net.add(conv2d, "stem", net.input((4, 2, 3, 3)), out=2, kernel=1)
    x = net.add(concat, "join", x, x)
    net.add(softmax_loss, "loss", net.reshape(x, (4, 36)))
    source = emit(make_plan(net.build(), 2, {"stem": {"b": 2}, "join": {"c": 2}}))
    assert "join = concat([stem, stem], mesh, [b, c, h, w], along=c)  # 288 B forward + 288 B backward" in source


def test_a_plan_of_before_built_in_kinds_had_bodies_is_explained_but_not_written() -> None:
    document = json.loads(json.dumps(plan_document(pase.search(small("mlp"), 4))))
    for operator in document["graph"]["operators"]:
        assert operator.pop("body")
    text = json.dumps(document["graph"], sort_keys=True, separators=(",", ":"))
    document["model"]["hash"] = sha256(text.encode()).hexdigest()
    plan = plan_from_document(document, DocumentSource(PlanError, "plan.json"))
    assert explain(plan)["fc1"].runner_up is not None
    assert "fc1" in pase.export(plan, "csv").text
    with pytest.raises(EmitError, match=r"layer 'fc1' is a 'dense' that .*, or search the model again"):
        emit(plan)
