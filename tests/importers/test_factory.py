"""`package.module:factory`: what is called, with what, and what is said where it cannot be."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pase import load
from pase.errors import MissingExtraError, ModelError
from pase.importers.front_end import call_factory, is_factory

SOURCE = """
def net(batch=4, layers=2, name="x", rate=0.1, wide=False):
    return dict(batch=batch, layers=layers, name=name, rate=rate, wide=wide)

def needs(width):
    return width

def anything(**given):
    return given

def fails():
    raise KeyError("no such thing")

class Nets:
    @staticmethod
    def small(width: int = 1):
        return width

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_nets.py").write_text(SOURCE)
    (tmp_path / "broken_nets.py").write_text("import does_not_exist_anywhere\n")
    (tmp_path / "wrong_nets.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield "own_nets"
    assert sys.path == path, "the current folder is looked into while the factory runs alone"
    for name in ("own_nets", "broken_nets", "wrong_nets"):
        sys.modules.pop(name, None)


def _call(source: str, batch: int | None = None, **arguments: str | int | float | bool) -> tuple[object, bool]:
    return call_factory(source, batch=batch, arguments=arguments, front_ends=())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a:b", True),
        ("a.b_c.d:Nets.small", True),
        ("alexnet", False),
        ("C:\\net.onnx", False),
        ("a:b/c", False),
        ("a:", False),
        (":b", False),
        ("a.b", False),
        ("./a:b", False),
        ("1a:b", False),
    ],
)
def test_what_is_a_factory(source: str, expected: bool) -> None:
    assert is_factory(source) is expected


def test_arguments_reach_it_as_what_they_stand_for(module: str) -> None:
    made, took_batch = _call(f"{module}:net", 8, layers="3", name="7", rate="1e-3", wide="true")
    assert made == {"batch": 8, "layers": 3, "name": "7", "rate": 1e-3, "wide": True}
    assert took_batch


def test_a_batch_that_it_does_not_take_is_left_to_others(module: str) -> None:
    assert _call(f"{module}:Nets.small", 8, width="5") == (5, False)
    assert _call(f"{module}:anything", None, width="wide") == ({"width": "wide"}, False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_nets:nothing", "module 'own_nets' has no 'nothing'; a factory is given as package.module:function"),
        ("own_nets:Nets.large", "module 'own_nets' has no 'Nets.large'"),
        ("own_nets:number", "'own_nets:number' is not a function but a int; name a function that returns the model"),
        ("own_nets:needs", "needs an argument 'width'; give it as --arg width=VALUE"),
        ("own_nets:fails", "factory 'own_nets:fails' failed: KeyError: 'no such thing'"),
        ("no_nets:net", "there is no module 'no_nets' for factory 'no_nets:net'; it is looked for in the current fol"),
        ("broken_nets:net", "module 'broken_nets' of 'broken_nets:net' cannot be imported: No module named 'does_not"),
        ("wrong_nets:net", "module 'wrong_nets' of 'wrong_nets:net' cannot be imported: ZeroDivisionError: division"),
    ],
)
def test_what_cannot_be_called_is_said(module: str, name: str, message: str) -> None:
    assert module
    with pytest.raises(ModelError, match=message):
        _call(name)


@pytest.mark.parametrize("text", ["import torch\n\ndef net():\n    ...\n", "def net():\n    import torch.nn\n"])
def test_a_framework_that_is_not_installed_is_named_with_its_extra(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "without_torch.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises what it raises where it is not there
    with pytest.raises(MissingExtraError, match="torch, which is not installed; PaSE's extra 'torch' brings it"):
        load("without_torch:net")
    assert "Traceback" not in capsys.readouterr().err
    sys.modules.pop("without_torch", None)


def test_an_argument_that_it_does_not_take_is_refused(module: str) -> None:
    with pytest.raises(ModelError, match="takes no argument 'depth'; its parameters are batch, layers, name, ra"):
        _call(f"{module}:net", depth="3")
    with pytest.raises(ModelError, match="takes no argument 'depth'; it takes none"):
        _call(f"{module}:fails", depth="3")


def test_its_own_traceback_is_shown_and_ours_is_not(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match="KeyError"):
        _call(f"{module}:fails")
    shown = capsys.readouterr().err
    assert "own_nets.py" in shown
    assert "factory.py" not in shown


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("{}", "^a model of type dict cannot be imported; give the name of a built-in"),
        ("1", "^a model of type int cannot be imported; give the name of a built-in"),
        ("'alexnet'", "the factory returned 'alexnet'; expected a model of a framework"),
        ("pase.load('lenet5')", r"returned the Graph 'lenet5'; .* searched from Python: pase\.search\(graph"),
    ],
)
def test_what_it_returns_must_be_a_model(module: str, tmp_path: Path, made: str, message: str) -> None:
    (tmp_path / "own_nets.py").write_text(f"import pase\n\ndef net():\n    return {made}\n")
    with pytest.raises(ModelError, match=message):
        load(f"{module}:net")
