"""The end of a segment: normalised rows to the output, or a partial result of a cut block to its workspace slot."""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr

from ..common import work_device as work
from ..common.math import half_scale, row_result, shift_of, with_output
from .config import Barrier
from .layouts import CHUNK


@cute.jit
def finish(c: cutlass.Constexpr, w: cutlass.Constexpr, me, smem, args, seg, whole, turn):
    """Both warpgroups call it with their columns of O. turn: 0 or 1 by turns: where the sums go."""
    for r in cutlass.range_constexpr(2):
        v = me.total[r]
        v = v + cute.arch.shuffle_sync_bfly(v, offset=1)
        v = v + cute.arch.shuffle_sync_bfly(v, offset=2)
        me.total[r] = v
        if me.tid % 4 == 0:
            smem.sum[me.row + 8 * r, w, turn] = v
    cute.arch.barrier(barrier_id=Barrier.SUM, number_of_threads=256)
    for r in cutlass.range_constexpr(2):
        me.total[r] = me.total[r] + smem.sum[me.row + 8 * r, 1 - w, turn]
    live, row = work.live_rows(c, args, seg), work.first_row(c, args, seg)
    if seg.last - seg.first < seg.steps:
        live = cutlass.min(live, args.slot_rows)  # a longer request than was planned must not leave its slot
        store_partial(c, w, me, smem, args, seg, live, row)
    else:
        for r in cutlass.range_constexpr(2):
            mine = me.row + 8 * r
            me.alpha[r], lse = row_result(shift_of(c, me.ref[r], smem.scale[w]), me.total[r], args)
            if const_expr(w == 0):
                if (me.tid % 4 == 0) & (mine < live) & (args.lse_scale != 0.0):
                    args.lse[row + mine] = lse
        if whole:
            with_output(args, partial(stage_output, c, me))
        else:
            with_output(args, partial(store_output, c, w, me, row, live))


@cute.jit
def slot_of(args, seg, live, row, teller):
    """The slot of a partial result. The CTA in which the block begins tells combine: its thread `teller` does."""
    if teller & (seg.parts > 0):
        for i, v in enumerate((row, live, seg.parts, seg.team)):
            args.split_info[4 * work.entry_of(args, seg.slot) + i] = v
    return seg.slot


@cute.jit
def trade(low, high, upper, offset: cutlass.Constexpr):
    """Lanes `offset` apart: the lower takes the `low` of both, the upper the `high`, each in the order of the lanes."""
    got = cute.arch.shuffle_sync_bfly(low if upper else high, offset=offset)
    return (got if upper else low), (high if upper else got)


@cute.jit
def store_partial(c: cutlass.Constexpr, w: cutlass.Constexpr, me, smem, args, seg, live, row):
    """O in fp16, times a power of two for each half of a row, and (shift, sum, what undoes the power, 0) of the half.
    Place 8n + 2i + v of it in the slot has column 64i + 2n + v: what a thread holds is 16 bytes, and what lanes of
    combine write is whole sectors.
    """
    slot = slot_of(args, seg, live, row, (w == 0) & (me.tid == 0))
    lane, groups = me.tid % 4, c.half // 8
    stat = cute.make_rmem_tensor((4,), Float32)
    stat.fill(0.0)
    eight, words = (cute.make_rmem_tensor((8,), dtype) for dtype in (Float32, c.part_dtype))
    for r in cutlass.range_constexpr(2):
        mine = me.row + 8 * r
        at = slot * args.slot_rows + mine
        tops = [Float32(0.0) for _ in range(4)]
        for k in cutlass.range_constexpr(groups):
            for v in cutlass.range_constexpr(2):
                i = (2 * k + v) % 4
                tops[i] = cute.arch.fmax(tops[i], abs(me.out[(v, r, k), 0, 0]))
        top = cute.arch.fmax(cute.arch.fmax(tops[0], tops[1]), cute.arch.fmax(tops[2], tops[3]))
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))
        gain, scale = half_scale(cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=2)))
        if (lane == 0) & (mine < live):
            stat[0], stat[1], stat[2] = shift_of(c, me.ref[r], smem.scale[w]), me.total[r], scale
            cute.autovec_copy(stat, cute.local_tile(args.part_stat, (4,), (2 * at + w,)))
        line = args.part_out.iterator + at.to(cutlass.Int64) * c.latent + (w * c.half + lane * 8)
        for k in cutlass.range_constexpr(groups // 4):
            for i in cutlass.range_constexpr(4):
                for v in cutlass.range_constexpr(2):
                    eight[2 * i + v] = me.out[(v, r, k + groups // 4 * i), 0, 0] * gain
            words.store(eight.load().to(c.part_dtype))
            if mine < live:
                cute.autovec_copy(words, cute.make_tensor((line + 32 * k).align(16), cute.make_layout(8)))


@cute.jit
def stage_output(c: cutlass.Constexpr, me, out):
    """O times the rows' factors (alpha) to the shared memory from which the KV warp stores it."""
    for k in cutlass.range_constexpr(c.half // CHUNK):
        part = cute.make_rmem_tensor(me.scores.layout, out.element_type)
        for e in cutlass.range_constexpr(cute.size(part)):
            part[e] = (me.out[k * cute.size(part) + e] * me.alpha[(e // 2) % 2]).to(out.element_type)
        words = cute.recast_tensor(part, c.dtype)
        cute.copy(me.store, me.store.retile(words), me.store_out[None, None, None, k])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()


@cute.jit
def store_output(c: cutlass.Constexpr, w: cutlass.Constexpr, me, row, live, out):
    """O times the rows' factors (alpha). Lane l of a quad holds columns 2l, 2l+1 of every group of 8. A 4 x 4 transpose
    in the quad gives each lane 8 columns in a row of every fourth group: one 16-byte store.
    """
    lane, odd, high = me.tid % 4, (me.tid % 2) != 0, (me.tid % 4) >= 2
    groups = cute.make_tensor(me.out.iterator, cute.make_layout((2, 2, 4, c.half // 32), stride=(1, 2, 4, 16)))
    for r in cutlass.range_constexpr(2):
        mine = me.row + 8 * r
        line = out.iterator + (row + mine).to(cutlass.Int64) * c.latent + (w * c.half + lane * 8)
        for k in cutlass.range_constexpr(c.half // 32):
            part = cute.make_rmem_tensor((2, 4), out.element_type)
            for i in cutlass.range_constexpr(4):
                for j in cutlass.range_constexpr(2):
                    part[j, i] = (groups[j, r, i, k] * me.alpha[r]).to(out.element_type)
            packed = cute.recast_tensor(part, Int32)
            v = [packed[i] for i in range(4)]
            for i in cutlass.range_constexpr(2):  # lanes 1 apart trade groups 2i, 2i+1
                v[2 * i], v[2 * i + 1] = trade(v[2 * i], v[2 * i + 1], odd, 1)
            for i in cutlass.range_constexpr(2):  # lanes 2 apart trade groups i, i+2
                v[i], v[i + 2] = trade(v[i], v[i + 2], high, 2)
            words = cute.make_rmem_tensor((4,), Int32)
            for i in cutlass.range_constexpr(4):
                words[i] = v[i]
            if mine < live:
                target = cute.make_tensor((line + 32 * k).align(16), cute.make_layout(8))
                cute.autovec_copy(cute.recast_tensor(words, out.element_type), target)


def row_of(me, e):
    """The row of a thread's e-th accumulator column."""
    return me.row + row_after(e)


def row_after(e):
    return e % 2 + e // 2 * 8


def latent_of(c, w, tid):
    """The first latent of a thread's accumulators in the swapped form. The second is the next one where values were
    widened, else 8 on; those of the other blocks lie CHUNK on.
    """
    return w * (c.latent // c.tiles) + (tid >> 5) * 16 + ((tid & 31) >> 2) * (2 if c.fp8 else 1)


@cute.jit
def finish_swapped(c: cutlass.Constexpr, w: cutlass.Constexpr, me, smem, args, seg):
    """finish() for the swapped form: rows are the columns of O^T, and their sums lie in all math warps. Thread r of
    warpgroup 0 sees to the numbers of row r.
    """
    for e in cutlass.range_constexpr(cute.size(me.total)):
        v = me.total[e]
        for i in cutlass.range_constexpr(3):
            v = v + cute.arch.shuffle_sync_bfly(v, offset=4 << i)
        if me.tid % 32 < 4:
            smem.sum[row_of(me, e), me.warp] = v
    meet(c)
    live, row, cut = work.live_rows(c, args, seg), work.first_row(c, args, seg), seg.last - seg.first < seg.steps
    slot, first = Int32(0), row
    if cut:
        live = cutlass.min(live, args.slot_rows)
        slot = slot_of(args, seg, live, row, (w == 0) & (me.tid == 0))
        first = slot * args.slot_rows
    if (w == 0) & (me.tid < live):
        sums = cute.make_rmem_tensor((c.math_warps,), Float32)
        cute.autovec_copy(smem.sum[me.tid, None], sums)
        stat = cute.make_rmem_tensor((2,), Float32)
        stat[0] = -Float32.inf if smem.high[me.tid] == -Float32.inf else smem.shift[me.tid]
        stat[1] = (sums[0] + sums[1]) + (sums[2] + sums[3])
        for i in cutlass.range_constexpr(4, c.math_warps, 2):
            stat[1] = stat[1] + (sums[i] + sums[i + 1])
        if cut:
            cute.autovec_copy(stat, cute.local_tile(args.part_stat, (2,), (first + me.tid,)))
        else:
            smem.alpha[me.tid], lse = row_result(stat[0], stat[1], args)
            if args.lse_scale != 0.0:
                args.lse[row + me.tid] = lse
    if cut:
        store_columns(c, w, me, args.part_out, first, live)
    else:
        meet(c)
        if const_expr(c.fp8):
            store_pairs(c, w, me, smem, args, first, live)
        else:
            with_output(args, partial(store_rows, c, me, smem, first, live))
    meet(c)  # the rows' numbers may be overwritten


def meet(c):
    """All math warps."""
    cute.arch.barrier(barrier_id=Barrier.SUM, number_of_threads=32 * c.math_warps)


@cute.jit
def store_columns(c: cutlass.Constexpr, w: cutlass.Constexpr, me, target, first, live):
    """O^T as it is to fp32 rows of `target` from `first` on. Eight lanes hold eight or sixteen neighbouring latents of
    a row, so single words or pairs fill whole sectors. The code runs once a block, mostly cold: its length counts. In
    fp16 it would be 57 instructions a row instead of 19, as much time as half of the bytes would save.
    """
    line = target.iterator + (first + me.row).to(cutlass.Int64) * c.latent + latent_of(c, w, me.tid)
    two = cute.make_rmem_tensor((2,), Float32)
    for e in cutlass.range_constexpr(c.rows // 4):
        if row_of(me, e) < live:
            for n in cutlass.range_constexpr(len(me.blocks)):
                place = line + (row_after(e) * c.latent + n * CHUNK)
                for v in cutlass.range_constexpr(2):
                    two[v] = me.blocks[n][(e % 2, v, e // 2), 0, 0]
                if const_expr(c.fp8):
                    cute.autovec_copy(two, cute.make_tensor(place.align(8), cute.make_layout(2)))
                else:
                    words = cute.make_tensor(place, cute.make_layout(2, stride=8))
                    words[0], words[1] = two[0], two[1]


@cute.jit
def store_pairs(c: cutlass.Constexpr, w: cutlass.Constexpr, me, smem, args, first, live):
    """Rows times their factor (alpha) to the output's from `first` on: a word of two latents a lane, and eight lanes
    fill a sector. Both dtypes are made of each: for code of its own for each, 64 rows lack registers.
    """
    line = args.out.iterator + (first + me.row).to(cutlass.Int64) * c.latent + latent_of(c, w, me.tid)
    two = [cute.make_rmem_tensor((2,), dtype) for dtype in (BFloat16, Float16)]
    for e in cutlass.range_constexpr(c.rows // 4):
        if row_of(me, e) < live:
            gain = smem.alpha[row_of(me, e)]
            for n in cutlass.range_constexpr(len(me.blocks)):
                for v in cutlass.range_constexpr(2):
                    x = me.blocks[n][(e % 2, v, e // 2), 0, 0] * gain
                    two[0][v], two[1][v] = x.to(BFloat16), x.to(Float16)
                bf16, fp16 = (cute.recast_tensor(pair, Int32)[0] for pair in two)
                place = line + (row_after(e) * c.latent + n * CHUNK)
                word = cute.make_tensor(cute.recast_ptr(place.align(4), dtype=Int32), cute.make_layout(1))
                word[0] = bf16 if args.out_bf16 != 0 else fp16


@cute.jit
def store_rows(c: cutlass.Constexpr, me, smem, first, live, out):
    """Rows times their factor (alpha) to the output's from `first` on. Eight lanes hold neighbouring
    latents of two rows, and again 8 latents on: two trades give each lane four latents of one row, and the warp 16.
    """
    upper, right = (me.tid & 4) != 0, (me.tid & 8) != 0
    latent = (me.tid // 32) * 16 + (me.tid & 8) + (me.tid & 16) // 4
    four = cute.make_rmem_tensor((4,), out.element_type)
    for g in cutlass.range_constexpr(c.rows // 8):
        mine = me.row + (me.tid & 4) // 4 + 8 * g
        gain = smem.alpha[mine]
        line = out.iterator + (first + mine).to(cutlass.Int64) * c.latent + latent
        for n in cutlass.range_constexpr(c.latent // CHUNK):
            pairs = [trade(me.blocks[n][(0, v, g), 0, 0], me.blocks[n][(1, v, g), 0, 0], upper, 4) for v in range(2)]
            for i in cutlass.range_constexpr(2):
                a, b = trade(pairs[0][i], pairs[1][i], right, 8)
                four[i], four[2 + i] = (a * gain).to(out.element_type), (b * gain).to(out.element_type)
            if mine < live:
                cute.autovec_copy(four, cute.make_tensor((line + n * CHUNK).align(8), cute.make_layout(4)))
