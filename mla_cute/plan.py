"""How a launch is sized: number of CTAs and layout of the workspace. Integers only; no live length is read here.

A CTA leaves at most two partial results (kernels/common/work.py), hence 2 * num_ctas slots of `slot_rows` rows;
batch-invariant, each part of each row tile has a slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol

from mla_cute.errors import UnsupportedProblem
from mla_cute.kernels.common.work import HEAD_WORDS, MAX_CTAS, best_team, own_parts
from mla_cute.problem import INT32_MAX, KV_LORA_RANK, MLAProblem

ALIGNMENT = 256  # bytes, of every section of the workspace
_forced: ContextVar[int | None] = ContextVar("forced_ctas", default=None)


class Tiling(Protocol):
    """The part of a kernel's config that sizes depend on."""

    @property
    def rows(self) -> int: ...  # query rows (token x head) a CTA holds

    @property
    def tile_tokens(self) -> int: ...  # KV tokens of the unit in which work is split

    @property
    def block_cost(self) -> int: ...  # such units that a change of blocks costs

    @property
    def word_rows(self) -> int: ...  # of fp32 that a slot has room for, whatever rows the workspace is for


@dataclass(frozen=True)
class LargestTiling:
    """Needs no less workspace than any kernel's for a cache of this dtype, and plans where there is no GPU."""

    kv_dtype: str
    rows: int = 64
    tile_tokens: int = 64
    block_cost: int = 2

    @property
    def word_rows(self) -> int:
        return 64 if self.kv_dtype == "e4m3" else 32


@dataclass(frozen=True)
class Section:
    """Bytes [offset, offset + bytes) of the workspace."""

    offset: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """Launch size and workspace of a problem."""

    num_ctas: int
    slot_rows: int
    word_rows: int  # of fp32 that have as many bytes as the O of a slot, at most slot_rows
    team: int = 1  # CTAs that take neighbouring row tiles of a request together
    room: int = 1  # CTAs that the workspace has room for, if more than num_ctas
    row_tiles: int = 0  # batch-invariant: of the batch; else 0
    parts: int = 0  # batch-invariant: of a row tile, at most; else 0

    @property
    def sections(self) -> tuple[Section, Section, Section]:
        """part_out (int32), part_stat (fp32), split_info (int32), in this order."""
        return self._sections(self.num_ctas)

    @property
    def workspace_bytes(self) -> int:
        last = self._sections(max(self.num_ctas, self.room))[-1]
        return last.offset + last.bytes

    def _sections(self, ctas: int) -> tuple[Section, Section, Section]:
        slots, entries = 2 * ctas, ctas
        if self.parts:
            entries = self.row_tiles * self.parts
            slots = entries if self.parts > 1 else 1  # that nothing is written to
        offset, sections = 0, []
        for elements in (slots * self.word_rows * KV_LORA_RANK, slots * self.slot_rows * 8, entries * 4 + HEAD_WORDS):
            sections.append(Section(offset, 4 * elements))
            offset += -(-4 * elements // ALIGNMENT) * ALIGNMENT
        return sections[0], sections[1], sections[2]


def make_plan(problem: MLAProblem, tiling: Tiling, sm_count: int) -> Plan:
    """Size a launch. Never less workspace for a larger batch_size, max_seq_len_q or max_kv_len, though these may bring
    another kernel whose steps are longer, hence its CTAs fewer: there is room for as many as with the shortest steps.

    Raises UnsupportedProblem where the kernel could not count its tiles, or elements of the workspace, in int32.
    """
    rows = problem.max_seq_len_q * problem.num_heads
    row_tiles, units = -(-rows // tiling.rows), _units(problem, tiling)
    most = _units(problem, LargestTiling(problem.kv_dtype))
    num_ctas, room = (_forced.get() or max(1, min(count, sm_count, MAX_CTAS)) for count in (units, most))
    plan = Plan(num_ctas, min(tiling.rows, rows), min(tiling.word_rows, rows), best_team(row_tiles, num_ctas), room)
    if problem.batch_invariant:
        all_tiles = problem.batch_size * row_tiles
        team = best_team(row_tiles, num_ctas, even=True)  # a member without a row tile would waste slots
        plan = replace(plan, team=team, row_tiles=all_tiles, parts=units // all_tiles)
    tiles = units + problem.batch_size * row_tiles * tiling.block_cost
    elements = max(section.bytes for section in plan.sections) // 4
    for count, what in ((tiles, "tiles"), (elements, "elements of workspace")):
        if count > INT32_MAX:
            raise UnsupportedProblem(
                f"batch_size={problem.batch_size}, max_seq_len_q={problem.max_seq_len_q}, "
                f"num_heads={problem.num_heads}, max_kv_len={problem.max_kv_len}, "
                f"batch_invariant={problem.batch_invariant} make {count} {what}; at most {INT32_MAX} can be counted"
            )
    return plan


def _units(problem: MLAProblem, tiling: Tiling) -> int:
    """Units of work at most: more CTAs than that have nothing to do."""
    row_tiles = -(-problem.max_seq_len_q * problem.num_heads // tiling.rows)
    steps = -(-problem.max_kv_len // tiling.tile_tokens)
    each = own_parts(steps, tiling.tile_tokens) if problem.batch_invariant else steps
    return problem.batch_size * row_tiles * each


@contextmanager
def forced_ctas(count: int | None) -> Iterator[None]:
    """Within the block, plans get this many CTAs (so, of splits) whatever the GPU; None: as many as ever. For tests
    and measurements only. ValueError outside 1..MAX_CTAS."""
    if count is not None and not 1 <= count <= MAX_CTAS:
        raise ValueError(f"count must be in 1..{MAX_CTAS}, got {count}")
    token = _forced.set(count)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> int | None:
    """The forced number of CTAs, part of the key of any cached plan."""
    return _forced.get()
