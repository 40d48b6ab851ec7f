"""Twin of work.py for the kernels: the same partition, from the live lengths, by every CTA for itself.

It runs before the first byte is loaded, and a run-time division costs about 100 cycles: those by numbers that the
host knows are multiplications (Divisor), the others are left out where their result is plain.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64

from .work import MOST_PARTS, NO_CUT, PART_TOKENS

LANES = 32


class Divisor(NamedTuple):
    """n // number is n * factor >> shift for all n of 31 bits."""

    number: Int32
    factor: Uint32
    shift: Int32


class Divisors(NamedTuple):
    ctas: Divisor
    team: Divisor
    teams: Divisor  # ctas // team
    heads: Divisor


@cute.jit
def divisor(number: Int32) -> Divisor:
    """On the host. With 2**(bits - 1) < number <= 2**bits the factor, 2**shift / number rounded up, has 32 bits."""
    shift, power = Int32(31), Int64(1)
    while power < number.to(Int64):
        shift, power = shift + 1, power * 2
    return Divisor(number, (((power << Int64(31)) + number.to(Int64) - 1) // number.to(Int64)).to(Uint32), shift)


def divisors(num_ctas, team, heads):
    return Divisors(*(divisor(n) for n in (num_ctas, team, num_ctas // team, heads)))


def divide(n, by):
    """n // by; n must not be negative unless `by` is a constant power of two. `//` itself takes up to 10 instructions
    more, to round down where signs differ.
    """
    if isinstance(by, Divisor):
        return ((n.to(Uint64) * by.factor.to(Uint64)) >> by.shift.to(Uint64)).to(Int32)
    if isinstance(by, int):
        return n >> (by.bit_length() - 1) if by & (by - 1) == 0 else (n.to(Uint32) // Uint32(by)).to(Int32)
    return (n.to(Uint32) // by.to(Uint32)).to(Int32)


def divide_up(n, by):
    return divide(n + ((by.number if isinstance(by, Divisor) else by) - 1), by)


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


class Place(NamedTuple):
    """A position on the line; it lies in `request`, whose own piece begins at `before`."""

    pos: Int32
    request: Int32
    before: Int32
    lengths: Request


class Segment(NamedTuple):
    request: Int32  # -1: there is none
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
    each = divide(total, parts)
    return index * each + divide(index * (total - each * parts), parts)


@cute.jit
def team_share(total, teams, index):
    """share() by a Divisor; where there are fewer items than teams, the first teams have one each."""
    each = divide(total, teams)
    begin = index * each + divide(index * (total - each * teams.number), teams)
    return cutlass.min(index, total) if each == 0 else begin


def owner_of(total, parts, item):
    return (((item + 1).to(Int64) * parts.to(Int64) - 1) // total.to(Int64)).to(Int32)


def query_offset(args, offset):
    """Where a request of a packed query begins, by what qo_indptr says: inside the query in any case."""
    return cutlass.max(cutlass.min(offset, args.total_q), 0)


@cute.jit
def read_request(args, index: Int32):
    """A request's length and the ends of its query tokens as they stand in memory."""
    b = cutlass.min(index, args.batch - 1)
    begin, end = Int32(0), args.seq_len_q
    if args.seq_len_q == 0:
        begin, end = args.qo_indptr[b], args.qo_indptr[b + 1]
    return args.seq_lens[b], begin, end


def request_of(args, words):
    """What read_request() found. A length below 0 counts as 0, one beyond the table or the plan is cut, and so are
    offsets beyond the query: nothing outside the tensors is read or written, whatever they say.
    """
    kv_len, begin, end = words
    begin = query_offset(args, begin)
    q_len = cutlass.max(query_offset(args, end) - begin, 0)
    return Request(cutlass.min(cutlass.max(kv_len, 0), args.max_kv_len), begin, q_len)


def load_request(args, index):
    return request_of(args, read_request(args, index))


def shape_of(c, args, request):
    """(blocks, steps) of a request."""
    return divide_up(request.q_len * args.heads, c.rows), divide_up(request.kv_len, c.tile_tokens)


@cute.jit
def groups_of(args, blocks, team):
    """team is args.team or 1."""
    groups = divide_up(blocks, args.divisors.team)
    return blocks if team == 1 else groups


@cute.jit
def counted(c: cutlass.Constexpr, args, steps: Int32) -> Int32:
    """What the line counts of a group: its steps; batch-invariant, their own_parts."""
    parts = cutlass.min(divide_up(steps, PART_TOKENS // c.tile_tokens), MOST_PARTS)
    return parts if args.batch_invariant != 0 else steps


@cute.jit
def group_length(c: cutlass.Constexpr, args, line: Line, steps: Int32) -> Int32:
    length = line.parts if line.parts > 0 else counted(c, args, steps) + line.extra
    return length if steps > 0 else Int32(0)


@cute.jit
def parts_of_group(c: cutlass.Constexpr, total: Int32, groups: Int32, longest: Int32, teams) -> Int32:
    parts = Int32(0)
    if groups > 1:  # one group is cut by the line of steps as well as by parts
        parts, turns, depth = Int32(1), divide_up(groups, teams), longest
        if 2 * groups <= teams.number:
            parts = cutlass.max(1, cutlass.min(divide(teams.number, groups), longest))
            depth = divide_up(longest, parts)
        fits = turns * (depth + c.block_cost) <= divide(total + groups * c.block_cost, teams) + c.split_cost
        parts = parts if fits & ((parts == 1) | (total == groups * longest)) else Int32(0)
    return parts


@cute.jit
def sizes_of(c: cutlass.Constexpr, args, b: Int32, request: Request):
    """(blocks, what the line counts of a group) of request b; both 0 where it has none, or there is no such request."""
    blocks, steps = shape_of(c, args, request)
    length = counted(c, args, steps)
    none = (blocks == 0) | (steps == 0) | (b >= args.batch)
    return Int32(0) if none else blocks, Int32(0) if none else length


def wasteful(steps, team, alone):
    """Whether teams have too many members without a block; `alone`: the steps if each block had a team of its own."""
    return steps.to(Int64) * (team * 8).to(Int64) > alone.to(Int64) * Int64(9)


@cute.jit
def line_of(c: cutlass.Constexpr, args, team: Int32, steps: Int32, groups: Int32, longest: Int32, cta: Int32) -> Line:
    """Lay the batch out. team: args.team, or 1 where that is wasteful."""
    teams, index = args.divisors.teams, divide(cta, args.divisors.team)
    member = cta - index * team
    most = divide(args.max_entries, args.divisors.team)
    if team == 1:
        teams, index, member, most = args.divisors.ctas, cta, Int32(0), args.max_entries
    parts, extra = Int32(0), Int32(0)
    if args.batch_invariant == 0:
        parts = parts_of_group(c, steps, groups, longest, teams)
        extra = Int32(c.block_cost) if (parts == 0) & (groups > 1) else Int32(0)
    total = groups * parts if parts > 0 else steps + groups * extra
    total = cutlass.max(total, 0)  # offsets that claim the query again and again may pass 2**31: nothing is computed
    single = (groups == 1).to(Int32)
    entries = args.divisors.ctas.number if parts != 1 else Int32(NO_CUT)
    if args.batch_invariant != 0:
        steps = steps * (PART_TOKENS // c.tile_tokens)
        # requests beyond the plan, and those behind them, are promised no result, but must not leave the workspace
        total = cutlass.min(total, most)
        entries = total * team if longest > 1 else Int32(NO_CUT)
    start = team_share(total, teams, index)
    end = team_share(total, teams, index + 1) if index < teams.number else start
    used = cutlass.min(teams.number, total)
    return Line(start, end, total, steps, parts, extra, team, used, single, index, member, entries)


@cute.jit
def on_line(line: Line, steps: Int32, groups: Int32) -> Int32:
    return groups * line.parts if line.parts > 0 else steps + groups * line.extra


def lane_requests(args):
    """(The first request of a lane in find_line(), how many neighbours from it on a lane has)"""
    chunk = divide_up(args.batch, LANES)
    return cute.arch.lane_idx() * chunk, chunk


def read_ahead(args):
    """read_request() of a lane's first and second request."""
    low, _ = lane_requests(args)
    return read_request(args, low), read_request(args, low + 1)


@cute.jit
def find_line(c: cutlass.Constexpr, args, cta: Int32, words):
    """One warp lays the batch out and finds where the CTA begins. words: of read_ahead(). Returns (Line, Place); the
    place means nothing where the CTA has no work.
    """
    lane = cute.arch.lane_idx()
    low, chunk = lane_requests(args)
    first, ahead = request_of(args, words[0]), words[1]
    blocks, longest = sizes_of(c, args, low, first)
    own_groups = groups_of(args, blocks, args.team)
    own_steps, alone = own_groups * longest, blocks * longest  # alone: if each block had a team of its own
    for i in cutlass.range(1, chunk, unroll=1):  # as often in all lanes: their numbers stay in uniform registers
        more, length = sizes_of(c, args, low + i, request_of(args, ahead))
        ahead = read_request(args, low + i + 1)
        groups = groups_of(args, more, args.team)
        own_steps += groups * length
        own_groups += groups
        alone += more * length
        blocks += more
        longest = cutlass.max(longest, length)
    team = args.team
    if (args.seq_len_q == 0) & (team > 1):  # packed: requests may have few blocks
        if wasteful(sum_of(own_steps), team, sum_of(alone)):
            team, own_steps, own_groups = Int32(1), alone, blocks
    longest = cute.arch.warp_redux_sync(longest, kind="max")
    line = line_of(c, args, team, sum_of(own_steps), sum_of(own_groups), longest, cta)
    mine = on_line(line, own_steps, own_groups)
    reached = mine
    if args.batch > 1:
        for e in cutlass.range_constexpr(5):
            others = cute.arch.shuffle_sync_up(reached, offset=1 << e)
            if lane >= (1 << e):
                reached += others
    before = reached - mine
    holds = (line.start < line.end) & (before <= line.start) & (line.start < reached)
    # one lane holds the start, so each sum is that lane's number; the first, should wrapped sums let several hold it
    mask = cute.arch.vote_ballot_sync(holds)
    holds = (mask & -mask) >> lane & 1 != 0
    low, before, *lengths = (sum_of(v if holds else Int32(0)) for v in (low, before, *first))
    return line, Place(line.start, low, before, Request(*lengths))


def sum_of(v):
    return cute.arch.warp_redux_sync(v, kind="add")


def sizes_on(c, args, line, request):
    """(blocks, steps, groups, what the line counts of a group) of a request."""
    blocks, steps = shape_of(c, args, request)
    return blocks, steps, groups_of(args, blocks, line.team), group_length(c, args, line, steps)


@cute.jit
def next_segment(c: cutlass.Constexpr, args, line: Line, place: Place):
    """(The segment at a place without its parts, Place where the next begins, where its block ends on the line). There
    is none where the CTA's piece of the line is over, or holds no block of its own here. place.request holds place.pos,
    or is an earlier one; the search ends at the last request, whatever the lengths are.
    """
    pos, b, before, now = place
    blocks, steps, groups, length = sizes_on(c, args, line, now)
    while (before + groups * length <= pos) & (pos < line.end) & (b + 1 < args.batch):
        before += groups * length
        b += 1
        now = load_request(args, b)
        blocks, steps, groups, length = sizes_on(c, args, line, now)
    place = Place(pos, b, before, now)
    group = Int32(0)
    if groups > 1:
        group = divide(pos - before, cutlass.max(length, 1))  # 0 where nothing is left
    begin = before + group * length
    first, last = pos - begin, cutlass.min(length, line.end - begin)
    slot = pos * line.team + line.member
    if args.batch_invariant != 0:
        last = first + 1
    tail = begin + length
    lies = (pos < line.end) & (tail <= line.total)
    pos = begin + last
    first, last = cutlass.max(first - line.extra, 0), last - line.extra  # steps, or parts
    if args.batch_invariant == 0:
        slot = 2 * args.cta + (first == 0).to(Int32)
    if (line.parts > 0) | (args.batch_invariant != 0):
        if length <= 1:
            last = steps
        else:
            first, last = share(steps, length, first), share(steps, length, last)
    block = group * line.team + line.member
    light = (line.steps < c.evict_first_steps).to(Int32)
    b = b if lies & (block >= 0) & (block < blocks) & (last > 0) else Int32(-1)
    seg = Segment(b, *now, block, first, last, steps, Int32(0), slot, last, line.team, light)
    return seg._replace(end=last_step(c, args, seg)), place._replace(pos=pos), tail


@cute.jit
def parts_of(args, line: Line, seg: Segment, pos: Int32, tail: Int32) -> Int32:
    """Segment.parts of a segment that ends at pos, of a block that ends at tail."""
    parts = Int32(0)
    if (seg.first == 0) & (pos < tail):
        parts = tail - pos + 1
        if args.batch_invariant == 0:
            parts = owner_of(line.total, line.teams, tail - 1) - line.index + 1
    return parts


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
    return seg.kv_len - hidden + args.causal * divide(seg.block * c.rows + row, args.divisors.heads)


def is_whole(c, args, seg):
    """Whether the segment is an uncut block of c.rows rows that sees a token."""
    return (seg.last - seg.first == seg.steps) & (live_rows(c, args, seg) == c.rows) & (seg.first < seg.end)


def last_step(c, args, seg):
    """The segment's last step that a row of the block sees."""
    seen = seen_by(c, args, seg, live_rows(c, args, seg) - 1)
    return cutlass.min(seg.last, divide_up(seen, c.tile_tokens))


def entry_of(args, slot):
    """The entry of split_info that names a block, by the slot of its first part."""
    return slot >> (1 - args.batch_invariant)
