"""What is measured: decode steps of equal lengths, from one short request to large batches of 128 heads."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cute.problem import HEAD_DIM, KV_LORA_RANK

ELEMENT = 2  # bytes of bf16


@dataclass(frozen=True)
class BenchCase:
    """A bf16 batch in which every request has the same kv_len."""

    batch_size: int
    seq_len_q: int
    num_heads: int
    kv_len: int

    def __str__(self) -> str:
        return f"{self.batch_size},{self.seq_len_q},{self.num_heads},{self.kv_len}"

    @property
    def rows(self) -> int:
        return self.batch_size * self.seq_len_q * self.num_heads

    @property
    def flops(self) -> int:
        """Multiplications and additions of QK and PV. What a causal mask hides is counted: it is less than one tile."""
        return 2 * self.rows * self.kv_len * (HEAD_DIM + KV_LORA_RANK)

    @property
    def bytes(self) -> int:
        """The cache read once, the query and the output."""
        return ELEMENT * (self.batch_size * self.kv_len * HEAD_DIM + self.rows * (HEAD_DIM + KV_LORA_RANK))


def parse(text: str) -> BenchCase:
    """ "batch,query tokens,heads,kv_len". Raises ValueError."""
    try:
        case = BenchCase(*map(int, text.split(",")))
    except (ValueError, TypeError):
        raise ValueError(f"a case is batch,query_tokens,heads,kv_len, such as 128,1,16,8192; got {text!r}") from None
    if min(case.batch_size, case.seq_len_q, case.num_heads, case.kv_len) < 1 or case.seq_len_q > case.kv_len:
        raise ValueError(f"a case needs positive integers and query_tokens <= kv_len, got {text!r}")
    return case


DEFAULT = tuple(
    BenchCase(*numbers)
    for numbers in (
        (1, 1, 16, 4096),
        (1, 1, 16, 32768),
        (1, 1, 16, 131072),
        (1, 1, 64, 32768),
        (1, 1, 128, 4096),
        (1, 1, 128, 32768),
        (16, 1, 16, 4096),
        (16, 1, 128, 4096),
        (64, 1, 16, 4096),
        (128, 1, 16, 8192),
        (32, 1, 16, 32768),
        (128, 1, 32, 8192),
        (64, 1, 64, 4096),
        (128, 1, 64, 8192),
        (64, 1, 128, 4096),
        (128, 1, 128, 4096),
        (132, 1, 128, 8192),
        (64, 2, 128, 4096),
        (128, 2, 128, 8192),
        (64, 4, 128, 4096),
        (64, 4, 16, 8192),
    )
)
