"""The roles of warpgroup 0 but the scheduler's: one warp gathers KV tiles by page id, two fetch query rows; and the
results of what has no tokens, which the scheduler warp writes with those two.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from ..common import work_device as work
from ..common.bundle import bundle
from ..common.schedule import follow
from ..common.work_device import LANES
from .layouts import CHUNK, after_step, copy_view, output_view, place, query_word

EVICT_FIRST, EVICT_NORMAL = 0x12F0000000000000, 0x1000000000000000  # TMA cache policies
WORD = 16  # bytes of one asynchronous copy and of one store


@cute.jit
def prefetch_table(c: cutlass.Constexpr, block_tables, batch, cta, tid):
    """Ask L2 for the first 1,024 columns of the table at once, a row a warp: page ids are wanted one memory latency
    later, when the lengths are known.
    """
    row, column = cta * (c.threads // LANES) + tid // LANES, tid % LANES * 32  # a 128-byte line a thread
    if (row < batch) & (column < block_tables.shape[1]):
        prefetch(block_tables[row, None].iterator + column)


def prefetch(pointer):
    """Ask L2 for a pointer's line."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[pointer.toint()])


@cute.jit
def load_kv(c: cutlass.Constexpr, tma, smem, bars, args, first):
    """The KV warp: the pieces of each step in their order, each as soon as its slot is free."""
    copies = bundle(**{name: ring_copy(c, name, ring, tma, smem) for name, ring in c.rings.items()})
    body = partial(load_segment, c, copies, tma, smem, bars, args)
    _, phase, owed = follow(bars, smem.segments, body, (Int32(0), Int32(1), Int32(-1)), first)
    if const_expr(not c.swapped):
        if owed >= 0:
            store_output(c, tma, smem, bars, args, phase, owed)


def ring_copy(c, name, ring, tma, smem):
    """(TMA atom, boxes of the cache, boxes of the ring's slots)"""
    atom = getattr(tma, name)
    box = (8, CHUNK, ring.columns // CHUNK, c.page_rows // 8)
    source = cute.local_tile(getattr(tma, "m_" + name), box, (0, 0, None, None, None))
    target = copy_view(c, getattr(smem, name), ring.columns)
    to, frm = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 4), cute.group_modes(source, 0, 4)
    )
    return atom, frm, to


@cute.jit
def load_segment(c: cutlass.Constexpr, copies, tma, smem, bars, args, seg, state):
    """A copy takes page_rows tokens: copy i of the request is the (i & mask)-th of the page in table column i >> shift.
    Lane l of the warp holds the page id of the l-th of the next 32 copies; L2 is asked for the 32 behind. Held in
    registers, those would be waited for before the first copy. owed: the first row of a block whose output the math
    warps leave in the slots of tile b, or -1; it is stored before they are filled.
    """
    slot, phase, owed = state
    per_tile, per_step = c.tile // c.page_rows, c.tile_tokens // c.page_rows
    lane = cute.arch.lane_idx()
    live = work.divide_up(seg.kv_len, c.page_rows)  # copies that hold a token; the others are left out
    policy = Int64(EVICT_FIRST) if seg.light != 0 else Int64(EVICT_NORMAL)
    table = args.block_tables[seg.request, None]
    step = seg.first
    while step < seg.end:
        base = step * per_step
        ids = table[page_column(args, base + lane, live)]
        prefetch(table.iterator + page_column(args, base + LANES + lane, live))
        for i in cutlass.range(cutlass.min(seg.end - step, LANES // per_step), unroll=1):
            for piece in c.pieces:
                if const_expr(piece == c.staging):
                    if owed >= 0:
                        store_output(c, tma, smem, bars, args, phase, owed)
                        owed = Int32(-1)
                at = i * per_step + piece.tile * per_tile
                count = cutlass.min(cutlass.max(live - base - at, 0), per_tile)
                gather(c, piece, copies, bars, *place(c, piece, slot, phase), count, ids, base, at, args, policy)
            slot, phase = after_step(c, slot, phase)
        step += LANES // per_step
    if const_expr(not c.swapped):
        if work.is_whole(c, args, seg):
            owed = work.first_row(c, args, seg)
    return slot, phase, owed


def page_column(args, copy, live):
    """Of the table, for a copy; of the last live one for copies past the end, so that no dead table column is read."""
    return cutlass.min(copy, live - 1) >> args.page_shift


@cute.jit
def gather(
    c: cutlass.Constexpr, piece: cutlass.Constexpr, copies, bars, slot, phase, count, ids, base, at, args, policy
):
    """Fill a slot with the `count` live copies of a tile; what the rest of the slot holds meets no output."""
    atom, source, target = getattr(copies, piece.ring)
    full = getattr(bars, piece.ring + "_full") + slot
    cute.arch.mbarrier_wait(getattr(bars, piece.ring + "_empty") + slot, phase)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, count * (c.page_rows * c.rings[piece.ring].columns * c.kv_bytes))
    for n in cutlass.range_constexpr(c.tile // c.page_rows):
        page = cute.arch.shuffle_sync(ids, at + n)
        if n < count:
            group = (base + at + n) & args.page_mask
            cute.copy(
                atom, source[None, piece.box, group, page], target[None, n, slot], tma_bar_ptr=full, cache_policy=policy
            )


@cute.jit
def store_output(c: cutlass.Constexpr, tma, smem, bars, args, phase, row):
    """Both halves of O from the slots of tile b to the output; afterwards the slots may be filled."""
    box = (c.rows, CHUNK, c.half // CHUNK)
    target = cute.local_tile(cute.domain_offset((row, 0, 0), tma.m_out), box, (0, 0, None))
    for w in cutlass.range_constexpr(2):
        slot = c.output_slots[w]
        source = output_view(c, smem.half, slot)
        frm, to = cpasync.tma_partition(
            tma.out, 0, cute.make_layout(1), cute.group_modes(source, 0, 3), cute.group_modes(target, 0, 3)
        )
        cute.arch.mbarrier_wait(bars.half_empty + slot, phase)
        cute.copy(tma.out, frm[None], to[None, w])
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def load_query(c: cutlass.Constexpr, tma, smem, bars, args, tid, first):
    """The query warps: the rows of each block, in one TMA copy where (token, head) rows lie evenly apart."""
    body = partial(query_segment, c, tma, smem, bars, args, tid)
    follow(bars, smem.segments, body, Int32(1), first)


@cute.jit
def query_segment(c: cutlass.Constexpr, tma, smem, bars, args, tid, seg, phase):
    warp_idx = cute.arch.make_warp_uniform(tid // LANES)
    packed = args.seq_len_q == 0
    batch = Int32(0) if packed else seg.request
    if args.even_rows & (warp_idx == 0):
        # rows past the request's last are zeros or another's: no output has a part in them
        first = seg.q_first * args.heads + seg.block * c.rows
        box = (c.rows, CHUNK, c.head_dim // CHUNK)
        source = cute.local_tile(cute.domain_offset((first, 0, 0, 0), tma.m_query), box, (0, 0, 0, None))
        target = cute.composition(smem.query, cute.make_layout(box))
        to, frm = cpasync.tma_partition(
            tma.query, 0, cute.make_layout(1), cute.group_modes(target, 0, 3), cute.group_modes(source, 0, 3)
        )
        cute.prefetch(tma.query, frm[None, batch])  # to L2, while the block before needs the shared memory
        cute.arch.mbarrier_wait(bars.query_empty, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bars.query_full, c.rows * c.head_dim * c.q_bytes)
        cute.copy(tma.query, frm[None, batch], to[None], tma_bar_ptr=bars.query_full)
    else:
        cute.arch.mbarrier_wait(bars.query_empty, phase)
        if not args.even_rows:
            copy_rows(c, smem, args, seg, batch, warp_idx, tid % LANES)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(bars.query_full)
    return phase ^ 1


@cute.jit
def copy_rows(c: cutlass.Constexpr, smem, args, seg, batch, warp_idx, lane):
    """A warp's share of the rows, by asynchronous copies of 16 bytes; rows past the last become zeros."""
    words = c.head_dim * c.q_bytes // WORD
    live = work.live_rows(c, args, seg)
    query, target = args.query, smem.query.iterator.toint()
    # lane l finds the address of the warp's l-th row
    flat = seg.block * c.rows + cutlass.min(warp_idx + lane * c.query_warps, live - 1)
    token = work.divide(flat, args.divisors.heads)
    head = flat - token * args.heads
    line = batch.to(Int64) * query.stride[0] + (seg.q_first + token).to(Int64) * query.stride[1]
    line = query.iterator.toint() + (line + head.to(Int64) * query.stride[2]) * c.q_bytes
    for i in cutlass.range((c.rows - warp_idx + c.query_warps - 1) // c.query_warps, unroll=1):
        row = warp_idx + i * c.query_warps
        source = cute.arch.shuffle_sync(line, i)
        size = (row < live).to(Int32) * WORD  # 0: the copy writes zeros
        for k in cutlass.range_constexpr((words + LANES - 1) // LANES):
            x = lane + k * LANES
            if x < words:
                offset = query_word(c, row, x)
                cute.arch.inline_ptx(
                    "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
                    read_only_args=[target + offset, source + x.to(Int64) * WORD, size],
                )
    cute.arch.inline_ptx("cp.async.wait_all;")
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()


@cute.jit
def fill_empty(c: cutlass.Constexpr, args, cta, tid):
    """out = 0 and LSE = -inf for requests without tokens, and for packed rows that belong to no request."""
    for b in cutlass.range(cta, args.batch, args.num_ctas, unroll=1):
        request = work.load_request(args, b)
        if request.kv_len == 0:
            token = request.q_first + b * args.seq_len_q
            fill_rows(c, args, token * args.heads, (token + request.q_len) * args.heads, tid)
    if args.seq_len_q == 0:
        begin = work.query_offset(args, args.qo_indptr[args.batch]) * args.heads
        end = args.total_q * args.heads
        each = (end - begin + args.num_ctas - 1) // args.num_ctas
        begin = cutlass.min(begin + cta * each, end)
        fill_rows(c, args, begin, cutlass.min(begin + each, end), tid)


@cute.jit
def fill_rows(c: cutlass.Constexpr, args, begin, end, tid):
    zeros = cute.make_rmem_tensor((8,), args.out.element_type)
    zeros.fill(0.0)
    words = c.latent * 2 // WORD
    for row in cutlass.range(begin, end, unroll=1):
        line = args.out.iterator + row.to(Int64) * c.latent
        if tid < words:
            cute.autovec_copy(zeros, cute.make_tensor((line + tid * 8).align(16), cute.make_layout(8)))
        if (tid == words) & (args.lse_scale != 0.0):
            args.lse[row] = -Float32.inf
