"""examples/decode_loop.py runs, reuses pages, and would notice a wrong answer."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_cute.problem import PAGE_SIZES

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "decode_loop.py"
SMALL = ("--steps", "100", "--batch", "3", "--heads", "4", "--page-size", "16", "--check-every", "10")


@pytest.mark.parametrize("kv_dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"))],
)
def test_runs_and_agrees(device: str, kv_dtype: str) -> None:
    command = [sys.executable, str(EXAMPLE), "--device", device, "--kv-dtype", kv_dtype, *SMALL]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"= \d+ tokens/s", run.stdout)
    assert ("reference" in run.stdout) == (device == "cpu")
    assert re.search(r"^kernel: \S", run.stdout, re.MULTILINE)
    quantised = re.search(r"against a bf16 cache: (\S+)", run.stdout)
    assert (quantised is not None) == (kv_dtype == "e4m3")
    assert quantised is None or 0.01 < float(quantised[1]) < 0.05
    pages = re.search(r"pages: (\d+) handed out from a pool of (\d+)", run.stdout)
    assert pages is not None
    assert int(pages[1]) > int(pages[2])


def share_a_page(self: Any) -> int:
    return int(self.free[-1])


def forget_pages(self: Any, pages: list[int]) -> None:
    self.free += pages[1:]


@pytest.mark.parametrize(
    ("method", "broken", "complaint"),
    [("take", share_a_page, "differ from plain attention"), ("give_back", forget_pages, "a page was lost")],
)
def test_notices_a_broken_allocator(
    method: str, broken: Any, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--device", "cpu", *SMALL, "--steps", "10"])
    example = runpy.run_path(str(EXAMPLE))
    monkeypatch.setattr(example["PageAllocator"], method, broken)
    assert example["main"]() == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--page-size", "48"), r"--page-size: invalid choice: 48 \(choose from 16, 32, 64, 128, 256\)"),
        (("--batch", "0"), "--batch: must be a positive integer, got '0'"),
        pytest.param(
            ("--device", "cuda"),
            "--device: must be cpu on this machine",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU"),
        ),
    ],
)
def test_wrong_arguments_are_errors_of_usage(
    arguments: tuple[str, ...], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLE))["main"]()
    assert re.search(complaint, capsys.readouterr().err)


def test_page_sizes_are_those_of_the_package() -> None:
    assert runpy.run_path(str(EXAMPLE))["PAGE_SIZES"] == PAGE_SIZES
