"""Architectures of other packages are imported with the loss that they are trained with, and all of each is known."""

import pytest

from tests.importers.architectures import ARCHITECTURES, BATCH, RESIZED, ROUTED, imported

QUICK = {
    "transformers": ("gpt2", "bert", "falcon", "vit"),
    "keras": ("MobileNetV3Small", "ResNet50", "EfficientNetB0", "ConvNeXtTiny"),
    "diffusers": ("dit",),
    "timm": (),
    "torchvision": (),
}
"""Those that are tried in every run of the tests; the others are slow."""

_ALL = [
    pytest.param(package, name, marks=() if name in QUICK[package] else (pytest.mark.slow,))
    for package, makes in ARCHITECTURES.items()
    for name in makes
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "name"), _ALL)
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
    assert sum(len(makes) for package, makes in ARCHITECTURES.items() if package != "keras") >= 60
