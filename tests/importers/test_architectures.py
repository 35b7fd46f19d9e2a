"""Architectures of other packages, that `test_batch` imports with the loss that they are trained with."""

from tests.importers.architectures import ARCHITECTURES, KERAS_FAMILIES


def test_there_are_enough_of_them() -> None:
    assert len(ARCHITECTURES["keras"]) == 40
    assert len(KERAS_FAMILIES) == 27
    assert {*KERAS_FAMILIES, *KERAS_FAMILIES.values()} <= {*ARCHITECTURES["keras"]}
    assert not {*KERAS_FAMILIES} & {*KERAS_FAMILIES.values()}
    assert sum(len(makes) for package, makes in ARCHITECTURES.items() if package != "keras") >= 60
