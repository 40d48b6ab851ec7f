"""The roles of warpgroups 1 and 2: scores, softmax and P V of pairs of tiles (a, b).

Warpgroup "left" (w = 0) owns O columns 0-255 and the softmax of tile a, "right" (w = 1) columns 256-511 and that of
tile b. Each publishes its P in shared memory over the rope columns of its tile, which are dead by then; its own P it
multiplies from registers:

    tensor core | QK a     | QK b                | P_a V_a (left, right) | P_b V_b (right, left)  | QK a' ...
    left        | (waits)  | softmax a, publish  | frees L_a             | QK a' queued, then frees L_b, rope_b
    right       | issues QK b; P_a V_aR queued   | softmax b, publish    | frees R_a, rope_a      | frees R_b

Both use one reference per row, kept in shared memory. A row's reference moves only when a score passes it by `lazy`
log2 units: the usual tile needs no maximum across threads and no rescaling. The result is exact all the same, since
sums and O share the reference. A row that has seen no token has the reference -inf, a sum of 0 and O = 0.
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
from .config import Barrier
from .epilogue import finish
from .layouts import CHUNK, output_view, value_view

DEPTH_BITS = 256  # of one WGMMA


def issue(mma, acc, a, b, zero=False, a_chunk=0, b_chunk=0, chunks=None):
    """Issue acc += a b (acc = a b with zero) over the whole K mode, or over `chunks` 64-column chunks of it from
    a_chunk and b_chunk on; nothing waits or commits.
    """
    per_chunk = CHUNK * mma.op.a_dtype.width // DEPTH_BITS
    atom = cute.make_mma_atom(mma.op)  # set() changes the atom, so each call makes its own
    atom.set(warpgroup.Field.ACCUMULATE, not zero)
    for k in range(cute.size(a.shape[2]) if chunks is None else chunks * per_chunk):
        cute.gemm(atom, acc, a[None, None, a_chunk * per_chunk + k], b[None, None, b_chunk * per_chunk + k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)


def arrive(*bars):
    """One arrive a warp on each barrier."""
    with cute.arch.elect_one():
        for bar in bars:
            cute.arch.mbarrier_arrive(bar)


@cute.jit
def factor(old, new, scale):
    """2**(scale (old - new)); 1 where the reference did not move, also from -inf to -inf."""
    moved = cute.math.exp2((old - new) * scale, fastmath=True)
    return Float32(1.0) if old == new else moved


@cute.jit
def attend(c: cutlass.Constexpr, w: cutlass.Constexpr, mmas, smem, bars, args, tid):
    """One math warpgroup, w = 0 (left) or 1 (right); tid counts from 0 in it."""
    qk, pv = mmas.qk.get_slice(0), mmas.pv.get_slice(0)
    store = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), c.dtype), mmas.qk).get_slice(
        tid
    )
    scores = cute.make_rmem_tensor(mmas.qk.partition_shape_C((c.rows, c.tile)), Float32)
    own_p = cute.make_rmem_tensor(mmas.pv_own.partition_shape_A((c.rows, c.tile)), c.dtype)
    row = (tid // 32) * 16 + (tid % 32) // 4
    me = bundle(
        tid=tid,
        row=row,  # this thread's rows: row and row + 8
        coord=mmas.qk.get_slice(tid).partition_C(cute.make_identity_tensor((c.rows, c.tile))),
        query=qk.make_fragment_A(qk.partition_A(smem.query)),
        half=qk.make_fragment_B(qk.partition_B(smem.half)),
        rope=qk.make_fragment_B(qk.partition_B(smem.rope)),
        p=pv.make_fragment_A(pv.partition_A(smem.rope)),  # P of a tile lies where its rope columns were
        value=pv.make_fragment_B(pv.partition_B(value_view(c, smem.half))),
        out=cute.make_rmem_tensor(mmas.pv.partition_shape_C((c.rows, c.half)), Float32),
        scores=scores,
        own_p=own_p,
        own_p_acc=cute.make_tensor(own_p.iterator, scores.layout),  # the same registers in accumulator order
        store=store,
        store_p=store.partition_D(smem.rope),
        store_out=store.partition_D(output_view(c, smem.half, c.output_slots[w])),
        ref=cute.make_rmem_tensor((2,), Float32),
        total=cute.make_rmem_tensor((2,), Float32),
        alpha=cute.make_rmem_tensor((2,), Float32),
        limit=cute.make_rmem_tensor((2,), Int32),
        slack=cutlass.min(Float32(c.lazy) / args.scale_log2, Float32(1e30)),  # finite: -inf + slack stays -inf
    )
    if tid == 0:  # read for each tile: with the scale in a register, ptxas computes P of the right warpgroup twice
        smem.scale[w] = args.scale_log2
    cute.arch.barrier(barrier_id=Barrier.WARPGROUP + w, number_of_threads=128)
    follow(bars, smem.segments, partial(attend_segment, c, w, me, mmas, smem, bars, args), (Int32(0), Int32(0)))


@cute.jit
def attend_segment(c: cutlass.Constexpr, w: cutlass.Constexpr, me, mmas, smem, bars, args, seg, state):
    phase, query_phase = state
    end, masked, whole = seg.end, Int32(0), work.is_whole(c, args, seg)
    if const_expr(w == 1):
        masked = reset(c, w, me, smem, args, seg)
    cute.arch.mbarrier_wait(bars.query_full, query_phase)
    if seg.first >= end:
        arrive(bars.query_empty)
        if const_expr(w == 0):
            masked = reset(c, w, me, smem, args, seg)
    elif const_expr(w == 0):
        issue_scores(c, w, me, mmas, bars, phase, 0, 9)
        warpgroup.commit_group()
        warpgroup.wait_group(1)  # waits for nothing: tells ptxas that O is not in flight
        masked = reset(c, w, me, smem, args, seg)
        warpgroup.wait_group(0)
        arrive(bars.scored)
        for step in cutlass.range(seg.first, end - 1, unroll=1):
            left_half(c, w, me, mmas, smem, bars, args, seg, masked, step, phase)
            phase ^= 1
            issue_scores(c, w, me, mmas, bars, phase, 0, 2)  # queued behind P_b V_b
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            arrive(bars.half_empty + 3, bars.rope_empty + 1)
            issue_scores(c, w, me, mmas, bars, phase, 2, 9)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            arrive(bars.scored)
        arrive(bars.query_empty)
        left_half(c, w, me, mmas, smem, bars, args, seg, masked, end - 1, phase)
        warpgroup.wait_group(0)
        arrive(bars.rope_empty + 1)
        if not whole:
            arrive(bars.half_empty + 3)
        phase ^= 1
    else:
        for step in cutlass.range(seg.first, end, unroll=1):
            right_half(c, w, me, mmas, smem, bars, args, seg, masked, step, phase, step == end - 1, whole)
            phase ^= 1
    finish(c, w, me, smem, args, seg, whole, query_phase)
    if whole:  # O lies in the slot: the KV warp stores it before it fills the slot
        arrive(bars.half_empty + c.output_slots[w])
    return phase, query_phase ^ 1


@cute.jit
def reset(c: cutlass.Constexpr, w: cutlass.Constexpr, me, smem, args, seg):
    """Begin a block. Returns the number of tokens that every row sees: tiles beyond are masked."""
    for r in cutlass.range_constexpr(2):
        me.limit[r] = work.seen_by(c, args, seg, me.row + 8 * r)
    me.out.fill(0.0)
    me.total.fill(0.0)
    me.ref.fill(-Float32.inf)
    me.alpha.fill(1.0)
    if const_expr(w == 0):
        if me.tid < c.rows:
            smem.ref[me.tid] = -Float32.inf
        cute.arch.barrier(barrier_id=Barrier.WARPGROUP, number_of_threads=128)
    return work.seen_by(c, args, seg, 0)


@cute.jit
def left_half(c: cutlass.Constexpr, w: cutlass.Constexpr, me, mmas, smem, bars, args, seg, masked, step, phase):
    """Scores of tile a at hand: softmax, O_L += P_a V_a, then issue O_L += P_b V_b."""
    clear_dead(c, w, me, smem, seg, 2 * step, 0)  # not behind the softmax: ptxas would compute P twice
    moved = softmax(c, w, me, smem, args, masked, 2 * step)
    publish(c, w, me, bars, phase)
    rescale(me, moved)
    warpgroup.fence()
    issue(mmas.pv_own, me.out, me.own_p, me.value[None, None, None, 0])
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    arrive(bars.half_empty)
    cute.arch.mbarrier_wait(bars.p_full + 1, phase)
    rescale(me, adopt(w, me, smem))
    clear_dead(c, w, me, smem, seg, 2 * step + 1, 3)
    warpgroup.fence()
    issue(mmas.pv, me.out, me.p[None, None, None, 1], me.value[None, None, None, 3])
    warpgroup.commit_group()


@cute.jit
def right_half(
    c: cutlass.Constexpr, w: cutlass.Constexpr, me, mmas, smem, bars, args, seg, masked, step, phase, is_last, whole
):
    """Scores of tile b, O_R += P_a V_a behind them, softmax of b, O_R += P_b V_b."""
    issue_scores(c, w, me, mmas, bars, phase, 0, 9)
    warpgroup.commit_group()
    cute.arch.mbarrier_wait(bars.p_full, phase)
    moved = adopt(w, me, smem)
    clear_dead(c, w, me, smem, seg, 2 * step, 1)
    warpgroup.wait_group(1)  # waits for nothing: tells ptxas that O is not in flight
    rescale(me, moved)
    warpgroup.fence()
    issue(mmas.pv, me.out, me.p[None, None, None, 0], me.value[None, None, None, 1])
    warpgroup.commit_group()
    warpgroup.wait_group(1)
    arrive(bars.scored + 1)
    if is_last:  # the query rows are read no more: the next block's may come
        arrive(bars.query_empty)
    clear_dead(c, w, me, smem, seg, 2 * step + 1, 2)
    moved = softmax(c, w, me, smem, args, masked, 2 * step + 1)
    publish(c, w, me, bars, phase)
    warpgroup.wait_group(0)
    arrive(bars.half_empty + 1, bars.rope_empty)
    rescale(me, moved)
    warpgroup.fence()
    issue(mmas.pv_own, me.out, me.own_p, me.value[None, None, None, 2])
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    if not (is_last & whole):
        arrive(bars.half_empty + 2)


@cute.jit
def issue_scores(
    c: cutlass.Constexpr,
    w: cutlass.Constexpr,
    me,
    mmas,
    bars,
    phase,
    first: cutlass.Constexpr,
    last: cutlass.Constexpr,
):
    """Issue chunks [first, last) of S = Q K^T of the own tile, in the order in which its pieces arrive."""
    per_half = c.half // CHUNK
    for n in cutlass.range_constexpr(first, last):
        j, chunk = n // per_half, n % per_half
        if const_expr(n == 2 * per_half):
            cute.arch.mbarrier_wait(bars.rope_full + w, phase)
        elif const_expr(chunk == 0):
            cute.arch.mbarrier_wait(bars.half_full + (2 * w + j), phase)
        if const_expr(n == first or chunk == 0):
            warpgroup.fence()
        if const_expr(n == 2 * per_half):
            issue(mmas.qk, me.scores, me.query, me.rope[None, None, None, w], a_chunk=n, chunks=1)
        else:
            column = chunk if const_expr(j == w) else per_half + chunk
            keys = me.half[None, None, None, 2 * w + j]
            issue(mmas.qk, me.scores, me.query, keys, n == 0, column, chunk, 1)


@cute.jit
def softmax(c: cutlass.Constexpr, w: cutlass.Constexpr, me, smem, args, masked, tile):
    """P of the own tile to registers, relative to the rows' reference. Returns whether a row of this warp moved: then
    O is still to be multiplied by alpha.
    """
    scale, s = smem.scale[w], me.scores
    if (tile + 1) * c.tile > masked:
        for e in cutlass.range_constexpr(cute.size(s)):
            if me.coord[e][1] + tile * c.tile >= me.limit[(e // 2) % 2]:
                s[e] = -Float32.inf
    tops = []
    for r in cutlass.range_constexpr(2):
        four = [cute.arch.fmax(s[(k % 2, r, k // 2), 0, 0], s[(k % 2, r, 2 + k // 2), 0, 0]) for k in range(4)]
        for k in cutlass.range_constexpr(8, 16):
            four[k % 4] = cute.arch.fmax(four[k % 4], s[(k % 2, r, k // 2), 0, 0])
        tops.append(cute.arch.fmax(cute.arch.fmax(four[0], four[1]), cute.arch.fmax(four[2], four[3])))
    moved = cute.arch.vote_any_sync((tops[0] > me.ref[0] + me.slack) | (tops[1] > me.ref[1] + me.slack))
    if moved:
        for r in cutlass.range_constexpr(2):
            top = cute.arch.fmax(tops[r], cute.arch.shuffle_sync_bfly(tops[r], offset=1))
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2))
            new = top if top > me.ref[r] + me.slack else me.ref[r]
            move(me, r, new, scale)
            if cute.arch.lane_idx() % 4 == 0:
                smem.ref[me.row + 8 * r] = new
    for r in cutlass.range_constexpr(2):
        shift = shift_of(c, me.ref[r], scale)
        shift = Float32(0.0) if shift == -Float32.inf else shift  # no token yet: P = 2**-inf = 0
        sums = [me.total[r]] + [Float32(0.0) for _ in range(3)]
        for k in cutlass.range_constexpr(16):
            p = cute.math.exp2(s[(k % 2, r, k // 2), 0, 0] * scale - shift, fastmath=True)
            s[(k % 2, r, k // 2), 0, 0] = p
            sums[k % 4] = sums[k % 4] + p
        me.total[r] = (sums[0] + sums[1]) + (sums[2] + sums[3])
    me.own_p_acc.store(s.load().to(c.dtype))
    return moved


def move(me, r, new, scale):
    """Set the reference of row r; alpha is what O of the row is owed."""
    me.alpha[r] = factor(me.ref[r], new, scale)
    me.total[r] = me.total[r] * me.alpha[r]
    me.ref[r] = new


@cute.jit
def publish(c: cutlass.Constexpr, w: cutlass.Constexpr, me, bars, phase):
    """P of the own tile to shared memory for the other warpgroup, once all four warps have read its rope columns."""
    cute.arch.mbarrier_wait(bars.scored + w, phase)
    cute.copy(me.store, me.store.retile(me.own_p_acc), me.store_p[None, None, None, w])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    arrive(bars.p_full + w)


@cute.jit
def adopt(w: cutlass.Constexpr, me, smem):
    """Take over the references that the other warpgroup used for its tile; returns whether a row of this warp moved."""
    new = [smem.ref[me.row], smem.ref[me.row + 8]]
    moved = cute.arch.vote_any_sync((new[0] != me.ref[0]) | (new[1] != me.ref[1]))
    if moved:
        for r in cutlass.range_constexpr(2):
            move(me, r, new[r], smem.scale[w])
    return moved


@cute.jit
def rescale(me, moved):
    """O *= alpha; no WGMMA on O may be in flight."""
    if moved:
        for e in cutlass.range_constexpr(cute.size(me.out)):
            me.out[e] = me.out[e] * me.alpha[(e // 2) % 2]


@cute.jit
def clear_dead(c: cutlass.Constexpr, w: cutlass.Constexpr, me, smem, seg, tile, slot: cutlass.Constexpr):
    """Zero the rows of a tile past the request's end in the own half of V: P is 0 there, but V may be NaN or Inf."""
    valid = cutlass.max(seg.kv_len - tile * c.tile, 0)
    if valid < c.tile:
        zero_rows(c, smem.half, c.half, slot, valid, me.tid)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=Barrier.WARPGROUP + w, number_of_threads=128)


@cute.jit
def zero_rows(c: cutlass.Constexpr, slots, columns: cutlass.Constexpr, slot, first, tid):
    """Zero the rows of a slot from `first` on, by 128 threads: each does a 16-byte word of a row in all its chunks."""
    line, chunks = CHUNK * c.kv_bytes // 4, columns // CHUNK  # 4-byte words of a chunk's row
    words = line // 4
    zeros = cute.make_rmem_tensor((4,), Int32)
    zeros.fill(0)
    base = cute.make_ptr(Int32, slots.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
    for index in cutlass.range(tid, (c.tile - first) * words, 128, unroll=1):
        row = first + index // words
        offset = slot * (c.tile * chunks * line) + (row // 8) * (8 * chunks * line) + row % 8 * line + index % words * 4
        for n in cutlass.range_constexpr(chunks):
            cute.autovec_copy(zeros, cute.make_tensor((base + offset + n * 8 * line).align(16), cute.make_layout(4)))
