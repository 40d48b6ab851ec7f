"""Run by test_fp8.py: what a launcher, compiled for the CPU, sees of an e4m3 tensor and of addresses."""

import json
import os
from typing import Any

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported; only host code is compiled

import torch
from cutlass import Int64, cute
from cutlass.cute.runtime import from_dlpack

from mla_cute.launch import converted


class Probe:
    @cute.jit
    def __call__(self, cache: cute.Tensor, one: Int64, other: Int64, found: cute.Tensor) -> None:
        values = (cache.iterator.toint(), one, cache.shape[0], cache.stride[0], other)
        for i, value in enumerate(values):
            found[i] = Int64(value)


def given(tensor: torch.Tensor) -> Any:
    return from_dlpack(tensor, enable_tvm_ffi=True).mark_layout_dynamic(leading_dim=tensor.ndim - 1)


def main() -> None:
    cache = torch.zeros(4, 16, 592, dtype=torch.uint8).view(torch.float8_e4m3fn)[..., :576]
    found = torch.zeros(5, dtype=torch.int64)
    arguments = given(cache), Int64(0), Int64(0), given(found)
    compiled = cute.compile(Probe(), *arguments, options="--enable-tvm-ffi")
    results: list[object] = []
    for tensor in (cache, converted(cache)):
        compiled(tensor, 2**40 + 5, 0, found)
        first, *others = found.tolist()
        results.append([first - cache.data_ptr(), *others])
    try:
        compiled(cache.to(torch.bfloat16), 0, 0, found)
    except (RuntimeError, TypeError, ValueError) as error:
        results.append(str(error))
    print(json.dumps(results))
