"""The public functions: decode in one call, decode by plan and run, and the size of the workspace."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_cute import validate as checks
from mla_cute.launch import Bound, Prepared, capturing, prepare, run, size
from mla_cute.plan import forced
from mla_cute.problem import KV_LORA_RANK, LSE_BASES, QK_ROPE_HEAD_DIM, MLAProblem
from mla_cute.validate import Call


def batch_mla_decode_with_paged_kv_cache(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    qo_indptr: Tensor | None = None,
    max_seq_len_q: int | None = None,
    kv_lora_rank: int = KV_LORA_RANK,
    qk_rope_head_dim: int = QK_ROPE_HEAD_DIM,
    mask_type: str = "causal",
    max_kv_len: int | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    lse: Tensor | None = None,
    return_lse: bool = False,
    lse_mode: str = "base2",
    workspace_buffer: Tensor | None = None,
    validate: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head latent attention of a few query tokens a request over a paged cache of latent vectors.

    out = bmm2_scale * softmax(bmm1_scale * query . key) . key[:512], over the keys that a row sees; fp32 accumulation.
    CUDA tensors run on a kernel for that GPU, on its current stream. CPU tensors run on the reference, in plain torch.

    query: [B, SQ, H, 576] (fixed form) or, with qo_indptr, [total_q, H, 576] (packed form); bf16, fp16 or e4m3
        (torch.float8_e4m3fn). The first 512 channels meet the latent part of a key, the last 64 its RoPE part. Strides:
        last 1, others multiples of 16 bytes and at least compact, so slices of a larger buffer pass.
    kv_cache: [pages, page_size, 576] or [pages, 1, page_size, 576], dtype of query, or e4m3 with a query of any of the
        three; page_size 16, 32, 64, 128 or 256. Strides as for query.
    block_tables: int32 [>= B, width >= ceil(max_kv_len / page_size)], rows may be padded. Entry [b, c] is the page of
        tokens c * page_size and on. Columns beyond a request's length are not read.
    seq_lens: int32 [>= B], tokens in the cache, those of this call's queries included; 0 is allowed.
    qo_indptr: int32 [B + 1], query rows of request b are qo_indptr[b] to qo_indptr[b + 1] - 1; equal for no queries.
    max_seq_len_q: bound on the query tokens of a request (packed; None: found in qo_indptr). In the fixed form it is
        SQ.
    kv_lora_rank, qk_rope_head_dim: 512 and 64.
    mask_type: "causal": query token i of n sees keys 0 .. kv_len - n + i; "dense": all keys of its request.
    max_kv_len: bound on seq_lens (None: found in seq_lens).
    bmm1_scale, bmm2_scale: finite positive factors of the scores and of the output: numbers, or fp32 tensors of one
        element ([] or [1]) on the device of query, which the kernel reads when it runs. What e4m3 values were divided
        by belongs into them: bmm1_scale = softmax scale * query's * cache's, bmm2_scale = cache's.
    out: [..., H, 512] in out_dtype, contiguous; None: allocated. A given tensor is returned itself.
    out_dtype: torch.bfloat16 or torch.float16.
    lse: fp32 [..., H], contiguous; written whenever it is given. return_lse: return (out, lse), allocated if not given.
    lse_mode: "base2": log2 of the sum of exp(score); "basee": its natural logarithm. bmm2_scale is not in it.
    workspace_buffer: int8 or uint8, of at least get_batch_mla_decode_workspace_size(...) bytes, 32-byte aligned, of any
        content; None: allocated for this call.
    validate: True checks all arguments and copies the metadata to the host, which waits for the device. False checks
        nothing and never waits; then max_kv_len and, in the packed form, max_seq_len_q are needed.

    A row that sees no key gets out 0 and LSE -inf: seq_lens 0, and with validate=False (else they are errors) causal
    rows before the first key and packed rows beyond qo_indptr[-1].

    Raises TypeError, ValueError or NotImplementedError, naming the argument; UnsupportedProblem (a
    NotImplementedError) where no kernel serves the problem; RuntimeError where a CUDA graph is captured with
    validate=True, without workspace_buffer or without the bounds that validate=False needs.
    """
    checks.check_bool("validate", validate)
    call = Call(query, kv_cache, block_tables, seq_lens, qo_indptr, bmm1_scale, bmm2_scale, out, lse)
    if validate:
        checks.check_ranks(call)
        checks.check_devices(call, checks.resolve_device("query.device", query.device))
        checks.check_dims(kv_lora_rank, qk_rope_head_dim)
        checks.check_bool("return_lse", return_lse)
        checks.check_choice("lse_mode", lse_mode, LSE_BASES)
    bounded = max_kv_len is not None and (qo_indptr is None or max_seq_len_q is not None)
    if (validate or workspace_buffer is None or not bounded) and capturing(query.device):
        raise RuntimeError(
            "capture in a CUDA graph needs validate=False, workspace_buffer, max_kv_len and, in the packed form, "
            "max_seq_len_q"
        )
    if validate:
        max_kv_len, max_seq_len_q = checks.find_bounds(call, max_kv_len, max_seq_len_q)
    problem = problem_of(call, max_seq_len_q, max_kv_len, mask_type, out_dtype, lse_mode)
    if validate:
        checks.check_problem(problem)
        checks.check_run(problem, query.device, call, workspace_buffer)
        checks.check_metadata(problem, call)
    prepared = prepare(problem, query.device, forced())
    if validate and workspace_buffer is not None:
        checks.check_workspace(workspace_buffer, prepared.plan.workspace_bytes, query.device)
    return run(prepared, prepared.bind(workspace_buffer), call, return_lse)


class BatchMLADecodePagedTSWrapper:
    """Decode in two steps: plan() once for a geometry, run() for every layer and step, also inside a CUDA graph.

    A wrapper owns one workspace, so only one of its runs or graph replays may be in flight; use a wrapper for each
    stream. A captured graph holds the address of the workspace: as long as the graph is used, and while a run is in
    flight, keep the wrapper and a workspace_buffer of yours, and do not plan the wrapper anew.
    """

    def __init__(self) -> None:
        self._prepared: Prepared | None = None
        self._bound: Bound | None = None
        self._workspace: Tensor | None = None

    @property
    def kernel(self) -> str:
        """Name and config of the chosen kernel, for people. RuntimeError before plan()."""
        return self._planned().kernel

    def plan(
        self,
        device: int | str | torch.device,
        batch_size: int,
        num_heads: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        page_size: int,
        max_kv_len: int,
        *,
        max_seq_len_q: int,
        packed_query: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        o_data_type: torch.dtype,
        mask_type: str = "causal",
        workspace_buffer: Tensor | None = None,
        lse_mode: str = "none",
        batch_invariant: bool = False,
        validate: bool = True,
    ) -> None:
        """Choose and load the kernel (the first use of one may compile it), and size the workspace.

        Loaded includes a launch on a request without tokens, so that a CUDA graph of runs can be captured straight
        away. (A plan() during a capture launches nothing.)

        device: index, name or torch.device of a GPU, or "cpu" for the reference.
        batch_size, max_seq_len_q, max_kv_len: the most requests, query tokens a request (fixed form: exactly) and
            tokens in the cache that a run may have. One buffer sized for the largest serves all smaller plans.
        packed_query: whether runs pass qo_indptr and a packed query.
        q_data_type, kv_data_type: of query and cache: both torch.bfloat16, torch.float16 or torch.float8_e4m3fn; or a
            query of 16 bits and a cache of torch.float8_e4m3fn. o_data_type: torch.bfloat16 or torch.float16.
        lse_mode: "none", "base2" or "basee"; "none" if runs need no LSE.
        batch_invariant: True: the bits of a row's out and LSE depend on its request alone (query, cache, length; not on
            the pages that hold it), whatever the other requests are, its place among them, batch_size, max_kv_len and
            the GPU's number of SMs. They may depend on num_heads, max_seq_len_q, page_size and the dtypes. It costs
            time, most where few requests leave SMs without work, and workspace: for each 2,048 of max_kv_len tokens,
            up to 131,072, and each 64 query rows of each request 68 KB, 134 KB with an e4m3 cache.
        Others as in batch_mla_decode_with_paged_kv_cache. validate=False skips the checks of these arguments.

        Raises as batch_mla_decode_with_paged_kv_cache does; after an error the previous plan is still in force.
        """
        checks.check_bool("validate", validate)
        target = checks.resolve_device("device", device)
        problem = MLAProblem(
            batch_size=batch_size,
            num_heads=num_heads,
            max_seq_len_q=max_seq_len_q,
            max_kv_len=max_kv_len,
            page_size=page_size,
            packed=packed_query,
            mask_type=mask_type,
            q_dtype=checks.dtype_name("q_data_type", q_data_type),
            kv_dtype=checks.dtype_name("kv_data_type", kv_data_type),
            out_dtype=checks.out_dtype_name("o_data_type", o_data_type),
            lse_mode=lse_mode,
            batch_invariant=batch_invariant,
        )
        if validate:
            checks.check_dims(kv_lora_rank, qk_rope_head_dim)
            checks.check_problem(problem)
        prepared = prepare(problem, target, forced())
        if validate and workspace_buffer is not None:
            checks.check_workspace(workspace_buffer, prepared.plan.workspace_bytes, target)
        bound = prepared.bind(workspace_buffer)
        self._prepared, self._bound, self._workspace = prepared, bound, workspace_buffer

    def run(
        self,
        query: Tensor,
        kv_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        *,
        qo_indptr: Tensor | None = None,
        bmm1_scale: float | Tensor = 1.0,
        bmm2_scale: float | Tensor = 1.0,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        validate: bool = True,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Decode with the planned kernel; arguments as in batch_mla_decode_with_paged_kv_cache, dtypes as planned.

        The number of requests (query.shape[0], or len(qo_indptr) - 1) may be anything from 0 to batch_size. seq_lens
        and block_tables may have more rows; they are not read. Without requests or query rows nothing is launched.
        validate=False checks nothing, never waits for the device and, if out (and lse) are given, allocates nothing:
        what a CUDA graph captures. A graph freezes addresses, and scales that are numbers; it reads lengths, offsets,
        page ids and scales in tensors anew each time.

        Raises RuntimeError before plan(), and where a CUDA graph is captured with validate=True; else as plan().
        """
        prepared = self._planned()
        call = (query, kv_cache, block_tables, seq_lens, qo_indptr, bmm1_scale, bmm2_scale, out, lse)
        if (return_lse or lse is not None) and prepared.problem.lse_mode == "none":
            raise ValueError("lse and return_lse need a plan with lse_mode 'base2' or 'basee', it has 'none'")
        if qo_indptr is None and prepared.problem.packed:
            raise ValueError("qo_indptr must be given, as the plan has packed_query=True")
        if validate is not False:
            checks.check_bool("validate", validate)
            checks.check_bool("return_lse", return_lse)
            self._check(prepared, Call(*call))
        return run(prepared, self._bound, call, return_lse)

    def _check(self, prepared: Prepared, call: Call) -> None:
        if call.qo_indptr is not None and not prepared.problem.packed:
            raise ValueError("qo_indptr must be None, as the plan has packed_query=False")
        if capturing(prepared.device):
            raise RuntimeError("run() can be captured in a CUDA graph only with validate=False")
        checks.check_ranks(call)
        checks.check_run(prepared.problem, prepared.device, call, self._workspace)
        checks.check_metadata(prepared.problem, call)

    def _planned(self) -> Prepared:
        if self._prepared is None:
            raise RuntimeError("plan() must come before run() and kernel")
        return self._prepared


MLADecodeWrapper = BatchMLADecodePagedTSWrapper


def get_batch_mla_decode_workspace_size(
    batch_size: int,
    num_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    page_size: int,
    max_seq_len: int,
    *,
    seq_len_q: int | None = None,
    max_seq_len_q: int | None = None,
    q_dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    mask_type: str = "causal",
    batch_invariant: bool = False,
    device: int | str | torch.device | None = None,
) -> int:
    """Bytes of workspace that a plan of this geometry needs; compiles nothing. Never smaller for larger bounds.

    max_seq_len is the plan's max_kv_len; seq_len_q an older name of max_seq_len_q (neither given: 1); kv_dtype None:
    q_dtype. device None is the current GPU. For the CPU, or where there is no GPU, the size is an upper bound for
    every GPU.

    Raises as BatchMLADecodePagedTSWrapper.plan.
    """
    if seq_len_q is not None and max_seq_len_q is not None and seq_len_q != max_seq_len_q:
        raise ValueError(f"seq_len_q must equal max_seq_len_q if both are given, got {seq_len_q} and {max_seq_len_q}")
    for name, value in (("max_seq_len", max_seq_len), ("seq_len_q", 1 if seq_len_q is None else seq_len_q)):
        checks.check_int(name, value)
    tokens = max_seq_len_q if max_seq_len_q is not None else seq_len_q
    problem = MLAProblem(
        batch_size=batch_size,
        num_heads=num_heads,
        max_seq_len_q=1 if tokens is None else tokens,
        max_kv_len=max_seq_len,
        page_size=page_size,
        packed=False,
        mask_type=mask_type,
        q_dtype=checks.dtype_name("q_dtype", q_dtype),
        kv_dtype=checks.dtype_name("kv_dtype", q_dtype if kv_dtype is None else kv_dtype),
        out_dtype=checks.out_dtype_name("out_dtype", out_dtype),
        batch_invariant=batch_invariant,
    )
    checks.check_dims(kv_lora_rank, qk_rope_head_dim)
    checks.check_problem(problem)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = checks.resolve_device("device", device)
    return size(problem, target).workspace_bytes


get_prims_ts_batch_mla_decode_workspace_size = get_batch_mla_decode_workspace_size


def problem_of(
    call: Call,
    max_seq_len_q: int | None,
    max_kv_len: int | None,
    mask_type: str,
    out_dtype: torch.dtype,
    lse_mode: str,
) -> MLAProblem:
    """The problem of a one-shot call. ValueError where it lacks a bound."""
    query, kv_cache, qo_indptr = call.query, call.kv_cache, call.qo_indptr
    if qo_indptr is None and max_seq_len_q is None:
        max_seq_len_q = query.shape[1]
    if max_kv_len is None or max_seq_len_q is None:
        name = "max_kv_len" if max_kv_len is None else "max_seq_len_q"
        raise ValueError(f"{name} must be given where the metadata are not read on the host, got None")
    return MLAProblem(
        batch_size=max(1, query.shape[0] if qo_indptr is None else len(qo_indptr) - 1),
        num_heads=query.shape[-2],
        max_seq_len_q=max_seq_len_q,
        max_kv_len=max_kv_len,
        page_size=kv_cache.shape[-2],
        packed=qo_indptr is not None,
        mask_type=mask_type,
        q_dtype=checks.dtype_name("query.dtype", query.dtype),
        kv_dtype=checks.dtype_name("kv_cache.dtype", kv_cache.dtype),
        out_dtype=checks.out_dtype_name("out_dtype", out_dtype),
        lse_mode=lse_mode,
    )
