"""From a problem to a kernel's launch: choose, size and load it once, then hand it its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

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

LSE_SCALE = {"base2": 1.0, "basee": math.log(2)}  # factor on the log2 that kernels compute
Views = tuple[Tensor, Tensor, Tensor, Tensor]
_loaded: set[tuple[str, torch.device]] = set()  # kernels whose CUDA module is on the device


@dataclass(frozen=True)
class Prepared:
    """All of a problem on a device that no run changes. launch None: the reference."""

    problem: MLAProblem
    device: torch.device
    plan: Plan
    kernel: str
    launch: Callable[..., Any] | None

    def views(self, workspace: Tensor | None) -> Views | None:
        """Sections of a workspace, allocated if not given, as kernels take them; last a rank-3 stand-in for no LSE."""
        if self.launch is None:
            return None
        if workspace is None:
            workspace = torch.empty(self.plan.workspace_bytes, dtype=torch.int8, device=self.device)
        flat = workspace.view(-1)
        dtypes = (torch.float32, torch.float32, torch.int32)
        part_out, part_stat, split_info = (
            flat[section.offset : section.offset + section.bytes].view(dtype)
            for section, dtype in zip(self.plan.sections, dtypes, strict=True)
        )
        return part_out, part_stat, split_info, part_stat.view(1, 1, -1)


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
        prepared.problem, batch_size=1, num_heads=1, max_seq_len_q=1, max_kv_len=1, packed=False, lse_mode="none"
    )
    tiny = replace(prepared, problem=smallest, plan=Plan(num_ctas=1, slot_rows=1))
    zeros = partial(torch.zeros, device=prepared.device)
    query = zeros(1, 1, 1, HEAD_DIM, dtype=TORCH_DTYPES[smallest.q_dtype])
    kv_cache = zeros(1, smallest.page_size, HEAD_DIM, dtype=TORCH_DTYPES[smallest.kv_dtype])
    metadata = zeros(1, 1, dtype=torch.int32), zeros(1, dtype=torch.int32)
    run(tiny, tiny.views(None), Call(query, kv_cache, *metadata, None, 1.0, 1.0, None, None), return_lse=False)


def capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def size(problem: MLAProblem, device: torch.device) -> Plan:
    """The plan of a problem on a device; on the CPU one that suffices for any GPU."""
    if device.type == "cpu":
        return make_plan(problem, LargestTiling(), LARGEST_SM_COUNT)
    if not torch.cuda.is_available():
        raise UnsupportedProblem(f"device {device} cannot be used: torch finds no GPU on this machine")
    return make_plan(problem, dispatch.select(problem, capability(device)), sm_count(device))


def run(prepared: Prepared, views: Views | None, call: Call, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Every public path ends here. Nothing in it waits for a GPU."""
    problem, query, out, lse = prepared.problem, call.query, call.out, call.lse
    if out is None:
        dtype = TORCH_DTYPES[problem.out_dtype]
        out = torch.empty((*query.shape[:-1], KV_LORA_RANK), dtype=dtype, device=query.device)
    if lse is None and return_lse:
        lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    requests = call.qo_indptr.shape[0] - 1 if problem.packed and call.qo_indptr is not None else query.shape[0]
    if requests == 0 or query.shape[0] == 0:
        with torch.no_grad():
            out.zero_()  # packed rows that belong to no request, if any
            if lse is not None:
                lse.fill_(-math.inf)
    elif prepared.launch is None or views is None:
        _run_reference(problem, call, out, lse)
    else:
        arguments = launch_arguments(prepared, views, call, out, lse, requests)
        if torch.cuda.current_device() == prepared.device.index:
            prepared.launch(*arguments)
        else:
            with torch.cuda.device(prepared.device):
                prepared.launch(*arguments)
    return (out, lse) if return_lse and lse is not None else out


@torch.no_grad()
def _run_reference(problem: MLAProblem, call: Call, out: Tensor, lse: Tensor | None) -> None:
    bmm1_scale, bmm2_scale = real("bmm1_scale", call.bmm1_scale), real("bmm2_scale", call.bmm2_scale)
    capacity = call.block_tables.shape[1] * problem.page_size  # of tokens; lengths are cut as kernels cut them
    result, result_lse = decode_reference(
        call.query,
        call.kv_cache,
        call.block_tables,
        call.seq_lens.clamp(max=min(problem.max_kv_len, capacity)),
        qo_indptr=call.qo_indptr if problem.packed else None,
        mask_type=problem.mask_type,
        bmm1_scale=float(bmm1_scale),
        bmm2_scale=float(bmm2_scale),
        out_dtype=out.dtype,
        lse_mode=problem.lse_mode,
    )
    out.copy_(result)
    if lse is not None:
        lse.copy_(result_lse)


def launch_arguments(
    prepared: Prepared, views: Views, call: Call, out: Tensor, lse: Tensor | None, requests: int
) -> tuple[Any, ...]:
    """In the order of kernels/common/abi.py."""
    problem, plan = prepared.problem, prepared.plan
    part_out, part_stat, split_info, no_lse = views
    query, kv_cache, qo_indptr = call.query, call.kv_cache, call.qo_indptr
    lse_scale = 0.0 if lse is None else LSE_SCALE[problem.lse_mode]
    if problem.packed:
        query, out = query.unsqueeze(0), out.unsqueeze(0)
        lse = no_lse if lse is None else lse.unsqueeze(0)
    else:
        qo_indptr = call.seq_lens  # not read
        lse = no_lse if lse is None else lse
    if kv_cache.ndim == 4:
        kv_cache = kv_cache.squeeze(1)
    if kv_cache.shape[0] == 1:
        kv_cache = kv_cache[0].unsqueeze(0)  # TMA checks the page stride, which may be anything where there is one page
    return (
        query,
        kv_cache,
        call.block_tables,
        call.seq_lens,
        qo_indptr,
        out,
        lse,
        part_out,
        part_stat,
        split_info,
        requests,
        0 if problem.packed else problem.max_seq_len_q,
        int(problem.mask_type == "causal"),
        problem.max_kv_len,
        plan.slot_rows,
        plan.num_ctas,
        plan.team,
        call.bmm1_scale * LOG2_E,  # without float(), which waits for a CUDA tensor: the kernel refuses one
        call.bmm2_scale * 1.0,
        lse_scale,
    )
