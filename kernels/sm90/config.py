"""Resources of the Hopper decode kernel: tile shapes, roles, registers, shared memory, and which problems it takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from mla_cute.problem import MLAProblem

ARCH = "sm_90a"
CAPABILITIES = ((9, 0),)
KERNEL = "mla_cute.kernels.sm90.decode:Decode"
DTYPES = ("bf16", "fp16")
SMEM_LIMIT = 232_448  # bytes of dynamic shared memory a CTA may have on sm_90


class Barrier(IntEnum):
    """Named barriers (0 is the CTA's own)."""

    SUM = 1  # the two warpgroups exchange row sums
    WARPGROUP = 2  # + warpgroup: its 128 threads alone


@dataclass(frozen=True)
class DecodeConfig:
    """One compiled kernel. Nothing of the batch is in it, so a new batch never recompiles.

    in_dtype, out_dtype: "bf16" or "fp16" (query and cache share in_dtype). page_rows: tokens a TMA copy takes from
    one page, min(page_size, 64). Pages of 64, 128 and 256 share a kernel: the page size is a run-time shift.
    """

    in_dtype: str
    out_dtype: str
    page_rows: int

    arch: ClassVar[str] = ARCH
    rows: ClassVar[int] = 64  # query rows (token x head) a CTA: the M of one WGMMA
    tile: ClassVar[int] = 64  # KV tokens of one softmax step
    tile_tokens: ClassVar[int] = 128  # a pair of tiles: the unit in which work is split
    head_dim: ClassVar[int] = 576
    latent: ClassVar[int] = 512
    half: ClassVar[int] = 256  # latent columns a consumer warpgroup owns
    # In steps, see common/work.py. H200, 128 heads, a step of 3.3 us: from the last P V of a block to the first of the
    # next 5.6 to 6.3 us; cutting everywhere 16 us, 12 of them to combine.
    block_cost: ClassVar[int] = 2
    split_cost: ClassVar[int] = 5
    half_slots: ClassVar[int] = 4  # two tiles, each as two halves
    rope_slots: ClassVar[int] = 2
    threads: ClassVar[int] = 384  # warpgroup 0: KV warp, three query warps; warpgroups 1, 2: math
    query_warps: ClassVar[int] = 3
    producer_regs: ClassVar[int] = 40
    consumer_regs: ClassVar[int] = 232
    # Below this much work (226 MB of KV) the cache is read with evict_first. H200: 38 MB 31.0 -> 29.6 us, 76 MB 42.4 ->
    # 39.8 us, 151 MB 61.3 -> 59.4 us, but 1.2 GB 297 -> 315 us.
    evict_first_steps: ClassVar[int] = 1536

    @property
    def name(self) -> str:
        return f"sm90_r{self.rows}_{self.in_dtype}_{self.out_dtype}_p{self.page_rows}"

    @property
    def lazy(self) -> float:
        """log2 units by which a score may pass its row's reference before O is rescaled."""
        return 8.0 if self.in_dtype == "bf16" else 2.0

    @property
    def lift(self) -> float:
        """log2 of a factor in P and its row sums. fp16 has 5 exponent bits: P fills them up to 2**15 (lazy + lift), so
        that weights down to 2**-27 of the largest keep all their bits, as beside an attention sink they must.
        """
        return 0.0 if self.in_dtype == "bf16" else 13.0

    @property
    def smem_bytes(self) -> int:
        """Tiles alone; the barriers and row statistics take less than 2 KB more."""
        kv = self.half_slots * self.tile * self.half + self.rope_slots * self.tile * 64
        return 2 * (self.rows * self.head_dim + kv)


def refuse(problem: MLAProblem) -> str | None:
    """Why this kernel cannot serve the problem, or None."""
    if problem.q_dtype not in DTYPES:
        return f"query dtype {problem.q_dtype} is not one of {', '.join(DTYPES)}"
    if problem.kv_dtype != problem.q_dtype:
        return f"kv_cache dtype {problem.kv_dtype} differs from query dtype {problem.q_dtype}"
    if problem.out_dtype not in DTYPES:
        return f"output dtype {problem.out_dtype} is not one of {', '.join(DTYPES)}"
    if problem.batch_invariant:
        return (
            "batch_invariant=True needs a split that depends on one request alone, which this kernel does not have yet"
        )
    return None


def config_for(problem: MLAProblem) -> DecodeConfig:
    return DecodeConfig(problem.q_dtype, problem.out_dtype, min(problem.page_size, DecodeConfig.tile))


def shipped() -> tuple[DecodeConfig, ...]:
    """Every kernel of this architecture."""
    return tuple(DecodeConfig(i, o, p) for i in DTYPES for o in DTYPES for p in (16, 32, 64))
