"""Launches in child processes: with a time limit, under a memory checker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from .harness import ROWS

ROOT = Path(__file__).parents[__name__.count(".")]  # where the package of this file starts
PACKAGE = __name__.rpartition(".")[0]


def child(module: str, *arguments: str, prefix: tuple[str, ...] = (), seconds: int, **environment: str) -> str:
    command = [*prefix, sys.executable, "-m", f"{PACKAGE}.{module}", *arguments]
    try:
        done = subprocess.run(
            command,
            check=False,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{module} did not end within {seconds} s: {str(error.output)[-3000:]}")
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_f10_f11_random_launches_end(device: torch.device, scaled: Callable[[Any, Any], Any]) -> None:
    launches = scaled(2000, 60)
    assert f"{launches} launches are right" in child("fuzz", device.type, str(launches), seconds=120)


@pytest.mark.cuda
def test_a_graph_is_captured_straight_after_plan() -> None:
    assert child("capture_first", seconds=140).count("right") == 3 * len(ROWS) + 8


def test_no_access_out_of_bounds(device: torch.device) -> None:
    tool = shutil.which("compute-sanitizer") if device.type == "cuda" else None
    if tool is None:
        child("sanitizer_cases", device.type, seconds=120)
        pytest.skip("right, but not run under compute-sanitizer: not a GPU, or the tool is not on PATH")
    prefix = (tool, "--tool", "memcheck", "--error-exitcode", "9")
    output = child("sanitizer_cases", "cuda", prefix=prefix, seconds=140, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert "ERROR SUMMARY: 0 errors" in output
