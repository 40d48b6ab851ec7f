"""One warp of a CTA, the scheduler, finds the segments of work one after the other and publishes each in shared memory,
up to two ahead; all other roles follow. Walked by every role for itself, the integer code between two blocks took
0.7 us (H200). Only the CTA's first segment is found by all four warps of warpgroup 0, each on its own sub-partition of
the SM, so that nothing lies between it and the first loads.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from . import work_device as work
from .work import NO_CUT, ONE_GROUP

AHEAD = 2
WORDS = len(work.Segment._fields)
NONE = work.Segment(*(Int32(-1) for _ in range(WORDS)))


@cute.jit
def publish_all(c: cutlass.Constexpr, bars, s_segments, args, line, first):
    """The scheduler: every segment of the CTA, and one with request -1 behind. first: what next_segment() gave."""
    turn = Int32(0)
    seg, place, tail = first
    clear_splits(args, line)
    more = line.start < line.end
    while more:
        if seg.request >= 0:
            seg = seg._replace(parts=work.parts_of(args, line, seg, place.pos, tail))
            turn = publish(c, bars, s_segments, args, line, seg, turn)
        more = place.pos < line.end
        seg, place, tail = work.next_segment(c, args, line, place)
    publish(c, bars, s_segments, args, line, NONE, turn)


@cute.jit
def clear_splits(args, line):
    """No block is cut in this CTA, unless a role says otherwise."""
    first, end, each = args.cta, args.cta + 1, Int32(1)
    if args.batch_invariant != 0:
        first, end, each = line.start * line.team + line.member, line.end * line.team, line.team
    for entry in cutlass.range(first + cute.arch.lane_idx() * each, end, work.LANES * each, unroll=1):
        args.split_info[4 * entry + 2] = Int32(0)
    cute.arch.sync_warp()


@cute.jit
def publish(c: cutlass.Constexpr, bars, s_segments, args, line, seg, turn):
    slot = turn % AHEAD
    cute.arch.mbarrier_wait(bars.segment_empty + slot, turn // AHEAD % 2 ^ 1)
    if cute.arch.lane_idx() == 0:
        for i, v in enumerate(seg):
            s_segments[i, slot] = v
        cute.arch.mbarrier_arrive(bars.segment_full + slot)
        if turn == 0:
            tell_combine(c, args, line, seg)
    cute.arch.sync_warp()
    return turn + 1


@cute.jit
def tell_combine(c: cutlass.Constexpr, args, line, seg):
    """Tell combine what it need not wait for (work.HEAD_WORDS), and that it may start. The combine of the launch before
    is over: decode itself is launched without programmatic dependent launch.
    """
    if args.cta == 0:
        cuts = line.entries
        if (line.single != 0) & (seg.request >= 0):  # it begins in this CTA
            cuts = Int32(ONE_GROUP) if seg.parts > 0 else Int32(NO_CUT)
        rows = seg.q_len * args.heads
        for i, v in enumerate((cuts, work.first_row(c, args, seg), rows, seg.parts, seg.team)):
            args.split_info[4 * args.max_entries + i] = v
        cute.arch.fence_acq_rel_gpu()
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def take(bars, s_segments, turn, seg):
    """The turn-th segment. Every warp of the other roles calls it for each. seg: what the warp knows of it, or NONE."""
    slot = turn % AHEAD
    if seg.request < 0:
        cute.arch.mbarrier_wait(bars.segment_full + slot, turn // AHEAD % 2)
        seg = work.Segment(*(s_segments[i, slot] for i in range(WORDS)))
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(bars.segment_empty + slot)
    return seg


@cute.jit
def follow(bars, s_segments, body: cutlass.Constexpr, state, first=NONE):
    """state = body(segment, state) for each segment; returns the last state. first: the first, if the warp found it."""
    seg, turn = take(bars, s_segments, Int32(0), first), Int32(1)
    while seg.request >= 0:
        state = body(seg, state)
        seg = take(bars, s_segments, turn, NONE)
        turn += 1
    return state
