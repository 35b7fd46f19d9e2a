from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from pase.views.drawing.plans import PALETTE, PATTERNS, UNSPLIT, split_classes

Floats = NDArray[np.float64]

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
INK = ("#16191d", "#f4f6f8")


@dataclass(frozen=True)
class Layer:
    splits: dict[str, int]


def _linear(colour: str) -> Floats:
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _lab(linear: Floats) -> Floats:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(linear, 0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def _contrast(a: str, b: str) -> float:
    """WCAG 2's ratio of relative luminances."""
    low, high = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ _linear(colour)) for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("surroundings", [0, 1])
def test_any_two_colours_differ_for_all_eyes(vision: str, surroundings: int) -> None:
    seen = [_lab(VISION[vision] @ _linear(pair[surroundings])) for pair in (*PALETTE, UNSPLIT)]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > 13


@pytest.mark.parametrize("surroundings", [0, 1])
def test_text_can_be_read_on_every_colour(surroundings: int) -> None:
    assert min(_contrast(pair[surroundings], INK[surroundings]) for pair in (*PALETTE, UNSPLIT)) > 4.5


def test_classes_come_in_order_of_how_many_layers_they_have() -> None:
    layers = [Layer(splits) for splits in ({"b": 2, "n": 1}, {"n": 4, "b": 2}, {"b": 8}, {"b": 1}, {"c": 2}, {"b": 2})]
    found = split_classes(layers)
    assert [(of.dims, of.num_layers) for of in found.classes] == [(("b",), 3), ((), 1), (("b", "n"), 1), (("c",), 1)]
    assert found.of_layer == (0, 2, 0, 1, 3, 0)
    assert [of.label for of in found.classes] == ["b", "not split", "b n", "c"]
    # Grey is for what is not split alone, and takes no colour away.
    assert [(of.light, of.dark) for of in found.classes] == [PALETTE[0], UNSPLIT, PALETTE[1], PALETTE[2]]


def test_no_two_of_many_classes_look_the_same() -> None:
    many = len(PALETTE) * len(PATTERNS)
    found = split_classes([Layer({f"d{i:02}": 2}) for i in range(many + 3)])
    looks = [(of.light, of.pattern) for of in found.classes]
    assert len(set(looks[:many])) == many
    assert {pattern for _, pattern in looks[: len(PALETTE)]} == {"plain"}
    assert {of.label for of in found.classes} == {f"d{i:02}" for i in range(many + 3)}


def test_no_layers() -> None:
    assert split_classes([]).classes == ()
