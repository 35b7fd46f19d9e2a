"""The emitter: a plan written as a Mesh-TensorFlow program that trains, or that computes what an imported model does.

No framework is loaded to write one.
"""

from pase.targets.emitter.emit import emit, emit_forward, outputs_left_out

__all__ = ["emit", "emit_forward", "outputs_left_out"]
