from pase.targets.mesh_tensorflow.primitives.compat import tf
from pase.targets.mesh_tensorflow.runtime.measure import crossed_bytes


def test_tensors_count_and_control_edges_and_the_host_do_not() -> None:
    first, second, host = ("/device:CPU:1", "/device:CPU:2", "/device:CPU:0")
    with tf.Graph().as_default() as graph:
        with tf.device(host):
            fed = tf.placeholder(tf.float32, [100])
        with tf.device(first):
            x = fed * 2.0
            parts = tf.split(x, [40, 60])
        with tf.device(second):
            # 60 words once, though two operations read them, and a control edge.
            y = parts[1] + 1.0
            z = parts[1] * 3.0
            with tf.control_dependencies([x]):
                waits = tf.zeros([7]) + 1.0
        with tf.device(host):
            total = tf.reduce_sum(y) + tf.reduce_sum(z) + tf.reduce_sum(waits)
        config = tf.ConfigProto(device_count={"CPU": 3})
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        metadata = tf.RunMetadata()
        with tf.Session(config=config) as session:
            options = tf.RunOptions(output_partition_graphs=True)
            session.run(total, {fed: [0.0] * 100}, options=options, run_metadata=metadata)
    sends = [node for part in metadata.partition_graphs for node in part.node if node.op == "_Send"]
    assert len(sends) > 1
    assert crossed_bytes(metadata, graph) == 60 * 4
