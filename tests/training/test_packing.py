"""One vector for all weights: what is packed is what is unpacked, and which messages it goes in."""

import numpy as np
import pytest

from pase.easgd.messages import Packing
from pase.errors import TrainingError

PACKING = Packing(
    names=("conv/w", "conv/bias", "norm/scale", "norm/shift", "table", "fc/w", "fc/bias"),
    shapes=((2, 3, 1), (2,), (4,), (4,), (5, 2), (3, 3), (3,)),
    dtype="float64",
)


def arrays() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(0)
    return {name: numbers.standard_normal(shape) for name, shape in zip(PACKING.names, PACKING.shapes, strict=True)}


def test_unpacking_undoes_packing() -> None:
    given = arrays()
    found = PACKING.unpack(PACKING.pack(dict(reversed(given.items()))))
    assert list(found) == list(PACKING.names)
    for name, array in given.items():
        assert np.array_equal(found[name], array)


def test_a_vector_holds_the_arrays_one_after_another_in_row_major_order() -> None:
    given = arrays()
    vector = PACKING.pack(given)
    assert vector.dtype == np.float64
    assert vector.flags["C_CONTIGUOUS"]
    assert vector.tolist() == [number for name in PACKING.names for number in given[name].flatten().tolist()]
    assert PACKING.num_weights == vector.size == 6 + 2 + 4 + 4 + 10 + 9 + 3
    assert PACKING.num_bytes == vector.nbytes


def test_unpacking_copies_nothing() -> None:
    vector = np.zeros(PACKING.num_weights)
    PACKING.unpack(vector)["fc/w"][1, 2] = 7
    assert vector[26 + 5] == 7


def test_a_message_for_all_or_one_for_each_weight_array_with_its_bias() -> None:
    assert PACKING.layout(packed=True) == ((0, 38),)
    assert PACKING.layout(packed=False) == ((0, 8), (8, 12), (12, 16), (16, 26), (26, 38))


def test_a_bias_of_another_layer_travels_alone() -> None:
    packing = Packing(names=("bias", "a/w", "b/bias"), shapes=((1,), (2,), (3,)))
    assert packing.layout(packed=False) == ((0, 1), (1, 3), (3, 6))


@pytest.mark.parametrize("packed", [True, False])
def test_messages_cover_the_vector_without_gaps(packed: bool) -> None:
    layout = PACKING.layout(packed=packed)
    assert [0, *(end for _, end in layout)] == [*(begin for begin, _ in layout), PACKING.num_weights]


def test_what_does_not_fit_is_named() -> None:
    given = arrays()
    with pytest.raises(TrainingError, match="there is no weight 'norm/scale'; the network has conv/w"):
        PACKING.pack({name: array for name, array in given.items() if name != "norm/scale"})
    with pytest.raises(TrainingError, match="there is no use for weight 'more'"):
        PACKING.pack(given | {"more": np.zeros(1)})
    with pytest.raises(TrainingError, match=r"'fc/w' has shape \[9\]; the network has \[3, 3\]"):
        PACKING.pack(given | {"fc/w": np.zeros(9)})
    with pytest.raises(TrainingError, match=r"shape \[37\] is not that of the network, which has 38"):
        PACKING.unpack(np.zeros(37))
