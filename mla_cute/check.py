"""Does this installation compute right answers on this machine? A table of cases, each against a plain fp64 formula."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_cute.api import batch_mla_decode_with_paged_kv_cache
from mla_cute.problem import DTYPES, INPUT_DTYPES, KV_LORA_RANK, OUT_DTYPES, PAGE_SIZES
from mla_cute.testing import Case, assert_close, make_case

LONG = 20_000


@dataclass(frozen=True)
class Row:
    """One line of the table: arguments of testing.make_case, output type, LSE base."""

    name: str
    lengths: tuple[int, ...]
    kind: str = "random"
    q_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    out_dtype: str = "bf16"
    lse_mode: str = "base2"
    case: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """error: relative L2 of out; problem: why the row failed, or None."""

    name: str
    error: float
    seconds: float
    problem: str | None


def rows() -> Iterator[Row]:
    """Each kernel, and each way to call it."""
    for page_size in PAGE_SIZES:
        edges = (page_size - 1, page_size, page_size + 1, 1000, 1)
        yield Row(f"page size {page_size}", edges, case={"page_size": page_size})
    for (q_dtype, kv_dtype), out_dtype in itertools.product(INPUT_DTYPES, OUT_DTYPES):
        inputs = q_dtype if q_dtype == kv_dtype else f"{q_dtype} over {kv_dtype}"
        sizes = ((16, 64), (16, 32, 64)) if kv_dtype == "e4m3" else ((16, 32, 64), (8, 16, 32, 64))
        for page_size, heads in itertools.product(*sizes):
            name = f"{inputs} to {out_dtype}, page size {page_size}, {heads} heads"
            how = {"page_size": page_size, "num_heads": heads}
            yield Row(name, (513, 100), "random", q_dtype, kv_dtype, out_dtype, "basee", how)
    for heads in (1, 65, 128):
        yield Row(f"{heads} heads", (700, 64), case={"num_heads": heads})
    for mask_type in ("causal", "dense"):
        yield Row(f"4 query tokens, {mask_type}", (4, 129, 700), case={"q_lens": 4, "mask_type": mask_type})
        ragged = {"q_lens": (5, 0, 2, 1), "mask_type": mask_type}
        yield Row(f"packed queries, {mask_type}", (5, 64, 300, 0), case=ragged)
    yield Row("empty requests", (0, 100, 0, 64))
    yield Row("one long request among short ones", (LONG, *[65] * 7))
    for kind in ("uniform", "select", "deepneg", "two"):
        yield Row(f"known answer: {kind}", (2, 63, 257, 1000), kind)
        yield Row(f"known answer, e4m3: {kind}", (2, 63, 257, 1000), kind, "e4m3", "e4m3")
    for batch in (1, 2, 7, 64):
        lengths = tuple(1000 * (b % 3) // 2 + b for b in range(1, batch + 1))
        yield Row(f"bf16 over e4m3, {batch} requests", lengths, kv_dtype="e4m3")


def run(row: Row, device: torch.device) -> Result:
    """One row through the one-shot function, with every check on and NaN in all that must not be read."""
    started, error, problem = time.perf_counter(), math.nan, None
    try:
        types = {name: getattr(torch, dtype.torch_name) for name, dtype in DTYPES.items()}
        dtypes = {"dtype": types[row.q_dtype], "kv_dtype": types[row.kv_dtype]}
        case = make_case(row.kind, row.lengths, **dtypes, device=device, **row.case)  # type: ignore[arg-type]
        shape = (*case.query.shape[:-1], KV_LORA_RANK)
        out = torch.full(shape, math.nan, dtype=types[row.out_dtype], device=device)
        more = {"out": out, "out_dtype": out.dtype, "return_lse": True, "lse_mode": row.lse_mode}
        _, lse = batch_mla_decode_with_paged_kv_cache(*case.tensors, **case.call(**more))
        expected, expected_lse = plain_attention(case)
        if row.lse_mode == "base2":
            expected_lse = expected_lse / math.log(2)
        error = float((out.double() - expected).norm() / expected.norm().clamp(min=1e-30))
        assert_close(out, lse, expected, expected_lse, case.kv_cache.dtype, row.lse_mode, q_dtype=case.query.dtype)
    except Exception as failure:  # a row that fails in any way is a line of the table, and the next row still runs
        problem = f"{type(failure).__name__}: {failure}"
    return Result(row.name, error, time.perf_counter() - started, problem)


def plain_attention(case: Case) -> tuple[Tensor, Tensor]:
    """softmax(scale * Q K^T) V in fp64, a query token at a time; natural LSE. Shares no code with the reference."""
    query = case.query.double().flatten(0, -3)
    out, lse = query.new_zeros(*query.shape[:2], KV_LORA_RANK), query.new_full(query.shape[:2], -math.inf)
    pages, dtype = case.kv_cache, case.kv_cache.dtype
    pages = pages.view(torch.uint8) if dtype.itemsize == 1 else pages  # torch does not index e4m3 on every device
    starts = range(0, len(query) + 1, case.query.shape[1]) if case.qo_indptr is None else case.qo_indptr.tolist()
    for request, length in enumerate(case.seq_lens.tolist()):
        token = torch.arange(length, device=query.device)
        keys = pages[case.block_tables[request, token // pages.shape[1]].long(), token % pages.shape[1]]
        keys = keys.view(dtype).double()
        for row in range(starts[request], starts[request + 1]):
            visible = length - (starts[request + 1] - 1 - row if case.mask_type == "causal" else 0)
            if visible <= 0:
                continue
            scores = case.bmm1_scale * query[row] @ keys[:visible].T
            out[row] = case.bmm2_scale * scores.softmax(-1) @ keys[:visible, :KV_LORA_RANK]
            lse[row] = scores.logsumexp(-1)
    return out.view(*case.query.shape[:-1], KV_LORA_RANK), lse.view(case.query.shape[:-1])
