"""Options, fixtures and safety nets of the GPU suite.

pytest tests/gpu                    on a GPU; without one every test skips
pytest tests/gpu --mla-device cpu   the same cases through the reference, at small sizes: a test of the tests
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cute import compile, dispatch
from mla_cute.device import arch_of, capability, may_compile

from .harness import store

HERE = Path(__file__).parent
HANG_SECONDS = 150  # far above any test; a hung kernel would otherwise hold the machine for ever
STDERR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mla-device", choices=("cuda", "cpu"), default="cuda", help="where tests/gpu runs")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: about CUDA itself (graphs, streams, synchronisation)")
    config.addinivalue_line("markers", "big: gigabytes of GPU memory; runs last")
    config.stash[STDERR] = os.dup(2)  # the one that pytest does not capture


def _device_name(config: pytest.Config) -> str:
    return str(config.getoption("--mla-device", default="cuda"))  # the default serves runs that load this file late


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = {item for item in items if item.path.is_relative_to(HERE)}
    on_cpu = _device_name(config) == "cpu"
    for item in ours:
        item.add_marker(pytest.mark.xdist_group("gpu"))  # one worker: they share the GPU's memory
        if not on_cpu and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU here"))
        elif on_cpu and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="about CUDA itself: graphs, streams or synchronisation"))
    items.sort(key=lambda item: item in ours and item.get_closest_marker("big") is not None)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    on_cpu = _device_name(request.config) == "cpu"
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def scaled(device: torch.device) -> Callable[[Any, Any], Any]:
    """scaled(on_gpu, on_cpu): the size to use."""
    return lambda on_gpu, on_cpu: on_gpu if device.type == "cuda" else on_cpu


@pytest.fixture(scope="session", autouse=True)
def _kernels(device: torch.device) -> None:
    """Compile what is missing in several processes, before a test or a child with a time limit waits for it."""
    if device.type != "cuda" or not may_compile() or find_spec("cutlass") is None:
        return
    arch = arch_of(capability(device))
    ours = [config for config in dispatch.shipped() if config.arch == arch]
    missing = [config for config in ours if compile.where(config) == "needs compilation"]
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(store, missing))


@pytest.fixture(autouse=True)
def _safety_net(request: pytest.FixtureRequest, device: torch.device) -> Iterator[None]:
    """End the run when a kernel hangs or the CUDA context is lost: every later test would fail of the same cause."""
    if device.type != "cuda":
        yield
        return
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=request.config.stash[STDERR])
    yield
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        pytest.exit(f"the CUDA context is lost in {request.node.nodeid}: {error}", returncode=1)
    finally:
        faulthandler.cancel_dump_traceback_later()
    if request.node.get_closest_marker("big"):
        torch.cuda.empty_cache()
