"""The CuTe DSL kernels. Nothing here imports torch; importing a module of this package imports ``cutlass``."""
