"""Measure cases and lay the results out, as a table and as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import mla_cute
from mla_cute.api import BatchMLADecodePagedTSWrapper
from mla_cute.bench.cases import BenchCase
from mla_cute.bench.timing import Rates, measure_rates, median_seconds
from mla_cute.problem import DTYPES, KV_LORA_RANK
from mla_cute.testing import make_case, reference_of

PAGE_SIZE = 64
SCALE = 192**-0.5  # of a model with 128 + 64 query dimensions before absorption
HEADER = f"{'B,SQ,H,S':>16} {'us':>9} {'TB/s':>6} {'of copy':>7} {'TFLOP/s':>8} {'of gemm':>7} {'error':>8}  kernel"


@dataclass(frozen=True)
class Measurement:
    """error: relative L2 of the timed run's output against the fp32 reference."""

    case: BenchCase
    seconds: float
    error: float
    kernel: str

    @property
    def correct(self) -> bool:
        return self.error <= DTYPES["bf16"].tolerance  # False for NaN

    @property
    def bandwidth(self) -> float:
        return self.case.bytes / self.seconds

    @property
    def flop_rate(self) -> float:
        return self.case.flops / self.seconds

    def row(self, rates: Rates) -> str:
        return (
            f"{self.case!s:>16} {self.seconds * 1e6:9.1f} "
            f"{self.bandwidth / 1e12:6.2f} {self.bandwidth / rates.copy:7.2f} "
            f"{self.flop_rate / 1e12:8.1f} {self.flop_rate / rates.gemm:7.2f} {self.error:8.1e}  {self.kernel}"
            f"{'' if self.correct else '  WRONG'}"
        )


def measure(case: BenchCase, device: torch.device) -> Measurement:
    """Time run(validate=False) of a planned wrapper, then compare what the last launch wrote."""
    lengths = [case.kv_len] * case.batch_size
    data = make_case(
        "random",
        lengths,
        q_lens=case.seq_len_q,
        num_heads=case.num_heads,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        device=device,
        bmm1_scale=SCALE,
    )
    wrapper = BatchMLADecodePagedTSWrapper()
    wrapper.plan(**data.plan())
    out = torch.full((*data.query.shape[:-1], KV_LORA_RANK), math.nan, dtype=torch.bfloat16, device=device)
    arguments = data.run(out=out, validate=False)

    def launch() -> None:
        wrapper.run(*data.tensors, **arguments)

    launch()
    seconds = median_seconds(launch)
    out.fill_(math.nan)
    launch()
    expected, _ = reference_of(data, compute=torch.float32)
    error = float((out.float() - expected).norm() / expected.norm())
    return Measurement(case, seconds, error, str(wrapper.kernel))


def run(
    cases: Iterable[BenchCase], device: torch.device, done: Callable[[Measurement], object] = lambda _: None
) -> tuple[list[Measurement], Rates]:
    """Measure all cases between two readings of the machine's rates, of which the mean is returned."""
    before = measure_rates(device)
    measurements = []
    for case in cases:
        measurements.append(measure(case, device))
        done(measurements[-1])
    after = measure_rates(device)
    return measurements, Rates((before.copy + after.copy) / 2, (before.gemm + after.gemm) / 2)


def as_data(measurements: Iterable[Measurement], rates: Rates, device: torch.device) -> dict[str, Any]:
    """What --json writes; seconds, bytes/s and FLOP/s."""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "mla_cute": mla_cute.__version__,
        "page_size": PAGE_SIZE,
        "copy": rates.copy,
        "gemm": rates.gemm,
        "cases": [
            asdict(m.case)
            | {"seconds": m.seconds, "bytes": m.case.bytes, "flops": m.case.flops, "error": m.error, "kernel": m.kernel}
            | {"of_copy": m.bandwidth / rates.copy, "of_gemm": m.flop_rate / rates.gemm}
            for m in measurements
        ],
    }
