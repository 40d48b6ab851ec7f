"""Who computes what: the partition of a batch over CTAs, in plain Python.

`work_device.py` is the same on the GPU, where it runs on the live lengths in every launch; tests hold the two together.

A request with kv_len tokens and q_len query tokens has *blocks* of `rows` query rows (token x head) and *steps* of
`tile_tokens` KV tokens. CTAs work in teams: the members of a team take neighbouring blocks of a request, step by step
at the same time, so that a KV tile comes from DRAM once and from L2 for the others. `team` blocks together are a
*group*; all groups of all requests, one after the other, form one line, and team t takes an even piece of it, so the
work is balanced whatever the lengths are. A group is as long as its steps and `block_cost` before them: the time in
which a CTA changes blocks, in steps. Where cutting every group into equal parts is as good (`parts_of_group`; one part:
groups stay whole), the line counts parts, not steps, and most CTAs have one piece less. A piece of one block inside
one CTA is a *segment*.

A block that lies in one CTA goes straight to the output; of a block that is cut, each CTA writes a partial result to
a slot of the workspace: slot 2k where the block began in an earlier CTA, slot 2k + 1 where it begins in CTA k. So
there are two slots a CTA at the most, whatever the batch. CTA k names the block that begins and is cut in it in
split_info[k].

Batch-invariant, a block is cut into `own_parts` equal parts, which its own length decides, and each part is a segment
even where one CTA computes its neighbour, too: so no row's result depends on where CTAs share a block. The line counts
these parts. That at position i of the line has, for each member of the team, slot and entry i * team + member of the
workspace; the entry of a cut block's first part names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_CTAS = 256  # of decode
# The first of HEAD_WORDS behind all entries of split_info: NO_CUT, ONE_GROUP (the others are its row, rows, parts and
# team), or the number of entries.
NO_CUT, ONE_GROUP = 0, -1
HEAD_WORDS = 5
# Batch-invariant: tokens of a part (2.4 MB of the cache; the partial result of 64 rows takes 0.07 MB), most of a block
PART_TOKENS, MOST_PARTS = 2048, 64


class Segment(NamedTuple):
    request: int
    block: int
    first: int  # steps [first, last) of the block's `steps`
    last: int
    steps: int
    slot: int  # of the workspace, where its result goes if the block is cut

    @property
    def split(self) -> bool:
        return self.last - self.first < self.steps


class Split(NamedTuple):
    """What combine needs of a block that is cut: rows [row, row + rows) of the output, from `parts` slots, entries
    of split_info `stride` apart.
    """

    row: int
    rows: int
    parts: int
    stride: int

    def slots(self, entry: int, batch_invariant: bool = False) -> list[int]:
        """In the order in which combine adds them; `entry` of split_info is the one that names the block."""
        entries = [entry + i * self.stride for i in range(self.parts)]
        return entries if batch_invariant else [2 * entry + 1, *(2 * other for other in entries[1:])]


def share(total: int, parts: int, index: int) -> int:
    """Where part `index` of an even division begins: floor(total * index / parts), without the large product."""
    each, rest = divmod(total, parts)
    return index * each + index * rest // parts


def owner_of(total: int, parts: int, item: int) -> int:
    """The part that holds an item: the inverse of `share`."""
    return ((item + 1) * parts - 1) // total


def own_parts(steps: int, tile_tokens: int) -> int:
    """Batch-invariant: parts into which a block of so many steps is cut."""
    return min(-(-steps * tile_tokens // PART_TOKENS), MOST_PARTS)


def best_team(blocks: int, ctas: int, even: bool = False) -> int:
    """CTAs a team for requests of `blocks` blocks: what leaves the fewest CTAs without work, with 10% in favour of
    sharing. even: no member of a team goes without a block.
    """
    sizes = [n for n in range(1, min(blocks, ctas, 16) + 1) if not even or blocks % n == 0]
    return min(sizes, key=lambda size: -(-blocks // size) / (ctas // size) * (1 + 0.1 / size))


def parts_of_group(total: int, groups: int, longest: int, teams: int, block_cost: int, split_cost: int) -> int:
    """Equal parts into which each group is cut, or 0: teams take even pieces of the line of steps instead.

    Parts are right if no team gets more than an even share plus what cutting anywhere costs, in steps. Cutting into
    more than one part needs groups of one length.
    """
    parts = max(1, min(teams // max(groups, 1), longest))
    if groups < 2 or (parts > 1 and total != groups * longest):  # the line of steps cuts one group evenly, too
        return 0
    most = -(-groups * parts // teams) * (-(-longest // parts) + block_cost)
    return parts if most <= (total + groups * block_cost) // teams + split_cost else 0


def partition(
    kv_lens: Sequence[int],
    q_lens: Sequence[int],
    num_heads: int,
    ctas: int,
    *,
    team: int = 1,
    rows: int = 64,
    tile_tokens: int = 128,
    block_cost: int = 2,
    split_cost: int = 5,
    batch_invariant: bool = False,
) -> tuple[list[list[Segment]], list[Split | None]]:
    """Segments of every CTA, and split_info: an entry a CTA; batch-invariant, one a part on the line and member."""
    shape = [(-(-q * num_heads // rows), -(-max(n, 0) // tile_tokens)) for n, q in zip(kv_lens, q_lens, strict=True)]
    sizes = [(blocks, own_parts(steps, tile_tokens) if batch_invariant else steps) for blocks, steps in shape]
    alone = sum(blocks * length for blocks, length in sizes)
    if sum(-(-blocks // team) * team * length for blocks, length in sizes) * 8 > alone * 9:
        team = 1  # members without a block would waste more than an eighth
    teams = ctas // team
    groups = [(-(-blocks // team), length) for blocks, length in sizes]
    total = sum(count * length for count, length in groups)
    number = sum(count for count, length in groups if length)
    longest = max((length for count, length in groups if count), default=0)
    parts = extra = 0
    if not batch_invariant:
        parts = parts_of_group(total, number, longest, teams, block_cost, split_cost)
        extra = block_cost if parts == 0 and number > 1 else 0
    line = number * parts if parts else total + number * extra
    teams = min(teams, line)  # so that none is empty between two that share a block

    segments: list[list[Segment]] = [[] for _ in range(ctas)]
    splits: list[Split | None] = [None] * (line * team if batch_invariant else ctas)
    begin, row = 0, 0
    for request, ((count, counted), (blocks, steps)) in enumerate(zip(groups, shape, strict=True)):
        length = parts if parts else counted + extra  # of a group on the line
        for group in range(count if steps else 0):
            left, right = owner_of(line, teams, begin + extra), owner_of(line, teams, begin + length - 1)
            for member in range(min(team, blocks - group * team)):
                block = group * team + member
                for t in range(left, right + 1):
                    cta = t * team + member
                    first = max(share(line, teams, t) - begin - extra, 0)
                    last = min(share(line, teams, t + 1) - begin, length) - extra
                    for run in [(i, i + 1) for i in range(first, last)] if batch_invariant else [(first, last)]:
                        slot = (begin + run[0]) * team + member if batch_invariant else 2 * cta + (run[0] == 0)
                        cut = [share(steps, length, i) for i in run] if batch_invariant or parts else run
                        segments[cta].append(Segment(request, block, cut[0], cut[1], steps, slot))
                pieces = length if batch_invariant else right - left + 1
                if pieces > 1:
                    live = min(rows, q_lens[request] * num_heads - block * rows)
                    entry = (begin if batch_invariant else left) * team + member
                    splits[entry] = Split(row + block * rows, live, pieces, team)
            begin += length
        row += q_lens[request] * num_heads
    return segments, splits
