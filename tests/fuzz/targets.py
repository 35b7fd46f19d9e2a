"""All targets, by the files that they read."""

from tests.fuzz import arrays, documents, keras_models, onnx_models

TARGETS = (*documents.TARGETS, *arrays.TARGETS, *onnx_models.TARGETS, *keras_models.TARGETS)
