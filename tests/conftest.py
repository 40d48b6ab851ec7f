"""For all tests. The GPU suite has a conftest of its own."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):  # they share the cores
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


@pytest.fixture(scope="session")
def compiled() -> Callable[[Any], Any]:
    """compiled(config): a kernel's files, of one compilation for all tests; see emulator/build.py."""
    return importlib.import_module("emulator.build").compiled  # type: ignore[no-any-return]
