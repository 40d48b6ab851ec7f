"""The partition of work: every step once, evenly, in slots that do not meet."""

from __future__ import annotations

import random

import pytest
from mla_cute.kernels.common.work import Segment, Split, best_team, own_parts, owner_of, partition, share


def check(
    kv_lens: list[int], q_lens: list[int], heads: int, ctas: int, team: int, batch_invariant: bool = False
) -> list[list[Segment]]:
    segments, splits = partition(kv_lens, q_lens, heads, ctas, team=team, batch_invariant=batch_invariant)
    longest = max(own_parts(-(-max(n, 0) // 128), 128) for n in kv_lens)
    held = len(kv_lens) * -(-max(q_lens) * heads // 64) * longest if batch_invariant else 2 * ctas
    pieces: dict[tuple[int, int], list[tuple[Segment, int]]] = {}
    for cta, mine in enumerate(segments):
        for piece in mine:
            assert piece.first < piece.last
            pieces.setdefault((piece.request, piece.block), []).append((piece, cta))
    blocks = {(b, i) for b, n in enumerate(kv_lens) if n > 0 for i in range(-(-q_lens[b] * heads // 64))}
    assert set(pieces) == blocks, "each block of a request with tokens, and no other"
    cut = 0
    for (request, block), found in pieces.items():
        found.sort()
        ends = [piece.last for piece, _ in found]
        assert [piece.first for piece, _ in found] == [0, *ends[:-1]]
        assert ends[-1] == found[0][0].steps == -(-kv_lens[request] // 128)
        if len(found) > 1:
            cut += 1
            owner = found[0][0].slot if batch_invariant else found[0][1]
            row = sum(q_lens[:request]) * heads + block * 64
            split = splits[owner]
            assert split is not None
            assert split[:3] == (row, min(64, q_lens[request] * heads - block * 64), len(found))
            assert split.slots(owner, batch_invariant) == [piece.slot for piece, _ in found]
    assert sum(split is not None for split in splits) == cut
    slots = [piece.slot for mine in segments for piece in mine if piece.split]
    assert len(slots) == len(set(slots))
    assert all(0 <= slot < held for slot in slots)
    return segments


def load(mine: list[Segment]) -> int:
    """Steps of a CTA, and 2 for each block that begins in it."""
    return sum(piece.last - piece.first + 2 * (piece.first == 0) for piece in mine)


@pytest.mark.parametrize("seed", range(200))
def test_every_step_once(seed: int) -> None:
    rng = random.Random(seed)
    batch, heads, ctas = rng.randint(1, 9), rng.choice([1, 16, 20, 128]), rng.choice([1, 2, 7, 132])
    length = rng.randint(1, 9000)
    equal = rng.random() < 0.3
    kv_lens = [length if equal else rng.choice([0, -1, 1, rng.randint(1, 3000)]) for _ in range(batch)]
    q_lens = [rng.choice([2, 5])] * batch if rng.random() < 0.5 else [rng.randint(0, 40) for _ in range(batch)]
    check(kv_lens, q_lens, heads, ctas, best_team(-(-max(*q_lens, 1) * heads // 64), ctas))


@pytest.mark.parametrize("seed", range(200))
def test_batch_invariant_parts_are_the_requests_own(seed: int) -> None:
    rng = random.Random(seed)
    batch, heads, ctas = rng.randint(1, 9), rng.choice([1, 16, 20, 128]), rng.choice([1, 2, 7, 132])
    kv_lens = [rng.choice([0, -1, 1, 2048, 2049, 300_000, rng.randint(1, 30_000)]) for _ in range(batch)]
    q_lens = [rng.choice([2, 5])] * batch if rng.random() < 0.5 else [rng.randint(0, 40) for _ in range(batch)]
    team = best_team(-(-max(*q_lens, 1) * heads // 64), ctas, even=True)
    segments = check(kv_lens, q_lens, heads, ctas, team, batch_invariant=True)
    cuts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for piece in sorted(piece for mine in segments for piece in mine):
        cuts.setdefault((piece.request, piece.block), []).append((piece.first, piece.last))
    for (request, _), found in cuts.items():
        steps = -(-kv_lens[request] // 128)
        parts = min(-(-kv_lens[request] // 2048), 64)
        assert found == [(share(steps, parts, i), share(steps, parts, i + 1)) for i in range(parts)]
    if len(set(q_lens)) == 1:  # no member of a team goes without a block
        counts = [len(mine) for mine in segments[: ctas // team * team]]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("kv_lens", "q_len", "heads"),
    [
        ([131072] + [512] * 63, 1, 16),
        ([32768], 1, 16),
        ([8192] * 128, 1, 16),
        ([4096] * 128, 1, 128),
        ([4096] * 64, 4, 128),
        (list(range(1, 30000, 400)), 1, 128),
    ],
)
def test_no_cta_waits_long_for_another(kv_lens: list[int], q_len: int, heads: int) -> None:
    """No CTA gets more than an even share plus what cutting costs (5) and the first half of a block cost twice."""
    team = best_team(-(-q_len * heads // 64), 132)
    segments = check(kv_lens, [q_len] * len(kv_lens), heads, 132, team)
    loads = [load(mine) for mine in segments]
    assert max(loads) <= sum(loads) / len(loads) + 6


def test_equal_requests_are_cut_alike() -> None:
    """128 requests on 132 CTAs stay whole; 64 are halved, instead of 131 uneven cuts each."""
    whole, _ = partition([8192] * 128, [1] * 128, 16, 132)
    assert [len(mine) for mine in whole] == [1] * 128 + [0] * 4
    halves, splits = partition([8192] * 64, [1] * 64, 16, 132)
    assert {(piece.first, piece.last) for mine in halves for piece in mine} == {(0, 32), (32, 64)}
    assert splits[:4] == [Split(0, 16, 2, 1), None, Split(16, 16, 2, 1), None]


def test_a_team_takes_one_request_together() -> None:
    segments, _ = partition([4096] * 128, [1] * 128, 128, 132, team=2)
    assert segments[:4] == [[Segment(0, i, 0, 32, 32, 2 * i + 1)] for i in range(2)] + [
        [Segment(b, i, 0, 32, 32, 2 * (2 + i) + 1) for b in (1, 2)] for i in range(2)
    ]
    for left, right in zip(segments[0::2], segments[1::2], strict=True):
        assert [piece._replace(block=1, slot=piece.slot + 2) for piece in left] == right


def test_teams_are_given_up_where_most_members_would_idle() -> None:
    """One request of 8 blocks beside 60 of one block."""
    segments = check([4096] * 61, [4] + [1] * 60, 128, 132, 4)
    loads = [load(mine) for mine in segments]
    assert max(loads) <= sum(loads) / len(loads) + 6


@pytest.mark.parametrize("blocks", range(1, 300))
def test_an_even_team_leaves_no_member_without_a_block(blocks: int) -> None:
    for ctas in (1, 3, 7, 132):
        assert blocks % best_team(blocks, ctas, even=True) == 0


@pytest.mark.parametrize("blocks", range(1, 300))
def test_best_team_keeps_the_ctas_busy(blocks: int) -> None:
    team = best_team(blocks, 132)
    groups, teams = -(-blocks // team), 132 // team
    assert groups / teams <= 1.1 * blocks / 132


def test_share_and_owner_of_are_inverse() -> None:
    for total in (1, 2, 5, 131, 132, 133, 4096, 2**31 - 1):
        parts = min(132, total)
        starts = [share(total, parts, i) for i in range(parts + 1)]
        assert starts[0] == 0
        assert starts[-1] == total
        assert starts == sorted(set(starts))
        for i in range(parts):
            assert owner_of(total, parts, starts[i]) == i
            assert owner_of(total, parts, starts[i + 1] - 1) == i
