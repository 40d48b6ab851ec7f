"""One warp of a CTA, the scheduler, finds the segments of work one after the other and publishes each in shared memory,
up to two ahead; all other roles follow. Walked by every role for itself, the integer code between two blocks took
0.7 us, and 0.4 us before the first load (H200).
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from . import work_device as work

AHEAD = 2
WORDS = len(work.Segment._fields)


@cute.jit
def publish_all(c: cutlass.Constexpr, bars, s_segments, args, span):
    """The scheduler: every segment of the CTA, and one with request -1 behind the last."""
    turn, cut = Int32(0), (span.line.parts != 1).to(Int32)
    if span.line.start < span.line.end:
        turn = work.walk(c, args, span, partial(publish, bars, s_segments, args, cut), turn)
    publish(bars, s_segments, args, cut, work.Segment(*(Int32(-1) for _ in range(WORDS))), turn)


@cute.jit
def publish(bars, s_segments, args, cut, seg, turn):
    slot = turn % AHEAD
    cute.arch.mbarrier_wait(bars.segment_empty + slot, turn // AHEAD % 2 ^ 1)
    if cute.arch.lane_idx() == 0:
        if turn == 0:
            args.split_info[4 * args.cta + 2] = Int32(0)  # no block is cut in this CTA, unless a role says otherwise
        for i, v in enumerate(seg):
            s_segments[i, slot] = v
        cute.arch.mbarrier_arrive(bars.segment_full + slot)
        if turn == 0:
            tell_combine(args, cut)
    cute.arch.sync_warp()
    return turn + 1


@cute.jit
def tell_combine(args, cut):
    """Whether any block can be cut, in the word behind all CTAs' entries, and that combine may start. It reads that word
    without waiting for decode to end. The combine of the launch before is over: decode itself is launched without PDL.
    """
    if args.cta == 0:
        args.split_info[4 * args.num_ctas] = cut
        cute.arch.fence_acq_rel_gpu()
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def take(bars, s_segments, turn):
    """The turn-th segment. Every warp of the other roles calls it for each."""
    slot = turn % AHEAD
    cute.arch.mbarrier_wait(bars.segment_full + slot, turn // AHEAD % 2)
    seg = work.Segment(*(s_segments[i, slot] for i in range(WORDS)))
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(bars.segment_empty + slot)
    return seg


@cute.jit
def follow(bars, s_segments, body: cutlass.Constexpr, state):
    """state = body(segment, state) for each segment; returns the last state."""
    seg, turn = take(bars, s_segments, Int32(0)), Int32(1)
    while seg.request >= 0:
        state = body(seg, state)
        seg = take(bars, s_segments, turn)
        turn += 1
    return state
