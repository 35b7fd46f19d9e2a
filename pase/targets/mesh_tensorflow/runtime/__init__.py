"""What emitted programs run on: meshes, resharding, layers and training with Mesh-TensorFlow.

Importing this package loads no framework. `compat` is the one module that imports TensorFlow; the geometry
(`boxes`, `layouts`, `refine`, `moves`), the initial values and the data are plain Python and numpy.
"""
