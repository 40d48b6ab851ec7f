"""The argument list of every compiled kernel, written once: names for the host, fake tensors for the compiler.

Importing this module imports no cutlass; `fake_arguments` does.
"""

from __future__ import annotations

from typing import Any

ARGUMENTS = (
    # Of each pair (plain, packed) a launch reads one: they differ in rank, and a view would cost the caller 2.7 us.
    "query",  # [batch, SQ, H, 576], last stride 1
    "packed_query",  # [total_q, H, 576]
    "kv_cache",  # [pages, page_size, 576], last stride 1
    "block_tables",  # int32 [>= batch, width], last stride 1
    "seq_lens",  # int32 [>= batch]
    "qo_indptr",  # int32 [>= batch + 1]; fixed: any int32 vector, it is not read
    "part_out",  # int32, mla_cute/plan.py sizes it: rows of fp32 or, of blocks of 64 with a 16-bit cache, fp16
    "part_stat",  # fp32 [2 * num_ctas * slot_rows * 8]: (shift, sum) of a row or, of fp16, (those, scale, -) of a half
    "split_info",  # int32 [4 * num_ctas + work.HEAD_WORDS]; batch-invariant: mla_cute/plan.py sizes these three
    "batch",  # requests of this run
    "seq_len_q",  # query tokens a request; 0: packed
    "causal",  # 0 or 1
    "max_kv_len",  # lengths beyond it are cut
    "slot_rows",  # rows of a slot of part_out, min(config.rows, query rows of a request)
    "num_ctas",  # grid of the decode kernel
    "team",  # CTAs that take neighbouring blocks of a request together, see work.py
    "batch_invariant",  # 0 or 1
    "out_bf16",  # 1: the output is bf16, 0: fp16
    "out_address",  # int64: of the output, compact rows (token x head) of 512
    "lse_address",  # int64: of an fp32 for each of these rows; not written where lse_scale is 0
    "scale1_address",  # int64: of an fp32 in device memory that multiplies scale_log2 when the kernel runs; 0: none
    "scale2_address",  # the same for out_scale
    "scale_log2",  # bmm1_scale * log2(e); log2(e) where scale1_address has bmm1_scale
    "out_scale",  # bmm2_scale; 1 where scale2_address has it
    "lse_scale",  # 1: base 2, ln(2): base e, 0: no LSE is written
)


def fake_arguments(config: Any) -> tuple[Any, ...]:
    """Arguments for cute.compile, with the stream that the compiled function takes from its caller's environment."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

    types = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "e4m3": cutlass.Float8E4M3FN}
    extent = cute.sym_int

    def strided(dtype: Any, *shape: Any, align: int) -> Any:
        # 64-bit strides: a cache passes 2**31 elements. They are multiples of `align` bytes too.
        strides = tuple(cute.sym_int64(divisibility=align * 8 // dtype.width) for _ in shape[1:])
        return make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=align)

    def vector(dtype: Any, align: int) -> Any:
        return make_fake_compact_tensor(dtype, (extent(),), assumed_align=align)

    q_dtype, kv_dtype = types[config.q_dtype], types[config.kv_dtype]
    return (
        strided(q_dtype, extent(), extent(), extent(), config.head_dim, align=16),
        strided(q_dtype, extent(), extent(), config.head_dim, align=16),
        strided(kv_dtype, extent(), extent(), config.head_dim, align=16),
        strided(cutlass.Int32, extent(), extent(), align=4),
        vector(cutlass.Int32, 4),
        vector(cutlass.Int32, 4),
        vector(cutlass.Int32, 32),
        vector(cutlass.Float32, 32),
        vector(cutlass.Int32, 32),
        *(cutlass.Int32(1) for _ in range(9)),
        *(cutlass.Int64(0) for _ in range(4)),
        *(cutlass.Float32(1.0) for _ in range(3)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
