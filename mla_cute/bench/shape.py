"""What the shape of a batch costs: pairs of batches that should take the same time, measured turn by turn."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_cute.bench.cases import BenchCase
from mla_cute.bench.report import Decode, Measurement
from mla_cute.bench.timing import Rates, median_seconds

ROUNDS = 7
REST_SECONDS = 0.3  # before each timing: large 128-head batches run into the power cap, which would slow the next one
HEADER = f"{'case / base':44} {'us':>8} {'base us':>8} {'ratio':>6} {'limit':>6}"


@dataclass(frozen=True)
class Pair:
    """limit: the most that case may take, as a multiple of base."""

    name: str
    case: BenchCase
    base: BenchCase
    limit: float


@dataclass(frozen=True)
class Comparison:
    """Medians of the rounds; ratio: the median of each round's."""

    pair: Pair
    case: Measurement
    base: Measurement
    ratio: float

    @property
    def correct(self) -> bool:
        return self.case.correct and self.base.correct

    def row(self, rates: Rates) -> str:
        times = f"{self.case.seconds * 1e6:8.1f} {self.base.seconds * 1e6:8.1f}"
        notes = ("" if self.ratio <= self.pair.limit else "  over") + ("" if self.correct else "  WRONG")
        return f"{self.pair.name:44} {times} {self.ratio:6.3f} {self.pair.limit:6.2f}{notes}"

    def as_data(self, rates: Rates) -> dict[str, Any]:
        both = {"case": self.case.as_data(rates), "base": self.base.as_data(rates)}
        return {"name": self.pair.name, "ratio": self.ratio, "limit": self.pair.limit, **both}


def compare(pair: Pair, device: torch.device) -> Comparison:
    (case, base), rounds = in_turn((pair.case, pair.base), device)
    return Comparison(pair, case, base, statistics.median(mine / other for mine, other in rounds))


def in_turn(cases: Sequence[BenchCase], device: torch.device) -> tuple[list[Measurement], list[list[float]]]:
    """Each case's median over rounds in which they take turns, and the seconds of each round."""
    decodes = [Decode(case, device) for case in cases]
    rounds = [[_rested(decode) for decode in decodes] for _ in range(ROUNDS)]
    measured = [
        Measurement(case, statistics.median(times), decode.error(), str(decode.wrapper.kernel))
        for case, decode, times in zip(cases, decodes, zip(*rounds, strict=True), strict=True)
    ]
    return measured, rounds


def _rested(decode: Decode) -> float:
    time.sleep(REST_SECONDS)
    return median_seconds(decode)


def pairs() -> Iterator[Pair]:
    for heads in (16, 128):
        generator = random.Random(0)
        normal = tuple(max(1, round(generator.gauss(4096, 2048))) for _ in range(64))
        for name, lengths in (("varlen, normal", normal), ("one long among short", (131072, *[512] * 63))):
            mean, rest = divmod(sum(lengths), 64)
            equal = (*[mean + 1] * rest, *[mean] * (64 - rest))
            case, base = (BenchCase(64, 1, heads, mean, each) for each in (lengths, equal))
            yield Pair(f"{heads} heads: {name} / equal", case, base, 1.05)
    for shape in ((1, 1, 16, 32768), (128, 1, 16, 8192), (64, 1, 128, 4096)):
        small, large = (BenchCase(*shape, page_size=page_size) for page_size in (16, 64))
        yield Pair(f"{large}: page 16 / 64", small, large, 1.05)
    tails = tuple(4096 + offset for offset in range(-63, 64, 2))  # as many tokens as 64 x 4096, none a multiple of 64
    for heads in (16, 128):
        causal = BenchCase(64, 2, heads, 4096, tails)
        for name, lengths in (("dense", tails), ("dense, even", ())):
            base = BenchCase(64, 2, heads, 4096, lengths, mask_type="dense")
            yield Pair(f"{heads} heads, SQ=2: causal, tails / {name}", causal, base, 1.03)
