"""Few requests, where fixed costs count: each time beside a bound made of the machine's rates and a launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from mla_cute.bench import report
from mla_cute.bench.cases import BenchCase
from mla_cute.bench.report import Measurement
from mla_cute.bench.timing import Rates

FIXED_SECONDS = 8e-6  # a launch, the first bytes from DRAM, and the merge of partial results
GEMM_SHARE = 0.85  # of the rate of a large matrix product, which attention's own can reach
HEADER = f"{'B,SQ,H,S':>24} {'us':>8} {'bound us':>8} {'ratio':>6} {'limit':>6} {'TB/s':>5} {'TFLOP/s':>7} {'error':>8}"


@dataclass(frozen=True)
class Bound:
    """At most limit * (FIXED_SECONDS + the time of bytes_factor * bytes, or of the products where that is longer)."""

    case: BenchCase
    limit: float = 1.6
    bytes_factor: float = 1.0

    def seconds(self, rates: Rates) -> float:
        loads, products = self.case.bytes / rates.copy, self.case.flops / (GEMM_SHARE * rates.gemm)
        return max(self.bytes_factor * loads, products) + FIXED_SECONDS


@dataclass(frozen=True)
class Bounded:
    bound: Bound
    measured: Measurement

    @property
    def correct(self) -> bool:
        return self.measured.correct

    def ratio(self, rates: Rates) -> float:
        return self.measured.seconds / self.bound.seconds(rates)

    def row(self, rates: Rates) -> str:
        notes = ("  over" if self.ratio(rates) > self.bound.limit else "") + ("" if self.correct else "  WRONG")
        found = self.measured
        return (
            f"{found.case!s:>24} {found.seconds * 1e6:8.1f} {self.bound.seconds(rates) * 1e6:8.1f} "
            f"{self.ratio(rates):6.2f} {self.bound.limit:6.2f} {found.bandwidth / 1e12:5.2f} "
            f"{found.flop_rate / 1e12:7.1f} {found.error:8.1e}{notes}"
        )

    def as_data(self, rates: Rates) -> dict[str, Any]:
        bound = {"bound_seconds": self.bound.seconds(rates), "ratio": self.ratio(rates), "limit": self.bound.limit}
        return self.measured.as_data(rates) | bound


def bounds() -> Iterator[Bound]:
    for heads, batch, kv_len in product((8, 16, 32, 64, 128), (1, 2, 4, 8, 16), (1024, 4096, 16384, 131072)):
        yield Bound(BenchCase(batch, 1, heads, kv_len))
    for heads in (16, 128):  # several query tokens of one request read its cache once
        yield Bound(BenchCase(1, 4, heads, 32768))
    yield Bound(BenchCase(64, 1, 16, 2552, (131072, *[512] * 63)), limit=1.0, bytes_factor=1.25)


def measure(bound: Bound, device: torch.device) -> Bounded:
    return Bounded(bound, report.measure(bound.case, device))
