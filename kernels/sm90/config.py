"""Resources of the Hopper decode kernel: tile shapes, roles, registers, shared memory, and which problems it takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from mla_cute.problem import MLAProblem

ARCH = "sm_90a"
CAPABILITIES = ((9, 0),)
KERNEL = "mla_cute.kernels.sm90.decode:Decode"
DTYPES = ("bf16", "fp16")  # of outputs
INPUTS = (("bf16", "bf16"), ("fp16", "fp16"), ("e4m3", "e4m3"), ("bf16", "e4m3"), ("fp16", "e4m3"))  # query, cache
FP8 = "e4m3"
THIRD = 192  # columns of a piece in the swapped form, of 576
SMEM_LIMIT = 232_448  # bytes of dynamic shared memory a CTA may have on sm_90
FEW_ROWS = (8, 16, 24, 32)  # what the swapped form compiles for besides 64; rows_for picks among those shipped
SHIPPED_FEW = (8, 16, 32)
SHIPPED_FEW_FP8 = (16, 32)


class Barrier(IntEnum):
    """Named barriers (0 is the CTA's own)."""

    SUM = 1  # all math warps
    WARPGROUP = 2  # + warpgroup: its 128 threads alone
    MOVED = 4  # swapped form: the math warps ask whether a reference has to move


class Ring(NamedTuple):
    """Slots of shared memory, each for `columns` columns of a tile; TMA fills them one after the other."""

    columns: int
    slots: int


class Piece(NamedTuple):
    """One filling of a slot: columns [box * columns, (box + 1) * columns) of a tile, `columns` being the ring's."""

    ring: str
    slot: int  # counted from where the step's first piece of this ring lies
    tile: int  # of the step
    box: int


@dataclass(frozen=True)
class DecodeConfig:
    """One compiled kernel. Nothing of the batch is in it, so a new batch never recompiles.

    q_dtype, kv_dtype: one of INPUTS; the output's dtype is known at run time alone. page_rows: tokens a TMA copy takes
    from a page: min(page_size, 64), of an e4m3 cache 16 or 64. The page size, a multiple of them, is a run-time shift.
    rows: query rows (token x head) a CTA. 64 are the M of a WGMMA, and two math warpgroups share each pair of tiles;
    8, 16, 24 or 32 ("few") are the N of WGMMAs whose M is tokens or latents (the swapped form), and one math warpgroup
    does a tile. With an e4m3 cache all rows take the swapped form, by two math warpgroups for each pair of tiles.
    """

    q_dtype: str
    kv_dtype: str
    page_rows: int
    rows: int = 64

    arch: ClassVar[str] = ARCH
    tile: ClassVar[int] = 64  # KV tokens of one softmax step
    head_dim: ClassVar[int] = 576
    latent: ClassVar[int] = 512
    half: ClassVar[int] = 256  # latent columns a math warpgroup owns, where there are two
    # In steps, see common/work.py. H200, 128 heads, a step of 3.3 us: from the last P V of a block to the first of the
    # next 5.6 to 6.3 us; cutting everywhere 16 us, 12 of them to combine.
    block_cost: ClassVar[int] = 2
    split_cost: ClassVar[int] = 5
    query_warps: ClassVar[int] = 2
    scheduler_warp: ClassVar[int] = 3
    least_merge_ctas: ClassVar[int] = 128  # of combine: a piece of 16 rows for each, see combine

    def __post_init__(self) -> None:
        if self.rows not in (*FEW_ROWS, 64):
            raise ValueError(f"rows must be one of {FEW_ROWS} or 64, got {self.rows}")

    @property
    def name(self) -> str:
        inputs = self.q_dtype if self.kv_dtype == self.q_dtype else f"{self.q_dtype}_{self.kv_dtype}"
        return f"sm90_r{self.rows}_{inputs}_p{self.page_rows}"

    @property
    def few(self) -> bool:
        return self.rows < 64

    @property
    def fp8(self) -> bool:
        return self.kv_dtype == FP8

    @property
    def compute(self) -> str:
        """The dtype of all products: fp16 holds every e4m3 number, and widening takes one instruction for two."""
        return "fp16" if self.fp8 else self.q_dtype

    @property
    def swapped(self) -> bool:
        return self.few or self.fp8

    @property
    def tiles(self) -> int:
        """Of a step, the unit in which work is split."""
        return 1 if self.few and not self.fp8 else 2

    @property
    def tile_tokens(self) -> int:
        return self.tile * self.tiles

    @property
    def math_warps(self) -> int:
        return 4 * self.tiles

    @property
    def q_bytes(self) -> int:
        return 1 if self.q_dtype == FP8 else 2

    @property
    def kv_bytes(self) -> int:
        return 1 if self.fp8 else 2

    @property
    def widen_keys(self) -> bool:
        """Whether keys become fp16, too; an e4m3 query multiplies them as they are."""
        return self.fp8 and self.q_dtype != FP8

    @property
    def sum_chunks(self) -> int:
        """Chunks of 64 columns of scores that the tensor cores add up; fp32 registers add these sums. Of FP8 products
        the tensor cores keep some 13 bits while they add. H200, e4m3 query, chunks added: LSE off by up to 5e-3 (9),
        6.4e-4 (2), 5.1e-4 (1); (128, 1, 128, 4096) 234, 247, 285 us.
        """
        return 2 if self.q_dtype == FP8 else 9

    @property
    def row_gains(self) -> bool:
        """Whether each row has a power of two of its own in its scores: bf16 rows that become fp16 ones."""
        return self.fp8 and self.q_dtype == "bf16"

    @property
    def combine_beside(self) -> bool:
        """Whether combine waits on the same SM (PDL): registers are left for it."""
        return self.math_warps == 4

    @property
    def threads(self) -> int:
        """Warpgroup 0: KV warp, two query warps, scheduler; the others: math."""
        return 128 + 32 * self.math_warps

    @property
    def producer_regs(self) -> int:
        # with fewer the KV warp spills, with more the math warps of 32 rows
        if self.fp8:
            return 72 if self.few else 40
        return 56 if self.few and self.rows < 32 else 40

    @property
    def consumer_regs(self) -> int:
        # of a launch with 128 or 168 a thread
        return 256 - self.producer_regs if self.combine_beside else 252 - self.producer_regs // 2

    @property
    def blocks_per_sm(self) -> int:
        """CTAs an SM that registers are left for. ptxas keeps setmaxnreg only where it is given. 2, though shared
        memory holds one, where the other half of the registers is for combine.
        """
        return 2 if self.combine_beside else 1

    @property
    def merge_ctas(self) -> int:
        """CTAs of combine for each of decode: as many as fit on an SM at once; few rows: one, see merge_flight."""
        return 1 if self.few else 4

    @property
    def invariant_parts(self) -> int:
        """Batch-invariant: parts up to which a warp of combine merges rows alone, see combine.is_shared. With few rows,
        four blocks may have 33 parts each, and their rows are too many for a CTA each.
        """
        return 40 if self.few else 8

    @property
    def part_type(self) -> str:
        """Of O in a partial result. Swapped form: making fp16 of it costs a block as much as half of the bytes save."""
        return "fp32" if self.swapped else "fp16"

    @property
    def word_rows(self) -> int:
        """Rows of fp32 that a slot has room for, the same for all kernels of a cache's dtype: a workspace for more
        query rows serves fewer, too. With a 16-bit cache 64 rows are fp16, and take no more than 32.
        """
        return 64 if self.fp8 else 32

    @property
    def merge_flight(self) -> tuple[int, int]:
        """Parts of few and of many that a warp of combine has in flight, as registers allow; fp32 ones: beside the
        first part, see combine.merge.
        """
        if self.swapped:
            return (7, 8) if self.few else (2, 3)
        return 4, 3

    @property
    def rings(self) -> dict[str, Ring]:
        if self.fp8:
            return {"third": Ring(THIRD, 15 if self.rows <= 16 else 12 if self.few or not self.widen_keys else 9)}
        if self.few:  # beside combine's shared memory
            return {"third": Ring(THIRD, 8 if self.rows <= 16 else 7)}
        return {"half": Ring(256, 4), "rope": Ring(64, 2)}  # two tiles

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Of a step, in the order in which they are loaded and used: L_a, R_a, rope_a, R_b, L_b, rope_b for a pair."""
        if self.swapped:
            return tuple(Piece("third", 3 * t + n, t, n) for t in range(self.tiles) for n in range(3))
        tiles = ([Piece("half", 2 * t + j, t, t ^ j) for j in (0, 1)] + [Piece("rope", t, t, 8)] for t in (0, 1))
        return tuple(piece for tile in tiles for piece in tile)

    @property
    def slot_bytes(self) -> int:
        """Of a ring of thirds."""
        return self.tile * THIRD * self.kv_bytes

    @property
    def fragments(self) -> int:
        """e4m3: pairs of WGMMAs in flight from widened operands, 8 registers each. With 3, 64 rows spill."""
        return 2 if self.rows == 64 else 4

    @property
    def output_slots(self) -> tuple[int, int]:
        """Half slots in which the left and the right half of a finished O wait for TMA: those that they free last."""
        return 3, 2

    @property
    def staging(self) -> Piece | None:
        """The first piece that may lie where O waits."""
        return None if self.swapped else self.pieces[3]

    @property
    def evict_first_steps(self) -> int:
        """Below this much work (226 MB of KV) the cache is read with evict_first. H200: 38 MB 31.0 -> 29.6 us, 76 MB
        42.4 -> 39.8 us, 151 MB 61.3 -> 59.4 us, but 1.2 GB 297 -> 315 us.
        """
        return 1536 * 128 * 2 // (self.kv_bytes * self.tile_tokens)

    @property
    def lazy(self) -> float:
        """log2 units by which a score may pass its row's reference before O is rescaled."""
        return 8.0 if self.compute == "bf16" else 2.0

    @property
    def lift(self) -> float:
        """log2 of a factor in P and its row sums. fp16 has 5 exponent bits: P fills them up to 2**15 (lazy + lift), so
        that weights down to 2**-27 of the largest keep all their bits, as beside an attention sink they must.
        """
        return 0.0 if self.compute == "bf16" else 13.0

    @property
    def smem_bytes(self) -> int:
        """Tiles and P alone; the barriers and row statistics take less than 6 KB more."""
        kv = sum(self.tile * ring.columns * ring.slots for ring in self.rings.values()) * self.kv_bytes
        p = self.rows * self.tile_tokens if self.swapped else 0  # else it lies over the rope columns
        return kv + self.q_bytes * self.rows * self.head_dim + 2 * p


def refuse(problem: MLAProblem) -> str | None:
    """Why this kernel cannot serve the problem, or None."""
    if (problem.q_dtype, problem.kv_dtype) not in INPUTS:
        pairs = ", ".join(f"({q}, {kv})" for q, kv in INPUTS)
        return f"query dtype {problem.q_dtype} and kv_cache dtype {problem.kv_dtype} are none of {pairs}"
    if problem.out_dtype not in DTYPES:
        return f"output dtype {problem.out_dtype} is not one of {', '.join(DTYPES)}"
    return None


def rows_for(problem: MLAProblem) -> int:
    """The smallest shipped block that holds all rows of a request, so that its tokens are read once; else 64.

    H200, us, few rows against 64: (1, 1, 16, 4096) 13.7 / 16.6, (1, 1, 16, 32768) 23.3 / 28.3, (16, 1, 16, 4096)
    34.7 / 38.8, (1, 1, 32, 32768) 28.2 / 30.2, (128, 1, 16, 8192) 288.8 / 289.7. With more rows, blocks of 32 lose:
    (1, 1, 64, 32768) 31.7 / 29.6, (1, 1, 128, 4096) 27.5 / 19.4. 8 rows against 16: (1, 1, 8, 32768) 24.6 / 25.9,
    (16, 1, 8, 4096) 34.4 / 35.6; 24 against 32 gain 1%, and are not shipped.
    """
    rows = problem.max_seq_len_q * problem.num_heads
    shipped_few = SHIPPED_FEW_FP8 if problem.kv_dtype == FP8 else SHIPPED_FEW
    return next((n for n in shipped_few if rows <= n), 64)


def config_for(problem: MLAProblem) -> DecodeConfig:
    page_rows = min(problem.page_size, DecodeConfig.tile)
    if problem.kv_dtype == FP8 and page_rows == 32:
        page_rows = 16  # two copies a page: not worth kernels of their own
    return DecodeConfig(problem.q_dtype, problem.kv_dtype, page_rows, rows_for(problem))


def shipped() -> tuple[DecodeConfig, ...]:
    """Every kernel of this architecture."""
    return tuple(
        DecodeConfig(q, kv, page_rows, rows)
        for q, kv in INPUTS
        for rows in (64, *reversed(SHIPPED_FEW_FP8 if kv == FP8 else SHIPPED_FEW))
        for page_rows in ((16, 64) if kv == FP8 else (16, 32, 64))
    )
