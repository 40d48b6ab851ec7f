"""For all tests. The GPU suite has a conftest of its own."""

from __future__ import annotations

import os

import torch

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):  # they share the cores
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
