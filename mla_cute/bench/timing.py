"""Time on the device with a cold L2, and the two rates of this very machine that results are put beside."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

FLUSH_BYTES = 256 << 20  # zeroed before every launch: more than any L2
COPY_BYTES = 2 << 30
GEMM = 8192
WARM_UP_MS, MEASURE_MS = 25.0, 100.0


@dataclass(frozen=True)
class Rates:
    """copy: bytes/s, read and write counted, of a 2 GiB copy. gemm: FLOP/s of an 8192^3 bf16 matrix product."""

    copy: float
    gemm: float

    def __str__(self) -> str:
        return f"copy {self.copy / 1e12:.2f} TB/s, gemm {self.gemm / 1e12:.0f} TFLOP/s"


def median_seconds(function: Callable[[], object]) -> float:
    """Median time of a launch. Like triton.testing.do_bench, which is used where it is installed."""
    try:
        from triton.testing import do_bench  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return _do_bench(function)
    return float(do_bench(function, warmup=WARM_UP_MS, rep=MEASURE_MS, return_mode="median")) * 1e-3


def measure_rates(device: torch.device) -> Rates:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy = 2 * COPY_BYTES / median_seconds(lambda: target.copy_(source))
    a, b = (torch.randn(GEMM, GEMM, device=device, dtype=torch.bfloat16) for _ in range(2))
    return Rates(copy, 2 * GEMM**3 / median_seconds(lambda: torch.matmul(a, b)))


def _do_bench(function: Callable[[], object]) -> float:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def time_once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call,unused-ignore]
        flush.zero_()
        start.record()
        function()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))  # ms

    def repeat(budget_ms: float) -> list[float]:
        return [time_once() for _ in range(max(5, int(budget_ms / estimate)))]

    function()
    estimate = max(statistics.median(time_once() for _ in range(5)), 1e-3)
    repeat(WARM_UP_MS)
    return statistics.median(repeat(MEASURE_MS)) * 1e-3
