"""An e4m3 cache beside a bf16 one, measured turn by turn: with bf16 and with e4m3 queries, each against a limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mla_cute.bench.cases import BenchCase
from mla_cute.bench.report import Measurement
from mla_cute.bench.shape import in_turn
from mla_cute.bench.timing import Rates

HEADER = (
    "e4m3: an e4m3 cache with a query of that type. FI fa3: FlashInfer's bf16 query over an e4m3 cache, as read on an "
    "H200.\ngain: bf16 cache / bf16 over e4m3.\n"
    f"{'B,SQ,H,S':>16} {'limit us':>8} {'bf16 over e4m3':>14} {'e4m3':>8} {'bf16':>8} {'FI fa3':>8} {'gain':>6} "
    f"{'TB/s':>5} {'of copy':>7} {'error':>8}"
)
TARGETS = {  # B, SQ, H, S: us at most, us of FlashInfer
    (128, 1, 16, 8192): (165, 896),
    (64, 1, 16, 4096): (56, 250),
    (16, 1, 16, 4096): (24, 103),
    (1, 1, 16, 32768): (17.5, 107),
    (128, 1, 64, 8192): (255, 900),
    (128, 1, 128, 4096): (260, 918),
    (64, 2, 128, 4096): (250, 941),
}


@dataclass(frozen=True)
class Target:
    """Seconds that either query may take at most over an e4m3 cache, and those of the peer; base: all in bf16."""

    base: BenchCase
    limit: float
    peer: float

    @property
    def cases(self) -> tuple[BenchCase, BenchCase, BenchCase]:
        """bf16 over e4m3, e4m3, bf16."""
        mixed = replace(self.base, kv_dtype="e4m3")
        return mixed, replace(mixed, q_dtype="e4m3"), self.base


@dataclass(frozen=True)
class Outcome:
    """Of a target's three cases, in their order."""

    target: Target
    measured: tuple[Measurement, Measurement, Measurement]

    @property
    def correct(self) -> bool:
        return all(each.correct for each in self.measured)

    def row(self, rates: Rates) -> str:
        mixed, fp8, base = self.measured
        over = max(mixed.seconds, fp8.seconds) > self.target.limit
        return (
            f"{mixed.case!s:>16} {self.target.limit * 1e6:8.1f} {mixed.seconds * 1e6:14.1f} {fp8.seconds * 1e6:8.1f} "
            f"{base.seconds * 1e6:8.1f} {self.target.peer * 1e6:8.1f} {base.seconds / mixed.seconds:6.3f} "
            f"{mixed.bandwidth / 1e12:5.2f} {mixed.bandwidth / rates.copy:7.3f} {max(mixed.error, fp8.error):8.1e}"
            f"{'  over' if over else ''}{'' if self.correct else '  WRONG'}"
        )

    def as_data(self, rates: Rates) -> dict[str, Any]:
        names = ("bf16 over e4m3", "e4m3", "bf16")
        cases = {name: each.as_data(rates) for name, each in zip(names, self.measured, strict=True)}
        return {"limit": self.target.limit, "flashinfer_fa3_fp8kv": self.target.peer, **cases}


def targets() -> Iterator[Target]:
    for shape, (limit, peer) in TARGETS.items():
        yield Target(BenchCase(*shape), limit * 1e-6, peer * 1e-6)


def measure(target: Target, device: torch.device) -> Outcome:
    (mixed, fp8, base), _ = in_turn(target.cases, device)
    return Outcome(target, (mixed, fp8, base))
