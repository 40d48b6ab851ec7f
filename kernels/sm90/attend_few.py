"""The math role with 8 to 32 rows a CTA: one warpgroup, tokens and latents as the tall side (M) of its products.

    S^T[64 tokens x rows] = K[64 x 576] Q^T,  softmax down the tokens,  O^T[512 x rows] += V^T[512 x 64] P^T

A tile comes as three pieces of 192 columns, and each goes back to the KV warp as soon as its part of O^T is done. A
thread has two tokens of rows / 4 rows: rows e % 2 + 8 (e // 2) from `row` on. So a row's maximum and sum lie across all
four warps. The maximum is needed only where a score passes the row's reference by `lazy` log2 units, which one
barrier with a vote tells: the usual tile exchanges nothing but P. Sums meet at the end of the segment.
"""

from functools import partial

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
from .epilogue import finish_few, row_of
from .layouts import CHUNK, after_step, place, value_blocks


@cute.jit
def attend_few(c: cutlass.Constexpr, mmas, smem, bars, args, tid):
    qk, pv = mmas.qk.get_slice(0), mmas.pv.get_slice(0)
    matrices = 4 if c.rows % 16 == 0 else 2  # 8 x 8, of one stmatrix
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, matrices), c.dtype)
    store = cute.make_tiled_copy_C(atom, mmas.qk).get_slice(tid)
    p_by_token = cute.composition(smem.p, cute.make_layout((c.tile, c.rows), stride=(c.rows, 1)))
    fragment = cute.make_layout(((2, 2, c.rows // 8), 1, 1), stride=((1, 2, 4), 0, 0))
    blocks = c.latent // CHUNK  # of 64 latents, one WGMMA each
    out = cute.make_rmem_tensor((blocks * cute.size(fragment),), Float32)
    columns = c.rows // 4  # rows of this thread: columns of its accumulators
    me = bundle(
        tid=tid,
        token=(tid // 32) * 16 + (tid % 32) // 4,  # this thread's tokens of a tile: token and token + 8
        row=(tid % 4) * 2,  # see row_of
        query=qk.make_fragment_B(qk.partition_B(smem.query)),
        keys=qk.make_fragment_A(qk.partition_A(smem.third)),
        values=pv.make_fragment_A(pv.partition_A(value_blocks(c, smem.third))),
        p=pv.make_fragment_B(pv.partition_B(smem.p)),
        scores=cute.make_rmem_tensor(fragment, Float32),
        out=out,
        blocks=[cute.make_tensor(out.iterator + n * cute.size(fragment), fragment) for n in range(blocks)],
        store=store,
        store_p=store.partition_D(p_by_token),
        high=cute.make_rmem_tensor((columns,), Float32),  # reference + slack: a score beyond it moves the reference
        shift=cute.make_rmem_tensor((columns,), Float32),  # of P, finite
        total=cute.make_rmem_tensor((columns,), Float32),
        slack=cutlass.min(Float32(c.lazy) / args.scale_log2, Float32(1e30)),  # finite: -inf + slack stays -inf
    )
    body = partial(attend_segment, c, me, mmas, smem, bars, args)
    follow(bars, smem.segments, body, (Int32(0), Int32(0), Int32(0)))


@cute.jit
def attend_segment(c: cutlass.Constexpr, me, mmas, smem, bars, args, seg, state):
    slot, phase, query_phase = state
    masked = work.seen_by(c, args, seg, 0)  # tokens that every row sees: tiles beyond are masked
    if me.tid < c.rows:  # one division a thread; registers are scarce at 32 rows, and few tiles are masked
        smem.limit[me.tid] = work.seen_by(c, args, seg, me.tid)
    me.out.fill(0.0)
    me.total.fill(0.0)
    me.high.fill(-Float32.inf)
    me.shift.fill(0.0)
    cute.arch.barrier(barrier_id=Barrier.WARPGROUP, number_of_threads=128)
    cute.arch.mbarrier_wait(bars.query_full, query_phase)
    if seg.first >= seg.end:
        arrive(bars.query_empty)
    for step in cutlass.range(seg.first, seg.end, unroll=1):
        issue_scores(c, me, mmas, bars, slot, phase)
        warpgroup.wait_group(0)
        if step == seg.end - 1:  # the query rows are read no more: the next block's may come
            arrive(bars.query_empty)
        clear_dead(c, me, smem, seg, step, slot, phase)  # not behind the softmax: ptxas would compute P twice
        softmax(c, me, smem, args, masked, step)
        add_values(c, me, mmas, bars, slot, phase)
        slot, phase = after_step(c, slot, phase)
    finish_few(c, me, smem, args, seg)
    return slot, phase, query_phase ^ 1


@cute.jit
def issue_scores(c: cutlass.Constexpr, me, mmas, bars, slot, phase):
    """S^T = K Q^T, piece by piece as they arrive."""
    per_piece = c.rings["third"].columns // CHUNK
    for piece in c.pieces:
        at, turn = place(c, piece, slot, phase)
        cute.arch.mbarrier_wait(bars.third_full + at, turn)
        warpgroup.fence()
        keys = me.keys[None, None, None, at]
        issue(mmas.qk, me.scores, keys, me.query, piece.box == 0, 0, piece.box * per_piece, per_piece)
    warpgroup.commit_group()


@cute.jit
def softmax(c: cutlass.Constexpr, me, smem, args, masked, step):
    """P^T of the tile to shared memory. All four warps have multiplied the last one when this one's vote is over."""
    scale, s, columns = args.scale_log2, me.scores, cute.size(me.high)
    if (step + 1) * c.tile > masked:
        for e in cutlass.range_constexpr(columns):
            limit = smem.limit[row_of(me, e)]
            for v in cutlass.range_constexpr(2):
                if step * c.tile + me.token + 8 * v >= limit:
                    s[(e % 2, v, e // 2), 0, 0] = -Float32.inf
    tops = [cute.arch.fmax(s[(e % 2, 0, e // 2), 0, 0], s[(e % 2, 1, e // 2), 0, 0]) for e in range(columns)]
    passed = tops[0] > me.high[0]
    for e in cutlass.range_constexpr(1, columns):
        passed = passed | (tops[e] > me.high[e])
    if vote_any(passed) != 0:
        move(c, me, smem, scale, tops)
    for e in cutlass.range_constexpr(columns):
        gain = []
        for v in cutlass.range_constexpr(2):
            p = cute.math.exp2(s[(e % 2, v, e // 2), 0, 0] * scale - me.shift[e], fastmath=True)
            s[(e % 2, v, e // 2), 0, 0] = p
            gain.append(p)
        me.total[e] = me.total[e] + (gain[0] + gain[1])  # the tile's own sum first: kinder to small weights
    p16 = cute.make_rmem_tensor_like(s, c.dtype)
    p16.store(s.load().to(c.dtype))
    cute.copy(me.store, me.store.retile(p16), me.store_p)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=Barrier.WARPGROUP, number_of_threads=128)


def vote_any(flag):
    """1 if the flag is set in any of the warpgroup's threads. A barrier of them."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p, q; setp.ne.s32 q, {$r0}, 0; "
        f"barrier.cta.red.or.pred p, {int(Barrier.MOVED)}, 128, q; "
        "selp.s32 {$w0}, 1, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[flag.to(Int32)],
    )


@cute.jit
def move(c: cutlass.Constexpr, me, smem, scale, tops):
    """New references for the rows that a score has passed, and what the rows have so far made relative to them."""
    columns, lane = cute.size(me.high), me.tid % 32
    for e in cutlass.range_constexpr(columns):
        top = tops[e]
        for i in cutlass.range_constexpr(3):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=4 << i))
        if lane < 4:
            smem.top[row_of(me, e), me.tid // 32] = top
    cute.arch.barrier(barrier_id=Barrier.WARPGROUP, number_of_threads=128)
    four = cute.make_rmem_tensor((4,), Float32)
    alpha = cute.make_rmem_tensor((columns,), Float32)
    for e in cutlass.range_constexpr(columns):
        cute.autovec_copy(smem.top[row_of(me, e), None], four)
        top = cute.arch.fmax(cute.arch.fmax(four[0], four[1]), cute.arch.fmax(four[2], four[3]))
        high = top + me.slack if top > me.high[e] else me.high[e]
        # the reference in its own words, whatever the sum above rounded off
        alpha[e] = factor(me.high[e] - me.slack, high - me.slack, scale)
        shift = shift_of(c, high - me.slack, scale)
        me.high[e] = high
        me.shift[e] = Float32(0.0) if shift == -Float32.inf else shift  # no token yet: P = 2**-inf = 0
        me.total[e] = me.total[e] * alpha[e]
    for i in cutlass.range_constexpr(cute.size(me.out)):
        me.out[i] = me.out[i] * alpha[i % 2 + i // 4 % (c.rows // 8) * 2]


@cute.jit
def add_values(c: cutlass.Constexpr, me, mmas, bars, slot, phase):
    """O^T += V^T P^T; each piece is free as soon as its blocks are done."""
    per_piece = c.rings["third"].columns // CHUNK
    warpgroup.fence()
    for piece in c.pieces:
        at, _ = place(c, piece, slot, phase)
        for n in cutlass.range_constexpr(per_piece):
            block = piece.box * per_piece + n
            if const_expr(block < len(me.blocks)):  # the last chunk is rope
                issue(mmas.pv, me.blocks[block], me.values[None, None, None, n, at], me.p)
        warpgroup.commit_group()
    for i, piece in enumerate(c.pieces):
        at, _ = place(c, piece, slot, phase)
        warpgroup.wait_group(len(c.pieces) - 1 - i)
        arrive(bars.third_empty + at)


@cute.jit
def clear_dead(c: cutlass.Constexpr, me, smem, seg, step, slot, phase):
    """Zero the tile's rows past the request's end: P is 0 there, but V may be NaN or Inf."""
    valid = seg.kv_len - step * c.tile
    if valid < c.tile:
        for piece in c.pieces:
            at, _ = place(c, piece, slot, phase)
            zero_rows(c, smem.third, c.rings["third"].columns, at, valid, me.tid)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=Barrier.WARPGROUP, number_of_threads=128)
