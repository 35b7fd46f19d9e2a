"""What emitted programs run on: meshes, resharding, layers and training with Mesh-TensorFlow.

Importing this package loads no framework. `compat` is the one module that imports TensorFlow.
"""
