"""Options, fixtures and safety nets of the GPU suite.

    pytest tests/gpu                      on a GPU; without one every test skips
    pytest tests/gpu --mla-device cpu     the same cases through the reference, with small sizes: checks the tests themselves
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch

HERE = Path(__file__).parent
HANG_SECONDS = 150  # no test takes a third of it; a hung kernel would otherwise hold the machine for its whole lease
T = TypeVar("T")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mla-device", choices=("cuda", "cpu"), default="cuda", help="where tests/gpu runs (default: cuda)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: about CUDA itself (graphs, streams, synchronisation), not runnable on a CPU")
    config.addinivalue_line("markers", "big: allocates more than 4 GiB of GPU memory; runs last")
    global _stderr
    _stderr = os.dup(2)  # before pytest captures it


def _device_name(config: pytest.Config) -> str:
    return config.getoption("--mla-device", default="cuda")  # the default serves runs that load this file late


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    on_cpu = _device_name(config) == "cpu"
    for item in ours:
        if not on_cpu and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU (--mla-device cpu runs the cases through the reference)"))
        elif on_cpu and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="about CUDA itself: graphs, streams or synchronisation"))
    items.sort(key=lambda item: item in ours and item.get_closest_marker("big") is not None)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    name = _device_name(request.config)
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


@pytest.fixture(scope="session")
def scaled(device: torch.device) -> Callable[[T, T], T]:
    """scaled(on_gpu, on_cpu): the size a test uses."""
    return lambda on_gpu, on_cpu: on_gpu if device.type == "cuda" else on_cpu


@pytest.fixture(autouse=True)
def _safety_net(request: pytest.FixtureRequest, device: torch.device) -> Iterator[None]:
    """End the run when a kernel hangs or the CUDA context is lost: every later test would fail for the same cause."""
    if device.type != "cuda":
        yield
        return
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=_stderr)
    yield
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        pytest.exit(f"the CUDA context is lost in {request.node.nodeid}: {error}", returncode=1)
    finally:
        faulthandler.cancel_dump_traceback_later()
    if request.node.get_closest_marker("big"):
        torch.cuda.empty_cache()
