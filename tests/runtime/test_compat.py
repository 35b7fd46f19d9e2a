import subprocess
import sys

import pytest

from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf


@pytest.mark.parametrize("missing", ["tensorflow", "mesh_tensorflow"])
def test_a_missing_library_is_named_with_the_command_that_installs_it(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import pase.targets.mesh_tensorflow.primitives.compat"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    expected = "running a program needs TensorFlow and Mesh-TensorFlow; PaSE's extra 'mesh' brings it"
    assert f"MissingExtraError: {expected}" in last
    assert missing in last


def test_the_import_is_silent_leaves_eager_execution_on_and_keras_to_whoever_uses_it() -> None:
    code = (
        "import sys; from pase.targets.mesh_tensorflow.primitives.compat import tf; assert 'keras' not in sys.modules; "
        "import tensorflow; assert tensorflow.executing_eagerly(); "
        "from tensorflow.keras.layers import Dense; import keras; "
        "assert Dense is tensorflow.keras.layers.Dense is keras.layers.Dense"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_works_without_standard_error() -> None:
    code = "import os; os.close(2); from pase.targets.mesh_tensorflow.primitives.compat import tf; print(tf.__name__)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    assert done.stdout.startswith("tensorflow")


def test_variables_are_resources_so_that_reads_do_not_race_with_updates() -> None:
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        dim = mtf.Dimension("b", 2)
        tensor = mtf.get_variable(mesh, "v", mtf.Shape([dim]), initializer=tf.zeros_initializer())
        assert tensor.operation.get_master().handle.dtype == tf.resource
