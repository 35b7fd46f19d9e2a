"""The how-to pages say what adding a part takes: done here as they say, the part works."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import pase
from pase.analysis.explanation import explain
from pase.costs import COST_MODELS
from pase.graph import Graph
from pase.graph.operators import dense, softmax_loss
from pase.planning.plan_file import read_plan, write_plan
from tests.docs.kinds import file_name
from tests.docs.markdown import blocks

OPERATOR = "docs/how-to/own-operator.md"
COST_MODEL = "docs/how-to/own-cost-model.md"
FRONT_END = "docs/how-to/own-front-end.md"
TARGET = "docs/how-to/own-target.md"
ROOT = Path(__file__).parents[2]


def names_of(page: str, file: str) -> dict[str, object]:
    """What a file of a page defines."""
    (block,) = (block for block in blocks(page) if file_name(block) == file)
    namespace: dict[str, object] = {"__name__": file.removesuffix(".py")}
    exec(compile(block.text, file, "exec", dont_inherit=True), namespace)
    return namespace


def _towers(*, batch: int, width: int) -> Graph:
    bilinear = names_of(OPERATOR, "bilinear.py")["bilinear"]
    net = pase.Builder("two towers")
    left, right = (
        net.add(dense, side, net.input((batch, 2 * width)), out=(("n", width),), activation="relu")
        for side in ("left", "right")
    )
    net.add(softmax_loss, "softmax", net.add(bilinear, "join", left, right, out=16))  # type: ignore[arg-type]
    return net.build()


def test_the_operator_refuses_what_does_not_fit() -> None:
    bilinear = names_of(OPERATOR, "bilinear.py")["bilinear"]
    with pytest.raises(pase.PaseError, match=r"reads shapes \(4, 2\) and \(5, 2\); expected \[b, c\] and \[b, d\]"):
        bilinear("join", (4, 2), (5, 2), out=3)  # type: ignore[operator]


def test_an_operator_without_a_body_cannot_be_emitted() -> None:
    graph = _towers(batch=4, width=8)
    operators = tuple(replace(op, body=None) if op.kind == "bilinear" else op for op in graph.operators)
    plan = pase.search(replace(graph, operators=operators), devices=2)
    with pytest.raises(pase.PaseError, match=r"layer 'join' is a 'bilinear' that does not say how .* a body"):
        pase.emit(plan)


def test_with_the_body_of_the_page_the_program_computes_what_one_device_does() -> None:
    from pase.targets.execute import max_relative_difference
    from pase.targets.mesh_tensorflow.runtime.reference import reference_losses
    from tests.runtime.options import options
    from tests.runtime.plans import random_plan
    from tests.runtime.training import parallel_losses

    shown = next(block.text for block in blocks(OPERATOR) if block.text.startswith("# -- join"))
    emitted = pase.emit(pase.search(_towers(batch=64, width=256), devices=8))
    assert " ".join(shown.split()) in " ".join(emitted.split())
    graph = _towers(batch=16, width=32)
    losses = reference_losses(graph, options(3, rate=0.5))
    assert losses[-1] < losses[0]
    plans = [pase.search(graph, devices=4), *(random_plan(graph, 4, seed) for seed in range(2))]
    assert any(np.prod([plan["join"].splits[dim] for dim in "cd"]) > 1 for plan in plans)
    for plan in plans:
        assert max_relative_difference(parallel_losses(plan, steps=3, rate=0.5), losses) < 1e-12


def test_a_registered_cost_model_serves_every_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = names_of(COST_MODEL, "overlapped.py")["OverlappedCostModel"]
    monkeypatch.setitem(COST_MODELS, "overlapped", model.of)  # type: ignore[attr-defined]
    graph = pase.load("alexnet", batch=128)
    options = pase.SearchOptions(cost_model="overlapped")
    plan = pase.search(graph, devices=8, options=options)
    assert plan.exact
    assert (plan.cost_model, plan.cost_unit) == ("overlapped", "s")
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").total_cost == plan.total_cost
    assert explain(plan)["fc1"].runner_up is not None


def test_the_cost_model_is_the_paper_s_in_seconds_where_nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all communication counted it is Eq. 1 divided by the peak."""
    model = names_of(COST_MODEL, "overlapped.py")["OverlappedCostModel"]
    machine = pase.load_machine("1080ti")
    full = model(flop_per_s=machine.peak_flop_per_s(), bytes_per_s=12.5e9, hidden=0.0)  # type: ignore[operator]
    monkeypatch.setitem(COST_MODELS, "overlapped", lambda *_: full)
    graph = pase.load("transformer", batch=64, arguments={"layers": 1})
    ours = pase.search(graph, devices=32, machine=machine, options=pase.SearchOptions(cost_model="overlapped"))
    paper = pase.search(graph, devices=32, machine=machine)
    assert ours.total_cost * machine.peak_flop_per_s() == pytest.approx(paper.total_cost, rel=1e-9)
    data_parallel = ours.baselines["data_parallel"] * machine.peak_flop_per_s()
    assert data_parallel == pytest.approx(paper.baselines["data_parallel"], rel=1e-9)


def test_one_file_is_all_that_an_operator_takes_to_be_imported_trained_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's: its losses are PyTorch's on the same weights and data, under any strategy."""
    torch = pytest.importorskip("torch")
    from pase.importers.frameworks import import_model
    from tests.importers.test_training import SAME_AS_PYTORCH, arrays, by_pytorch, double, trained
    from tests.runtime.plans import random_plan

    monkeypatch.setattr("pase.importers.OPERATORS", {})
    registered = names_of(OPERATOR, "distances.py")["OPERATORS"]
    monkeypatch.setattr("pase.importers.lower.vertices.OPERATORS", registered)
    (block,) = (block.text for block in blocks(OPERATOR) if block.text.startswith("import pase\nimport torch"))
    class_of = {"torch": torch}
    exec(compile(block[block.index("class ") : block.index("model =")], OPERATOR, "exec", dont_inherit=True), class_of)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    inputs = {"x": torch.randn(8, 64, generator=generator, dtype=torch.float64), "labels": torch.arange(8) % 16}
    source = class_of["Prototypes"]().double(), inputs
    graph = import_model(source).graph
    (layer,) = (operator for operator in graph.operators if operator.kind == "distances")
    assert [access.tensor for access in layer.parameters] == ["w"]
    weights = double(source)
    expected, _ = by_pytorch(*source)
    plans = [pase.search(graph, devices=4), *(random_plan(graph, 4, seed) for seed in range(2))]
    assert any(plan[layer.name].splits["c"] > 1 for plan in plans)
    for plan in plans:
        losses, _ = trained(plan, weights, arrays(inputs))
        np.testing.assert_allclose(losses, expected, rtol=SAME_AS_PYTORCH)


def test_one_line_is_all_that_a_front_end_takes_to_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from pase.importers import frameworks

    page = names_of(FRONT_END, "chains.py")
    chain, front_end = page["Chain"], page["ChainFrontEnd"]
    with pytest.raises(pase.PaseError, match=r"a model of type Chain cannot be imported; give the name of a built-in"):
        pase.load(chain("c", (8, 4)))  # type: ignore[operator]
    monkeypatch.setattr(frameworks, "FRONT_ENDS", (*frameworks.FRONT_ENDS, front_end()))  # type: ignore[operator]
    widths = (12, 20, 8, 4)
    graph = pase.load(chain("c", widths), batch=16)  # type: ignore[operator]
    pairs = list(pairwise(widths))
    assert graph.num_parameters == sum(m * n + n for m, n in pairs)
    assert graph.forward_flop(contractions_only=True) == sum(2 * 16 * m * n for m, n in pairs)
    assert pase.search(graph, devices=4).exact
    for widths, arguments, told in [
        ((8,), {}, r"has widths \(8,\); expected two or more"),
        ((8, 0), {}, r"has widths \(8, 0\); expected two or more, of 1 at least"),
        ((8, 4), {"depth": 2}, "takes no arguments; found depth"),
    ]:
        with pytest.raises(pase.PaseError, match=told):
            pase.load(chain("c", widths), arguments=arguments)  # type: ignore[operator]


def test_programs_for_the_target_of_the_page_compute_what_one_device_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside plain TensorFlow, under strategies that split every dim, the classes of the loss and uneven ones too."""
    jax = pytest.importorskip("jax")
    from pase.targets.mesh_tensorflow.runtime.reference import reference_losses
    from pase.targets.training.data import Batches
    from tests.runtime.options import options
    from tests.runtime.plans import make_plan, random_plan

    for file in ("pretended.py", "pretended_layers.py"):
        (block,) = (block for block in blocks(TARGET) if file_name(block) == file)
        (tmp_path / file).write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    from pretended import PRETENDED  # type: ignore[import-not-found]
    from pretended_layers import Training  # type: ignore[import-not-found]

    net = pase.Builder("digits")
    x = net.add(dense, "fc1", net.input((8, 12)), out=(("n", 16),), activation="relu")
    x = net.add(dense, "fc2", x, out=(("n", 8),), activation="tanh")
    net.add(softmax_loss, "loss", x)
    graph = net.build()
    told = options(3, rate=0.5)
    expected = reference_losses(graph, told)
    plans = [pase.search(graph, devices=4), *(random_plan(graph, 4, seed) for seed in range(2))]
    plans += [make_plan(graph, 4, {"loss": {"n": 4}}), make_plan(graph, 3, {"fc1": {"n": 3}})]
    for plan in plans:
        program = {"__name__": "emitted"}
        exec(compile(pase.emit(plan, target=PRETENDED), "emitted", "exec", dont_inherit=True), program)
        with jax.enable_x64(True):
            training = Training(program["build"], plan.num_devices, told)
            batches = Batches(training.inputs, seed=told.seed or 0)
            losses = [training.step(batches.batch(step), learning_rate=0.5).loss for step in range(3)]
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
    with pytest.raises(pase.PaseError, match=r"layer 'conv1' needs convolve, window, which programs for pretended do"):
        pase.emit(pase.search("alexnet", devices=4), target=PRETENDED)


def test_the_function_of_the_page_trains_under_its_plan(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    (block,) = (block for block in blocks("docs/how-to/parallelize-jax.md") if file_name(block) == "train_jax.py")
    told = (
        "\nassert any(len({str(s.index) for s in w.addressable_shards}) > 1 for w, _ in weights), 'nothing is split'\n"
    )
    (tmp_path / "train_jax.py").write_text(block.text + told)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "train_jax.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    first, second, third = ast.literal_eval(ran.stdout)
    assert first > second > third > 0


TRANSFORMERS = "docs/how-to/transformers.md"


def _shown(program: str, page: str = TRANSFORMERS) -> list[float]:
    """The numbers that a program of a page prints."""
    (text,) = (block.text for block in blocks(page) if f"{program}\n" in block.text)
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


@pytest.mark.full
@pytest.mark.parametrize(("program", "examples", "accumulated"), [("train_llama", 24, 1), ("with_accelerate", 32, 2)])
def test_losses_of_the_page_are_those_of_the_unmodified_model(program: str, examples: int, accumulated: int) -> None:
    torch, page = pytest.importorskip("torch"), names_of(TRANSFORMERS, "llama.py")
    torch.manual_seed(0)
    model, _ = page["llama"]()  # type: ignore[operator]
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(1)).tolist()
    data = page["examples"](examples)  # type: ignore[operator]
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for begin in range(0, examples, 8):
        tokens = torch.stack([data[number]["input_ids"] for number in order[begin : begin + 8]])
        loss = model(input_ids=tokens, labels=tokens).loss
        (loss / accumulated).backward()
        if (begin // 8 + 1) % accumulated == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == pytest.approx(_shown(f"{program}.py"), abs=1e-4)


def test_losses_of_the_stand_in_for_torchtitan_are_those_of_the_model_alone() -> None:
    torch, page = pytest.importorskip("torch"), "docs/how-to/torchtitan.md"
    torch.manual_seed(0)
    model = names_of(page, "decoder.py")["Decoder"]()  # type: ignore[operator]
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(3):
        tokens = (torch.randint(256, (8, 1)) + torch.arange(17)) % 256
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(_shown("stand_in.py", page), abs=1e-4)


@pytest.mark.full
def test_losses_of_the_trainer_of_the_page_are_those_of_transformers_own(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    import torch
    from torch.utils.data import DataLoader
    from transformers import Trainer, TrainingArguments

    class Ordered(Trainer):  # type: ignore[misc]
        """Trains on the page's batches; in order, to evaluate."""

        def _get_dataloader(self, dataset, description, batch_size, is_training=False, **_):  # type: ignore[no-untyped-def]
            order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(42)).tolist()
            rows = [dataset[number] for number in (order if is_training else sorted(order))]
            return DataLoader(rows, batch_size=8, collate_fn=self.data_collator)

    page = names_of(TRANSFORMERS, "llama.py")
    torch.manual_seed(0)
    model, _ = page["llama"]()  # type: ignore[operator]
    arguments = TrainingArguments(
        str(tmp_path), learning_rate=3e-3, num_train_epochs=1, gradient_accumulation_steps=2, logging_steps=1,
        per_device_train_batch_size=8, save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    train, test = (page["examples"](count) for count in (64, 16))  # type: ignore[operator]
    trainer = Ordered(model, args=arguments, train_dataset=train, eval_dataset=test)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [*losses, trainer.evaluate()["eval_loss"]] == pytest.approx(_shown("with_trainer.py"), abs=1e-4)
