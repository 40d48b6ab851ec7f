"""Paged MLA decode and the merge of partial results in plain torch: the oracle of the tests, and server of CPU
tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mla_cute.problem import HEAD_DIM, KV_LORA_RANK, LSE_BASES
from mla_cute.validate import check_choice, check_tensor, fail

CHUNK_TOKENS = 16384
CHUNK_SCORES = 1 << 25  # scores held at once: bounds the memory of many rows x many tokens


def decode_reference(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    qo_indptr: Tensor | None = None,
    mask_type: str = "causal",
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    lse_mode: str = "basee",
    compute: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attend each request's query rows to its own pages, in `compute` precision.

    Shapes as in `batch_mla_decode_with_paged_kv_cache`; negative lengths count as 0. Only pages that hold tokens
    are read, and of the last page only its owned part. Rows that see nothing, packed rows beyond qo_indptr[-1]
    included, get out 0 and LSE -inf.

    Returns out [..., H, 512] in out_dtype (None: the query's, with e4m3 bf16) and lse [..., H] in `compute`, natural
    unless lse_mode is "base2".
    """
    out_dtype = out_dtype or (query.dtype if query.dtype.itemsize > 1 else torch.bfloat16)
    rows = query.flatten(0, -3)  # [rows, H, 576]
    pages = kv_cache.squeeze(1) if kv_cache.ndim == 4 else kv_cache
    out = torch.zeros(*rows.shape[:-1], KV_LORA_RANK, dtype=out_dtype, device=query.device)
    lse = torch.full(rows.shape[:-1], -math.inf, dtype=compute, device=query.device)
    starts = range(0, len(rows) + 1, query.shape[1]) if qo_indptr is None else qo_indptr.tolist()
    for b, length in enumerate(seq_lens[: len(starts) - 1].tolist()):
        first, last = starts[b], starts[b + 1]
        if length <= 0 or first == last:
            continue
        table = block_tables[b, : -(-length // pages.shape[1])]
        # rows see 0 .. bounds - 1; bottom-right: the last row sees all
        bounds = torch.full((last - first,), length, device=query.device)
        if mask_type == "causal":
            bounds = (bounds - torch.arange(last - first - 1, -1, -1, device=query.device)).clamp_(min=0)
        step = max(1, CHUNK_SCORES // (min(length, CHUNK_TOKENS) * rows.shape[1]))
        for r in range(first, last, step):
            part = slice(r, min(r + step, last))
            scaled = rows[part].to(compute) * bmm1_scale
            part_out, part_lse = _attend(scaled, pages, table, bounds[r - first : part.stop - first], length)
            out[part] = (part_out * bmm2_scale).to(out.dtype)
            lse[part] = part_lse
    if lse_mode == "base2":
        lse = lse / math.log(2)
    return out.view(*query.shape[:-1], KV_LORA_RANK), lse.view(query.shape[:-1])


def _attend(query: Tensor, pages: Tensor, table: Tensor, bounds: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """One request, softmax in chunks: query [n, H, 576], already scaled, and bounds [n] -> out [n, H, 512], LSE [n,
    H]."""
    page_size = pages.shape[1]
    peak = query.new_full(query.shape[:-1], -math.inf)
    total = torch.zeros_like(peak)
    acc = query.new_zeros(*query.shape[:-1], KV_LORA_RANK)
    chunk_pages = max(1, CHUNK_TOKENS // page_size)
    for column in range(0, len(table), chunk_pages):
        start = column * page_size
        gathered = raw(pages)[table[column : column + chunk_pages].long()].view(pages.dtype)
        tokens = gathered.reshape(-1, HEAD_DIM)[: length - start].to(query.dtype)
        scores = query @ tokens.T  # [n, H, tokens]
        hidden = torch.arange(start, start + len(tokens), device=query.device) >= bounds[:, None]
        scores.masked_fill_(hidden[:, None], -math.inf)
        new_peak = torch.maximum(peak, scores.amax(-1))
        shift = new_peak.masked_fill(new_peak == -math.inf, 0.0)  # sees nothing yet: exp(-inf - 0) = 0
        weights = torch.exp(scores - shift[..., None])
        decay = torch.exp(peak - shift)
        total = total * decay + weights.sum(-1)
        acc = acc * decay[..., None] + weights @ tokens[:, :KV_LORA_RANK]
        peak = new_peak
    seen = total > 0
    return acc / total.where(seen, 1.0)[..., None], (peak + total.log()).where(seen, -math.inf)


def raw(tensor: Tensor) -> Tensor:
    """The bytes of an e4m3 tensor, which torch does not index on every device; another one as it is."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor], lse_mode: str = "base2") -> tuple[Tensor, Tensor]:
    """Combine attention over disjoint sets of keys, e.g. the shards of decode context parallelism.

    outs: tensors [..., 512], computed with the same scales. lses: their LSE [...], all in the units of lse_mode,
    "base2" or "basee". A shard whose LSE is -inf has no weight, whatever its out holds; where all are -inf, out is 0
    and LSE -inf.

    Returns (out in the first out's dtype, lse in fp32). Raises TypeError or ValueError naming the argument.
    """
    _check_states(outs, lses, lse_mode)
    exp, log = (torch.exp2, torch.log2) if lse_mode == "base2" else (torch.exp, torch.log)
    lse = torch.stack([part.float() for part in lses])
    peak = lse.amax(0)
    weights = exp(lse - peak.masked_fill(peak == -math.inf, 0.0))
    total = weights.sum(0)
    merged = torch.zeros(outs[0].shape, dtype=torch.float32, device=outs[0].device)
    for weight, out in zip(weights / total.where(total > 0, 1.0), outs, strict=True):
        merged += (weight[..., None] * out.float()).where(weight[..., None] > 0, 0.0)
    return merged.to(outs[0].dtype), peak + log(total)


def _check_states(outs: Sequence[Tensor], lses: Sequence[Tensor], lse_mode: str) -> None:
    check_choice("lse_mode", lse_mode, LSE_BASES)
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (Sequence, Tensor)):  # shards may be stacked
            fail(name, "be a sequence of tensors", f"{parts!r} of type {type(parts).__name__}", TypeError)
        for index, part in enumerate(parts):
            check_tensor(f"{name}[{index}]", part)
    if len(outs) == 0:
        fail("outs", "have at least one tensor", 0)
    if len(lses) != len(outs):
        fail("lses", f"have {len(outs)} tensors, as outs has", len(lses))
    shape = outs[0].shape
    if shape[-1:] != (KV_LORA_RANK,):
        fail("outs[0]", f"have {KV_LORA_RANK} elements in its last dimension", list(shape))
    for name, parts, expected in (("outs", outs, shape), ("lses", lses, shape[:-1])):
        for index, part in enumerate(parts):
            if part.shape != expected:
                allowed = f"have shape {list(expected)}, as outs[0] has shape {list(shape)}"
                fail(f"{name}[{index}]", allowed, list(part.shape))
