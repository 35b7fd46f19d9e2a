"""Architectures of other packages are imported with the loss that they are trained with, and all of each is known."""

import pytest

from tests.importers.architectures import ARCHITECTURES, BATCH, KERAS_FAMILIES, RESIZED, ROUTED, cases, imported

QUICK = {
    *(("transformers", name) for name in ("gpt2", "bert", "falcon", "vit")),
    *(("keras", name) for name in ("MobileNetV3Small", "ResNet50", "EfficientNetB0", "ConvNeXtTiny")),
    ("diffusers", "dit"),
}
"""Those that take little time; the others are slow."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "name"), cases(QUICK))
def test_nothing_is_opaque_but_routers_and_resizing(package: str, name: str) -> None:
    (model,) = imported(package, name, BATCH)
    assert model.differences == ()
    opaque = [op for op in model.graph.operators if op.kind == "opaque"]
    functions = {op.attribute("function", "") for op in opaque}
    allowed = (
        {"aten.topk.default"} if name in ROUTED else {"aten.upsample_bilinear2d.vec"} if name in RESIZED else set()
    )
    assert functions <= allowed, [(op.name, op.attribute("function", ""), op.extents) for op in opaque]
    # The loss is among what it returns: one number.
    shapes = [model.traces[0].values[output].shape for output in model.traces[0].outputs]
    assert () in shapes


def test_there_are_enough_of_them() -> None:
    assert len(ARCHITECTURES["keras"]) == 40
    assert len(KERAS_FAMILIES) == 24
    assert {*KERAS_FAMILIES, *KERAS_FAMILIES.values()} <= {*ARCHITECTURES["keras"]}
    assert not {*KERAS_FAMILIES} & {*KERAS_FAMILIES.values()}
    assert sum(len(makes) for package, makes in ARCHITECTURES.items() if package != "keras") >= 60
