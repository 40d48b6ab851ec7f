"""Blackwell (compute capability 10.0, 10.3) kernels: the row of the dispatch table; no kernel exists yet."""
