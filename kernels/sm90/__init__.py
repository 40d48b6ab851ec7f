"""Hopper (compute capability 9.0) kernels."""
