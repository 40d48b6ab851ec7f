"""Run by test_combine.py: scales of fp16 partial results, and which blocks CTAs share, as compiled for the CPU."""

import json
import os
import sys

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported; only host code is compiled

import torch
from cutlass import Int32, cute
from mla_cute.kernels.combine import is_shared
from mla_cute.kernels.common.bundle import bundle
from mla_cute.kernels.common.math import half_scale
from mla_cute.kernels.sm90.config import DecodeConfig
from mla_cute.kernels.sm90.layouts import DTYPES

from .work_probe import given


class Probe:
    def __init__(self, config: DecodeConfig):
        parts = config.invariant_parts
        self.c = bundle(latent=config.latent, invariant_parts=parts, part_dtype=DTYPES[config.part_type])

    @cute.jit
    def __call__(self, tops: cute.Tensor, scales: cute.Tensor, asked: cute.Tensor, shared: cute.Tensor) -> None:
        for i in range(tops.shape[0]):
            gain, scale = half_scale(tops[i])  # type: ignore[no-untyped-call]
            scales[i, 0], scales[i, 1] = gain, scale
        for i in range(asked.shape[0]):
            args = bundle(slot_rows=asked[i, 0], batch_invariant=asked[i, 4])
            shared[i] = Int32(is_shared(self.c, args, asked[i, 1], asked[i, 2], asked[i, 3]))


def main() -> None:
    questions = json.load(sys.stdin)
    tops = torch.tensor(questions["tops"], dtype=torch.float32)
    scales, answers = torch.zeros(len(tops), 2), []
    for rows in (64, 16):
        asked = torch.tensor(questions[str(rows)], dtype=torch.int32)
        shared = torch.zeros(len(asked), dtype=torch.int32)
        tensors = [given(tensor) for tensor in (tops, scales, asked, shared)]
        cute.compile(Probe(DecodeConfig("bf16", "bf16", "bf16", 64, rows)), *tensors)(*tensors)
        answers.append(shared.tolist())
    print(json.dumps([scales.tolist(), *answers]))


if __name__ == "__main__":
    main()
