from __future__ import annotations

import itertools

import pytest
from mla_cute.kernels.common.work import HEAD_WORDS, MAX_CTAS
from mla_cute.kernels.sm90 import config as sm90

from mla_cute import dispatch
from mla_cute.plan import ALIGNMENT, LargestTiling, forced, forced_ctas, make_plan
from mla_cute.problem import MAX_KV_LEN

from .test_problem import problem

TILING = LargestTiling("bf16")


def test_sections_are_aligned_disjoint_and_large_enough() -> None:
    plan = make_plan(problem(num_heads=5, max_seq_len_q=3), TILING, 132)
    part_out, part_stat, split_info = plan.sections
    assert (plan.num_ctas, plan.slot_rows) == (132, 15)
    assert part_out.bytes == 2 * 132 * 15 * 512 * 4
    assert part_stat.bytes == 2 * 132 * 15 * 8 * 4
    assert split_info.bytes == 132 * 4 * 4 + HEAD_WORDS * 4
    end = 0
    for section in plan.sections:
        assert section.offset % ALIGNMENT == 0
        assert end <= section.offset < end + ALIGNMENT
        end = section.offset + section.bytes
    assert plan.workspace_bytes == end


@pytest.mark.parametrize(
    ("changes", "ctas", "rows"),
    [
        ({"batch_size": 1, "max_kv_len": 1, "num_heads": 1}, 1, 1),  # one unit of work
        ({"batch_size": 2, "max_kv_len": 65}, 4, 16),  # two tiles a request
        ({"batch_size": 2, "max_kv_len": 64, "num_heads": 65}, 4, 64),  # two row tiles
        ({"batch_size": 1, "max_kv_len": 1 << 20}, 132, 16),
        ({"batch_size": 1 << 14, "max_kv_len": 1 << 20}, 132, 16),
    ],
)
def test_ctas_and_rows(changes: dict[str, int], ctas: int, rows: int) -> None:
    plan = make_plan(problem(**changes), TILING, 132)
    assert (plan.num_ctas, plan.slot_rows) == (ctas, rows)


def test_no_more_ctas_than_kernels_take() -> None:
    assert make_plan(problem(max_kv_len=1 << 20), TILING, MAX_CTAS + 44).num_ctas == MAX_CTAS


@pytest.mark.parametrize("kv_dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize(("heads", "batch_invariant"), [(8, False), (24, False), (3, True)])
def test_size_never_falls_with_a_larger_bound(heads: int, batch_invariant: bool, kv_dtype: str) -> None:
    """Though a longer query may bring a kernel of more rows, whose steps are longer."""
    grid = {"batch_size": (1, 2, 7, 300), "max_seq_len_q": (1, 2, 5, 64), "max_kv_len": (1, 65, 129, 4096, 1 << 20)}
    sizes = {}
    for values in itertools.product(*grid.values()):
        bounds = dict(zip(grid, values, strict=True))
        one = problem(num_heads=heads, batch_invariant=batch_invariant, kv_dtype=kv_dtype, **bounds)
        sizes[values] = make_plan(one, dispatch.select(one, (9, 0)), 132).workspace_bytes
        assert sizes[values] == make_plan(one, LargestTiling(kv_dtype), 132).workspace_bytes
    for small, large in itertools.product(sizes, sizes):
        if all(a <= b for a, b in zip(small, large, strict=True)):
            assert sizes[small] <= sizes[large]


@pytest.mark.parametrize(
    ("changes", "ctas", "team", "parts"),
    [
        ({"max_kv_len": 2048}, 8, 1, 1),  # nothing is cut
        ({"max_kv_len": 2049}, 16, 1, 2),
        ({"max_kv_len": 1 << 20}, 132, 1, 64),
        ({"max_kv_len": 8192, "num_heads": 128}, 64, 2, 4),
        ({"max_kv_len": 2049, "num_heads": 64, "max_seq_len_q": 7}, 112, 7, 2),
        ({"max_kv_len": 2049, "num_heads": 64, "max_seq_len_q": 17}, 132, 1, 2),  # no team divides 17
    ],
)
@pytest.mark.parametrize("sm_count", [1, 132])
def test_batch_invariant_slots(changes: dict[str, int], ctas: int, team: int, parts: int, sm_count: int) -> None:
    """One for each part of each block of 64 rows, whatever the number of SMs."""
    invariant = problem(batch_invariant=True, **changes)
    plan = make_plan(invariant, TILING, sm_count)
    row_tiles = 8 * -(-invariant.max_seq_len_q * invariant.num_heads // 64)
    assert (plan.num_ctas, plan.parts) == (min(ctas, sm_count), parts)
    assert plan.team == (team if sm_count > 1 else 1)
    slots = row_tiles * parts if parts > 1 else 1
    words = [section.bytes // 4 for section in plan.sections]
    assert words == [
        slots * min(plan.slot_rows, 32) * 512,
        slots * plan.slot_rows * 8,
        4 * row_tiles * parts + HEAD_WORDS,
    ]


def test_batch_invariant_workspace_is_counted_in_int32() -> None:
    large = problem(batch_size=2048, num_heads=64, max_kv_len=1 << 20, batch_invariant=True)
    with pytest.raises(NotImplementedError, match="batch_size=2048.* elements of workspace"):
        make_plan(large, TILING, 132)
    assert make_plan(problem(batch_size=2047, num_heads=64, max_kv_len=1 << 20, batch_invariant=True), TILING, 132)


def test_forced_ctas_hold_within_the_block_alone() -> None:
    with forced_ctas(7):
        assert forced() == 7
        assert make_plan(problem(), TILING, 132).num_ctas == 7
        with forced_ctas(None):
            assert make_plan(problem(), TILING, 132).num_ctas == 132
    assert forced() is None


@pytest.mark.parametrize("count", [-1, 0, MAX_CTAS + 1])
def test_forced_ctas_that_no_kernel_takes(count: int) -> None:
    with pytest.raises(ValueError, match=f"{MAX_CTAS}, got {count}"), forced_ctas(count):
        pass
    with forced_ctas(MAX_CTAS):
        assert make_plan(problem(), TILING, 132).num_ctas == MAX_CTAS


def test_tiles_are_counted_in_int32() -> None:
    large = problem(batch_size=65, max_kv_len=MAX_KV_LEN)
    with pytest.raises(NotImplementedError, match="max_kv_len"):
        make_plan(large, TILING, 132)
    assert make_plan(problem(batch_size=64, max_kv_len=MAX_KV_LEN), TILING, 132).num_ctas == 132


def test_the_size_without_a_gpu_bounds_every_kernel() -> None:
    for config in dispatch.shipped():
        largest = LargestTiling(config.kv_dtype)
        assert config.rows <= largest.rows
        assert config.tile_tokens >= largest.tile_tokens
        assert config.word_rows <= largest.word_rows


def test_a_slot_holds_the_rows_of_every_kernel() -> None:
    sizes = {"fp32": 4, "fp16": 2}
    for config in sm90.shipped():
        one = problem(num_heads=config.rows, max_kv_len=1 << 20, kv_dtype=config.kv_dtype)
        plan = make_plan(one, config, 132)
        slots, columns = 2 * plan.num_ctas, 512 // config.half  # (shift, sum), or four words for each half
        words = 2 if config.part_type == "fp32" else 4 * columns
        assert plan.sections[0].bytes >= slots * plan.slot_rows * 512 * sizes[config.part_type]
        assert plan.sections[1].bytes >= slots * plan.slot_rows * words * 4
