"""The emitter: a plan written as a Mesh-TensorFlow training program; no framework is loaded to write one."""

from pase.emitter.emit import emit

__all__ = ["emit"]
