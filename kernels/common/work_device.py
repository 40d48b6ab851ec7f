"""Twin of work.py for the kernels: the same partition, from the live lengths, by every CTA for itself.

It runs before the first byte is loaded, and a run-time division costs about 130 cycles: those by numbers that the
host knows are multiplications (Divisors), the others are left out where their result is plain.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import FastDivmodDivisorV2

from .work import MOST_PARTS, NO_CUT, PART_TOKENS

LANES = 32


class Divisors(NamedTuple):
    ctas: FastDivmodDivisorV2
    team: FastDivmodDivisorV2
    teams: FastDivmodDivisorV2  # ctas // team


def divisors(num_ctas, team):
    """On the host."""
    return Divisors(*(FastDivmodDivisorV2(n) for n in (num_ctas, team, num_ctas // team)))


class Line(NamedTuple):
    """The line of work, and the piece [start, end) of it that is a CTA's."""

    start: Int32
    end: Int32
    total: Int32
    steps: Int32  # of all groups, whatever the line counts
    parts: Int32  # equal parts of a group on the line; 0: it counts its steps, or own_parts of them
    extra: Int32  # what a group adds to its steps on the line
    team: Int32
    teams: Int32  # that have work
    single: Int32  # 1: there is one group
    index: Int32  # which of them the CTA is in, and which member it is
    member: Int32
    entries: Int32  # of split_info, or NO_CUT


class Request(NamedTuple):
    kv_len: Int32
    q_first: Int32  # its first query token; 0 in fixed mode, where the batch index says which
    q_len: Int32


class Span(NamedTuple):
    """A CTA's piece of the line: it begins in `request`, whose own piece begins at `before`."""

    line: Line
    request: Int32
    before: Int32
    lengths: Request


class Segment(NamedTuple):
    request: Int32
    kv_len: Int32
    q_first: Int32
    q_len: Int32
    block: Int32
    first: Int32
    last: Int32
    steps: Int32
    parts: Int32  # of the block, if it is cut and this is the first; else 0
    slot: Int32  # of the workspace, where its result goes if the block is cut
    end: Int32  # rows of the block see tokens of the steps [first, end) only; end may be below first
    team: Int32
    light: Int32  # 1: the batch is little work


@cute.jit
def share(total: Int32, parts: Int32, index: Int32) -> Int32:
    each = total // parts
    return index * each + index * (total - each * parts) // parts


@cute.jit
def team_share(total: Int32, teams, index: Int32) -> Int32:
    """share() by a divisor; where there are fewer items than teams, the first teams have one each."""
    each = total // teams
    begin = index * each + index * (total - each * teams.divisor) // teams
    return cutlass.min(index, total) if each == 0 else begin


def owner_of(total, parts, item):
    return (((item + 1).to(Int64) * parts.to(Int64) - 1) // total.to(Int64)).to(Int32)


def query_offset(args, b):
    """First query token of a request of a packed query."""
    return cutlass.min(cutlass.max(args.qo_indptr[b], 0), args.total_q)


@cute.jit
def load_request(args, index: Int32) -> Request:
    """Lengths of a request. A length below 0 counts as 0, one beyond the table or the plan is cut, and so are offsets
    beyond the query: nothing outside the tensors is read or written, whatever they say.
    """
    b = cutlass.min(index, args.batch - 1)
    kv_len = cutlass.min(cutlass.max(args.seq_lens[b], 0), args.max_kv_len)
    q_first, q_len = Int32(0), args.seq_len_q
    if args.seq_len_q == 0:
        q_first = query_offset(args, b)
        q_len = cutlass.max(query_offset(args, b + 1) - q_first, 0)
    return Request(kv_len, q_first, q_len)


def shape_of(c, args, request):
    """(blocks, steps) of a request."""
    return (request.q_len * args.heads + c.rows - 1) // c.rows, (request.kv_len + c.tile_tokens - 1) // c.tile_tokens


@cute.jit
def groups_of(args, blocks: Int32, team: Int32) -> Int32:
    """team is args.team or 1."""
    groups = (blocks + (team - 1)) // args.divisors.team
    return blocks if team == 1 else groups


@cute.jit
def counted(c: cutlass.Constexpr, args, steps: Int32) -> Int32:
    """What the line counts of a group: its steps; batch-invariant, their own_parts."""
    each = PART_TOKENS // c.tile_tokens
    parts = cutlass.min((steps + (each - 1)) // each, MOST_PARTS)
    return parts if args.batch_invariant != 0 else steps


@cute.jit
def group_length(c: cutlass.Constexpr, args, line: Line, steps: Int32) -> Int32:
    length = line.parts if line.parts > 0 else counted(c, args, steps) + line.extra
    return length if steps > 0 else Int32(0)


@cute.jit
def length_of(c: cutlass.Constexpr, args, line: Line, b: Int32) -> Int32:
    """What a request adds to the line."""
    blocks, steps = shape_of(c, args, load_request(args, b))
    return groups_of(args, blocks, line.team) * group_length(c, args, line, steps)


@cute.jit
def parts_of_group(c: cutlass.Constexpr, total: Int32, groups: Int32, longest: Int32, teams) -> Int32:
    parts, turns, depth = Int32(1), (groups + (teams.divisor - 1)) // teams, longest
    if (groups > 1) & (2 * groups <= teams.divisor):
        parts = cutlass.max(1, cutlass.min(teams.divisor // groups, longest))
        depth = (longest + parts - 1) // parts
    fits = turns * (depth + c.block_cost) <= (total + groups * c.block_cost) // teams + c.split_cost
    # one group is cut by the line of steps as well as by parts
    return parts if fits & (groups > 1) & ((parts == 1) | (total == groups * longest)) else Int32(0)


@cute.jit
def sizes_of(c: cutlass.Constexpr, args, b: Int32, team: Int32):
    """(what the line counts of all groups, groups, what it counts of one) of a request; all 0 where it has none."""
    blocks, steps = shape_of(c, args, load_request(args, b))
    groups, length = groups_of(args, blocks, team), counted(c, args, steps)
    if (blocks == 0) | (steps == 0):
        groups, length = Int32(0), Int32(0)
    return groups * length, groups, length


def wasteful(steps, team, alone):
    """Whether teams have too many members without a block; `alone`: the steps if each block had a team of its own."""
    return steps.to(Int64) * (team * 8).to(Int64) > alone.to(Int64) * Int64(9)


@cute.jit
def line_of(c: cutlass.Constexpr, args, team: Int32, steps: Int32, groups: Int32, longest: Int32, cta: Int32) -> Line:
    """Lay the batch out. team: args.team, or 1 where that is wasteful."""
    teams, index, member = args.divisors.teams, cta // args.divisors.team, cta % args.divisors.team
    if team == 1:
        teams, index, member = args.divisors.ctas, cta, Int32(0)
    parts, extra = Int32(0), Int32(0)
    if args.batch_invariant == 0:
        parts = parts_of_group(c, steps, groups, longest, teams)
        extra = Int32(c.block_cost) if (parts == 0) & (groups > 1) else Int32(0)
    total = groups * parts if parts > 0 else steps + groups * extra
    total = cutlass.max(total, 0)  # offsets that claim the query again and again may pass 2**31: nothing is computed
    single = (groups == 1).to(Int32)
    entries = args.divisors.ctas.divisor if parts != 1 else Int32(NO_CUT)
    if args.batch_invariant != 0:
        steps = steps * (PART_TOKENS // c.tile_tokens)
        # requests beyond the plan, and those behind them, are promised no result, but must not leave the workspace
        total = cutlass.min(total, args.max_entries // team)
        entries = total * team if longest > 1 else Int32(NO_CUT)
    start = team_share(total, teams, index)
    end = team_share(total, teams, index + 1) if index < teams.divisor else start
    used = cutlass.min(teams.divisor, total)
    return Line(start, end, total, steps, parts, extra, team, used, single, index, member, entries)


@cute.jit
def on_line(line: Line, steps: Int32, groups: Int32) -> Int32:
    return groups * line.parts if line.parts > 0 else steps + groups * line.extra


@cute.jit
def find_request(c: cutlass.Constexpr, args, line: Line, first: Int32, begin: Int32):
    """The request, from `first` on, that holds line.start, and where it begins; `first` begins at `begin`."""
    b, before = first, begin
    length = length_of(c, args, line, b)
    while before + length <= line.start:
        before += length
        b += 1
        length = length_of(c, args, line, b)
    return b, before


@cute.jit
def scan(c: cutlass.Constexpr, args, low: Int32, high: Int32, team: Int32):
    """Sums of sizes_of(): (steps, groups) of the requests [low, high) of this lane, then of those of all earlier
    lanes, then (steps, groups, longest) of all, seven numbers in a row.
    """
    lane = cute.arch.lane_idx()
    own_steps, own_groups, longest = Int32(0), Int32(0), Int32(0)
    for b in cutlass.range(low, high, unroll=1):
        steps, groups, depth = sizes_of(c, args, b, team)
        own_steps += steps
        own_groups += groups
        longest = cutlass.max(longest, depth)
    before_steps, before_groups = own_steps, own_groups
    for e in cutlass.range_constexpr(5):
        steps = cute.arch.shuffle_sync_up(before_steps, offset=1 << e)
        groups = cute.arch.shuffle_sync_up(before_groups, offset=1 << e)
        if lane >= (1 << e):
            before_steps += steps
            before_groups += groups
    steps, groups = (cute.arch.shuffle_sync(v, LANES - 1) for v in (before_steps, before_groups))
    longest = cute.arch.warp_redux_sync(longest, kind="max")
    return own_steps, own_groups, before_steps - own_steps, before_groups - own_groups, steps, groups, longest


@cute.jit
def find_span(c: cutlass.Constexpr, args, cta: Int32) -> Span:
    """One warp finds the CTA's span. `request`, `before` and `lengths` mean nothing where it is empty."""
    lane = cute.arch.lane_idx()
    chunk = (args.batch + LANES - 1) // LANES  # neighbours: a lane finds all but the first in its L1 line
    low = cutlass.min(lane * chunk, args.batch)
    high = cutlass.min(low + chunk, args.batch)
    team = args.team
    own_steps, own_groups, before_steps, before_groups, steps, groups, longest = scan(c, args, low, high, team)
    if (args.seq_len_q == 0) & (team > 1):  # packed: requests may have few blocks
        alone = scan(c, args, low, high, Int32(1))
        if wasteful(steps, team, alone[4]):
            team = Int32(1)
            own_steps, own_groups, before_steps, before_groups, steps, groups, longest = alone
    line = line_of(c, args, team, steps, groups, longest, cta)
    before = on_line(line, before_steps, before_groups)
    mine = on_line(line, own_steps, own_groups)
    request, lengths = Int32(0), Request(Int32(0), Int32(0), Int32(0))
    holds = (line.start < line.end) & (before <= line.start) & (line.start < before + mine)
    if holds:
        request, before = find_request(c, args, line, low, before)
        lengths = load_request(args, request)
    mask = cute.arch.vote_ballot_sync(holds)
    source = cute.arch.popc((mask & -mask) - 1)
    request, before, *found = (cute.arch.shuffle_sync(v, source) for v in (request, before, *lengths))
    return Span(line, request, before, Request(*found))


@cute.jit
def walk(c: cutlass.Constexpr, args, span: Span, body: cutlass.Constexpr, state):
    """state = body(segment, state) for each segment of a span that is not empty; returns the last state."""
    line = span.line
    pos, b, before = line.start, span.request, span.before
    now = span.lengths
    while pos < line.end:
        blocks, steps = shape_of(c, args, now)
        groups, length = groups_of(args, blocks, line.team), group_length(c, args, line, steps)
        while pos - before >= groups * length:
            before += groups * length
            b += 1
            now = load_request(args, b)
            blocks, steps = shape_of(c, args, now)
            groups, length = groups_of(args, blocks, line.team), group_length(c, args, line, steps)
        group = Int32(0)
        if groups > 1:
            group = (pos - before) // length
        begin = before + group * length
        first, last = pos - begin, cutlass.min(length, line.end - begin)
        slot = pos * line.team + line.member
        if args.batch_invariant != 0:
            last = first + 1
        pos = begin + last
        first, last = cutlass.max(first - line.extra, 0), last - line.extra  # steps, or parts
        cuts = Int32(0)
        if (first == 0) & (pos < begin + length):
            cuts = length
            if args.batch_invariant == 0:
                cuts = owner_of(line.total, line.teams, begin + length - 1) - line.index + 1
        if args.batch_invariant == 0:
            slot = 2 * args.cta + (first == 0).to(Int32)
        if (line.parts > 0) | (args.batch_invariant != 0):
            if length == 1:
                last = steps
            else:
                first, last = share(steps, length, first), share(steps, length, last)
        block = group * line.team + line.member
        if (block < blocks) & (last > 0) & (begin + length <= line.total):
            light = (line.steps < c.evict_first_steps).to(Int32)
            seg = Segment(b, *now, block, first, last, steps, cuts, slot, last, line.team, light)
            state = body(seg._replace(end=last_step(c, args, seg)), state)
    return state


def live_rows(c, args, seg):
    """Rows of the segment's block that exist; c.rows but for a request's last block."""
    return cutlass.min(seg.q_len * args.heads - seg.block * c.rows, c.rows)


def first_row(c, args, seg):
    """The block's first row in the output, seen as [rows, latent]."""
    token = seg.q_first + (seg.request * args.seq_len_q)  # seq_len_q is 0 in packed mode
    return token * args.heads + seg.block * c.rows


def seen_by(c, args, seg, row):
    """KV tokens that a row of the block sees. Causal is bottom-right: token i of n sees kv_len - n + i + 1."""
    hidden = (seg.q_len - 1) * args.causal
    return seg.kv_len - hidden + args.causal * ((seg.block * c.rows + row) // args.heads)


def is_whole(c, args, seg):
    """Whether the segment is an uncut block of c.rows rows that sees a token."""
    return (seg.last - seg.first == seg.steps) & (live_rows(c, args, seg) == c.rows) & (seg.first < seg.end)


def last_step(c, args, seg):
    """The segment's last step that a row of the block sees."""
    seen = seen_by(c, args, seg, live_rows(c, args, seg) - 1)
    return cutlass.min(seg.last, (seen + c.tile_tokens - 1) // c.tile_tokens)


def entry_of(args, slot):
    """The entry of split_info that names a block, by the slot of its first part."""
    return slot >> (1 - args.batch_invariant)
