"""Run by test_work_device.py: what work_device.py, compiled for the CPU, finds for the cases on standard input."""

import json
import os
import sys
from typing import Any

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported; only host code is compiled

import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack
from mla_cute.kernels.common import work_device as work
from mla_cute.kernels.common.bundle import bundle


@cute.jit
def record(found: Any, cta: Any, seg: Any, count: Any) -> Any:
    for i, value in enumerate((cta, seg.request, seg.block, seg.first, seg.last, seg.steps, seg.slot, seg.parts)):
        found[count, i] = value
    return count + 1


class Probe:
    def __init__(self, rows: int, tile_tokens: int):
        self.c = bundle(rows=rows, tile_tokens=tile_tokens, block_cost=2, split_cost=5, evict_first_steps=1536)

    @cute.jit
    def __call__(
        self,
        seq_lens: cute.Tensor,
        qo_indptr: cute.Tensor,
        found: cute.Tensor,
        count: cute.Tensor,
        batch: Int32,
        heads: Int32,
        ctas: Int32,
        team: Int32,
        seq_len_q: Int32,
        batch_invariant: Int32,
    ) -> None:
        c = self.c
        args = bundle(
            seq_lens=seq_lens,
            qo_indptr=qo_indptr,
            batch=batch,
            causal=Int32(0),
            heads=heads,
            team=team,
            max_kv_len=Int32(1 << 30),
            seq_len_q=seq_len_q,
            batch_invariant=batch_invariant,
            max_entries=Int32(1 << 28),
            cta=Int32(0),
            total_q=Int32(1 << 30),
            divisors=work.divisors(ctas, team, heads),  # type: ignore[no-untyped-call]
        )
        steps, groups, longest, alone, blocks = (Int32(0) for _ in range(5))
        for b in range(batch):
            request = work.load_request(args, b)  # type: ignore[no-untyped-call]
            size, length = work.sizes_of(c, args, b, request)
            each = work.groups_of(args, size, team)
            steps, groups, longest = steps + each * length, groups + each, max(longest, length)
            alone, blocks = alone + size * length, blocks + size
        used = team
        if work.wasteful(steps, team, alone):  # type: ignore[no-untyped-call]
            used, steps, groups = Int32(1), alone, blocks
        at, entries = Int32(0), Int32(0)
        for cta in range(ctas):
            line = work.line_of(c, args, used, steps, groups, longest, cta)
            entries = line.entries
            first = work.load_request(args, Int32(0))  # type: ignore[no-untyped-call]
            place = work.Place(line.start, Int32(0), Int32(0), first)
            while place.pos < line.end:
                seg, place, tail = work.next_segment(c, args._replace(cta=cta), line, place)
                if seg.request >= 0:
                    parts = work.parts_of(args, line, seg, place.pos, tail)
                    at = record(found, cta, seg._replace(parts=parts), at)
        count[0], count[1] = at, entries


def given(tensor: torch.Tensor) -> Any:
    return from_dlpack(tensor).mark_layout_dynamic()


def main() -> None:
    results: list[tuple[list[list[int]], int]] = []
    compiled: dict[tuple[int, int], Any] = {}
    for case in json.load(sys.stdin):
        q_lens = case["q_lens"]
        offsets = [sum(q_lens[:b]) for b in range(len(q_lens) + 1)]
        found, count = torch.zeros(1 << 15, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        lengths = (torch.tensor(values, dtype=torch.int32) for values in (case["kv_lens"], offsets))
        tensors = [given(tensor) for tensor in (*lengths, found, count)]
        sizes = [len(q_lens), case["heads"], case["ctas"], case["team"], 0 if case["packed"] else q_lens[0]]
        sizes.append(int(case["batch_invariant"]))
        tiling = case["rows"], case["tile_tokens"]
        if tiling not in compiled:
            compiled[tiling] = cute.compile(Probe(*tiling), *tensors, *(Int32(size) for size in sizes))
        compiled[tiling](*tensors, *sizes)
        results.append((found[: int(count[0])].tolist(), int(count[1])))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
