"""Merge the partial results of blocks that were cut between CTAs, in a fixed order. Arch-neutral.

Launched with programmatic dependent launch behind decode; a few CTAs an SM, whatever the batch. With m the largest
shift of a row's parts,
    out = sum_i 2**(shift_i - m) O_i / sum_i 2**(shift_i - m) sum_i,   LSE = m + log2 of that denominator.

O_i is fp32, or fp16 with a scale for each half of a row and its columns in another order (see store).

All CTAs share all rows. Of a block of few parts a warp merges half a row. Of a block of many, all warps of a CTA take
one piece of a row: MERGE_LANES lanes with 16 bytes each read a part, in THREADS / MERGE_LANES streams. How many parts
are many depends on how many rows have as many: see is_shared.
"""

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute import FastDivmodDivisorV2
from cutlass.memory import SmemAllocator

from .common.bundle import bundle
from .common.math import row_result, scale_by, with_output
from .common.work import NO_CUT, ONE_GROUP
from .common.work_device import LANES

THREADS, WARPS = 256, 8
MERGE_LANES = 16  # half a warp: with a whole one, few rows would leave half of the CTAs without work
HALF = 256  # columns of a row that a warp merges alone
FEW_PARTS = 8  # up to which it does so, whatever the rows
# what combine takes of decode's arguments
READS = (
    *("out", "lse", "part_out", "part_stat", "split_info"),
    *("slot_rows", "batch_invariant", "out_bf16", "max_entries", "scale2_address", "out_scale", "lse_scale"),
)


def arguments(given, ctas):
    """On the host, of decode's arguments. ctas: combine's own."""
    return bundle(
        **{name: getattr(given, name) for name in READS}, ctas=ctas, by_slot=FastDivmodDivisorV2(given.slot_rows)
    )


class Split(NamedTuple):
    slot: Int32  # of the first part, see load_part
    row: Int32  # rows [row, row + rows) of the output
    rows: Int32
    parts: Int32
    stride: Int32  # between the slots of the parts


@cute.kernel
def combine(c: cutlass.Constexpr, args):
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    warp_idx, lane = cute.arch.make_warp_uniform(tid // LANES), tid % LANES
    smem = SmemAllocator()
    s_mask = smem.allocate_tensor(Int32, cute.make_layout((2, WARPS)), byte_alignment=16)
    s_split = smem.allocate_tensor(Int32, cute.make_layout((5, THREADS)), byte_alignment=16)
    s_count = smem.allocate_tensor(Int32, cute.make_layout((3,)), byte_alignment=16)
    s_stat = smem.allocate_tensor(Float32, cute.make_layout((2, WARPS)), byte_alignment=16)
    s_acc = smem.allocate_tensor(Float32, cute.make_layout((MERGE_LANES * lane_columns(c), WARPS)), byte_alignment=16)
    # Written by decode before this kernel may start, so it is read without waiting for decode to end.
    head = args.split_info.iterator + 4 * args.max_entries
    cuts = cute.arch.load(head, Int32, sem="acquire", scope="gpu")
    if cuts == ONE_GROUP:
        list_group(c, args, s_split, s_count, tid)
    args = args._replace(out_scale=scale_by(args.out_scale, args.scale2_address))
    if (cuts != NO_CUT) | (cta == 0):  # one CTA waits in any case: this kernel must not end before decode
        cute.arch.griddepcontrol_wait()
    s_count[2] = cuts if cuts != ONE_GROUP else 1  # entries; here, as registers are scarce
    begin = Int32(0)
    while begin < s_count[2]:
        if cuts != ONE_GROUP:
            list_splits(c, args, s_mask, s_split, s_count, begin, tid, warp_idx, lane)
        merge_all(c, args, s_split, s_count, s_stat, s_acc, cta, tid)
        cute.arch.sync_threads()  # the list may be overwritten
        begin += THREADS


def lane_columns(c):
    """Columns of a part that a lane reads at once, 16 bytes."""
    return 128 // c.part_dtype.width


def shared_pieces(c):
    """Pieces of a row of which CTAs take one each."""
    return c.latent // (MERGE_LANES * lane_columns(c))


@cute.jit
def is_shared(c: cutlass.Constexpr, args, parts, blocks):
    """1 if CTAs share the rows of a block, of so many blocks that have more than FEW_PARTS parts. A CTA takes a
    piece through in about the time in which a warp alone reads 8 parts (H200, rows of 8 to 32 with 16 and 33 parts:
    sharing won in up to 2 rounds of pieces, was level at 4 rounds and 16 parts, lost at 8 and 16). Batch-invariant,
    the parts alone decide.
    """
    rounds = blocks * args.slot_rows * shared_pieces(c) <= args.ctas * ((parts + 7) // 8)
    own, by_rows = (parts > c.invariant_parts).to(Int32), ((parts > FEW_PARTS) & rounds).to(Int32)
    return own if args.batch_invariant != 0 else by_rows


@cute.jit
def merge_all(c: cutlass.Constexpr, args, s_split, s_count, s_stat, s_acc, cta, tid):
    """What is listed: s_count[0] blocks to merge by warps alone, then s_count[1] to share."""
    warp_idx, lane, each = cute.arch.make_warp_uniform(tid // LANES), tid % LANES, lane_columns(c)
    pieces, chunks = c.latent // HALF, HALF // (LANES * each)
    for item in cutlass.range(
        cta * WARPS + warp_idx, s_count[0] * args.slot_rows * pieces, args.ctas * WARPS, unroll=1
    ):
        split, row, piece = find_item(args, s_split, Int32(0), item, pieces)
        place = piece * HALF + lane * each
        if row < split.rows:
            acc, stat = merge(c, args, split, row, place, Int32(0), 1, chunks, c.merge_flight[0])
            store(c, args, acc, stat, split.row + row, place)
    width, streams = MERGE_LANES * each, THREADS // MERGE_LANES
    pieces = shared_pieces(c)
    for item in cutlass.range(cta, s_count[1] * args.slot_rows * pieces, args.ctas, unroll=1):
        split, row, piece = find_item(args, s_split, s_count[0], item, pieces)
        place = piece * width + lane % MERGE_LANES * each
        if row < split.rows:
            acc, stat = merge(c, args, split, row, place, tid // MERGE_LANES, streams, 1, c.merge_flight[1])
            merge_halves(acc, stat)
            merge_warps(s_acc, s_stat, acc, stat, warp_idx, lane)
            if tid < MERGE_LANES:
                store(c, args, acc, stat, split.row + row, place)
            cute.arch.sync_threads()


@cute.jit
def list_group(c: cutlass.Constexpr, args, s_split, s_count, tid):
    """list_splits() for the blocks of the one group that there is: entry i names block i."""
    row, rows, parts, team = (args.split_info[4 * args.max_entries + 1 + i] for i in range(4))
    blocks = (rows + c.rows - 1) // c.rows
    if tid < blocks:
        put(args, s_split, tid, tid, row + tid * c.rows, cutlass.min(rows - tid * c.rows, c.rows), parts, team)
    if tid == 0:
        shared = blocks * is_shared(c, args, parts, blocks)
        s_count[0], s_count[1] = blocks - shared, shared
    cute.arch.sync_threads()


def put(args, s_split, place, entry, row, rows, parts, stride):
    each = 2 - args.batch_invariant  # slots of an entry
    for i, v in enumerate((each * entry, row, rows, parts, each * stride)):
        s_split[i, place] = v


@cute.jit
def find_item(args, s_split, before, item, pieces: cutlass.Constexpr):
    """(block that is cut, row of it, piece of the row) of an item of work; the blocks begin at `before` of the list."""
    line = item // pieces
    at = line // args.by_slot
    return Split(*(s_split[i, before + at] for i in range(5))), line - at * args.slot_rows, item % pieces


@cute.jit
def list_splits(c: cutlass.Constexpr, args, s_mask, s_split, s_count, begin, tid, warp_idx, lane):
    """Of up to THREADS entries from `begin` on, the blocks that they name to s_split, those for warps alone before
    those to share, each in order; s_count: how many.
    """
    info = cute.make_rmem_tensor((4,), Int32)
    at = cutlass.min(begin + tid, s_count[2] - 1)
    cute.autovec_copy(cute.local_tile(args.split_info, (4,), (at,)), info)  # (row, rows, parts, stride)
    parts = info[2] if at == begin + tid else Int32(0)
    shared = is_shared(c, args, parts, count_threads(parts > FEW_PARTS))
    kinds = ((parts > 0) & (shared == 0), shared != 0)
    masks = [cute.arch.vote_ballot_sync(kind) for kind in kinds]
    if lane == 0:
        for k in cutlass.range_constexpr(2):
            s_mask[k, warp_idx] = masks[k]
    cute.arch.sync_threads()
    count, before = [Int32(0), Int32(0)], [cute.arch.popc(mask & ((1 << lane) - 1)) for mask in masks]
    for k in cutlass.range_constexpr(2):
        for w in cutlass.range_constexpr(WARPS):
            n = cute.arch.popc(s_mask[k, w])
            if w < warp_idx:
                before[k] += n
            count[k] += n
    if parts > 0:
        place = count[0] + before[1] if shared != 0 else before[0]
        put(args, s_split, place, at, *(info[j] for j in range(4)))
    if tid == 0:
        s_count[0], s_count[1] = count[0], count[1]
    cute.arch.sync_threads()


def count_threads(flag):
    """Threads of the CTA whose flag is set. A barrier of them."""
    return cute.arch.inline_ptx(
        "{ .reg .pred q; setp.ne.s32 q, {$r0}, 0; barrier.cta.red.popc.u32 {$w0}, 0, q; }",
        write_only_types=[Int32],
        read_only_args=[flag.to(Int32)],
    )


@cute.jit
def merge(
    c: cutlass.Constexpr,
    args,
    split,
    row,
    place,
    first,
    step: cutlass.Constexpr,
    chunks: cutlass.Constexpr,
    flight: cutlass.Constexpr,
):
    """Fold parts first, first + step, ... of 16 bytes, from `place` on in each of `chunks` chunks of a row, `flight` at
    a time; of fp32, where it needs no registers of its own, the first part besides. Returns O and (shift, sum), which
    it and the sum are relative to.
    """
    each = lane_columns(c)
    acc, stat = cute.make_rmem_tensor((each, chunks), Float32), cute.make_rmem_tensor((2,), Float32)
    if const_expr(c.part_dtype.width == 32):
        load_part(c, args, split, first, row, place, acc, stat)
        first += step
    else:
        acc.fill(0.0)
        stat[0], stat[1] = -Float32.inf, Float32(0.0)
    values = cute.make_rmem_tensor((each, chunks, flight), c.part_dtype)
    stats, scales = cute.make_rmem_tensor((2, flight), Float32), cute.make_rmem_tensor((flight,), Float32)
    for base in cutlass.range(first, split.parts, step * flight, unroll=1):
        for j in cutlass.range_constexpr(flight):
            scales[j] = load_part(c, args, split, base + j * step, row, place, values[None, None, j], stats[None, j])
        fold(acc, stat, values, stats, scales)
    return acc, stat


@cute.jit
def load_part(c: cutlass.Constexpr, args, split, index, row, place, values, stat):
    """values (lane_columns, chunks), stat (2), and returns the scale of the values; behind the last part, something
    finite of weight 0.
    """
    part = cutlass.min(index, split.parts - 1)
    # where CTAs cut anywhere, an entry has two slots, and its block begins in the second
    slot = split.slot + part * split.stride + ((part == 0) & (args.batch_invariant == 0)).to(Int32)
    at = slot * args.slot_rows + row
    scale = Float32(1.0)
    if const_expr(c.part_dtype.width == 16):
        at_half = (c.latent // HALF) * at + place // HALF
        cute.autovec_copy(cute.local_tile(args.part_stat, (2,), (2 * at_half,)), stat)
        scale = args.part_stat[4 * at_half + 2]
    else:
        cute.autovec_copy(cute.local_tile(args.part_stat, (2,), (at,)), stat)
    line, each = args.part_out.iterator + at.to(Int64) * c.latent + place, lane_columns(c)
    for k in cutlass.range_constexpr(values.shape[1]):
        source = cute.make_tensor((line + k * (LANES * each)).align(16), cute.make_layout(each))
        cute.autovec_copy(source, values[None, k])
    if index >= split.parts:
        stat[0], stat[1] = -Float32.inf, Float32(0.0)
    return scale


@cute.jit
def fold(acc, stat, values, stats, scales):
    """Add states (values (m, chunks, n) times scales (n), stats (2, n)) to the state (acc (m, chunks), stat)."""
    top = stat[0]
    for j in cutlass.range_constexpr(stats.shape[1]):
        top = cute.arch.fmax(top, stats[0, j])
    base = Float32(0.0) if top == -Float32.inf else top  # nothing seen yet: all weights are 2**-inf = 0
    weight = cute.math.exp2(stat[0] - base, fastmath=True)
    stat[0] = top
    stat[1] = stat[1] * weight
    for i in cutlass.range_constexpr(cute.size(acc)):
        acc[i] = acc[i] * weight
    for j in cutlass.range_constexpr(stats.shape[1]):
        weight = cute.math.exp2(stats[0, j] - base, fastmath=True)
        stat[1] = stat[1] + stats[1, j] * weight
        weight = weight * scales[j]
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] + values[i + cute.size(acc) * j].to(Float32) * weight


@cute.jit
def merge_halves(acc, stat):
    """Fold the states of the two halves of each warp."""
    values, stats = cute.make_rmem_tensor((cute.size(acc), 1, 1), Float32), cute.make_rmem_tensor((2, 1), Float32)
    for i in cutlass.range_constexpr(cute.size(acc)):
        values[i] = cute.arch.shuffle_sync_bfly(acc[i], offset=LANES // 2)
    for i in cutlass.range_constexpr(2):
        stats[i] = cute.arch.shuffle_sync_bfly(stat[i], offset=LANES // 2)
    fold(acc, stat, values, stats, [Float32(1.0)])


@cute.jit
def merge_warps(s_acc, s_stat, acc, stat, warp_idx, lane):
    """Fold the states of the eight warps into warp 0's."""
    each = cute.size(acc)
    if lane < MERGE_LANES:
        cute.autovec_copy(acc[None, 0], cute.local_tile(s_acc[None, warp_idx], (each,), (lane,)))
    if lane == 0:
        s_stat[0, warp_idx], s_stat[1, warp_idx] = stat[0], stat[1]
    cute.arch.sync_threads()
    if (warp_idx == 0) & (lane < MERGE_LANES):
        most = 32 // each  # at once, as registers allow
        for begin in cutlass.range_constexpr(1, WARPS, most):
            count = min(most, WARPS - begin)
            values = cute.make_rmem_tensor((each, 1, count), Float32)
            stats = cute.make_rmem_tensor((2, count), Float32)
            for w in cutlass.range_constexpr(count):
                cute.autovec_copy(cute.local_tile(s_acc[None, begin + w], (each,), (lane,)), values[None, 0, w])
                stats[0, w], stats[1, w] = s_stat[0, begin + w], s_stat[1, begin + w]
            fold(acc, stat, values, stats, [Float32(1.0)] * count)


@cute.jit
def store(c: cutlass.Constexpr, args, acc, stat, row, place):
    """A row of the output, or the part of it that lies from `place` on in a slot: see epilogue.store_partial."""
    gain, lse = row_result(stat[0], stat[1], args)
    run, apart, column = 4, LANES * 4, place
    if const_expr(c.part_dtype.width == 16):
        run, apart, column = 2, HALF // 4, place // HALF * HALF + place % HALF // 4
    for i in cutlass.range_constexpr(cute.size(acc)):
        acc[i] = acc[i] * gain
    with_output(args, partial(store_runs, acc, run, apart, row.to(Int64) * c.latent + column))
    if (place == 0) & (args.lse_scale != 0.0):
        args.lse[row] = lse


@cute.jit
def store_runs(acc, run: cutlass.Constexpr, apart: cutlass.Constexpr, place, out):
    """acc in runs of neighbouring elements, the first at `place` of the output, the others `apart` from each other."""
    some, line = cute.make_rmem_tensor((run,), out.element_type), out.iterator + place
    for k in cutlass.range_constexpr(cute.size(acc) // run):
        for i in cutlass.range_constexpr(run):
            some[i] = acc[run * k + i].to(out.element_type)
        cute.autovec_copy(some, cute.make_tensor((line + k * apart).align(2 * run), cute.make_layout(run)))
