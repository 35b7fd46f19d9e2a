import subprocess
import sys

from pase.targets.mesh_tensorflow.primitives.compat import mtf, tf

CODE = """
import os, sys
from pase.errors import MissingExtraError

MODULE = "pase.targets.mesh_tensorflow.primitives.compat"
for missing in ("tensorflow", "mesh_tensorflow"):
    sys.modules[missing] = None
    try:
        __import__(MODULE)
    except MissingExtraError as error:
        print(error)
    del sys.modules[missing]
os.close(2)
__import__(MODULE)
assert "keras" not in sys.modules
import tensorflow
assert tensorflow.executing_eagerly()
from tensorflow.keras.layers import Dense
import keras
assert Dense is tensorflow.keras.layers.Dense is keras.layers.Dense
"""


def test_the_import_is_silent_names_what_is_missing_and_leaves_keras_and_eager_execution_to_others() -> None:
    """With warnings as errors; what is said is all there is. At last there is no standard error any more."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", CODE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for line, missing in zip(done.stdout.splitlines(), ("tensorflow", "mesh_tensorflow"), strict=True):
        assert line.startswith("running a program needs TensorFlow and Mesh-TensorFlow; PaSE's extra 'mesh' brings it")
        assert missing in line


def test_variables_are_resources_so_that_reads_do_not_race_with_updates() -> None:
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        dim = mtf.Dimension("b", 2)
        tensor = mtf.get_variable(mesh, "v", mtf.Shape([dim]), initializer=tf.zeros_initializer())
        assert tensor.operation.get_master().handle.dtype == tf.resource
