"""Sequences whose attention has a closed form for every visible prefix: thousands of launches checked on the device.

Values live in the latent lanes, scores in the RoPE lanes alone. Token t of sequence s holds `value * COLUMNS`, value
random in [-1, 1), and in the last RoPE lane an integer k in 0..3. At a scale of ln 2 the query that is 1 in that lane
gives the token weight 2**k, exact in 16 bits: the answer is a quotient of two prefix sums. Token picks[j] holds 1 in
RoPE lane j besides: head h of the picking query is 192 in lane h % len(picks), which returns that token where the row
sees it. All of it is exact in e4m3 too.

`mla_cute.testing` has the cases that are built once and checked once; these here are for lengths that change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_cute.problem import HEAD_DIM, KV_LORA_RANK
from mla_cute.reference import raw
from mla_cute.testing import Case

SCALE = math.log(2)  # bmm1_scale of every case here: scores count in base 2
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a unit in the last place
# signs and powers of two without a period of 64 or 128 columns: a displaced block of columns is seen
COLUMNS = tuple((-1.0) ** (c * c // 7 % 2) * 2.0 ** -(c % 5 % 3) for c in range(KV_LORA_RANK))


@dataclass(frozen=True)
class Rows:
    """Of each query row: its sequence and how many tokens it sees."""

    sequence: Tensor
    visible: Tensor

    @staticmethod
    def of(case: Case, sequence: Tensor | None = None) -> Rows:
        """Rows of the case as its metadata stand now, without a synchronisation.

        sequence: of each request (None: its index).
        """
        lengths, device = case.seq_lens.long(), case.seq_lens.device
        row = torch.arange(case.query.shape[:-2].numel(), device=device)
        if case.qo_indptr is None:
            request, end = row // case.max_seq_len_q, (row // case.max_seq_len_q + 1) * case.max_seq_len_q
        else:
            request = torch.searchsorted(case.qo_indptr.long(), row, right=True) - 1
            request = request.clamp(max=len(case.qo_indptr) - 2)
            end = case.qo_indptr.long()[request + 1]  # rows past the last request see nothing
        visible = lengths[request] - (end - 1 - row if case.mask_type == "causal" else 0)
        visible = torch.where(row < end, visible, 0).clamp(min=0)
        return Rows(request if sequence is None else sequence[request], visible)


class Sequences:
    """`count` sequences of `length` tokens, pages permuted in a pool `pool_factor` times larger; NaN elsewhere."""

    def __init__(
        self,
        device: torch.device,
        *,
        count: int,
        length: int,
        page_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        picks: Sequence[int] = (0,),
        pool_factor: int = 3,
        seed: int = 0,
    ) -> None:
        random = torch.Generator(device).manual_seed(seed)
        values = torch.randint(-16, 16, (count, length), device=device, generator=random) / 16.0
        exponents = torch.randint(0, 4, (count, length), device=device, generator=random)
        width = -(-length // page_size)
        self.columns = torch.tensor(COLUMNS, device=device)
        kv_dtype = kv_dtype or dtype
        wide = torch.bfloat16 if kv_dtype.itemsize == 1 else kv_dtype  # torch computes with it
        tokens = torch.zeros(count, width * page_size, HEAD_DIM, device=device, dtype=wide)
        tokens[:, :length, :KV_LORA_RANK] = values[..., None].to(wide) * self.columns.to(wide)
        tokens[:, :length, -1] = exponents.to(wide)
        for lane, token in enumerate(picks):
            tokens[:, token, KV_LORA_RANK + lane] = 1
        tokens[:, length:] = math.nan
        pool = pool_factor * count * width
        self.device, self.dtype, self.picks = device, dtype, torch.tensor(picks, device=device)
        self.tokens = tokens.to(kv_dtype).view(-1, page_size, HEAD_DIM)
        self.kv_cache = torch.full((pool, page_size, HEAD_DIM), math.nan, device=device, dtype=kv_dtype)
        self.block_tables = torch.empty(count, width, dtype=torch.int32, device=device)
        self.place(self.kv_cache, torch.randperm(pool, device=device, generator=random)[: count * width])
        weights = torch.exp2(exponents.double())
        self._values = values.double()
        self._means = _prefix(self._values) / torch.arange(length + 1, device=device).clamp(min=1)
        self._weights = _prefix(weights)
        self._weighted = _prefix(weights * self._values) / self._weights.clamp(min=1)

    def place(self, kv_cache: Tensor, pages: Tensor) -> None:
        """Move the sequences to these pages of this pool."""
        raw(kv_cache)[pages] = raw(self.tokens)
        self.kv_cache, self.block_tables = kv_cache, pages.view(self.block_tables.shape).to(torch.int32)

    def case(
        self,
        seq_lens: Sequence[int] | Tensor,
        *,
        num_heads: int = 16,
        q_lens: int | Tensor = 1,
        total_q: int = 0,
        picking: bool = False,
        mask_type: str = "causal",
        sequence: Tensor | None = None,
        max_seq_len_q: int = 1,
    ) -> Case:
        """q_lens: query tokens of every request, or the qo_indptr of a packed query of total_q rows and max_seq_len_q.

        sequence: of each request (None: its index); several requests may share one.
        """
        if not isinstance(seq_lens, Tensor):
            seq_lens = torch.tensor(seq_lens, dtype=torch.int32, device=self.device)
        rows = (total_q,) if isinstance(q_lens, Tensor) else (len(seq_lens), q_lens)
        query = torch.zeros(*rows, num_heads, HEAD_DIM, device=self.device, dtype=torch.bfloat16)
        if picking:
            heads = torch.arange(num_heads, device=self.device)
            query[..., heads, KV_LORA_RANK + heads % len(self.picks)] = 192
        else:
            query[..., -1] = 1
        query = query.to(self.dtype)
        return Case(
            query=query,
            kv_cache=self.kv_cache,
            block_tables=self.block_tables[: len(seq_lens)] if sequence is None else self.block_tables[sequence],
            seq_lens=seq_lens,
            qo_indptr=q_lens if isinstance(q_lens, Tensor) else None,
            max_seq_len_q=q_lens if isinstance(q_lens, int) else max_seq_len_q,
            max_kv_len=self.block_tables.shape[1] * self.kv_cache.shape[-2],
            mask_type=mask_type,
            bmm1_scale=SCALE,
            bmm2_scale=1.0,
            out_value=None,
            out_lse=None,
        )

    def agrees(
        self, out: Tensor, lse: Tensor | None, rows: Rows, *, picking: bool = False, lse_mode: str = "base2"
    ) -> Tensor:
        """A boolean on the device, made without a synchronisation.

        out: equal where one token decides, else within one rounding; LSE within 1e-5 (1e-6 of large ones).
        """
        heads = out.shape[-2]
        sequence, visible = rows.sequence[:, None], rows.visible[:, None].expand(-1, heads)
        if picking:
            token = self.picks[torch.arange(heads, device=self.device) % len(self.picks)]
            sharp = token < visible
            value = torch.where(sharp, self._values[sequence, token], self._means[sequence, visible])
            total = torch.where(sharp, 192.0, visible.double().log2())
        else:
            sharp, value = visible <= 1, self._weighted[sequence, visible]
            total = self._weights[sequence, visible].log2()
        expected = value.float()[..., None] * self.columns
        # the closed form is of exact numbers; a kernel adds in float32, and rounds sums of parts to fp16
        tolerance = torch.where(sharp[..., None], 0.0, ROUNDING[out.dtype] * expected.abs() + 6e-5)
        good = ((out.view(expected.shape).float() - expected).abs() <= tolerance).all()
        if lse is None:
            return good
        total = total * (SCALE if lse_mode == "basee" else 1.0)
        got = lse.view(total.shape)
        near = (got.double() - total).abs() <= 1e-5 + 1e-6 * total.abs()
        return good & torch.where(total.isinf(), got == total, near).all()


def _prefix(x: Tensor) -> Tensor:
    """Sums of the first 0, 1, 2, ... entries of each row."""
    return torch.nn.functional.pad(x.cumsum(1), (1, 0))
