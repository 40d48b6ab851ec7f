"""Small launches for a memory checker: compute-sanitizer python -m gpu.sanitizer_cases cuda (from tests/).

Data are made and compared on the CPU, so that few kernels besides ours run under the checker. The caching allocator
must be off (PYTORCH_NO_CUDA_MEMORY_CACHING=1): only then has each tensor an end that the checker knows.
"""

from __future__ import annotations

import faulthandler
import sys
from dataclasses import fields, replace
from typing import Any

import torch

from mla_cute.testing import Case, make_case

from .harness import check, planned

E4M3 = torch.float8_e4m3fn
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "ragged, pages of 16": (make_case("random", [1, 15, 17, 0, 130], page_size=16, unused_page=2**31 - 1), {}),
    "pages of 32, fp16": (make_case("random", [33, 64], page_size=32, dtype=torch.float16, num_heads=5), {}),
    "pages of 64, causal tokens": (make_case("random", [70, 5, 129], q_lens=3, num_heads=40), {"ctas": 7}),
    "pages of 256": (make_case("random", [257, 1], page_size=256, num_heads=65), {"ctas": 3}),
    "empty requests, tables of -1": (make_case("uniform", [0, 0, 0]), {}),
    "packed": (make_case("random", [5, 3, 9, 0, 200], q_lens=(1, 3, 0, 2, 4), page_size=16), {"ctas": 5}),
    "packed, few rows": (make_case("random", [5, 3, 9, 0, 200], q_lens=(1, 3, 0, 2, 4), num_heads=4), {"ctas": 5}),
    "e4m3, pages of 16": (make_case("random", [1, 15, 17, 0, 130], page_size=16, dtype=E4M3), {}),
    "e4m3, many rows": (make_case("random", [70, 5, 129], q_lens=3, num_heads=40, dtype=E4M3), {"ctas": 7}),
    "bf16 over e4m3, packed": (make_case("random", [5, 200], q_lens=(3, 4), num_heads=6, kv_dtype=E4M3), {"ctas": 3}),
    "more splits than tiles": (make_case("random", [65], num_heads=128), {"ctas": 33}),
    "batch-invariant": (make_case("random", [2049, 70, 0, 20_000], q_lens=2, num_heads=40), {"batch_invariant": True}),
    "a table row for each request": (make_case("random", [128] * 40, q_lens=3, num_heads=8, page_size=16), {}),
}


def moved(case: Case, device: torch.device) -> Case:
    values: dict[str, Any] = {field.name: getattr(case, field.name) for field in fields(case)}
    tensors: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, torch.Tensor)}
    return replace(case, **tensors)


def main() -> int:
    faulthandler.dump_traceback_later(130, exit=True)  # killing the checker alone would leave this process behind
    device = torch.device(sys.argv[1])
    for name, (case, options) in CASES.items():
        there = moved(case, device)
        out, lse = planned(there, **options).run(*there.tensors, **there.run(return_lse=True, validate=False))
        check(case, out.cpu(), lse.cpu())
        print(name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
