"""What the kernels of every architecture share: argument order, partition of work, small device helpers."""
