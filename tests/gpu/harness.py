"""One careful launch: guards around all that is written, poison in it beforehand, inputs compared afterwards."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_cute
from mla_cute import compile, dispatch
from mla_cute.plan import forced_ctas
from mla_cute.problem import DTYPES, INPUT_DTYPES, KV_LORA_RANK
from mla_cute.testing import Case, Guarded, assert_close, assert_exact, assert_lse_close, expected_of

COMPARED_BYTES = 1 << 28  # larger inputs are not copied for the comparison
Result = tuple[Tensor, Tensor | None]
# Query rows that kernels hold: with num_heads=rows // tokens, requests of `tokens` query tokens reach each kernel.
ROWS = sorted({config.rows for config in dispatch.shipped()})
TORCH_DTYPES = {name: getattr(torch, dtype.torch_name) for name, dtype in DTYPES.items()}
Inputs = dict[str, Any]  # arguments of make_case and Sequences
INPUTS: dict[str, Inputs] = {
    q if q == kv else f"{q} over {kv}": {"dtype": TORCH_DTYPES[q], "kv_dtype": TORCH_DTYPES[kv]}
    for q, kv in INPUT_DTYPES
}
BF16, FP8, MIXED = INPUTS["bf16"], INPUTS["e4m3"], INPUTS["bf16 over e4m3"]
each_rows = pytest.mark.parametrize("rows", ROWS, ids="{} rows".format)
each_inputs = pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
# Kernels of few rows and of many, e4m3 widened on the cache's side alone and on both. test_every_kernel has the others.
each_kernel = pytest.mark.parametrize(
    ("rows", "inputs"),
    [
        *(pytest.param(rows, BF16, id=f"{rows} rows") for rows in ROWS),
        *(pytest.param(rows, FP8, id=f"{rows} rows e4m3") for rows in (16, 64)),
        *(pytest.param(rows, MIXED, id=f"{rows} rows bf16 over e4m3") for rows in (16, 64)),
    ],
)


def store(config: dispatch.KernelConfig) -> None:
    """Compile a kernel into the cache."""
    compile.get(config)


def bits(tensor: Tensor) -> Tensor:
    """Integers of the same width: equality that tells NaN from NaN and 0 from -0."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


@contextlib.contextmanager
def unchanged(*tensors: Tensor | None) -> Iterator[None]:
    """The bits of these tensors are the same afterwards."""
    kept = [(t, t.clone()) for t in tensors if t is not None and t.numel() * t.element_size() <= COMPARED_BYTES]
    yield
    for tensor, before in kept:
        assert same_bits(tensor, before), f"an input of shape {tuple(tensor.shape)} was modified"


def planned(case: Case, *, ctas: int | None = None, lse_mode: str = "base2", **arguments: Any) -> Any:
    """A wrapper planned for the case. ctas: the number of CTAs, so of splits; None leaves it to the planner."""
    wrapper = mla_cute.BatchMLADecodePagedTSWrapper()
    with forced_ctas(ctas):
        wrapper.plan(**case.plan(lse_mode=lse_mode, **arguments))
    return wrapper


def workspace_bytes(case: Case, *, ctas: int | None = None, **arguments: Any) -> int:
    renamed = {
        "max_kv_len": "max_seq_len",
        "q_data_type": "q_dtype",
        "kv_data_type": "kv_dtype",
        "o_data_type": "out_dtype",
    }
    plan = case.plan(**arguments)
    sizes = {renamed.get(name, name): value for name, value in plan.items() if name != "packed_query"}
    if not case.query.is_cuda:
        sizes["device"] = None
    with forced_ctas(ctas):
        return int(mla_cute.get_batch_mla_decode_workspace_size(**sizes))


def launch(
    case: Case,
    *,
    ctas: int | None = None,
    lse_mode: str = "base2",
    out_dtype: torch.dtype | None = None,
    validate: bool = True,
    **plan_arguments: Any,
) -> Result:
    """Plan and run the case once with caller-owned, guarded, poisoned buffers; returns (out, lse or None)."""
    query = case.query
    arguments: dict[str, Any] = {"ctas": ctas, "o_data_type": out_dtype or case.out_dtype, **plan_arguments}
    workspace = Guarded((workspace_bytes(case, **arguments),), torch.uint8, query.device)
    out = Guarded((*query.shape[:-1], KV_LORA_RANK), out_dtype or case.out_dtype, query.device)
    lse = Guarded(query.shape[:-1], torch.float32, query.device)
    workspace.tensor.fill_(0xFF)
    out.tensor.fill_(math.nan)
    lse.tensor.fill_(math.nan)
    wrapper = planned(case, lse_mode=lse_mode, workspace_buffer=workspace.tensor, **arguments)
    given = None if lse_mode == "none" else lse.tensor
    with unchanged(*case.tensors, case.qo_indptr):
        result = wrapper.run(*case.tensors, **case.run(out=out.tensor, lse=given, validate=validate))
    assert result is out.tensor, "run() returns the given out"
    assert out.intact(), "the launch wrote outside out"
    assert lse.intact(), "the launch wrote outside lse"
    assert workspace.intact(), "the launch wrote outside the workspace"
    return out.tensor, given


def check(case: Case, out: Tensor, lse: Tensor | None, lse_mode: str = "base2", lse_relative: float = 1e-6) -> None:
    """Against the closed form of a fixture case (exactly) or, for random data, the reference in fp64."""
    unit = lse_mode if lse is not None else "basee"
    ref_out, ref_lse = expected_of(case, unit)
    if case.out_value is None:
        assert_close(out, lse, ref_out, ref_lse, case.kv_cache.dtype, unit, lse_relative, case.query.dtype)
        return
    assert_exact(out, ref_out)
    if lse is not None:
        assert_lse_close(lse, ref_lse, unit, q_dtype=case.query.dtype)


def launch_and_check(case: Case, *, lse_mode: str = "base2", lse_relative: float = 1e-6, **options: Any) -> Result:
    out, lse = launch(case, lse_mode=lse_mode, **options)
    check(case, out, lse, lse_mode, lse_relative)
    return out, lse
