"""A graph of the first run after plan(), in a process that has launched nothing: python -m gpu.capture_first."""

from __future__ import annotations

import faulthandler
import itertools
import sys

import torch

from mla_cute.problem import KV_LORA_RANK
from mla_cute.testing import make_case, poisoned

from .harness import BF16, FP8, MIXED, ROWS, check, planned


def main() -> int:
    faulthandler.dump_traceback_later(130, exit=True)
    device = torch.device("cuda", torch.cuda.current_device())
    kernels = itertools.product((16, 32, 64), ROWS, (BF16,)), itertools.product((16, 64), (16, 64), (FP8, MIXED))
    for page_size, heads, inputs in itertools.chain(*kernels):  # a kernel each
        case = make_case("random", [300, 0, 65], num_heads=heads, page_size=page_size, **inputs, device=device)
        rows = case.query.shape[:-1]
        out = poisoned(*rows, KV_LORA_RANK, dtype=case.out_dtype, device=device)
        lse = poisoned(*rows, dtype=torch.float32, device=device)
        wrapper, graph = planned(case), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            wrapper.run(*case.tensors, **case.run(out=out, lse=lse, validate=False))
        graph.replay()
        check(case, out, lse)
        print(f"pages of {page_size}, {heads} heads, {inputs}: right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
