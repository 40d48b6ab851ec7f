"""Random launches, each checked by a closed form on the device: python -m gpu.fuzz cuda 2000 (from tests/).

A kernel whose warps disagree on whether a tile has work hangs, so a test runs this as a child with a time limit.
"""

from __future__ import annotations

import faulthandler
import random
import sys
from dataclasses import replace
from typing import Any

import torch

from mla_cute.problem import MASKS
from mla_cute.testing import Case

from .harness import INPUTS, planned
from .oracle import Rows, Sequences

REPORT = 100  # launches between two synchronisations
CTAS = (None, *range(1, 33))
HEADS = (3, 6, 16)  # with 1, 3 and 5 query tokens: every kernel of few rows and of many, in both forms


class Fuzz:
    def __init__(self, device: torch.device, batch: int, length: int) -> None:
        self.random, self.batch, self.length = random.Random(0), batch, length
        self.pools = [
            Sequences(device, count=batch, length=length, page_size=page, picks=(0, 63, 64, length - 1), **INPUTS[name])
            for page, name in (
                *((16, "bf16"), (64, "fp16"), (256, "bf16")),
                *((64, "e4m3"), (128, "bf16 over e4m3"), (32, "fp16 over e4m3")),
            )
        ]
        self.wrappers: dict[tuple[object, ...], Any] = {}

    def lengths(self, batch: int) -> list[int]:
        """A mixture: most launches have short, long and empty requests side by side."""
        empty, longest = self.random.choice((0.0, 0.2, 0.9)), self.random.choice((1, 64, 200, self.length))
        return [0 if self.random.random() < empty else self.random.randint(0, longest) for _ in range(batch)]

    def case(self, sequences: Sequences, picking: bool) -> Case:
        batch, mask = self.random.randint(1, self.batch), self.random.choice(MASKS)
        lengths, heads = self.lengths(batch), self.random.choice(HEADS)
        how: dict[str, Any] = {"num_heads": heads, "picking": picking, "mask_type": mask}
        if self.random.random() < 0.5:
            tokens = self.random.choice((1, 1, 3))
            return sequences.case(lengths, q_lens=tokens, **how)
        deltas = [self.random.choice((0, 1, 2, 5)) for _ in lengths]
        indptr = torch.tensor([0, *deltas], device=sequences.device).cumsum(0, dtype=torch.int32)
        total = sum(deltas) + self.random.choice((0, 0, 3))  # rows past the last request too
        return sequences.case(lengths, q_lens=indptr, total_q=total, max_seq_len_q=5, **how)

    def wrapper(self, case: Case, ctas: int | None) -> Any:
        form = case.qo_indptr is None, case.max_seq_len_q, case.query.shape[-2]
        key = (ctas, case.kv_cache.shape[1], case.query.dtype, case.kv_cache.dtype, *form, case.mask_type)
        if key not in self.wrappers:
            full = replace(case, seq_lens=torch.empty(self.batch, dtype=torch.int32, device=case.query.device))
            self.wrappers[key] = planned(full, ctas=ctas)
        return self.wrappers[key]

    def launch(self) -> tuple[torch.Tensor, str]:
        sequences, picking = self.random.choice(self.pools), self.random.random() < 0.5
        case, ctas = self.case(sequences, picking), self.random.choice(CTAS)
        out, lse = self.wrapper(case, ctas).run(*case.tensors, **case.run(return_lse=True, validate=False))
        good = sequences.agrees(out, lse, Rows.of(case), picking=picking)
        form = f"query {tuple(case.query.shape)} {case.query.dtype}, {case.mask_type}, picking {picking}"
        form += f", page {case.kv_cache.shape[1]} of {case.kv_cache.dtype}"
        return good, f"{form}, ctas {ctas}, batch {len(case.seq_lens)}"


def main() -> int:
    faulthandler.dump_traceback_later(110, exit=True)
    device, launches = torch.device(sys.argv[1]), int(sys.argv[2])
    fuzz = Fuzz(device, *((300, 1500) if device.type == "cuda" else (7, 200)))
    for first in range(0, launches, REPORT):
        good, descriptions = zip(*(fuzz.launch() for _ in range(min(REPORT, launches - first))), strict=True)
        wrong = (~torch.stack(good)).nonzero().flatten().tolist()
        for index in wrong:
            print(f"launch {first + index} is wrong: {descriptions[index]}")
        if wrong:
            return 1
    print(f"{launches} launches are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
