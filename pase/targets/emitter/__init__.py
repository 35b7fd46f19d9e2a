"""The emitter: a plan written as a program that trains, or that computes what an imported model does.

No framework is loaded to write one.
"""

from pase.targets.emitter.emit import TARGETS, emit, emit_forward, outputs_left_out, target_of

__all__ = ["TARGETS", "emit", "emit_forward", "outputs_left_out", "target_of"]
