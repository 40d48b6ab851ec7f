"""Run by test_combine.py: scales of fp16 partial results and in memory, which blocks CTAs share, made for the CPU."""

import json
import os
import sys

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported; only host code is compiled

import torch
from cutlass import Float32, Int32, Int64, cute
from mla_cute.kernels.combine import is_shared
from mla_cute.kernels.common.bundle import bundle
from mla_cute.kernels.common.math import half_scale, scale_by
from mla_cute.kernels.sm90.config import DecodeConfig
from mla_cute.kernels.sm90.layouts import DTYPES

from .work_probe import given


class Probe:
    def __init__(self, config: DecodeConfig):
        parts = config.invariant_parts
        self.c = bundle(latent=config.latent, invariant_parts=parts, part_dtype=DTYPES[config.part_type])

    @cute.jit
    def __call__(
        self,
        tops: cute.Tensor,
        scales: cute.Tensor,
        asked: cute.Tensor,
        shared: cute.Tensor,
        address: Int64,
        scaled: cute.Tensor,
    ) -> None:
        scaled[0] = scale_by(Float32(3.0), address)
        for i in range(tops.shape[0]):
            gain, scale = half_scale(tops[i])  # type: ignore[no-untyped-call]
            scales[i, 0], scales[i, 1] = gain, scale
        for i in range(asked.shape[0]):
            args = bundle(slot_rows=asked[i, 0], ctas=asked[i, 3], batch_invariant=asked[i, 4])
            shared[i] = Int32(is_shared(self.c, args, asked[i, 1], asked[i, 2]))


def main() -> None:
    questions = json.load(sys.stdin)
    tops = torch.tensor(questions["tops"], dtype=torch.float32)
    scales, answers = torch.zeros(len(tops), 2), []
    factor, scaled = torch.tensor([0.25]), torch.zeros(2)
    for rows in (64, 16):
        asked = torch.tensor(questions[str(rows)], dtype=torch.int32)
        shared = torch.zeros(len(asked), dtype=torch.int32)
        tensors = [given(tensor) for tensor in (tops, scales, asked, shared)]
        compiled = cute.compile(Probe(DecodeConfig("bf16", "bf16", 64, rows)), *tensors, Int64(0), given(scaled))
        for i, address in enumerate((0, factor.data_ptr())):
            compiled(*tensors, address, given(scaled[i : i + 1]))
        answers.append(shared.tolist())
    print(json.dumps([scales.tolist(), *answers, scaled.tolist()]))


if __name__ == "__main__":
    main()
