"""Measure cases between two readings of the machine's rates; lay the results out, as a table and as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch

import mla_cute
from mla_cute.api import BatchMLADecodePagedTSWrapper
from mla_cute.bench import anchors
from mla_cute.bench.cases import BenchCase
from mla_cute.bench.timing import Rates, measure_rates, median_seconds
from mla_cute.problem import DTYPES, KV_LORA_RANK
from mla_cute.testing import make_case, poisoned, reference_of

SCALE = 192**-0.5  # of a model with 128 + 64 query dimensions before absorption
HEADER = (
    f"{'B,SQ,H,S':>21} {'us':>8} {'TB/s':>5} {'of copy':>7} {'TFLOP/s':>7} {'of gemm':>7} {'error':>8} "
    f"{' '.join(f'{heading:>8}' for heading in anchors.PEERS.values())} {'best':>8} {'scaled by':>9} {'ratio':>6}"
    "  kernel"
)


class Result(Protocol):
    """A line of a table."""

    @property
    def correct(self) -> bool: ...
    def row(self, rates: Rates) -> str: ...
    def as_data(self, rates: Rates) -> dict[str, Any]: ...


Item = TypeVar("Item")
Line = TypeVar("Line", bound=Result)


class Decode:
    """A planned step over a case's tensors; a call launches it. Nothing is checked, so that kernels alone are timed."""

    def __init__(self, case: BenchCase, device: torch.device) -> None:
        self.data = make_case(
            "random",
            case.lengths,
            q_lens=case.seq_len_q,
            num_heads=case.num_heads,
            page_size=case.page_size,
            dtype=getattr(torch, DTYPES[case.q_dtype].torch_name),
            kv_dtype=getattr(torch, DTYPES[case.kv_dtype].torch_name),
            device=device,
            mask_type=case.mask_type,
            bmm1_scale=SCALE,
        )
        self.wrapper = BatchMLADecodePagedTSWrapper()
        self.wrapper.plan(**self.data.plan())
        self.out = poisoned(*self.data.query.shape[:-1], KV_LORA_RANK, dtype=self.data.out_dtype, device=device)
        self.arguments = self.data.run(out=self.out, validate=False)
        self()  # compiles, if need be

    def __call__(self) -> None:
        self.wrapper.run(*self.data.tensors, **self.arguments)

    def error(self) -> float:
        """Relative L2 of one more launch's output against the fp32 reference."""
        self.out.fill_(torch.nan)
        self()
        expected, _ = reference_of(self.data, compute=torch.float32)
        return float((self.out.float() - expected).norm() / expected.norm())


@dataclass(frozen=True)
class Measurement:
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

    @property
    def anchor(self) -> anchors.Anchor | None:
        return anchors.load().get(self.case)

    def row(self, rates: Rates) -> str:
        beside = f"{'':>{9 * len(anchors.PEERS) + 25}}"
        if self.anchor:
            peers = " ".join(f"{self.anchor.best(peer) * 1e6:8.1f}" for peer in anchors.PEERS)
            expected, scaled_by = self.anchor.expected(rates)
            beside = f"{peers} {expected * 1e6:8.1f} {scaled_by:>9} {expected / self.seconds:6.3f}"
        return (
            f"{self.case!s:>21} {self.seconds * 1e6:8.1f} "
            f"{self.bandwidth / 1e12:5.2f} {self.bandwidth / rates.copy:7.3f} "
            f"{self.flop_rate / 1e12:7.1f} {self.flop_rate / rates.gemm:7.3f} {self.error:8.1e} {beside}  "
            f"{self.kernel.split()[0]}"
            f"{'' if self.correct else '  WRONG'}"
        )

    def as_data(self, rates: Rates) -> dict[str, Any]:
        case = {**asdict(self.case), "bytes": self.case.bytes, "flops": self.case.flops}
        found = {"seconds": self.seconds, "error": self.error, "kernel": self.kernel}
        found |= {"of_copy": self.bandwidth / rates.copy, "of_gemm": self.flop_rate / rates.gemm}
        return case | found | ({"anchor": self.anchor.as_data(self.seconds, rates)} if self.anchor else {})


def measure(case: BenchCase, device: torch.device) -> Measurement:
    decode = Decode(case, device)
    return Measurement(case, median_seconds(decode), decode.error(), str(decode.wrapper.kernel))


def run(
    items: Iterable[Item],
    measure: Callable[[Item, torch.device], Line],
    device: torch.device,
    done: Callable[[], object] = lambda: None,
) -> tuple[list[Line], Rates]:
    """Measure all items between two readings of the machine's rates, of which the mean is returned."""
    before = measure_rates(device)
    results = []
    for item in items:
        results.append(measure(item, device))
        done()
    after = measure_rates(device)
    return results, Rates((before.copy + after.copy) / 2, (before.gemm + after.gemm) / 2)


def as_data(results: Iterable[Result], rates: Rates, gpu: str) -> dict[str, Any]:
    """What --json writes; seconds, bytes/s and FLOP/s."""
    versions = {"torch": torch.__version__, "mla_cute": mla_cute.__version__}
    return {"gpu": gpu, **versions, **asdict(rates), "cases": [result.as_data(rates) for result in results]}
