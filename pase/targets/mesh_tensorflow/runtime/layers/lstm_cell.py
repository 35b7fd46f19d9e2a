"""One step of an LSTM cell on one device (Hochreiter and Schmidhuber 1997; forget gates), and its gradient."""

from dataclasses import dataclass
from typing import Any

from pase.targets.mesh_tensorflow.runtime.compat import tf


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one device keeps of a step for its gradients. read: the hidden state before it, along d; None at first."""

    read: Any
    into: Any
    forget: Any
    out: Any
    candidate: Any
    before: Any
    activated: Any


def cell_step(gates: Any, read: Any, before: Any) -> tuple[Step, Any, Any]:
    """Return what to keep of a step, the hidden state and the cell after it."""
    columns = before.shape.as_list()[-1]
    sigmoids, candidate = tf.split(gates, [3 * columns, columns], axis=1)
    into, forget, out = tf.split(tf.sigmoid(sigmoids), 3, axis=1)
    candidate = tf.tanh(candidate)
    cell = forget * before + into * candidate
    activated = tf.tanh(cell)
    kept = Step(read=read, into=into, forget=forget, out=out, candidate=candidate, before=before, activated=activated)
    return kept, out * activated, cell


def cell_gradient(kept: Step, d_hidden: Any, d_cell: Any) -> tuple[Any, Any]:
    """Return the gradients of the gates and of the cell before a step from those of what it left."""
    # What depends on the forward pass alone is not to be computed, and held, before the gradient is there.
    with tf.control_dependencies([d_hidden]):
        d_cell = d_cell + d_hidden * kept.out * (1 - kept.activated * kept.activated)
        d_gates = [
            d_cell * kept.candidate * kept.into * (1 - kept.into),
            d_cell * kept.before * kept.forget * (1 - kept.forget),
            d_hidden * kept.activated * kept.out * (1 - kept.out),
            d_cell * kept.into * (1 - kept.candidate * kept.candidate),
        ]
        return tf.concat(d_gates, axis=1), d_cell * kept.forget
