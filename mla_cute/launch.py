"""From a problem to a kernel's launch: choose, size and load it once, then hand it its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_cute import compile as compiler
from mla_cute import dispatch
from mla_cute.device import LARGEST_SM_COUNT, capability, sm_count
from mla_cute.errors import UnsupportedProblem
from mla_cute.plan import LargestTiling, Plan, make_plan
from mla_cute.problem import HEAD_DIM, KV_LORA_RANK, MLAProblem
from mla_cute.reference import decode_reference
from mla_cute.validate import LOG2_E, TORCH_DTYPES, Call, real

LSE_SCALE = {"none": 0.0, "base2": 1.0, "basee": math.log(2)}  # factor on the log2 that kernels compute
_loaded: set[tuple[str, torch.device]] = set()  # kernels whose CUDA module is on the device
# The fields of Call. run(validate=False) passes a plain tuple, which takes less time to make.
Scale = float | Tensor
Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Scale, Scale, Tensor | None, Tensor | None]


class Bound(NamedTuple):
    """What a kernel is given alike at every run: see kernels/common/abi.py. The tensors are tvm-ffi's, since to convert
    one of torch's at each launch takes 0.1 us.
    """

    part_out: Any
    part_stat: Any
    split_info: Any
    no_query: Any  # stands where the other of the two queries is given; never read
    seq_len_q: int
    causal: int
    max_kv_len: int
    slot_rows: int
    num_ctas: int
    team: int
    batch_invariant: int
    out_bf16: int
    lse_scale: float


@dataclass(frozen=True)
class Prepared:
    """All of a problem on a device that no run changes. launch None: the reference."""

    problem: MLAProblem
    device: torch.device
    plan: Plan
    kernel: str
    launch: Callable[..., Any] | None

    def bind(self, workspace: Tensor | None) -> Bound | None:
        """With a workspace, allocated if not given. None: the reference needs none."""
        if self.launch is None:
            return None
        problem, plan = self.problem, self.plan
        if workspace is None:
            workspace = torch.empty(plan.workspace_bytes, dtype=torch.int8, device=self.device)
        flat = workspace.view(-1)
        if flat.numel() < plan.workspace_bytes:
            raise ValueError(f"workspace_buffer has {flat.numel()} bytes, {plan.workspace_bytes} are needed")
        dtypes = (torch.int32, torch.float32, torch.int32)
        part_out, part_stat, split_info = (
            flat[section.offset : section.offset + section.bytes].view(dtype)
            for section, dtype in zip(plan.sections, dtypes, strict=True)
        )
        dtype = TORCH_DTYPES[problem.q_dtype]
        no_query = flat[: HEAD_DIM * dtype.itemsize].view(dtype)
        return Bound(
            part_out=converted(part_out),
            part_stat=converted(part_stat),
            split_info=converted(split_info),
            no_query=converted(no_query.view(1, 1, 1, -1) if problem.packed else no_query.view(1, 1, -1)),
            seq_len_q=0 if problem.packed else problem.max_seq_len_q,
            causal=int(problem.mask_type == "causal"),
            max_kv_len=problem.max_kv_len,
            slot_rows=plan.slot_rows,
            num_ctas=plan.num_ctas,
            team=plan.team,
            batch_invariant=int(problem.batch_invariant),
            out_bf16=int(problem.out_dtype == "bf16"),
            lse_scale=LSE_SCALE[problem.lse_mode],
        )


def converted(tensor: Tensor) -> Any:
    """The same memory as tvm-ffi's tensor."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor)


def prepare(problem: MLAProblem, device: torch.device, ctas: int | None) -> Prepared:
    """Choose, size and load. ctas is plan.forced(), an argument because results are cached by arguments.

    Raises UnsupportedProblem; RuntimeError where the kernel has to be compiled and cannot be.
    """
    prepared = _prepare(problem, device, ctas)
    key = prepared.kernel, device
    if prepared.launch is not None and key not in _loaded and not capturing(device):
        _load(prepared)
        _loaded.add(key)
    return prepared


@lru_cache(maxsize=256)
def _prepare(problem: MLAProblem, device: torch.device, ctas: int | None) -> Prepared:
    plan = size(problem, device)
    if device.type == "cpu":
        return Prepared(problem, device, plan, "reference in torch, for CPU tensors", None)
    config = dispatch.select(problem, capability(device))
    return Prepared(problem, device, plan, f"{config.name} {config}", compiler.get(config))


def _load(prepared: Prepared) -> None:
    """Launch the kernel on a request of no tokens: the first launch loads its CUDA module, which a capture forbids."""
    smallest = replace(
        prepared.problem,
        batch_size=1,
        num_heads=1,
        max_seq_len_q=1,
        max_kv_len=1,
        packed=False,
        lse_mode="none",
        batch_invariant=False,
    )
    tiny = replace(prepared, problem=smallest, plan=Plan(num_ctas=1, slot_rows=1, word_rows=1))
    zeros = partial(torch.zeros, device=prepared.device)
    query = zeros(1, 1, 1, HEAD_DIM, dtype=TORCH_DTYPES[smallest.q_dtype])
    kv_cache = zeros(1, smallest.page_size, HEAD_DIM, dtype=TORCH_DTYPES[smallest.kv_dtype])
    metadata = zeros(1, 1, dtype=torch.int32), zeros(1, dtype=torch.int32)
    run(tiny, tiny.bind(None), (query, kv_cache, *metadata, None, 1.0, 1.0, None, None), return_lse=False)


def capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def size(problem: MLAProblem, device: torch.device) -> Plan:
    """The plan of a problem on a device; on the CPU one that suffices for any GPU."""
    if device.type == "cpu":
        return make_plan(problem, LargestTiling(problem.kv_dtype), LARGEST_SM_COUNT)
    if not torch.cuda.is_available():
        raise UnsupportedProblem(f"device {device} cannot be used: torch finds no GPU on this machine")
    return make_plan(problem, dispatch.select(problem, capability(device)), sm_count(device))


def run(prepared: Prepared, bound: Bound | None, call: Arguments, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Every public path ends here. Nothing in it waits for a GPU. A serving loop pays for each line of it."""
    query, _, _, _, qo_indptr, _, _, out, lse = call
    if out is None:
        dtype = TORCH_DTYPES[prepared.problem.out_dtype]
        out = torch.empty((*query.shape[:-1], KV_LORA_RANK), dtype=dtype, device=query.device)
    if lse is None and return_lse:
        lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    requests = rows = query.shape[0]
    if qo_indptr is not None and prepared.problem.packed:
        requests = qo_indptr.shape[0] - 1
    if requests == 0 or rows == 0:
        with torch.no_grad():
            out.zero_()  # packed rows that belong to no request, if any
            if lse is not None:
                lse.fill_(-math.inf)
    elif prepared.launch is None or bound is None:
        _run_reference(prepared.problem, Call(*call), out, lse)
    elif torch.accelerator.current_device_index() == prepared.device.index:
        _launch(prepared.launch, bound, call, out, lse, requests)
    else:
        with torch.cuda.device(prepared.device):
            _launch(prepared.launch, bound, call, out, lse, requests)
    return (out, lse) if return_lse and lse is not None else out


def _launch(
    launch: Callable[..., Any], bound: Bound, call: Arguments, out: Tensor, lse: Tensor | None, requests: int
) -> None:
    query, kv_cache, block_tables, seq_lens, qo_indptr, bmm1_scale, bmm2_scale, _, _ = call
    part_out, part_stat, split_info, no_query = bound[:4]
    seq_len_q, causal, max_kv_len, slot_rows, num_ctas, team, batch_invariant, out_bf16, lse_scale = bound[4:]
    lse_address = 0
    if lse is None:
        lse_scale = 0.0
    else:
        lse_address = lse.data_ptr()
    if seq_len_q:
        queries, qo_indptr = (query, no_query), split_info  # not read
    else:
        queries = no_query, query
    scale1_address = scale2_address = 0
    # isinstance(x, Tensor) takes 0.1 us, hence the test before it
    if type(bmm1_scale) is not float and isinstance(bmm1_scale, Tensor):
        scale1_address, bmm1_scale = bmm1_scale.data_ptr(), 1.0
    if type(bmm2_scale) is not float and isinstance(bmm2_scale, Tensor):
        scale2_address, bmm2_scale = bmm2_scale.data_ptr(), 1.0
    shape = kv_cache.shape
    if len(shape) == 4:
        kv_cache = kv_cache.squeeze(1)
    if shape[0] == 1:
        kv_cache = kv_cache[0][None]  # TMA checks the page stride, which may be anything where there is one page
    launch(
        *queries,
        kv_cache,
        block_tables,
        seq_lens,
        qo_indptr,
        part_out,
        part_stat,
        split_info,
        requests,
        seq_len_q,
        causal,
        max_kv_len,
        slot_rows,
        num_ctas,
        team,
        batch_invariant,
        out_bf16,
        out.data_ptr(),
        lse_address,
        scale1_address,
        scale2_address,
        bmm1_scale * LOG2_E,
        bmm2_scale * 1.0,
        lse_scale,
    )


@torch.no_grad()
def _run_reference(problem: MLAProblem, call: Call, out: Tensor, lse: Tensor | None) -> None:
    bmm1_scale, bmm2_scale = (
        float(scale if isinstance(scale, Tensor) else real(name, scale)) for name, scale in call.scales().items()
    )
    capacity = call.block_tables.shape[1] * problem.page_size  # of tokens; lengths are cut as kernels cut them
    result, result_lse = decode_reference(
        call.query,
        call.kv_cache,
        call.block_tables,
        call.seq_lens.clamp(max=min(problem.max_kv_len, capacity)),
        qo_indptr=call.qo_indptr if problem.packed else None,
        mask_type=problem.mask_type,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        out_dtype=out.dtype,
        lse_mode=problem.lse_mode,
    )
    out.copy_(result)
    if lse is not None:
        lse.copy_(result_lse)
