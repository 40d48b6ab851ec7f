"""CuTe DSL kernels of mla_cute, installed as `mla_cute.kernels`. Nothing here imports torch."""
