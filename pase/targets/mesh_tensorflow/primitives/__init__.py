"""Linear data movement between workers, each operation with its adjoint (Hewett and Grady 2020).

`data_movement` has the primitives and runs them on arrays; `mesh` is what programs stand on, `compat` the one
module that loads TensorFlow. Importing this package loads no framework.
"""
