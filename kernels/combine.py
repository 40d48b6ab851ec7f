"""Merge the partial results of blocks that were cut between CTAs, in a fixed order. Arch-neutral.

Grid: a few CTAs an SM, whatever the batch; launched with programmatic dependent launch behind decode. Each CTA reads split_info,
lists the cut blocks, and walks over (row, 128-column chunk) items: one warp an item where a block has few parts, all eight warps
where it has many. Lane l holds 4 columns. With m the largest reference of the parts,
    out = sum_i 2**(ref_i - m) O_i / sum_i 2**(ref_i - m) sum_i,   LSE = m + log2 of that denominator.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from .common.bundle import bundle
from .common.math import row_result

THREADS, WARPS, LANES = 256, 8, 32
PER_SM = 4  # CTAs an SM
MAX_CTAS = THREADS  # decode CTAs whose split_info one thread each can read
COLUMNS = 128  # of an item: 4 a lane
FLIGHT = 4  # parts whose loads a warp has in flight
FEW = 8  # parts up to which one warp does an item alone


@cute.kernel
def combine(
    c: cutlass.Constexpr,
    out: cute.Tensor,
    lse: cute.Tensor,
    part_out: cute.Tensor,
    part_stat: cute.Tensor,
    split_info: cute.Tensor,
    slot_rows: Int32,
    num_ctas: Int32,
    out_scale: Float32,
    lse_scale: Float32,
):
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    warp_idx, lane = tid // LANES, tid % LANES
    smem = SmemAllocator()
    s_info = smem.allocate_tensor(Int32, cute.make_layout((3, THREADS)), byte_alignment=16)
    s_ends = smem.allocate_tensor(Int32, cute.make_layout((THREADS, 2)), byte_alignment=16)
    s_warp = smem.allocate_tensor(Int32, cute.make_layout((WARPS, 2)), byte_alignment=16)
    s_stat = smem.allocate_tensor(Float32, cute.make_layout((2, WARPS)), byte_alignment=16)
    s_acc = smem.allocate_tensor(Float32, cute.make_layout((COLUMNS, WARPS)), byte_alignment=16)
    args = bundle(
        out=out, lse=lse, part_out=part_out, part_stat=part_stat, slot_rows=slot_rows, out_scale=out_scale, lse_scale=lse_scale
    )
    cute.arch.griddepcontrol_wait()
    parts, rows = Int32(0), Int32(0)
    if tid < num_ctas:
        parts, rows = split_info[4 * tid + 2], split_info[4 * tid + 1]
        s_info[0, tid], s_info[1, tid], s_info[2, tid] = split_info[4 * tid], rows, parts
    items = rows * (c.latent // COLUMNS)
    few = items if (parts > 0) & (parts <= FEW) else Int32(0)
    many = items if parts > FEW else Int32(0)
    few_items = scan(few, s_ends[None, 0], s_warp[None, 0], tid)
    many_items = scan(many, s_ends[None, 1], s_warp[None, 1], tid)
    for item in cutlass.range(cta, many_items, ctas, unroll=1):
        owner, row, chunk = locate(c, s_info, s_ends[None, 1], item)
        acc, stat = merge(c, args, owner, row, chunk, warp_idx, WARPS, s_info[2, owner], lane)
        merge_warps(s_acc, s_stat, acc, stat, warp_idx, lane)
        if warp_idx == 0:
            store(c, args, acc, stat, s_info[0, owner] + row, chunk, lane)
        cute.arch.sync_threads()
    for item in cutlass.range(cta * WARPS + warp_idx, few_items, ctas * WARPS, unroll=1):
        owner, row, chunk = locate(c, s_info, s_ends[None, 0], item)
        acc, stat = merge(c, args, owner, row, chunk, Int32(0), 1, s_info[2, owner], lane)
        store(c, args, acc, stat, s_info[0, owner] + row, chunk, lane)


@cute.jit
def scan(value, s_ends, s_warp, tid):
    """s_ends[i] = sum of the values of threads 0 .. i; returns the sum of all."""
    lane, warp_idx = tid % LANES, tid // LANES
    for e in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, offset=1 << e)
        if lane >= (1 << e):
            value += other
    if lane == LANES - 1:
        s_warp[warp_idx] = value
    cute.arch.sync_threads()
    total = Int32(0)
    for w in cutlass.range_constexpr(WARPS):
        if w < warp_idx:
            value += s_warp[w]
        total += s_warp[w]
    s_ends[tid] = value
    cute.arch.sync_threads()
    return total


@cute.jit
def locate(c: cutlass.Constexpr, s_info, s_ends, item):
    """(CTA in which the item's block begins, row in the block, column chunk)."""
    low, high = Int32(0), Int32(THREADS - 1)
    while low < high:
        middle = (low + high) // 2
        if s_ends[middle] > item:
            high = middle
        else:
            low = middle + 1
    chunks = c.latent // COLUMNS
    index = item - (s_ends[low] - s_info[1, low] * chunks)
    return low, index // chunks, index % chunks


@cute.jit
def merge(c: cutlass.Constexpr, args, owner, row, chunk, first, step: cutlass.Constexpr, parts, lane):
    """Fold parts first, first + step, ... of an item; (4 columns of O, (reference, sum)), relative to that reference."""
    acc = cute.make_rmem_tensor((4,), Float32)
    stat = cute.make_rmem_tensor((2,), Float32)
    values = cute.make_rmem_tensor((4, FLIGHT), Float32)
    stats = cute.make_rmem_tensor((2, FLIGHT), Float32)
    acc.fill(0.0)
    stat[0], stat[1] = -Float32.inf, Float32(0.0)
    for base in cutlass.range(first, parts, step * FLIGHT, unroll=1):
        for j in cutlass.range_constexpr(FLIGHT):
            part = cutlass.min(base + j * step, parts - 1)
            slot = 2 * (owner + part) + (part == 0).to(Int32)
            at = slot * args.slot_rows + row
            cute.autovec_copy(cute.local_tile(args.part_stat, (2,), (at,)), stats[None, j])
            line = args.part_out.iterator + at.to(Int64) * c.latent + (chunk * COLUMNS + lane * 4)
            cute.autovec_copy(cute.make_tensor(line.align(16), cute.make_layout(4)), values[None, j])
            if base + j * step >= parts:
                stats[0, j], stats[1, j] = -Float32.inf, Float32(0.0)
        fold(acc, stat, values, stats, FLIGHT)
    return acc, stat


@cute.jit
def fold(acc, stat, values, stats, count: cutlass.Constexpr):
    """Add `count` states (values, stats) to (acc, stat)."""
    top = stat[0]
    for j in cutlass.range_constexpr(count):
        top = cute.arch.fmax(top, stats[0, j])
    base = Float32(0.0) if top == -Float32.inf else top  # nothing seen yet: all weights are 2**-inf = 0
    weight = cute.math.exp2(stat[0] - base, fastmath=True)
    stat[0] = top
    stat[1] = stat[1] * weight
    for i in cutlass.range_constexpr(4):
        acc[i] = acc[i] * weight
    for j in cutlass.range_constexpr(count):
        weight = cute.math.exp2(stats[0, j] - base, fastmath=True)
        stat[1] = stat[1] + stats[1, j] * weight
        for i in cutlass.range_constexpr(4):
            acc[i] = acc[i] + values[i, j] * weight


@cute.jit
def merge_warps(s_acc, s_stat, acc, stat, warp_idx, lane):
    """Fold the states of the eight warps into warp 0's."""
    cute.autovec_copy(acc, cute.local_tile(s_acc[None, warp_idx], (4,), (lane,)))
    if lane == 0:
        s_stat[0, warp_idx], s_stat[1, warp_idx] = stat[0], stat[1]
    cute.arch.sync_threads()
    if warp_idx == 0:
        values = cute.make_rmem_tensor((4, WARPS - 1), Float32)
        stats = cute.make_rmem_tensor((2, WARPS - 1), Float32)
        for w in cutlass.range_constexpr(1, WARPS):
            cute.autovec_copy(cute.local_tile(s_acc[None, w], (4,), (lane,)), values[None, w - 1])
            stats[0, w - 1], stats[1, w - 1] = s_stat[0, w], s_stat[1, w]
        fold(acc, stat, values, stats, WARPS - 1)


@cute.jit
def store(c: cutlass.Constexpr, args, acc, stat, row, chunk, lane):
    gain, lse = row_result(stat[0], stat[1], args)
    four = cute.make_rmem_tensor((4,), args.out.element_type)
    for i in cutlass.range_constexpr(4):
        four[i] = (acc[i] * gain).to(args.out.element_type)
    line = args.out.iterator + row.to(Int64) * c.latent + (chunk * COLUMNS + lane * 4)
    cute.autovec_copy(four, cute.make_tensor(line.align(8), cute.make_layout(4)))
    if (chunk == 0) & (lane == 0) & (args.lse_scale != 0.0):
        args.lse[row] = lse
