"""Cases with known answers, poisoned memory, comparisons: for the tests, `python -m mla_cute check` and bench.

Scores of a fixture case go only through the RoPE lanes, values only through the latent lanes, so its answer has a
closed form:

    uniform  every score 0: the mean of the visible tokens
    select   head h scores 192 at one token (see `select`), 0 elsewhere: that token where it is visible, else the mean
    deepneg  every raw score -262144, bmm1_scale 1/24: the mean, at an LSE near -10922
    two      raw scores 0, 2, 0, 2, ..., bmm1_scale 1/2
    random   normal data; the reference in fp64 is the answer. e4m3 holds them divided by one scale for a whole tensor,
             latent and RoPE lanes alike, which bmm1_scale and bmm2_scale then contain; the answer is that of the stored
             data

Latent lanes of token t of request b hold v(b, t) = ((7b + t + 5(t // 32)) % 32 - 16) / 16, exact in every dtype, as
are the RoPE lanes and queries of fixture cases.
Pages are scattered over a larger pool in which all that no request owns is NaN, tails of last pages included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mla_cute.problem import DTYPES, HEAD_DIM, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from mla_cute.reference import decode_reference, raw

Kind = Literal["random", "uniform", "select", "deepneg", "two"]
Order = Literal["random", "identity", "reversed"]
SCALES = {"random": HEAD_DIM**-0.5, "uniform": 1.0, "select": 1.0, "deepneg": 1 / 24, "two": 0.5}  # bmm1_scale
PEAK = 192.0  # score of a selected token: exp(-192) vanishes in every dtype
E4M3_UNIT = 6.5 / 448  # what e4m3 divides standard normal data by: it saturates at 6.5 standard deviations
BLOCK_TOKENS = 1 << 18  # tokens of the pool written at once: bounds memory in very long cases


@dataclass(frozen=True)
class Case:
    """Arguments of a decode call and, for fixture kinds, its exact result in fp64: the value [..., H] that all 512
    lanes of out have, and the natural LSE [..., H]."""

    query: Tensor
    kv_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    qo_indptr: Tensor | None
    max_seq_len_q: int
    max_kv_len: int
    mask_type: str
    bmm1_scale: float
    bmm2_scale: float
    out_value: Tensor | None = None
    out_lse: Tensor | None = None

    @property
    def out_dtype(self) -> torch.dtype:
        """The query's type; with e4m3 bf16."""
        return self.query.dtype if self.query.dtype.itemsize > 1 else torch.bfloat16

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.query, self.kv_cache, self.block_tables, self.seq_lens

    def call(self, **more: Any) -> dict[str, Any]:
        """Keyword arguments of the one-shot function after `tensors`, but for out_dtype, whose default is bf16."""
        named = ("qo_indptr", "max_seq_len_q", "max_kv_len", "mask_type", "bmm1_scale", "bmm2_scale")
        return {name: getattr(self, name) for name in named} | more

    def plan(self, **more: Any) -> dict[str, Any]:
        """Keyword arguments of the wrapper's plan()."""
        arguments: dict[str, Any] = {
            "device": self.query.device,
            "batch_size": len(self.seq_lens),
            "num_heads": self.query.shape[-2],
            "kv_lora_rank": KV_LORA_RANK,
            "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
            "page_size": self.kv_cache.shape[-2],
            "max_kv_len": self.max_kv_len,
            "max_seq_len_q": self.max_seq_len_q,
            "packed_query": self.qo_indptr is not None,
            "q_data_type": self.query.dtype,
            "kv_data_type": self.kv_cache.dtype,
            "o_data_type": self.out_dtype,
            "mask_type": self.mask_type,
        }
        return arguments | more

    def run(self, **more: Any) -> dict[str, Any]:
        """Keyword arguments of the wrapper's run() after `tensors`."""
        return {name: getattr(self, name) for name in ("qo_indptr", "bmm1_scale", "bmm2_scale")} | more


def make_case(
    kind: Kind,
    lengths: Sequence[int],
    *,
    q_lens: int | Sequence[int] = 1,
    num_heads: int = 16,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    mask_type: str = "causal",
    select: int | Sequence[int] = -1,
    scale: float = 1.0,
    bmm1_scale: float | None = None,
    bmm2_scale: float = 1.0,
    table_width: int | None = None,
    max_kv_len: int | None = None,
    permute: Order = "random",
    pool_factor: int = 3,
    unowned: float = math.nan,
    unused_page: int = -1,
) -> Case:
    """Build a case.

    lengths: kv_len of each request (0 allowed).
    q_lens: one number makes a fixed query [B, SQ, H, 576], a sequence a packed one [total_q, H, 576].
    dtype, kv_dtype: of the query and of the cache (None: the query's).
    select: the token that a head picks, negative from the end; of a sequence, entry h % 64 % len belongs to head h.
    scale: factor on a random query. bmm1_scale: None is the kind's own (random: 1/sqrt(576)). The case's bmm1_scale and
        bmm2_scale have the scales of random e4m3 data besides.
    table_width: columns (None: as many as max_kv_len needs); columns that hold no token are `unused_page`.
    permute: order of physical pages, in a pool of pool_factor times the pages needed.
    unowned: fills every element that no request owns; e4m3 has NaN for infinity.
    """
    kv_dtype = kv_dtype or dtype
    q_unit, k_unit = (
        of * E4M3_UNIT if kind == "random" and t.itemsize == 1 else 1.0 for t, of in ((dtype, scale), (kv_dtype, 1.0))
    )
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    batch, packed = len(lengths), not isinstance(q_lens, int)
    q_list = [q_lens] * batch if isinstance(q_lens, int) else list(q_lens)
    kv_len = torch.tensor(lengths, dtype=torch.int64, device=device)
    q_len = torch.tensor(q_list, dtype=torch.int64, device=device)
    longest = max([*lengths, 1]) if max_kv_len is None else max_kv_len
    table, pool_pages = _scatter(kv_len, page_size, longest, table_width, permute, pool_factor, unused_page, generator)

    owner = torch.repeat_interleave(torch.arange(batch, device=device), kv_len)  # request of every token
    position = _position(owner, kv_len)
    value = (((7 * owner + position + 5 * (position // 32)) % 32) - 16).double() / 16
    slot = table[owner, position // page_size].long() * page_size + position % page_size
    chosen = [select] if isinstance(select, int) else list(select)
    lanes = torch.tensor([chosen[j % len(chosen)] for j in range(QK_ROPE_HEAD_DIM)], device=device)
    targets = lanes + kv_len[:, None] * (lanes < 0)  # [B, 64]
    nothing = unowned if kv_dtype.itemsize > 1 or math.isfinite(unowned) else math.nan
    pool = torch.full((pool_pages, page_size, HEAD_DIM), nothing, dtype=kv_dtype, device=device)
    for first in range(0, len(owner), BLOCK_TOKENS):
        part = slice(first, first + BLOCK_TOKENS)
        if kind == "random":
            keys = torch.randn(len(owner[part]), HEAD_DIM, generator=generator, device=device)
        else:
            keys = _keys(kind, value[part], position[part], targets[owner[part]])
        raw(pool).view(-1, HEAD_DIM)[slot[part]] = raw(stored(keys / k_unit, kv_dtype))

    indptr = torch.tensor([0, *q_list], device=device).cumsum(0)
    query = stored(_query(kind, int(indptr[-1]), num_heads, scale, generator) / q_unit, dtype)
    case = Case(
        query=query if isinstance(q_lens, Sequence) else query.view(batch, q_lens, num_heads, HEAD_DIM),
        kv_cache=pool,
        block_tables=table,
        seq_lens=kv_len.to(torch.int32),
        qo_indptr=indptr.to(torch.int32) if packed else None,
        max_seq_len_q=q_lens if isinstance(q_lens, int) else max([*q_list, 1]),
        max_kv_len=longest,
        mask_type=mask_type,
        bmm1_scale=(SCALES[kind] if bmm1_scale is None else bmm1_scale) * q_unit * k_unit,
        bmm2_scale=bmm2_scale * k_unit,
    )
    if kind == "random":
        return case
    out, lse = _answer(case, kind, value, position, targets, kv_len, q_len)
    return replace(case, out_value=out.view(case.query.shape[:-1]), out_lse=lse.view(case.query.shape[:-1]))


def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """As `dtype`. What is too large for e4m3 becomes its largest number; other types have infinity."""
    return (values.clamp(-448, 448) if dtype.itemsize == 1 else values).to(dtype)


def _position(owner: Tensor, counts: Tensor) -> Tensor:
    """Index of every element within its owner's run."""
    return torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]


def _scatter(
    kv_len: Tensor,
    page_size: int,
    longest: int,
    width: int | None,
    permute: Order,
    pool_factor: int,
    unused_page: int,
    generator: torch.Generator,
) -> tuple[Tensor, int]:
    """Block table, and number of pages in the pool."""
    device = kv_len.device
    pages = (kv_len + page_size - 1) // page_size
    columns = max(1, -(-longest // page_size)) if width is None else width
    needed = int(pages.sum())
    pool_pages = max(1, pool_factor * needed)
    ids = torch.arange(needed, device=device)
    if permute == "random":
        ids = torch.randperm(pool_pages, generator=generator, device=device)[:needed]
    elif permute == "reversed":
        ids = ids.flip(0)
    table = torch.full((len(kv_len), columns), unused_page, dtype=torch.int32, device=device)
    table[torch.arange(columns, device=device) < pages[:, None]] = ids.to(torch.int32)
    return table, pool_pages


def _keys(kind: Kind, value: Tensor, position: Tensor, targets: Tensor) -> Tensor:
    """Fixture keys [tokens, 576]. value, position [tokens]; targets [tokens, 64]: the position that each lane
    selects."""
    keys = torch.zeros(len(value), HEAD_DIM, device=value.device)
    keys[:, :KV_LORA_RANK] = value[:, None]
    if kind == "select":
        keys[:, KV_LORA_RANK:] = (targets == position[:, None]).float()
    elif kind == "deepneg":
        keys[:, KV_LORA_RANK:] = 64
    elif kind == "two":
        keys[:, KV_LORA_RANK] = (position % 2).float()
    return keys


def _query(kind: Kind, rows: int, heads: int, scale: float, generator: torch.Generator) -> Tensor:
    if kind == "random":
        return scale * torch.randn(rows, heads, HEAD_DIM, generator=generator, device=generator.device)
    query = torch.zeros(rows, heads, HEAD_DIM, device=generator.device)
    if kind == "select":
        head = torch.arange(heads, device=query.device)
        query[:, head, KV_LORA_RANK + head % QK_ROPE_HEAD_DIM] = PEAK
    elif kind == "deepneg":
        query[..., KV_LORA_RANK:] = -64
    elif kind == "two":
        query[..., KV_LORA_RANK] = 2
    return query


def _answer(
    case: Case, kind: Kind, value: Tensor, position: Tensor, targets: Tensor, kv_len: Tensor, q_len: Tensor
) -> tuple[Tensor, Tensor]:
    """Closed form: of a row's visible tokens `count`, whose values sum to `high_sum`, score `high`; the others
    `low`."""
    heads = torch.arange(case.query.shape[-2], device=value.device)
    owner = torch.repeat_interleave(torch.arange(len(kv_len), device=value.device), q_len)  # request of every row
    visible = kv_len[owner]
    if case.mask_type == "causal":
        visible = (visible - q_len[owner] + _position(owner, q_len) + 1).clamp(min=0)
    visible = visible[:, None].expand(-1, len(heads))  # [rows, H]
    first = (kv_len.cumsum(0) - kv_len)[owner][:, None]

    def visible_sum(values: Tensor) -> Tensor:
        sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
        return sums[first + visible] - sums[first]

    low, high = {"select": (0.0, PEAK), "two": (0.0, 2.0), "deepneg": (-262144.0, -262144.0)}.get(kind, (0.0, 0.0))
    count, high_sum = torch.zeros_like(visible), visible.double() * 0
    if kind == "select" and len(value):
        target = targets[owner][:, heads % QK_ROPE_HEAD_DIM]
        count = ((target >= 0) & (target < visible)).long()
        high_sum = value[first * count + target * count] * count
    elif kind == "two":
        count, high_sum = visible // 2, visible_sum(value * (position % 2))
    weight = math.exp(case.bmm1_scale * (high - low))
    total = (visible - count).double() + weight * count.double()
    out = (visible_sum(value) - high_sum + weight * high_sum) / total.clamp(min=1.0) * case.bmm2_scale
    return out, case.bmm1_scale * low + total.log()


def reference_of(
    case: Case, lse_mode: str = "basee", compute: torch.dtype = torch.float64, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The reference's result for a case; out_dtype None: as `compute`."""
    return decode_reference(
        *case.tensors,
        qo_indptr=case.qo_indptr,
        mask_type=case.mask_type,
        bmm1_scale=case.bmm1_scale,
        bmm2_scale=case.bmm2_scale,
        out_dtype=out_dtype or compute,
        lse_mode=lse_mode,
        compute=compute,
    )


def expected_of(case: Case, lse_mode: str = "basee") -> tuple[Tensor, Tensor]:
    """What a case must give, in fp64: its closed form where it has one, else the reference."""
    if case.out_value is None or case.out_lse is None:
        return reference_of(case, lse_mode)
    lse = case.out_lse / math.log(2) if lse_mode == "base2" else case.out_lse
    return case.out_value[..., None].expand(*case.out_value.shape, KV_LORA_RANK), lse


def assert_close(
    out: Tensor,
    lse: Tensor | None,
    ref_out: Tensor,
    ref_lse: Tensor,
    kv_dtype: torch.dtype | None = None,
    lse_mode: str = "basee",
    lse_relative: float = 1e-6,
    q_dtype: torch.dtype | None = None,
) -> None:
    """Assert the pass lines: relative L2 within the tolerance of the coarser of kv_dtype (None: out's) and out's type
    over all rows and within four times that for each row; the LSE as assert_lse_close says; exactly 0 and -inf where
    nothing is seen. The cache's type counts because softmax weights are rounded to it, with e4m3 to fp16: fp16 output
    of a bf16 cache has an error of 1.4e-3."""
    tolerances = {getattr(torch, t.torch_name): t.tolerance for t in DTYPES.values()}
    limit = max(tolerances.get(dtype, 0.0) for dtype in (out.dtype, kv_dtype or out.dtype))
    assert out.shape == ref_out.shape, f"out has shape {tuple(out.shape)}, expected {tuple(ref_out.shape)}"
    empty = ref_lse == -math.inf
    assert not out.isnan().any(), f"out has NaN in {int(out.isnan().any(-1).sum())} of {empty.numel()} rows"
    assert (out[empty] == 0).all(), "out is not 0 in a row that sees no token"
    error = (out.double() - ref_out).norm(dim=-1)
    norm = ref_out.double().norm(dim=-1)
    total = float(error.norm() / norm.norm().clamp(min=1e-30))
    worst = float((error / norm.clamp(min=1e-30)).where(norm > 0, error).amax()) if error.numel() else 0.0
    assert total <= limit, f"relative L2 error {total:.2e} of out exceeds {limit:.0e} (worst row {worst:.2e})"
    assert worst <= 4 * limit, f"relative L2 error {worst:.2e} of one row exceeds {4 * limit:.1e} (all: {total:.2e})"
    if lse is not None:
        assert_lse_close(lse, ref_lse, lse_mode, lse_relative, q_dtype)


def assert_lse_close(
    lse: Tensor,
    ref_lse: Tensor,
    lse_mode: str = "basee",
    relative: float = 1e-6,
    q_dtype: torch.dtype | None = None,
) -> None:
    """Assert that the LSE is within 2e-5 natural units and `relative` of its size. Scores of an e4m3 query are FP8
    products, of which the tensor cores keep 13 bits or so while they add: 1e-3 and 2**-11.
    """
    unit, absolute = math.log(2) if lse_mode == "base2" else 1.0, 2e-5
    if q_dtype == torch.float8_e4m3fn:
        absolute, relative = 1e-3, 2.0**-11
    assert lse.shape == ref_lse.shape, f"lse has shape {tuple(lse.shape)}, expected {tuple(ref_lse.shape)}"
    empty = ref_lse == -math.inf
    assert (lse[empty] == -math.inf).all(), "lse is not -inf in a row that sees no token"
    error = (lse[~empty].double() - ref_lse[~empty]).abs() * unit
    excess = error - relative * ref_lse[~empty].abs() * unit
    assert bool((excess <= absolute).all()), f"lse is off by {float(error.amax()):.2e} natural units"


def assert_exact(out: Tensor, expected: Tensor) -> None:
    """Assert that out is within one unit in the last place of `expected` (fp64), per element."""
    info = torch.finfo(out.dtype)
    error = (out.double() - expected).abs()
    worst = error - info.eps * expected.abs()
    assert bool((worst <= info.tiny).all()), f"out differs by up to {float(error.nan_to_num(math.inf).amax()):.3e}"


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A tensor full of NaN: an element that a call leaves unwritten shows."""
    return torch.full(shape, math.nan, dtype=dtype, device=device)


def padded(tensor: Tensor, dim: int, extra: int) -> Tensor:
    """The same values as a slice of a NaN-filled (of integers: -1) buffer with `extra` more elements in `dim`."""
    shape = list(tensor.shape)
    shape[dim] += extra
    hole = math.nan if tensor.is_floating_point() else -1
    view = torch.full(shape, hole, dtype=tensor.dtype, device=tensor.device).narrow(dim, 0, tensor.shape[dim])
    return view.copy_(tensor)


class Guarded:
    """`tensor` between two canaries of `margin` bytes; `intact()` tells whether they still hold their pattern."""

    PATTERN = 0xA5

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", margin: int = 4096
    ) -> None:
        size = math.prod(shape) * dtype.itemsize
        self.bytes = torch.full((size + 2 * margin,), self.PATTERN, dtype=torch.uint8, device=device)
        self.margin, self.end = margin, margin + size
        self.tensor = self.bytes[margin : self.end].view(dtype).view(*shape)

    def intact(self) -> bool:
        head, tail = self.bytes[: self.margin], self.bytes[self.end :]
        return bool((head == self.PATTERN).all() and (tail == self.PATTERN).all())
