"""What is static in a decode call: names, limits and the frozen `MLAProblem`. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
HEAD_DIM = KV_LORA_RANK + QK_ROPE_HEAD_DIM
PAGE_SIZES = (16, 32, 64, 128, 256)
INT32_MAX = 2**31 - 1
MAX_KV_LEN = 2**31 - 32768  # room above the last token, so that rounding up to a tile stays within int32
MASKS = ("dense", "causal")
LSE_BASES = ("base2", "basee")
LSE_MODES = ("none", *LSE_BASES)


@dataclass(frozen=True)
class DType:
    """An element type. tolerance: relative L2 error against fp64 that an output of this type may have, and one from a
    cache of this type: the softmax weights have the cache's type, with e4m3 that of fp16.
    """

    name: str
    torch_name: str
    bytes: int
    tolerance: float


DTYPES = {
    "bf16": DType("bf16", "bfloat16", 2, 4e-3),
    "fp16": DType("fp16", "float16", 2, 1e-3),
    "e4m3": DType("e4m3", "float8_e4m3fn", 1, 1e-3),
}
OUT_DTYPES = ("bf16", "fp16")
INPUT_DTYPES = (  # of query and cache
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("e4m3", "e4m3"),
    ("bf16", "e4m3"),
    ("fp16", "e4m3"),
)


@dataclass(frozen=True)
class MLAProblem:
    """All that a plan depends on. batch_size, max_seq_len_q and max_kv_len are capacities that a run stays within."""

    batch_size: int
    num_heads: int
    max_seq_len_q: int
    max_kv_len: int
    page_size: int
    packed: bool
    mask_type: str
    q_dtype: str
    kv_dtype: str
    out_dtype: str
    lse_mode: str = "none"
    batch_invariant: bool = False
