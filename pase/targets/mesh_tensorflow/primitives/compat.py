"""TensorFlow and Mesh-TensorFlow, imported and repaired: the one module that does either.

Mesh-TensorFlow 0.1.21 was written for an older TensorFlow. Three names that it imports are put back before it is
imported. Programs are built in graphs of their own (``with tf.Graph().as_default()``), so that nothing global, such
as eager execution, is switched off for the rest of the process. Variables are resource variables: reference
variables race with their updates.
"""

import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
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


@contextmanager
def _without_jax() -> Iterator[None]:
    """Let TensorFlow believe that there is no JAX: its converter for phones imports it, a sixth of the whole import."""
    if "jax" in sys.modules:
        yield
        return
    sys.modules["jax"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["jax"]


def _import() -> tuple[Any, Any, Any]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with _quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _without_keras(), _without_jax():
                import tensorflow.compat.v1 as tf
                from tensorflow.core.config import flags
            from tensorflow._api.v2.compat import v1 as inner
            from tensorflow.python.framework import ops, tensor_conversion_registry
        except ImportError as error:
            raise missing_extra(_NEEDED, "mesh", also=f" ({error})") from error
        tf.logging.set_verbosity(tf.logging.ERROR)
        # Operations' attributes are inferred in C++, where Python would take a quarter of the time to build a program.
        flags.config().graph_building_optimization.reset(True)
        # Nor do they keep the Python frames that made them: an eighth of that time, and no frame is a layer's.
        ops._create_c_op = partial(ops._create_c_op, extract_traceback=False)
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

__all__ = ["mtf", "placement", "tf"]
