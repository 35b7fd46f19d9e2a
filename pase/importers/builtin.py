"""Built-in networks, by name."""

from collections.abc import Mapping

from pase.graph import Graph, Scalar


class BuiltinImporter:
    """Takes every name that is not a path, so that a misspelt one is answered with the nearest."""

    def takes(self, source: object) -> bool:
        """Return whether the source is a name."""
        return isinstance(source, str) and not _looks_like_file(source)

    def load(self, source: object, *, batch: int | None, arguments: Mapping[str, Scalar]) -> Graph:
        """Return a built-in network; ModelError for an unknown name or parameter."""
        from pase.models import build

        return build(str(source), batch=batch, arguments=arguments)


_MODEL_FILES = (".onnx", ".keras", ".h5", ".pt", ".pth", ".pb", ".tflite", ".py", ".npz", ".json")


def _looks_like_file(source: str) -> bool:
    return "/" in source or "\\" in source or source.lower().endswith(_MODEL_FILES)
