"""Checks of a call's arguments. Each error names the argument, what is allowed and what was given.

TypeError: not the kind of object that is expected. ValueError: the right kind, but a value that is not allowed.
NotImplementedError: a sensible request that nothing here serves.

Only `check_metadata` reads values that lie on the device, so only it synchronises.
"""

from __future__ import annotations

import math
import numbers
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mla_cute.problem import (
    DTYPES,
    HEAD_DIM,
    INPUT_DTYPES,
    INT32_MAX,
    KV_LORA_RANK,
    LSE_MODES,
    MASKS,
    MAX_KV_LEN,
    OUT_DTYPES,
    PAGE_SIZES,
    QK_ROPE_HEAD_DIM,
    MLAProblem,
)

LOG2_E = math.log2(math.e)  # kernels multiply scores by bmm1_scale * LOG2_E and take powers of two
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype.torch_name) for name, dtype in DTYPES.items()}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Call(NamedTuple):
    """The arguments of one run."""

    query: Tensor
    kv_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    qo_indptr: Tensor | None
    bmm1_scale: float | Tensor
    bmm2_scale: float | Tensor
    out: Tensor | None
    lse: Tensor | None

    def inputs(self) -> dict[str, Tensor]:
        """By name, in the order of the signature; qo_indptr only if it is given."""
        required = dict(zip(self._fields[:4], self[:4], strict=True))
        return required if self.qo_indptr is None else required | {"qo_indptr": self.qo_indptr}

    def scales(self) -> dict[str, float | Tensor]:
        return {"bmm1_scale": self.bmm1_scale, "bmm2_scale": self.bmm2_scale}

    @property
    def requests(self) -> int:
        return self.query.shape[0] if self.qo_indptr is None else len(self.qo_indptr) - 1


def fail(name: str, allowed: str, got: object, error: type[Exception] = ValueError) -> None:
    raise error(f"{name} must {allowed}, got {got}")


# --- arguments that are not tensors ---


def check_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        fail(name, "be an int", f"{value!r} of type {type(value).__name__}", TypeError)
    elif value <= 0:
        fail(name, "be positive", value)


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        fail(name, "be True or False", f"{value!r} of type {type(value).__name__}", TypeError)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str):
        fail(name, "be a str", f"{value!r} of type {type(value).__name__}", TypeError)
    elif value not in choices:
        fail(name, f"be one of {', '.join(map(repr, choices))}", repr(value))


def real(name: str, value: object) -> numbers.Real:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(
            f"{name} must be a real number or a tensor of one, got {value!r} of type {type(value).__name__}"
        )
    return value


def check_scale(name: str, value: object, device: torch.device) -> None:
    """A real number as `_check_number` takes it, or a tensor of one fp32 element, whose value is not read."""
    if not isinstance(value, Tensor):
        _check_number(name, value)
        return
    if value.dtype != torch.float32:
        fail(name, "have dtype torch.float32, where it is a tensor", value.dtype, TypeError)
    if value.shape not in ((), (1,)):
        fail(name, "have shape [] or [1], where it is a tensor", list(value.shape))
    if value.device != device:
        fail(name, f"be on {device}, where it is a tensor", value.device)


def _check_number(name: str, value: object) -> None:
    """A real number that is finite and positive in fp32; bmm1_scale: and so is LOG2_E times it."""
    number = real(name, value)
    if not _positive_in_fp32(number):
        fail(name, "be finite and positive in fp32", value)
    if name == "bmm1_scale" and not _positive_in_fp32(number, LOG2_E):
        fail(name, "be finite and positive in fp32, also when multiplied by log2(e)", value)


def _positive_in_fp32(number: numbers.Real, factor: float = 1.0) -> bool:
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", float(number) * factor))
    except OverflowError:
        return False
    return bool(0 < rounded < math.inf)  # NaN fails too


def check_dims(kv_lora_rank: object, qk_rope_head_dim: object) -> None:
    check_int("kv_lora_rank", kv_lora_rank)
    check_int("qk_rope_head_dim", qk_rope_head_dim)
    if (kv_lora_rank, qk_rope_head_dim) != (KV_LORA_RANK, QK_ROPE_HEAD_DIM):
        raise NotImplementedError(
            f"(kv_lora_rank, qk_rope_head_dim) must be ({KV_LORA_RANK}, {QK_ROPE_HEAD_DIM}), "
            f"got ({kv_lora_rank}, {qk_rope_head_dim})"
        )


def dtype_name(name: str, dtype: object, choices: Sequence[str] = tuple(DTYPES)) -> str:
    """Our name of a torch.dtype. choices: the names allowed here."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype, got {dtype!r} of type {type(dtype).__name__}")
    if NAMES.get(dtype) not in choices:
        hint = "; an FP8 cache is e4m3: pass bytes that hold it as .view(torch.float8_e4m3fn)"
        allowed = f"be one of {', '.join(str(TORCH_DTYPES[choice]) for choice in choices)}"
        got = f"{dtype}{hint if dtype.itemsize == 1 and 'e4m3' in choices else ''}"
        fail(name, allowed, got, NotImplementedError)
    return NAMES[dtype]


def out_dtype_name(name: str, dtype: object) -> str:
    return dtype_name(name, dtype, OUT_DTYPES)


def resolve_device(name: str, device: object) -> torch.device:
    """A device from an index, a name or a torch.device; "cuda" without an index is the current GPU."""
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise TypeError(
            f"{name} must be an int, a str or a torch.device, got {device!r} of type {type(device).__name__}"
        )
    if isinstance(device, str) and device.startswith("cuda:") and device[5:].isdecimal():
        device = int(device[5:])
    if isinstance(device, int):
        if not 0 <= device < 128:  # torch keeps an index in 8 bits
            fail(name, "be the index of a GPU", device)
        device = f"cuda:{device}"
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise TypeError(f"{name} must be the name of a device, got {device!r}") from error
    if resolved.type not in ("cuda", "cpu"):
        fail(name, "be a CUDA device or the CPU", resolved)
    if resolved.type == "cpu":
        return torch.device("cpu")  # "cpu:0" is no other device, but compares so
    if resolved.type == "cuda" and torch.cuda.is_available():
        if resolved.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        if resolved.index >= torch.cuda.device_count():
            fail(name, f"be one of this machine's {torch.cuda.device_count()} GPUs", resolved)
    return resolved


def check_problem(problem: MLAProblem) -> None:
    for name in ("batch_size", "num_heads", "page_size", "max_kv_len", "max_seq_len_q"):
        check_int(name, getattr(problem, name))
    check_bool("packed_query", problem.packed)
    check_bool("batch_invariant", problem.batch_invariant)
    check_choice("mask_type", problem.mask_type, MASKS)
    check_choice("lse_mode", problem.lse_mode, LSE_MODES)
    if problem.page_size not in PAGE_SIZES:
        fail("page_size (dimension -2 of kv_cache)", f"be one of {', '.join(map(str, PAGE_SIZES))}", problem.page_size)
    if (problem.q_dtype, problem.kv_dtype) not in INPUT_DTYPES:
        allowed = [str(TORCH_DTYPES[kv]) for q, kv in INPUT_DTYPES if q == problem.q_dtype]
        what = f"have dtype {' or '.join(allowed)}, as query has {TORCH_DTYPES[problem.q_dtype]}"
        fail("kv_cache (kv_data_type, kv_dtype)", what, TORCH_DTYPES[problem.kv_dtype], NotImplementedError)
    if problem.max_kv_len > MAX_KV_LEN:
        fail("max_kv_len (max_seq_len)", f"be at most {MAX_KV_LEN}", problem.max_kv_len, NotImplementedError)
    check_count(
        "batch_size * max_seq_len_q * num_heads", problem.batch_size * problem.max_seq_len_q * problem.num_heads
    )


def check_count(name: str, count: int) -> None:
    """Coordinates are int32 in the kernels (offsets are not)."""
    if count > INT32_MAX:
        fail(name, f"be at most {INT32_MAX}", count, NotImplementedError)


# --- tensors ---


def check_ranks(call: Call) -> None:
    """What must hold before a problem can be read off the shapes."""
    inputs = call.inputs()
    for name, tensor in inputs.items():
        check_tensor(name, tensor)
    for name in inputs.keys() - {"query", "kv_cache"}:
        if inputs[name].dtype != torch.int32:
            fail(name, "have dtype torch.int32", inputs[name].dtype, TypeError)
    form, query_rank = ("fixed form", 4) if call.qo_indptr is None else ("packed form", 3)
    ranks = {"query": (query_rank,), "kv_cache": (3, 4), "block_tables": (2,), "seq_lens": (1,), "qo_indptr": (1,)}
    for name, tensor in inputs.items():
        if tensor.ndim not in ranks[name]:
            allowed = " or ".join(map(str, ranks[name]))
            fail(name, f"have {allowed} dimensions" + f" ({form})" * (name == "query"), list(tensor.shape))
    for name in ("query", "kv_cache"):
        shape = list(inputs[name].shape)
        if shape[-1] != HEAD_DIM:
            fail(name, f"have {HEAD_DIM} elements in its last dimension", shape)
        if 0 in shape[1:] or (name == "kv_cache" and shape[0] == 0):  # a query without requests or rows is no error
            fail(name, "have only positive extents", shape)
    if call.kv_cache.ndim == 4 and call.kv_cache.shape[1] != 1:
        fail("kv_cache", "have extent 1 in dimension 1 of 4", list(call.kv_cache.shape))
    if call.requests < 0:
        fail("qo_indptr", "have one element more than there are requests", 0)


def check_devices(call: Call, device: torch.device) -> None:
    for name, tensor in call.inputs().items():
        if tensor.device != device:
            fail(name, f"be on {device}", tensor.device)


def find_bounds(call: Call, max_kv_len: int | None, max_seq_len_q: int | None) -> tuple[int, int | None]:
    """Bounds that a call leaves out, from its metadata: waits for the device where there is one to find."""
    if max_kv_len is None:
        max_kv_len = max([1, *call.seq_lens[: call.requests].tolist()])
    if max_seq_len_q is None and call.qo_indptr is not None:
        max_seq_len_q = max([0, *_query_lengths(call.qo_indptr.cpu(), call.query.shape[0]).tolist()])
        if max_seq_len_q == 0:
            raise ValueError("max_seq_len_q must be given where qo_indptr gives no request a query token, got None")
    return max_kv_len, max_seq_len_q


def check_run(problem: MLAProblem, device: torch.device, call: Call, workspace: Tensor | None) -> None:
    """All of a call but values on the device, after check_ranks."""
    for name, scale in call.scales().items():
        check_scale(name, scale, device)
    _check_inputs(problem, device, call)
    rows = call.query.shape[:-1]
    if call.out is not None:
        _check_output("out", call.out, (*rows, KV_LORA_RANK), TORCH_DTYPES[problem.out_dtype], device)
    if call.lse is not None:
        _check_output("lse", call.lse, rows, torch.float32, device)
    if workspace is not None:
        check_tensor("workspace_buffer", workspace)
    check_overlap(call, workspace)


def _check_inputs(problem: MLAProblem, device: torch.device, call: Call) -> None:
    inputs, requests = call.inputs(), call.requests
    query, kv_cache, qo_indptr = call.query, call.kv_cache, call.qo_indptr
    check_devices(call, device)
    for name, dtype in (("query", problem.q_dtype), ("kv_cache", problem.kv_dtype)):
        if inputs[name].dtype != TORCH_DTYPES[dtype]:
            fail(name, f"have dtype {TORCH_DTYPES[dtype]}", inputs[name].dtype)
    _check_query(problem, query, requests, qo_indptr)
    if kv_cache.shape[-2] != problem.page_size:
        fail("kv_cache", f"have pages of {problem.page_size} tokens (page_size)", list(kv_cache.shape))
    check_count("number of pages in kv_cache", kv_cache.shape[0])
    _check_strided("kv_cache", kv_cache)
    _check_table(problem, call.block_tables, requests)
    for name, least in (("seq_lens", requests), ("qo_indptr", requests + 1)):
        if name in inputs:
            if len(inputs[name]) < least:
                fail(name, f"have at least {least} elements, as there are {requests} requests", len(inputs[name]))
            if not inputs[name].is_contiguous():
                fail(name, "be contiguous", f"stride {inputs[name].stride()}")
            _check_aligned(name, inputs[name], 4)


def _check_query(problem: MLAProblem, query: Tensor, requests: int, qo_indptr: Tensor | None) -> None:
    if requests > problem.batch_size:
        name = "query" if qo_indptr is None else "qo_indptr"
        fail(name, f"describe at most {problem.batch_size} requests (batch_size)", requests)
    if query.shape[-2] != problem.num_heads:
        fail("query", f"have {problem.num_heads} heads (num_heads)", list(query.shape))
    if qo_indptr is None:
        if query.shape[1] != problem.max_seq_len_q:
            fail("query", f"have {problem.max_seq_len_q} tokens a request (max_seq_len_q)", list(query.shape))
    else:
        check_count("total_q * num_heads of query", query.shape[0] * query.shape[1])
        capacity = requests * problem.max_seq_len_q
        if query.shape[0] > capacity:
            fail("query", f"have at most {capacity} rows ({requests} requests x max_seq_len_q)", query.shape[0])
    _check_strided("query", query)


def _check_table(problem: MLAProblem, block_tables: Tensor, requests: int) -> None:
    rows, columns = block_tables.shape
    check_count("number of elements in block_tables", block_tables.numel())
    if rows < requests:
        fail("block_tables", f"have at least {requests} rows, one a request", rows)
    needed = -(-problem.max_kv_len // problem.page_size)
    if columns < needed:
        fail("block_tables", f"have at least {needed} columns for max_kv_len={problem.max_kv_len}", columns)
    if columns > 1 and block_tables.stride(1) != 1:
        fail("block_tables", "have stride 1 in its last dimension", block_tables.stride())
    if rows > 1 and block_tables.stride(0) < columns:
        fail("block_tables", f"have rows that do not overlap (stride at least {columns})", block_tables.stride())
    _check_aligned("block_tables", block_tables, 4)


def _check_output(name: str, tensor: object, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """out or lse: compact and exactly of this shape."""
    checked = check_tensor(name, tensor)
    if checked.device != device:
        fail(name, f"be on {device}", checked.device)
    if checked.dtype != dtype:
        fail(name, f"have dtype {dtype}", checked.dtype)
    if checked.shape != torch.Size(shape):
        fail(name, f"have shape {list(shape)}", list(checked.shape))
    if not checked.is_contiguous():
        fail(name, "be contiguous", f"strides {checked.stride()}")
    _check_aligned(name, checked, 16 if dtype.itemsize == 2 else 4)


def check_workspace(workspace: object, least: int, device: torch.device) -> None:
    buffer = check_tensor("workspace_buffer", workspace)
    if buffer.dtype not in (torch.int8, torch.uint8):
        fail("workspace_buffer", "have dtype torch.int8 or torch.uint8", buffer.dtype, TypeError)
    if buffer.device != device:
        fail("workspace_buffer", f"be on {device}", buffer.device)
    if not buffer.is_contiguous():
        fail("workspace_buffer", "be contiguous", f"strides {buffer.stride()}")
    if buffer.numel() < least:
        fail("workspace_buffer", f"have at least {least} bytes", buffer.numel())
    _check_aligned("workspace_buffer", buffer, 32)


def check_overlap(call: Call, workspace: Tensor | None) -> None:
    """Nothing written may share bytes, holes of strides included, with anything else. Inputs may among themselves."""
    outputs = (("out", call.out), ("lse", call.lse), ("workspace_buffer", workspace))
    written = [(name, _span(tensor)) for name, tensor in outputs if tensor is not None]
    inputs = {**call.inputs(), **call.scales()}
    read = [(name, _span(tensor)) for name, tensor in inputs.items() if isinstance(tensor, Tensor)]
    for index, (name, (start, end)) in enumerate(written):
        for other, (other_start, other_end) in read + written[:index]:
            if max(start, other_start) < min(end, other_end):
                fail(name, f"not overlap {other}", f"bytes {start:#x}-{end:#x} and {other_start:#x}-{other_end:#x}")


def _span(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def check_tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    return value


def _check_aligned(name: str, tensor: Tensor, alignment: int) -> None:
    if tensor.data_ptr() % alignment:
        fail(name, f"start at a multiple of {alignment} bytes", f"address {tensor.data_ptr():#x}")


def _check_strided(name: str, tensor: Tensor) -> None:
    """Last stride 1, the others multiples of 16 bytes and no smaller than if compact. Extents of 1 have no stride."""
    shape, strides = tensor.shape, tensor.stride()
    if strides[-1] != 1:
        fail(name, "have stride 1 in its last dimension", f"strides {strides}")
    for dim in range(tensor.ndim - 1):
        compact = math.prod(shape[dim + 1 :])
        if shape[dim] > 1 and strides[dim] < compact:
            fail(name, f"have a stride of at least {compact} in dimension {dim}", f"strides {strides}")
        if shape[dim] > 1 and strides[dim] * tensor.element_size() % 16:
            fail(name, f"have a stride of a multiple of 16 bytes in dimension {dim}", f"strides {strides}")
    _check_aligned(name, tensor, 16)


# --- values on the device ---


def check_metadata(problem: MLAProblem, call: Call) -> None:
    """Lengths, offsets, page ids in use, scales in tensors. Copies them to the host, so it waits for the device."""
    for name, scale in call.scales().items():
        if isinstance(scale, Tensor):
            _check_number(name, scale.item())
    rows, pool = call.query.shape[0], call.kv_cache.shape[0]
    if call.qo_indptr is None:
        q_lens = torch.full((rows,), problem.max_seq_len_q)
    else:
        q_lens = _query_lengths(call.qo_indptr.cpu(), rows)
        if bad := _where(q_lens > problem.max_seq_len_q):
            allowed = f"give each request at most max_seq_len_q={problem.max_seq_len_q} query tokens"
            fail("qo_indptr", allowed, f"{int(q_lens[bad])} for request {bad[0]}")
    lengths = call.seq_lens[: call.requests].cpu()
    if bad := _where(lengths < 0):
        fail(f"seq_lens[{bad[0]}]", "not be negative", int(lengths[bad]))
    if bad := _where(lengths > problem.max_kv_len):
        fail(f"seq_lens[{bad[0]}]", f"be at most max_kv_len={problem.max_kv_len}", int(lengths[bad]))
    if problem.mask_type == "causal" and (bad := _where((lengths > 0) & (lengths < q_lens))):
        least = f"be 0 or at least the request's {int(q_lens[bad])} query tokens (mask_type 'causal')"
        fail(f"seq_lens[{bad[0]}]", least, int(lengths[bad]))
    # a request without query tokens reads no page
    pages = (lengths.where(q_lens > 0, 0) + problem.page_size - 1) // problem.page_size
    table = call.block_tables[: call.requests, : int(pages.max()) if len(pages) else 0].cpu()
    used = torch.arange(table.shape[1]) < pages[:, None]
    if bad := _where(used & ((table < 0) | (table >= pool))):
        fail(f"block_tables[{bad[0]}, {bad[1]}]", f"be a page id in 0..{pool - 1}", int(table[bad]))


def _query_lengths(offsets: Tensor, rows: int) -> Tensor:
    """Query tokens of each request. ValueError unless the offsets rise from 0 to the number of rows."""
    q_lens = offsets.diff()
    if int(offsets[0]) != 0:
        fail("qo_indptr[0]", "be 0", int(offsets[0]))
    if bad := _where(q_lens < 0):
        fail("qo_indptr", "not decrease", f"{offsets[bad[0] : bad[0] + 2].tolist()} at {bad[0]}")
    if int(offsets[-1]) != rows:
        fail("qo_indptr[-1]", f"be the number of query rows, {rows}", int(offsets[-1]))
    return q_lens


def _where(mask: Tensor) -> tuple[int, ...]:
    """Index of the first True element; empty if there is none."""
    found = mask.nonzero()
    return tuple(found[0].tolist()) if len(found) else ()
