"""An emitted program edited by hand computes the same, or is refused before the first step, as data that do not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase.targets.mesh_tensorflow.runtime.reference import reference_losses
from pase.targets.mesh_tensorflow.runtime.script import main
from tests.emitter.golden import GOLDEN
from tests.runtime.networks import small
from tests.runtime.options import options
from tests.runtime.training import builder_of

Array = np.ndarray[Any, Any]


def refused(source: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a program says that ends before the first step."""
    with pytest.raises(SystemExit, match="1"):
        main(builder_of(source), num_devices=4, arguments=["--steps", "1", *arguments])
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def test_an_edited_file_computes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    source = GOLDEN.read_text(encoding="utf-8")
    edits = [
        ('[("b", 4)]', '[("c", 2), ("n", 2)]'),
        ('[("n", 2), ("c", 2)]', '[("b", 2)]'),
        ("[0, 2, 1, 3]", "[3, 1, 0, 2]"),
    ]
    for old, new in edits:
        assert source.count(old) == 1
        source = source.replace(old, new)
    main(builder_of(source), num_devices=4, arguments=["--steps", "5", "--dtype", "float64", "--json"])
    expected = reference_losses(small("mlp"), options(5, rate=0.01))
    first, *steps, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [event["event"] for event in (first, *steps, last)] == ["built", *["step"] * 5, "done"]
    assert [event["loss"] for event in steps] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('[("b", 4)]', '[("b", 5)]', "layer 'fc1' is split in b=5 = 5 parts, which do not divide 4 devices; change an"),
        ('[("b", 4)]', '[("b", 0)]', "layer 'fc1': the axes (('b', 0),) are not a mesh; name each dim once"),
        ('[("n", 2), ("c", 2)]', '[("n", 2), ("n", 2)]', "layer 'fc2': the axes (('n', 2), ('n', 2)) are not a mesh"),
        ('"fc3", [("b", 2)]', '"fc3", [("s", 2)]', "layer 'fc3' has 2 parts along 's', which is a dim of none of its"),
        ("n=24, c=12)", "n=26, c=12)", "a tensor of shape [24, 26] cannot be read as [24, 24]: their sizes differ"),
        (
            "dims(b=24, n=24, c=12)",
            "dims(b=26, n=24, c=12)",
            "layer 'fc1' splits b = 26 in 4 parts, which do not divide",
        ),
        ("x = reshard(fc2, mesh, [b, c])", "x = fc2", "reads tensors of two meshes, those of layers 'fc2' and 'fc3'"),
        ("targets = reshard(labels, mesh, [b])", "targets = labels", "softmax_loss reads tensors of two meshes, those"),
        ("(x, targets, n)", "(x, targets, b)", "layer 'softmax': the logits have dims b=24, n=12; expected b=24, b=24"),
        ('"fc2/w"', '"fc1/w"', "layers 'fc1' and 'fc2' share weight 'fc1/w' with shapes [12, 24] and [24, 24]; give"),
        (
            *("[0, 2, 1, 3]", "[0, 2, 1]"),
            "layer 'fc2': devices [0, 2, 1] must name each of 0 to 3 once; correct the list, or leave it out for the d",
        ),
    ],
)
def test_an_edit_that_is_inconsistent(old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = GOLDEN.read_text(encoding="utf-8")
    assert source.count(old) == 1
    assert message in refused(source.replace(old, new), capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x[:20], y[:20]), "array 'inputs' of the data has shape [20, 12]; expected [N, 12] with N at le"),
        (lambda x, y: (x, y[:40]), "the arrays of the data have different numbers of rows: 'inputs' 48, 'labels' 40"),
    ],
)
@pytest.mark.parametrize("flag", ["--data", "--test-data"])
def test_data_that_do_not_fit(
    flag: str,
    change: Callable[[Array, Array], tuple[Array, Array]],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    x, y = change(np.random.default_rng(0).standard_normal((48, 12)), np.arange(48) % 12)
    np.savez(tmp_path / "data.npz", inputs=x, labels=y)
    expected = message.replace("of the data", "of the test data") if flag == "--test-data" else message
    line = refused(GOLDEN.read_text(encoding="utf-8"), capsys, flag, str(tmp_path / "data.npz"))
    assert line.startswith(expected)
