"""All targets, by the files that they read."""

from tests.fuzz import arrays, documents, onnx_models

TARGETS = (*documents.TARGETS, *arrays.TARGETS, *onnx_models.TARGETS)
