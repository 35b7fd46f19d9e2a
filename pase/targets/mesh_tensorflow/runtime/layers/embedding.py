"""`embedding`: rows of a table by index; the table's rows and columns may be split."""

from collections.abc import Sequence
from typing import Any

from pase.targets.mesh_tensorflow.runtime.compat import tf
from pase.targets.mesh_tensorflow.runtime.layers.shardwise import Shardwise, begins, names_of


def embedding(table: Any, indices: Any, out: Sequence[Any]) -> Any:
    """Return rows of `table`, dims [v, d], by `indices`, dims [b, …]; out: [b, …, d].

    A device looks up the indices that fall in its rows and leaves zeros for the others; a split of v leaves
    partial sums.
    """
    rows, _ = table.shape.dims
    num_rows = rows.size // table.mesh.devices.size(rows.name)

    def inside(begin: int, indices: Any) -> tuple[Any, Any]:
        local = indices - begin
        return local, (local >= 0) & (local < num_rows)

    def forward(begin: int, table: Any, indices: Any) -> Any:
        if num_rows == rows.size:
            return tf.gather(table, indices)
        local, is_inside = inside(begin, indices)
        found = tf.gather(table, tf.where(is_inside, local, tf.zeros_like(local)))
        return found * tf.cast(is_inside, found.dtype)[..., tf.newaxis]

    def gradient(dy: Any) -> list[Any]:
        def local_gradient(begin: int, indices: Any, dy: Any) -> Any:
            local, is_inside = inside(begin, indices)
            # Negative rows are dropped.
            row = tf.where(is_inside, local, -tf.ones_like(local))
            return tf.math.unsorted_segment_sum(dy, row, num_rows)

        operation = Shardwise(
            local_gradient,
            [indices, dy],
            shape=table.shape,
            dtype=table.dtype,
            name="embedding_gradient",
            partial_over=names_of(dy) - names_of(table),
            per_position=lambda: begins(table.mesh, rows),
        )
        return [operation.outputs[0], None]

    operation = Shardwise(
        forward,
        [table, indices],
        shape=list(out),
        name="embedding",
        partial_over=[rows.name],
        per_position=lambda: begins(table.mesh, rows),
        gradient=gradient,
    )
    return operation.outputs[0]
