"""Names of other releases of this API, as thin adapters."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_cute import validate as checks
from mla_cute.api import batch_mla_decode_with_paged_kv_cache, problem_of
from mla_cute.launch import size
from mla_cute.validate import Call


def prims_ts_batch_mla_decode_with_kv_cache(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    *,
    qo_indptr: Tensor | None = None,
    max_seq_len_q: int | None = None,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    mask_type: str = "causal",
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """FlashInfer 0.7.0's stand-alone launcher: batch_mla_decode_with_paged_kv_cache with a workspace and bounds given.

    max_seq_len is max_kv_len. Structure and overlap of the arguments are checked in every call, values on the device
    never: it does not wait for the device and, once the kernel is loaded, can be captured in a CUDA graph.
    """
    call = Call(query, kv_cache, block_tables, seq_lens, qo_indptr, bmm1_scale, bmm2_scale, out, None)
    checks.check_ranks(call)
    checks.check_devices(call, checks.resolve_device("query.device", query.device))
    checks.check_dims(kv_lora_rank, qk_rope_head_dim)
    checks.check_int("max_seq_len", max_seq_len)
    problem = problem_of(call, max_seq_len_q, max_seq_len, mask_type, out_dtype, "base2")
    checks.check_problem(problem)
    checks.check_run(problem, query.device, call, workspace_buffer)
    checks.check_workspace(workspace_buffer, size(problem, query.device).workspace_bytes, query.device)
    result = batch_mla_decode_with_paged_kv_cache(
        query,
        kv_cache,
        block_tables,
        seq_lens,
        qo_indptr=qo_indptr,
        max_seq_len_q=max_seq_len_q,
        mask_type=mask_type,
        max_kv_len=max_seq_len,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        out=out,
        out_dtype=out_dtype,
        workspace_buffer=workspace_buffer,
        validate=False,
    )
    assert isinstance(result, Tensor)
    return result
