"""The math role in the swapped form: tokens and latents as the tall side (M) of its products, rows as the narrow one.

    S^T[64 tokens x rows] = K[64 x 576] Q^T,  softmax down the tokens,  O^T[512 x rows] += V^T[512 x 64] P^T

With 16-bit caches one warpgroup does a tile alone. With e4m3 caches two share a step of two tiles: warpgroup w owns the
scores and the softmax of tile w, and latents [256 w, 256 w + 256) of O^T, for which it multiplies both tiles by P^T
from shared memory. Values go through registers on their way into the tensor cores (widen.py), and keys, too, unless the
query is e4m3.

A tile comes as three pieces of 192 columns, and each goes back to the KV warp as soon as it was used. A thread has two
tokens of rows / 4 rows: rows e % 2 + 8 (e // 2) from `row` on. So a row's maximum and sum lie across all math warps.
The maximum is needed only where a score passes the row's reference by `lazy` log2 units, which one barrier with a vote
tells: the usual step exchanges nothing but P. Sums meet at the end of the segment.

In shared memory, of each row: high (reference + slack: a score beyond it moves the reference), shift (of P, finite),
alpha (what a move makes of O), limit (tokens seen), gain (where it has one: the scale of its scores), and each warp's
top and sum.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from ..common import work_device as work
from ..common.bundle import bundle
from ..common.math import shift_of
from ..common.schedule import follow
from .attend import arrive, factor, issue, zero_rows
from .config import Barrier
from .epilogue import finish_swapped, meet, row_of
from .layouts import CHUNK, after_step, place, value_blocks
from .widen import GROUP_BYTES, STEP, fill_fragment, lane_offsets, load_matrices, widen_query


@cute.jit
def attend(c: cutlass.Constexpr, w: cutlass.Constexpr, mmas, smem, bars, args, tid):
    """One math warpgroup, w-th of c.tiles; tid counts from 0 in it."""
    matrices = 4 if c.rows % 16 == 0 else 2  # 8 x 8, of one stmatrix
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, matrices), c.dtype)
    store = cute.make_tiled_copy_C(atom, mmas.qk).get_slice(tid)
    p_by_token = cute.composition(
        smem.p, cute.make_layout((c.tile, c.rows, c.tiles), stride=(c.rows, 1, c.rows * c.tile))
    )
    fragment = cute.make_layout(((2, 2, c.rows // 8), 1, 1), stride=((1, 2, 4), 0, 0))
    blocks = c.latent // CHUNK // c.tiles  # of 64 latents, one WGMMA each
    out = cute.make_rmem_tensor((blocks * cute.size(fragment),), Float32)
    qk, pv = mmas.qk.get_slice(0), mmas.pv.get_slice(0)
    me = bundle(
        tid=tid,
        warp=w * 4 + (tid >> 5),  # of the math warps
        token=(tid >> 5) * 16 + ((tid & 31) >> 2),  # this thread's tokens of its tile: token and token + 8
        row=(tid & 3) * 2,  # see row_of
        query=qk.make_fragment_B(qk.partition_B(smem.query)),
        p=pv.make_fragment_B(pv.partition_B(smem.p)),
        scores=cute.make_rmem_tensor(fragment, Float32),
        part=cute.make_rmem_tensor(fragment, Float32),  # of the scores, see c.sum_chunks
        out=out,
        blocks=[cute.make_tensor(out.iterator + n * cute.size(fragment), fragment) for n in range(blocks)],
        store=store,
        store_p=store.partition_D(p_by_token),
        total=cute.make_rmem_tensor((c.rows // 4,), Float32),
        **operands(c, mmas, smem, tid),
    )
    body = partial(attend_segment, c, w, me, mmas, smem, bars, args)
    follow(bars, smem.segments, body, (Int32(0), Int32(0), Int32(0)))


def operands(c, mmas, smem, tid):
    """How this thread gets keys and values: as descriptors of shared memory, or through fragments of its own."""
    qk, pv = mmas.qk.get_slice(0), mmas.pv.get_slice(0)
    base = smem.third.iterator.toint()
    keys, values = (base + offset for offset in lane_offsets(tid >> 5, tid & 31))
    layout = cute.make_layout(((2, 2, 2), 1, 2), stride=((1, 2, 4), 0, 8))
    return {
        "keys": keys if c.widen_keys else qk.make_fragment_A(qk.partition_A(smem.third)),
        "values": values if c.fp8 else pv.make_fragment_A(pv.partition_A(value_blocks(c, smem.third))),
        "fragments": [cute.make_rmem_tensor(layout, c.dtype) for _ in range(c.fragments)] if c.fp8 else [],
    }


@cute.jit
def attend_segment(c: cutlass.Constexpr, w: cutlass.Constexpr, me, mmas, smem, bars, args, seg, state):
    slot, phase, query_phase = state
    masked = work.seen_by(c, args, seg, 0)  # tokens that every row sees: tiles beyond are masked
    if (w == 0) & (me.tid < c.rows):  # once a row; registers are scarce at 32 rows, and few tiles are masked
        smem.limit[me.tid] = work.seen_by(c, args, seg, me.tid)
        smem.high[me.tid] = -Float32.inf
        smem.shift[me.tid] = Float32(0.0)
    me.out.fill(0.0)
    me.total.fill(0.0)
    cute.arch.mbarrier_wait(bars.query_full, query_phase)
    if const_expr(c.widen_keys):
        widen_query(c, smem, args.scale_log2, me.warp, me.tid & 31)
        cute.arch.fence_proxy("async.shared", space="cta")
    meet(c)
    if seg.first >= seg.end:
        arrive(bars.query_empty)
    for step in cutlass.range(seg.first, seg.end, unroll=1):
        issue_scores(c, w, me, mmas, bars, slot, phase)
        warpgroup.wait_group(0)
        if step == seg.end - 1:  # the query rows are read no more: the next block's may come
            arrive(bars.query_empty)
        clear_dead(c, w, me, smem, seg, step, slot, phase)  # not behind the softmax: ptxas would compute P twice
        softmax(c, w, me, smem, args, masked, step)
        add_values(c, w, me, mmas, bars, slot, phase)
        slot, phase = after_step(c, slot, phase)
    finish_swapped(c, w, me, smem, args, seg)
    return slot, phase, query_phase ^ 1


@cute.jit
def issue_scores(c: cutlass.Constexpr, w: cutlass.Constexpr, me, mmas, bars, slot, phase):
    """S^T = K Q^T of the own tile, piece by piece as they arrive."""
    per_piece = c.rings["third"].columns // CHUNK
    pieces = [(piece, *place(c, piece, slot, phase)) for piece in c.pieces if piece.tile == w]
    if const_expr(c.widen_keys):
        loads = []
        for piece, at, turn in pieces:
            for n in cutlass.range_constexpr(2 * per_piece):
                address = (me.keys ^ STEP if n % 2 else me.keys) + (at * c.slot_bytes + n // 2 * GROUP_BYTES)
                ready = partial(cute.arch.mbarrier_wait, bars.third_full + at, turn) if n == 0 else None
                k = (piece.box * per_piece * 2 + n) * 2
                loads.append(Load(address, me.scores, me.query, k, first=k == 0, ready=ready))
        multiply(me, mmas.qk, loads, False)
    else:
        groups = [range(n, min(n + c.sum_chunks, 9)) for n in range(0, 9, c.sum_chunks)]
        for group in groups:
            acc = me.scores if group[0] == 0 else me.part
            for chunk in group:
                piece, at, turn = pieces[chunk // per_piece]
                if const_expr(chunk % per_piece == 0):
                    cute.arch.mbarrier_wait(bars.third_full + at, turn)
                warpgroup.fence()
                keys = me.keys[None, None, None, at]
                issue(mmas.qk, acc, keys, me.query, chunk == group[0], chunk % per_piece, chunk, 1)
            warpgroup.commit_group()
            if const_expr(group[0] > 0):
                warpgroup.wait_group(0)
                me.scores.store(me.scores.load() + me.part.load())


class Load(NamedTuple):
    """Two WGMMAs: acc += A b[k, k + 1], A from what lies at `address` in shared memory (widen.py)."""

    address: Int32
    acc: cute.Tensor
    b: cute.Tensor
    k: int
    first: bool = False  # acc = A b
    ready: Callable[[], None] | None = None  # waits for what is to be read
    done: Callable[[], None] | None = None  # what follows when it is read


def multiply(me, mma, loads, transposed):
    """Issue the products, a group for each load; what the next one needs is read meanwhile."""

    def read(load):
        if load.ready:
            load.ready()
        return load_matrices(load.address, transposed)

    words, depth = read(loads[0]), len(me.fragments)
    for n, load in enumerate(loads):
        now, words = words, read(loads[n + 1]) if n + 1 < len(loads) else None
        if n >= depth:
            warpgroup.wait_group(depth - 1)  # the fragment is free
        fragment = me.fragments[n % depth]
        fill_fragment(fragment, now, transposed)
        if load.done:
            load.done()
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        for i in range(2):
            atom.set(warpgroup.Field.ACCUMULATE, not load.first or i > 0)
            cute.gemm(atom, load.acc, fragment[None, None, i], load.b[None, None, load.k + i], load.acc)
        warpgroup.commit_group()


@cute.jit
def softmax(c: cutlass.Constexpr, w: cutlass.Constexpr, me, smem, args, masked, step):
    """P^T of the own tile to shared memory. All math warps have multiplied the last one when this vote is over."""
    s, columns, first = me.scores, cute.size(me.total), (step * c.tiles + w) * c.tile
    if first + c.tile > masked:
        for e in cutlass.range_constexpr(columns):
            limit = smem.limit[row_of(me, e)]
            for v in cutlass.range_constexpr(2):
                if first + me.token + 8 * v >= limit:
                    s[(e % 2, v, e // 2), 0, 0] = -Float32.inf
    passed = top_of(s, 0) > smem.high[row_of(me, 0)]
    for e in cutlass.range_constexpr(1, columns):
        passed = passed | (top_of(s, e) > smem.high[row_of(me, e)])
    if vote_any(c, passed) != 0:
        move(c, w, me, smem, args)
    for e in cutlass.range_constexpr(columns):
        shift, scale = smem.shift[row_of(me, e)], scale_of(c, smem, args, row_of(me, e))
        gain = []
        for v in cutlass.range_constexpr(2):
            p = cute.math.exp2(s[(e % 2, v, e // 2), 0, 0] * scale - shift, fastmath=True)
            s[(e % 2, v, e // 2), 0, 0] = p
            gain.append(p)
        me.total[e] = add_now(me.total[e], gain[0] + gain[1])  # the tile's own sum first: kinder to small weights
    p16 = cute.make_rmem_tensor_like(s, c.dtype)
    p16.store(s.load().to(c.dtype))
    cute.copy(me.store, me.store.retile(p16), me.store_p[None, None, None, w])
    cute.arch.fence_proxy("async.shared", space="cta")
    meet(c)


def add_now(a, b):
    """a + b. Volatile: else it waits until behind the products, and all of P in registers with it."""
    return cute.arch.inline_ptx("add.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def top_of(s, e):
    return cute.arch.fmax(s[(e % 2, 0, e // 2), 0, 0], s[(e % 2, 1, e // 2), 0, 0])


def scale_of(c, smem, args, row):
    """What makes log2 units of a row's scores."""
    return smem.gain[row] if c.row_gains else args.scale_log2


def vote_any(c, flag):
    """1 if the flag is set in any thread of the math warps. A barrier of them."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p, q; setp.ne.s32 q, {$r0}, 0; "
        f"barrier.cta.red.or.pred p, {int(Barrier.MOVED)}, {32 * c.math_warps}, q; "
        "selp.s32 {$w0}, 1, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[flag.to(Int32)],
    )


@cute.jit
def move(c: cutlass.Constexpr, w: cutlass.Constexpr, me, smem, args):
    """New references for the rows that a score has passed, and what the rows have so far made relative to them."""
    columns = cute.size(me.total)
    for e in cutlass.range_constexpr(columns):
        top = top_of(me.scores, e)
        for i in cutlass.range_constexpr(3):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=4 << i))
        if me.tid % 32 < 4:
            smem.top[row_of(me, e), me.warp] = top
    meet(c)
    if (w == 0) & (me.tid < c.rows):
        tops = cute.make_rmem_tensor((c.math_warps,), Float32)
        cute.autovec_copy(smem.top[me.tid, None], tops)
        top, old = tops[0], smem.high[me.tid]
        for i in cutlass.range_constexpr(1, c.math_warps):
            top = cute.arch.fmax(top, tops[i])
        scale = scale_of(c, smem, args, me.tid)
        slack = cutlass.min(Float32(c.lazy) / scale, Float32(1e30))  # finite: -inf + slack stays -inf
        high = top + slack if top > old else old
        # the reference in its own words, whatever the sum above rounded off
        smem.alpha[me.tid] = factor(old - slack, high - slack, scale)
        shift = shift_of(c, high - slack, scale)
        smem.shift[me.tid] = Float32(0.0) if shift == -Float32.inf else shift  # no token yet: P = 2**-inf = 0
        smem.high[me.tid] = high
    meet(c)
    alpha = [smem.alpha[row_of(me, e)] for e in range(columns)]
    for e in cutlass.range_constexpr(columns):
        me.total[e] = me.total[e] * alpha[e]
    for i in cutlass.range_constexpr(cute.size(me.out)):
        me.out[i] = me.out[i] * alpha[i % 2 + i // 4 % (columns // 2) * 2]


@cute.jit
def add_values(c: cutlass.Constexpr, w: cutlass.Constexpr, me, mmas, bars, slot, phase):
    """O^T += V^T P^T; each piece is free as soon as it is read, or its blocks are done."""
    per_piece, own = c.rings["third"].columns // CHUNK, len(me.blocks)
    pieces = [(piece, *place(c, piece, slot, phase)) for piece in c.pieces]
    # (chunk of the piece, own block); the last chunk of a tile is rope
    chunks = [[(n, piece.box * per_piece + n - w * own) for n in range(per_piece)] for piece in c.pieces]
    chunks = [[(n, block) for n, block in of_piece if 0 <= block < own] for of_piece in chunks]
    if const_expr(c.fp8):
        loads = []
        for (piece, at, turn), mine in zip(pieces, chunks, strict=True):
            free = partial(arrive, bars.third_empty + at)
            if const_expr(len(mine) == 0):
                free()
            for half in cutlass.range_constexpr(2):
                for n, block in mine:
                    address = me.values + at * c.slot_bytes + (n + half * (STEP // 8 * per_piece)) * GROUP_BYTES
                    loads.append(Load(address, me.blocks[block], me.p[None, None, None, piece.tile], 2 * half))
            if const_expr(len(mine) > 0):
                ready = partial(cute.arch.mbarrier_wait, bars.third_full + at, turn) if piece.tile != w else None
                loads[-2 * len(mine)] = loads[-2 * len(mine)]._replace(ready=ready)
                loads[-1] = loads[-1]._replace(done=free)
        multiply(me, mmas.pv, loads, True)
        warpgroup.wait_group(0)
    else:
        warpgroup.fence()
        for (_, at, _), mine in zip(pieces, chunks, strict=True):
            for n, block in mine:
                issue(mmas.pv, me.blocks[block], me.values[None, None, None, n, at], me.p[None, None, None, 0])
            warpgroup.commit_group()
        for i, (_, at, _) in enumerate(pieces):
            warpgroup.wait_group(len(pieces) - 1 - i)
            arrive(bars.third_empty + at)


@cute.jit
def clear_dead(c: cutlass.Constexpr, w: cutlass.Constexpr, me, smem, seg, step, slot, phase):
    """Zero the own tile's rows past the request's end: P is 0 there, but V may be NaN or Inf."""
    valid = cutlass.max(seg.kv_len - (step * c.tiles + w) * c.tile, 0)
    if valid < c.tile:
        for piece in c.pieces:
            if piece.tile == w:
                at, _ = place(c, piece, slot, phase)
                zero_rows(c, smem.third, c.rings["third"].columns, at, valid, me.tid)
        if const_expr(not c.fp8):  # else read as it was written, and behind the vote
            cute.arch.fence_proxy("async.shared", space="cta")
            meet(c)
