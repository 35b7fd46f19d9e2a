"""mlp on 4 devices: a training program for Mesh-TensorFlow.

The network was built with batch=24, inputs=12, hidden=24, layers=3, classes=12.

A block is a layer: its dims, its mesh, what it reads, what it computes. The axes of a mesh are the dims that
are split, with their numbers of parts; the parts go to the devices row-major, and devices left over hold
replicas. Edit the axes of a mesh and run again: the losses stay the same. Bytes are those of a float32 step.

    python FILE --steps 10 [--data batches.npz] [--dtype float64] [--learning-rate 0.01] [--json]
"""

from pase.targets.mesh_tensorflow.primitives.compat import mtf
from pase.targets.mesh_tensorflow.runtime.layers import dims, fn, product, reshard, softmax_loss
from pase.targets.mesh_tensorflow.runtime.program import Program
from pase.targets.mesh_tensorflow.runtime.script import main


def build(program: Program) -> mtf.Tensor:
    """Declare the layers in order and return the loss."""
    inputs = program.floats("inputs", [24, 12])
    labels = program.indices("labels", [24], below=12)

    # -- fc1   b=4                                      y[b,n] = relu(x[b,c] w[c,n] + bias[n])
    b, n, c = dims(b=24, n=24, c=12)
    mesh = program.mesh("fc1", [("b", 4)])
    x = reshard(inputs, mesh, [b, c])
    weights, bias = program.weight(mesh, "fc1/w", [c, n], 0.2887), program.weight(mesh, "fc1/bias", [n])
    fc1 = fn.relu(product(x, weights, [b, n]) + bias)

    # -- fc2   n=2 c=2                                  y[b,n] = relu(x[b,c] w[c,n] + bias[n])
    b, n, c = dims(b=24, n=24, c=24)
    mesh = program.mesh("fc2", [("n", 2), ("c", 2)], devices=[0, 2, 1, 3])
    x = reshard(fc1, mesh, [b, c])  # 3456 B forward + 1152 B backward
    weights, bias = program.weight(mesh, "fc2/w", [c, n], 0.2041), program.weight(mesh, "fc2/bias", [n])
    fc2 = fn.relu(product(x, weights, [b, n]) + bias)

    # -- fc3   b=2                                      y[b,n] = x[b,c] w[c,n] + bias[n]
    b, n, c = dims(b=24, n=12, c=24)
    mesh = program.mesh("fc3", [("b", 2)])
    x = reshard(fc2, mesh, [b, c])  # 2304 B forward + 2304 B backward
    weights, bias = program.weight(mesh, "fc3/w", [c, n], 0.2041), program.weight(mesh, "fc3/bias", [n])
    fc3 = product(x, weights, [b, n]) + bias

    # -- softmax   b=2 n=2                              loss = mean of -log softmax(x[b,n]) at labels[b]
    b, n = dims(b=24, n=12)
    mesh = program.mesh("softmax", [("b", 2), ("n", 2)])
    x = reshard(fc3, mesh, [b, n])  # 0 B forward + 1152 B backward
    targets = reshard(labels, mesh, [b])
    return softmax_loss(x, targets, n)


if __name__ == "__main__":
    main(build, num_devices=4)
