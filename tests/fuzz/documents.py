"""Readers of plans, graphs, machines and other texts; and all that is made of a plan that was accepted."""

import ast
import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from pase import Graph, Plan, emit, load, search
from pase.analysis.differences import compare_placements
from pase.analysis.evaluation import evaluate, strategy_of
from pase.analysis.explanation import ExplainOptions, explain
from pase.analysis.simulation.simulation import simulate
from pase.cli.main import cli
from pase.common.documents import DocumentSource
from pase.easgd.cluster import VARIABLE, cluster_of
from pase.errors import EmitError, ExportError, PaseError, PlanError
from pase.graph import graph_document, graph_from_document
from pase.machine import load_machine, machine_document, parse_machine, preset_names
from pase.machine.files import machine_text
from pase.planning.constraints import load_constraints
from pase.planning.plan_file import graph_hash, plan_document, plan_from_document, read_plan
from pase.targets.training.script import MetricsFile
from pase.views.exports import FORMATS, ExportOptions, export
from pase.views.reports.document import device_numbers, render, report_document
from tests.fuzz.harness import MOST_CHARACTERS, Reader, Target
from tests.fuzz.mutations import NUMBERS, WORDS, change_document, change_text, near, word
from tests.networks import slow_machine, small_graph, tiny_graph

_NETWORKS = ("lenet5", "rnnlm", "mlp")


@cache
def _plans() -> tuple[str, ...]:
    """Return plans as JSON: of built-in networks made small, and of one that tells how it is computed."""
    graphs = [tiny_graph(), *map(small_graph, _NETWORKS), _told_graph()]
    found = [search(graph, 4, machine=slow_machine()) for graph in graphs]
    found.append(search(tiny_graph(), 8, machine="v100_nvlink" if "v100_nvlink" in preset_names() else "1080ti"))
    return tuple(json.dumps(plan_document(plan)) for plan in found)


def _told_graph() -> Graph:
    """Return the graph of an imported network, whose operators say how they are computed."""
    from tests.importers.onnx_models import convolutional

    return load(convolutional(17))


# -- plans as they are read


def _plan_files() -> Reader:
    texts = _plans()

    def read(rng: Random, folder: Path) -> None:
        document = json.loads(rng.choice(texts))
        document = change_document(document, rng, rng.choice((0, 1, 1, 1, 2, 3)))
        if isinstance(document, dict) and rng.random() < 0.6:
            with suppress(PaseError, KeyError, TypeError):
                document["model"]["hash"] = _hash(document["graph"])
        data = json.dumps(document).encode()
        if rng.random() < 0.1:
            data = change_text(data.decode(), rng)
        path = folder / "plan.json"
        path.write_bytes(data)
        plan = read_plan(path)
        assert plan_from_document(plan_document(plan), DocumentSource(PlanError, "again")) == plan

    return read


def _hash(graph: Any) -> str:
    return graph_hash(graph_from_document(graph, DocumentSource(PlanError, "graph")))


def _graphs() -> Reader:
    """Graphs, of which operators alone are changed; what is accepted is the same graph when it is written and read."""
    texts = [json.dumps(json.loads(text)["graph"]) for text in _plans()]

    def read(rng: Random, folder: Path) -> None:
        document = change_document(json.loads(rng.choice(texts)), rng, rng.choice((1, 1, 2, 4)))
        graph = graph_from_document(document, DocumentSource(PlanError, "graph"))
        assert graph_from_document(graph_document(graph), DocumentSource(PlanError, "again")) == graph

    return read


# -- what is made of plans whose graph was changed


def _products(*, through_commands: bool) -> Callable[[], Reader]:
    def prepare() -> Reader:
        texts = _plans()

        def read(rng: Random, folder: Path) -> None:
            plan = _changed_plan(json.loads(rng.choice(texts)), rng)
            if through_commands:
                _commands(plan, rng, folder)
            else:
                _functions(plan, rng)

        return read

    return prepare


def _changed_plan(document: dict[str, Any], rng: Random) -> Plan:
    """Return the plan of a graph that was changed, with hash and costs made anew, as a file's author could."""
    graph = document["graph"]
    kind = rng.random()
    for _ in range(rng.choice((1, 1, 2, 3))):
        operators = graph.get("operators")
        if not isinstance(operators, list) or not operators:
            break  # what was changed before
        operator = rng.choice(operators)
        if not isinstance(operator, dict):
            break
        if kind < 0.45:
            attributes = operator.setdefault("attributes", {})
            names = [*attributes, *_ATTRIBUTES]
            name = rng.choice(names)
            attributes[name] = _scalar(attributes.get(name), rng)
        elif kind < 0.6:
            operator["kind"] = rng.choice((*_KINDS, word(rng)))
        elif kind < 0.75:
            access = rng.choice([*operator["reads"], *operator["writes"]] or [{"shape": [], "axes": []}])
            others = near(access["shape"], rng), near(access["axes"], rng)
            key = rng.choice(("tensor", "role", "shared", "axes", "shape", "partial_over"))
            access[key] = rng.choice((word(rng), "parameter", "activation", "index", [], [None], *others))
        elif kind < 0.85:
            graph["name"] = word(rng)
            graph["arguments"] = {word(rng): _scalar(None, rng)}
        else:
            change_document(operator if rng.random() < 0.7 else graph, rng, 1)
    found = graph_from_document(graph, DocumentSource(PlanError, "graph"))
    splits = [layer["splits"] for layer in document["layers"]]
    plan = search(found, document["num_devices"], machine=slow_machine())
    if len(splits) == len(plan.layers) and rng.random() < 0.3:
        machine = replace(plan.machine, name=word(rng), description=word(rng))
        plan = replace(plan, machine=machine)
    # As it comes from a file, with everything checked.
    return plan_from_document(
        json.loads(json.dumps(plan_document(plan))), DocumentSource(PlanError, "plan file p.json")
    )


_KINDS = (
    "dense", "conv2d", "conv1d", "conv3d", "max_pool2d", "mean_pool2d", "global_pool", "softmax_loss", "embedding",
    "lstm", "attention", "layer_norm", "batch_norm", "concat", "dropout", "elementwise", "add", "opaque", "softmax",
    "view", "transposed_conv2d",
)  # fmt: skip

_ATTRIBUTES = (
    "activation", "bias", "reduction", "forward", "rate", "stride", "padding", "groups", "function", "epsilon",
    "causal", "layers", "momentum", "counts_padding", "scale", "axis", "function_1", "operands",
)  # fmt: skip


def _scalar(old: Any, rng: Random) -> Any:
    if isinstance(old, str) and old.startswith("{") and rng.random() < 0.9:
        with suppress(ValueError):
            # A recipe, which is JSON in a text.
            return json.dumps(change_document(json.loads(old), rng, rng.choice((1, 1, 2))))
    if old is not None and rng.random() < 0.5:
        return near(old, rng)
    return rng.choice((*NUMBERS[:25], *WORDS, True, False, word(rng)))


def _functions(plan: Plan, rng: Random) -> None:
    """Make everything of a plan; each may be refused on its own."""
    with suppress(EmitError):
        ast.parse(_checked(lambda: emit(plan)))
    for name in FORMATS:
        with suppress(ExportError):
            _checked(lambda name=name: export(plan, name, ExportOptions(fold=rng.random() < 0.5)).text)  # type: ignore[misc]
    for make in rng.sample(_MAKERS, 2):
        with suppress(PaseError):
            _checked(lambda make=make: make(plan))  # type: ignore[misc]


def _checked(make: Callable[[], Any]) -> Any:
    """Return what is made; AssertionError for a refusal that is not one clean line."""
    try:
        return make()
    except PaseError as error:
        text = str(error)
        assert 0 < len(text) <= MOST_CHARACTERS, f"{len(text)} characters: {text[:200]!r}"
        assert text.isprintable(), repr(text[:200])
        raise


_MAKERS: tuple[Callable[[Plan], Any], ...] = (
    simulate,
    compare_placements,
    lambda plan: explain(plan, [plan.layers[0].name], options=ExplainOptions(max_solutions=5)),
    lambda plan: render(report_document({"p": plan}, explains=False)),
    lambda plan: repr(plan) + (plan._repr_html_() if hasattr(plan, "_repr_html_") else ""),
)


def _commands(plan: Plan, rng: Random, folder: Path) -> None:
    """Run one command on the plan's file."""
    path = folder / "plan.json"
    path.write_text(json.dumps(plan_document(plan)), encoding="utf-8")
    command = rng.choice(
        (
            ["emit", str(path)],
            ["emit", str(path), "--target", "mesh_tensorflow"],
            *(["export", str(path), "--to", name] for name in FORMATS),
            ["simulate", str(path)],
            ["simulate", str(path), "--json"],
            ["explain", str(path), "--time-limit", "0.5"],
            ["explain", str(path), "--json", "--time-limit", "0.5"],
            ["report", str(path), "-o", str(folder / "report.html"), "--time-limit", "0.5"],
        )
    )
    cli.main(args=command, prog_name="pase", standalone_mode=False)


# -- machines


def _machines() -> Reader:
    texts = [machine_text(load_machine(name)) for name in preset_names()]

    def read(rng: Random, folder: Path) -> None:
        text = rng.choice(texts)
        kind = rng.random()
        lines = text.split("\n")
        if kind < 0.75:
            for _ in range(rng.choice((1, 1, 2, 4))):
                at = rng.randrange(len(lines))
                key, equals, _value = lines[at].partition("=")
                choice = rng.random()
                if equals and choice < 0.6:
                    lines[at] = f"{key}= {_toml(rng)}"
                elif choice < 0.7:
                    lines.insert(rng.randrange(len(lines) + 1), lines[at])
                elif choice < 0.85:
                    del lines[at]
                    lines = lines or [""]
                else:
                    lines.insert(
                        at, f"{rng.choice(('a', 'name', 'x.y', '[levels]', '[[levels]]', word(rng)))} = {_toml(rng)}"
                    )
            data = "\n".join(lines).encode("utf-8", "surrogatepass")
        else:
            data = change_text(text, rng)
        path = folder / "machine.toml"
        path.write_bytes(data)
        machine = load_machine(str(path))
        again = parse_machine(machine_text(machine), source="again")
        assert machine_document(again) == machine_document(machine)

    return read


def _toml(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        number = rng.choice(NUMBERS)
        return str(number) if abs(number) < 1e300 else rng.choice(("inf", "nan", "1e400", "9" * 5000))
    if kind < 0.7:
        return json.dumps(word(rng))
    return rng.choice(_TOML)


_TOML = (
    "true", "[]", "{}", "[1, 2", "[[1]]", "{a = 1}", "1979-05-27", "07:32:00", "0x_1", "'''", '"""', "[" * 3000, "",
    "{a = " * 500,
)  # fmt: skip


# -- smaller texts


def _texts() -> Reader:
    cluster = json.dumps({"schema_version": 2, "tasks": ["127.0.0.1:4000"], "task": 0, "step_timeout_s": None})
    metrics = '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25, "worker": 0}\n'

    def read(rng: Random, folder: Path) -> None:
        path = folder / "text"
        path.unlink(missing_ok=True)
        kind = rng.randrange(3)
        if kind == 0:
            changed = json.dumps(change_document(json.loads(cluster), rng, rng.choice((1, 2))))
            if rng.random() < 0.2:
                changed = change_text(changed, rng).decode("utf-8", "replace")
            cluster_of({VARIABLE: changed})
        elif kind == 1:
            lines = metrics.split("\n")
            lines.insert(0, json.dumps(change_document(json.loads(lines[0]), rng, 1)))
            path.write_bytes("\n".join(lines).encode() if rng.random() < 0.7 else change_text(metrics, rng))
            with MetricsFile(path, num_steps=rng.choice((1, {None: 1, 0: 2})), resume=True):
                pass
        else:
            device_numbers(
                rng.choice(
                    (f"{rng.choice(NUMBERS)}..{rng.choice(NUMBERS)}", word(rng), "1..", f"{rng.choice(NUMBERS)}")
                )
            )

    return read


# -- constraints, strategies, and what the page of `pase serve` sends

_CONSTRAINTS = """
[pin]
fc1 = "n=2"
fc2 = "b=2"

[forbid]
softmax = "n"

[devices]
fc1 = [0, 2, 1, 3]
"""


def _constraints() -> Reader:
    graph = tiny_graph()

    def read(rng: Random, folder: Path) -> None:
        lines = _CONSTRAINTS.split("\n")
        for _ in range(rng.choice((0, 1, 1, 2))):
            at = rng.randrange(len(lines))
            key, equals, _ = lines[at].partition("=")
            kind = rng.random()
            if equals and kind < 0.6:
                lines[at] = f"{key}= {_toml(rng)}"
            elif kind < 0.8:
                lines.insert(at, f"{rng.choice(('pin', 'a', '[pin]', '[tie]', '[[only]]', word(rng)))} = {_toml(rng)}")
            else:
                del lines[at]
                lines = lines or [""]
        text = "\n".join(lines)
        path = folder / "constraints.toml"
        path.write_bytes(change_text(text, rng) if rng.random() < 0.1 else text.encode("utf-8", "surrogatepass"))
        if rng.random() < 0.5:
            search(graph, 4, machine=slow_machine(), constraints=load_constraints(path))
        else:
            evaluate(graph, strategy_of(path), devices=4, machine=slow_machine())

    return read


def _requests() -> Reader:
    from pase.views.reports.served import Planner, application

    port, token = 8000, "token"
    planner = Planner(search(tiny_graph(), 4, machine=slow_machine()))
    app, plain = application(planner, port=port, token=token), planner.start()["state"]["at"]

    def read(rng: Random, _folder: Path) -> None:
        body = json.dumps(change_document(dict(plain), rng, rng.choice((0, 1, 1, 2)))).encode()
        if rng.random() < 0.3:
            body = change_text(body.decode(), rng)
        query = "token=token" if rng.random() < 0.9 else rng.choice(("token=x", "", "token=%ff", "token=%00"))
        host = b"127.0.0.1:8000" if rng.random() < 0.95 else word(rng).encode("utf-8", "replace")
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST" if rng.random() < 0.95 else "GET",
            "scheme": "http", "path": rng.choice(("/replan",) * 8 + ("/", "/nothing")), "raw_path": b"/",
            "query_string": query.encode(), "headers": [(b"host", host)], "server": ("127.0.0.1", port),
        }  # fmt: skip
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(app(scope, receive, send))
        assert sent[0]["status"] in (200, 400, 403, 404, 405, 413), sent[0]
        if sent[0]["status"] in (400, 413):
            raise PlanError("refused")

    return read


TARGETS = (
    Target(name="constraints", prepare=_constraints, share=2),
    Target(name="requests", prepare=_requests, share=1),
    Target(name="plan", prepare=_plan_files, share=3),
    Target(name="graph", prepare=_graphs, share=3),
    Target(name="products", prepare=_products(through_commands=False), share=1.5),
    Target(name="commands", prepare=_products(through_commands=True), share=0.5),
    Target(name="machine", prepare=_machines, share=3),
    Target(name="texts", prepare=_texts, share=2),
)

__all__ = ["TARGETS"]
