"""What is measured: decode batches, and what they cost in bytes and operations."""

from __future__ import annotations

from dataclasses import dataclass

from mla_cute.problem import DTYPES, HEAD_DIM, KV_LORA_RANK


@dataclass(frozen=True)
class BenchCase:
    """A batch. seq_lens: kv_len of each request; empty where all have kv_len, which else is only their name. The output
    has 16 bits: the query's type, with an e4m3 query bf16.
    """

    batch_size: int
    seq_len_q: int
    num_heads: int
    kv_len: int
    seq_lens: tuple[int, ...] = ()
    page_size: int = 64
    mask_type: str = "causal"
    q_dtype: str = "bf16"
    kv_dtype: str = "bf16"

    def __str__(self) -> str:
        shape = f"{self.batch_size},{self.seq_len_q},{self.num_heads},{self.kv_len}"
        return f"varlen {shape}" if self.seq_lens else shape

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.seq_lens or (self.kv_len,) * self.batch_size

    @property
    def flops(self) -> int:
        """Multiplications and additions of QK and PV. What a causal mask hides is counted: it is less than one tile."""
        return 2 * self.seq_len_q * self.num_heads * sum(self.lengths) * (HEAD_DIM + KV_LORA_RANK)

    @property
    def bytes(self) -> int:
        """The cache read once, the query and the output."""
        rows = self.batch_size * self.seq_len_q * self.num_heads
        cache, query = DTYPES[self.kv_dtype].bytes * sum(self.lengths), DTYPES[self.q_dtype].bytes * rows
        return (cache + query) * HEAD_DIM + 2 * rows * KV_LORA_RANK


def parse(text: str) -> BenchCase:
    """ "batch,query tokens,heads,kv_len". Raises ValueError."""
    try:
        batch_size, seq_len_q, num_heads, kv_len = map(int, text.split(","))
    except ValueError:
        raise ValueError(f"a case is batch,query_tokens,heads,kv_len, such as 128,1,16,8192; got {text!r}") from None
    if min(batch_size, seq_len_q, num_heads, kv_len) < 1 or seq_len_q > kv_len:
        raise ValueError(f"a case needs positive integers and query_tokens <= kv_len, got {text!r}")
    return BenchCase(batch_size, seq_len_q, num_heads, kv_len)
