"""Linear data movement between workers, each operation with its adjoint (Hewett and Grady 2020).

`halo` and `partitions` are plain Python; `operations` and what it stands on are Mesh-TensorFlow operations. Importing
this package loads no framework.
"""
