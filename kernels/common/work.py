"""Who computes what: the partition of a batch over CTAs, in plain Python.

`work_device.py` is the same on the GPU, where it runs on the live lengths in every launch; tests hold the two together.

A request with kv_len tokens and q_len query tokens is cut into *blocks* of `rows` query rows (token x head) and *steps* of
`tile_tokens` KV tokens. Its blocks x steps, block by block, and all requests one after the other, form one line of steps.
CTA k takes an even piece of that line, so the work is balanced whatever the lengths are. A piece of one block inside one CTA is
a *segment*. A block that lies in one CTA goes straight to the output; of a block that is cut, each CTA writes a partial result
to a slot of the workspace: slot 2k where the block began in an earlier CTA, slot 2k + 1 where it begins in CTA k. So there are
two slots a CTA at the most, whatever the batch. CTA k names the block that begins and is cut in it in split_info[k].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    request: int
    block: int
    first: int  # steps [first, last) of the block's `steps`
    last: int
    steps: int

    @property
    def split(self) -> bool:
        return self.last - self.first < self.steps

    def slot(self, cta: int) -> int:
        return 2 * cta + (self.first == 0)


class Split(NamedTuple):
    """What combine needs of a block that is cut: rows [row, row + rows) of the output, from `parts` slots."""

    row: int
    rows: int
    parts: int


def cta_start(total: int, ctas: int, cta: int) -> int:
    """First step of a CTA: the first total % ctas of them take one step more than the others."""
    each, rest = divmod(total, ctas)
    return cta * each + min(cta, rest)


def cta_of(total: int, ctas: int, step: int) -> int:
    """The CTA that owns a step."""
    each, rest = divmod(total, ctas)
    head = rest * (each + 1)
    return step // (each + 1) if step < head else rest + (step - head) // each


def slots_of(cta: int, parts: int) -> list[int]:
    """Slots of a block that begins in `cta` and is cut into `parts`, in the order in which combine adds them."""
    return [2 * cta + 1] + [2 * (cta + i) for i in range(1, parts)]


def partition(
    kv_lens: Sequence[int], q_lens: Sequence[int], num_heads: int, ctas: int, rows: int = 64, tile_tokens: int = 128
) -> tuple[list[list[Segment]], list[Split | None]]:
    """Segments of every CTA, and its split_info."""
    shape = [(-(-q * num_heads // rows), -(-max(n, 0) // tile_tokens)) for n, q in zip(kv_lens, q_lens, strict=True)]
    total = sum(blocks * steps for blocks, steps in shape)
    segments: list[list[Segment]] = [[] for _ in range(ctas)]
    splits: list[Split | None] = [None] * ctas
    begin, row = 0, 0
    for request, (blocks, steps) in enumerate(shape):
        for block in range(blocks if steps else 0):
            left = cta_of(total, ctas, begin)
            right = cta_of(total, ctas, begin + steps - 1)
            for cta in range(left, right + 1):
                first = max(cta_start(total, ctas, cta), begin) - begin
                last = min(cta_start(total, ctas, cta + 1), begin + steps) - begin
                segments[cta].append(Segment(request, block, first, last, steps))
            if right > left:
                live = min(rows, q_lens[request] * num_heads - block * rows)
                splits[left] = Split(row + block * rows, live, right - left + 1)
            begin += steps
        row += q_lens[request] * num_heads
    return segments, splits
