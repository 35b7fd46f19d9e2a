"""Networks to make replicas of: from a model, a plan and a program; and what is said of files that are none."""

from pathlib import Path

import numpy as np
import pytest

from pase.easgd.network import Loaded, Network, load_build
from pase.errors import TrainingError
from pase.importers import load
from pase.planning.plan_file import write_plan
from pase.planning.planner import search
from pase.targets.programs import emit
from pase.targets.training.data import Batches

ARGUMENTS = {"inputs": 12, "hidden": 8, "layers": 2, "classes": 4}


def gradient(loaded: Loaded) -> np.ndarray:
    net = Network.load(loaded.build, num_devices=loaded.num_devices, dtype="float64")
    vector = net.replica(Batches(net.inputs, seed=0).batch).gradient(net.initial(0), 0).vector
    net.close()
    return vector


def test_model_plan_and_program_are_the_same_network(tmp_path: Path) -> None:
    plan = search(load("mlp", batch=8, arguments=dict(ARGUMENTS)), 2)
    write_plan(plan, tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(emit(plan), encoding="utf-8")
    told: list[str] = []
    of_model = load_build("mlp", devices=2, batch=8, arguments=ARGUMENTS, on_progress=lambda what, _: told.append(what))
    assert "costing layers" in told
    of_plan = load_build(str(tmp_path / "plan.json"))
    of_program = load_build(str(tmp_path / "train.py"))
    assert [loaded.num_devices for loaded in (of_model, of_plan, of_program)] == [2, 2, 2]
    expected = gradient(of_model)
    assert np.any(expected)
    assert np.array_equal(gradient(of_plan), expected)
    assert np.array_equal(gradient(of_program), expected)


def test_a_program_is_not_trained_when_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def main(build, *, num_devices):\n    raise AssertionError('called')\n\n"
        "def build(program):\n    return program\n\n"
        "if __name__ == '__main__':\n    main(build, num_devices=3)\n",
        encoding="utf-8",
    )
    loaded = load_build(str(path))
    assert loaded.num_devices == 3
    assert loaded.build(7) == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def build(program:\n", "is no Python program: .*; expected a file that pase emit wrote"),
        ("def build(program):\n    pass\n", "has no call of main with num_devices; expected"),
        ("main(build, num_devices=n)\n", "has no call of main with num_devices; expected"),
        ("if __name__ == '__main__':\n    main(None, num_devices=1)\n", "declares no function 'build'; expected"),
        ("1 / 0\nmain(build, num_devices=1)\n", "raised ZeroDivisionError: division by zero; expected"),
    ],
)
def test_what_is_no_emitted_program_is_said(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TrainingError, match=message):
        load_build(str(path))


def test_a_program_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"nothing\.py cannot be read: No such file or directory; expected"):
        load_build(str(tmp_path / "nothing.py"))
