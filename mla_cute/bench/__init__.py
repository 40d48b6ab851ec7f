"""Speed of the kernels on this machine: cases, timing, report."""
