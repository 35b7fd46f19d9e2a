"""TensorFlow and Mesh-TensorFlow, imported and repaired: the one module that does either.

Mesh-TensorFlow 0.1.21 was written for an older TensorFlow. Three names that it imports are put back before it is
imported. Programs are built in graphs of their own (``with ProgramGraph().as_default()``), so that nothing global, such
as eager execution, is switched off for the rest of the process. Variables are resource variables: reference
variables race with their updates.
"""

import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pase.errors import missing_extra

_NEEDED = "running a program needs TensorFlow and Mesh-TensorFlow"

_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard what goes to the file descriptor of standard error: TensorFlow greets before its logger is set up."""
    sys.stderr.flush()
    try:
        saved = os.dup(2)
    except OSError:
        # There is no standard error.
        yield
        return
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)


@contextmanager
def _without_keras() -> Iterator[None]:
    """Let TensorFlow import Keras when somebody uses `tensorflow.keras`, not with itself: programs need none of it.

    TensorFlow imports the older package, where it is asked for, in place of Keras; it looks again when it is used.
    """
    if _LEGACY_KERAS in os.environ:
        yield
        return
    os.environ[_LEGACY_KERAS] = "1"
    try:
        yield
    finally:
        del os.environ[_LEGACY_KERAS]


def _import() -> tuple[Any, Any, Any]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with _quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _without_keras():
                import tensorflow.compat.v1 as tf
            from tensorflow._api.v2.compat import v1 as inner
            from tensorflow.python.framework import ops, tensor_conversion_registry
        except ImportError as error:
            raise missing_extra(_NEEDED, "mesh", also=f" ({error})") from error
        tf.logging.set_verbosity(tf.logging.ERROR)
        if not hasattr(tf, "estimator"):
            estimator = types.ModuleType("estimator")
            estimator.CheckpointSaverListener = tf.train.CheckpointSaverListener  # type: ignore[attr-defined]
            estimator.SessionRunHook = tf.train.SessionRunHook  # type: ignore[attr-defined]
            tf.estimator = inner.estimator = estimator
        if not hasattr(ops, "register_tensor_conversion_function"):
            register = tensor_conversion_registry.register_tensor_conversion_function
            ops.register_tensor_conversion_function = register
        try:
            import mesh_tensorflow
            from mesh_tensorflow import placement_mesh_impl
        except ImportError as error:
            raise missing_extra(_NEEDED, "mesh", also=f" ({error})") from error
    return tf, mesh_tensorflow, placement_mesh_impl


tf, mtf, placement = _import()

__all__ = ["ProgramGraph", "mtf", "placement", "tf"]


class ProgramGraph(tf.Graph):
    """A graph that has each constant once on each device.

    Layers name the same shapes, orders of dims and numbers again and again: with a constant for each time, these were
    a third of a program's operations. Initial values of variables, which are fed, stay apart: they belong to the host,
    and no device is named for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._device_names: tuple[str, ...] = ()
        self._shared: dict[tuple[Any, ...], Any] = {}

    @contextmanager
    def device(self, device_name_or_function: Any) -> Iterator[None]:
        """Place operations, as `tf.device` asks for it."""
        outer = self._device_names
        if isinstance(device_name_or_function, str):
            self._device_names = (*outer, device_name_or_function)
        else:
            self._device_names = ()
        try:
            with super().device(device_name_or_function):
                yield
        finally:
            self._device_names = outer

    def _create_op_internal(self, op_type: str, *arguments: Any, **options: Any) -> Any:
        """Return a new operation, or the constant of that value that the device has."""
        names = self._device_names
        attributes = options.get("attrs") or {}
        if op_type != "Const" or not names or "/device:" not in names[-1] or {*attributes} != {"dtype", "value"}:
            return super()._create_op_internal(op_type, *arguments, **options)
        key = (names, attributes["value"].SerializeToString())
        if key not in self._shared:
            # Others use it too: it waits for nothing.
            with self.control_dependencies(None), self.colocate_with(None, ignore_existing=True):
                self._shared[key] = super()._create_op_internal(op_type, *arguments, **options)
        return self._shared[key]
