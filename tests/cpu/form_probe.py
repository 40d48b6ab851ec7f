"""Run by test_layouts.py: what the launcher, compiled for the CPU, makes of plain and packed arguments."""

import json
import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported; only host code is compiled

import torch
from cutlass import Int32, Int64, cute
from mla_cute.kernels.sm90.layouts import one_query

from .work_probe import given


class Probe:
    @cute.jit
    def __call__(self, plain: cute.Tensor, packed: cute.Tensor, seq_len_q: Int32, found: cute.Tensor) -> None:
        query = one_query(plain, packed, seq_len_q == 0, plain.element_type)
        for i, value in enumerate((*query.shape[:3], *query.stride[:3], query.iterator.toint())):
            found[i] = Int64(value)


def main() -> None:
    plain = torch.zeros(2, 3, 5, 576, dtype=torch.bfloat16)
    packed = torch.zeros(7, 8, 576, dtype=torch.bfloat16)[:, :4]
    found = torch.zeros(7, dtype=torch.int64)
    tensors = given(plain), given(packed)
    compiled = cute.compile(Probe(), *tensors, Int32(0), given(found))
    results = []
    for seq_len_q, taken in ((0, packed), (3, plain)):
        compiled(*tensors, seq_len_q, given(found))
        *values, address = found.tolist()
        results.append([*values, address - taken.data_ptr()])
    print(json.dumps(results))
