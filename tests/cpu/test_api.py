"""The public functions on CPU tensors."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import mla_cute
from mla_cute import api, compat, dispatch, launch
from mla_cute.plan import make_plan
from mla_cute.testing import (
    Case,
    Guarded,
    assert_close,
    assert_exact,
    expected_of,
    make_case,
    padded,
    poisoned,
)
from mla_cute.validate import Call

one_shot: Any = mla_cute.batch_mla_decode_with_paged_kv_cache
FORMS: list[int | Sequence[int]] = [1, 3, (2, 0, 4, 1)]
LENGTHS = (70, 0, 33, 128)


def planned(case: Case, **changes: Any) -> Any:
    wrapper = mla_cute.MLADecodeWrapper()
    wrapper.plan(**case.plan(lse_mode="base2") | changes)
    return wrapper


# --- signatures ---


def parameters(function: Any) -> tuple[list[str], dict[str, Any]]:
    """Positional parameters, and keyword-only ones with their defaults."""
    every = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    assert all(p.default is p.empty for p in every if p.kind is p.POSITIONAL_OR_KEYWORD)
    positional = [p.name for p in every if p.kind is p.POSITIONAL_OR_KEYWORD]
    return positional, {p.name: p.default for p in every if p.kind is p.KEYWORD_ONLY}


REQUIRED = inspect.Parameter.empty
TENSORS = ["query", "kv_cache", "block_tables", "seq_lens"]
DIMS = ["kv_lora_rank", "qk_rope_head_dim"]


def test_signatures() -> None:
    bf16 = torch.bfloat16
    assert parameters(one_shot) == (
        TENSORS,
        {
            "qo_indptr": None,
            "max_seq_len_q": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "mask_type": "causal",
            "max_kv_len": None,
            "bmm1_scale": 1.0,
            "bmm2_scale": 1.0,
            "out": None,
            "out_dtype": bf16,
            "lse": None,
            "return_lse": False,
            "lse_mode": "base2",
            "workspace_buffer": None,
            "validate": True,
        },
    )
    assert parameters(mla_cute.BatchMLADecodePagedTSWrapper.plan) == (
        ["device", "batch_size", "num_heads", *DIMS, "page_size", "max_kv_len"],
        {
            **dict.fromkeys(("max_seq_len_q", "packed_query", "q_data_type", "kv_data_type", "o_data_type"), REQUIRED),
            "mask_type": "causal",
            "workspace_buffer": None,
            "lse_mode": "none",
            "batch_invariant": False,
            "validate": True,
        },
    )
    scales = {"bmm1_scale": 1.0, "bmm2_scale": 1.0}
    assert parameters(mla_cute.BatchMLADecodePagedTSWrapper.run) == (
        TENSORS,
        {"qo_indptr": None, **scales, "out": None, "lse": None, "return_lse": False, "validate": True},
    )
    assert parameters(mla_cute.get_batch_mla_decode_workspace_size) == (
        ["batch_size", "num_heads", *DIMS, "page_size", "max_seq_len"],
        {
            "seq_len_q": None,
            "max_seq_len_q": None,
            "q_dtype": bf16,
            "kv_dtype": None,
            "out_dtype": bf16,
            "mask_type": "causal",
            "batch_invariant": False,
            "device": None,
        },
    )
    assert parameters(compat.prims_ts_batch_mla_decode_with_kv_cache) == (
        ["query", "kv_cache", "workspace_buffer", *DIMS, "block_tables", "seq_lens", "max_seq_len"],
        {"qo_indptr": None, "max_seq_len_q": None, "out": None, **scales, "mask_type": "causal", "out_dtype": bf16},
    )


def test_aliases() -> None:
    assert mla_cute.MLADecodeWrapper is mla_cute.BatchMLADecodePagedTSWrapper
    size = mla_cute.get_batch_mla_decode_workspace_size
    assert mla_cute.get_prims_ts_batch_mla_decode_workspace_size is size


# --- results ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask_type", ["dense", "causal"])
@pytest.mark.parametrize("q_lens", FORMS)
def test_every_path_gives_the_same_right_bits(
    q_lens: int | Sequence[int], mask_type: str, out_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    case = make_case("random", LENGTHS, q_lens=q_lens, mask_type=mask_type, num_heads=5, page_size=32, dtype=dtype)
    wrapper = planned(case, o_data_type=out_dtype)
    expected, expected_lse = expected_of(case, "base2")
    results = []
    for validate in (True, False):
        results += [
            one_shot(*case.tensors, **case.call(return_lse=True, out_dtype=out_dtype, validate=validate)),
            wrapper.run(*case.tensors, **case.run(return_lse=True, validate=validate)),
        ]
    for out, lse in results:
        assert out.dtype == out_dtype and lse.dtype == torch.float32
        assert_close(out, lse, expected, expected_lse, lse_mode="base2")
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
    workspace = torch.zeros(1 << 26, dtype=torch.int8)
    names = {name: value for name, value in case.call().items() if name != "max_kv_len"}
    tensors = (case.query, case.kv_cache, workspace, 512, 64, case.block_tables, case.seq_lens, case.max_kv_len)
    out = compat.prims_ts_batch_mla_decode_with_kv_cache(*tensors, **names, out_dtype=out_dtype)
    assert torch.equal(out, results[0][0])


def test_defaults_are_causal_bf16_unscaled_and_without_lse() -> None:
    case = make_case("uniform", (70, 33), q_lens=3, bmm2_scale=1.0)
    out = one_shot(*case.tensors)
    assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16
    assert_exact(out, expected_of(case)[0])


def test_scales_of_out_and_lse() -> None:
    case = make_case("two", (2, 70), bmm1_scale=0.25, bmm2_scale=2.0)
    for lse_mode in ("base2", "basee"):
        out, lse = one_shot(*case.tensors, **case.call(return_lse=True, lse_mode=lse_mode))
        assert_close(out, lse, *expected_of(case, lse_mode), lse_mode=lse_mode)


@pytest.mark.parametrize("q_lens", FORMS)
def test_outputs_of_the_caller(q_lens: int | Sequence[int]) -> None:
    case = make_case("uniform", LENGTHS, q_lens=q_lens)
    rows = case.query.shape[:-1]
    out, lse = Guarded((*rows, 512), torch.bfloat16), Guarded(rows, torch.float32)
    for validate in (True, False):
        out.tensor.fill_(math.nan)
        lse.tensor.fill_(math.nan)
        options = case.run(out=out.tensor, lse=lse.tensor, validate=validate)
        assert planned(case).run(*case.tensors, **options) is out.tensor  # lse is written without return_lse too
        assert_exact(out.tensor, expected_of(case)[0])
        assert_close(out.tensor, lse.tensor, *expected_of(case, "base2"), lse_mode="base2")
        given = one_shot(*case.tensors, **case.call(out=out.tensor, lse=lse.tensor, return_lse=True, validate=validate))
        assert given[0] is out.tensor and given[1] is lse.tensor
    assert out.intact() and lse.intact()


def test_layouts_change_no_bit() -> None:
    case = make_case("random", LENGTHS, q_lens=2, num_heads=5, page_size=16)
    query, cache, table, lengths = case.tensors
    plain = one_shot(*case.tensors, **case.call())
    odd = torch.zeros(len(cache) * 17 * 640, dtype=cache.dtype)
    layouts = {
        "heads of a larger buffer": {"query": padded(query, 2, 11)},
        "channels of a larger buffer": {"query": padded(query, 3, 64)},
        "pages of a larger buffer": {"kv_cache": padded(cache, 1, 3)},
        "tokens of a larger buffer": {"kv_cache": padded(cache, 2, 64)},
        "4-D cache": {"kv_cache": cache[:, None]},
        "4-D cache with any stride of its single dimension": {
            "kv_cache": odd.as_strided((len(cache), 1, 16, 576), (17 * 640, 3, 640, 1)).copy_(cache[:, None])
        },
        "rows of a larger table": {"block_tables": padded(table, 1, 5)},
        "a wider table with more rows": {"block_tables": padded(padded(table, 1, 5), 0, 2).contiguous()},
        "more lengths than requests": {"seq_lens": padded(lengths, 0, 3)},
    }
    for name, change in layouts.items():
        arguments = dict(zip(TENSORS, case.tensors, strict=True)) | change
        assert torch.equal(one_shot(**arguments, **case.call()), plain), name


def test_strides_of_single_elements_are_ignored() -> None:
    case = make_case("random", (40,), num_heads=1, page_size=64, pool_factor=1)
    assert case.kv_cache.shape[0] == 1 and case.block_tables.shape == (1, 1)
    buffer = torch.zeros(576 + 8, dtype=torch.bfloat16)
    arguments = {
        "query": buffer.as_strided((1, 1, 1, 576), (3, 5, 7, 1)).copy_(case.query),
        "kv_cache": case.kv_cache.as_strided((1, 64, 576), (1, 576, 1)),
        "block_tables": case.block_tables.as_strided((1, 1), (0, 5)),
        "seq_lens": case.seq_lens.as_strided((1,), (7,)),
    }
    assert torch.equal(one_shot(**arguments, **case.call()), one_shot(*case.tensors, **case.call()))


def test_inputs_are_left_alone() -> None:
    case = make_case("random", LENGTHS, q_lens=(2, 0, 4, 1))
    tensors = [t for t in (*case.tensors, case.qo_indptr) if t is not None]
    before = [t.clone() for t in tensors]
    one_shot(*case.tensors, **case.call())
    for tensor, kept in zip(tensors, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), kept.view(torch.uint8))


# --- runs smaller than the plan ---


@pytest.mark.parametrize("validate", [True, False])
def test_fewer_requests_than_planned(validate: bool) -> None:
    case = make_case("uniform", LENGTHS, q_lens=2)
    wrapper = planned(case)
    expected, expected_lse = expected_of(case, "base2")
    for requests in range(len(LENGTHS) + 1):
        query = case.query[:requests]
        out, lse = wrapper.run(query, *case.tensors[1:], return_lse=True, validate=validate)
        assert out.shape == (requests, 2, 16, 512) and lse.shape == (requests, 2, 16)
        assert_close(out, lse, expected[:requests], expected_lse[:requests], lse_mode="base2")


@pytest.mark.parametrize("validate", [True, False])
def test_fewer_packed_requests_than_planned(validate: bool) -> None:
    case = make_case("uniform", LENGTHS, q_lens=(2, 0, 4, 1))
    assert case.qo_indptr is not None
    wrapper = planned(case)
    expected = expected_of(case)[0]
    for requests in range(len(LENGTHS) + 1):
        offsets = case.qo_indptr[: requests + 1]
        rows = int(offsets[-1])
        out = wrapper.run(case.query[:rows], *case.tensors[1:], qo_indptr=offsets, validate=validate)
        assert_exact(out, expected[:rows])


def test_nothing_to_do() -> None:
    fixed = make_case("random", (), q_lens=2)
    out, lse = one_shot(*fixed.tensors, return_lse=True)
    assert out.shape == (0, 2, 16, 512) and lse.shape == (0, 2, 16)
    packed = make_case("random", (5, 7), q_lens=(0, 0))
    for validate in (True, False):
        assert one_shot(*packed.tensors, **packed.call(validate=validate)).shape == (0, 16, 512)
    given = poisoned(0, 2, 16, 512, dtype=torch.bfloat16)
    assert one_shot(*fixed.tensors, out=given) is given


@pytest.mark.parametrize("requests", [2, 0])
def test_packed_rows_of_no_request(requests: int) -> None:
    case = make_case("uniform", (5, 7)[:requests], q_lens=(1, 2)[:requests], max_kv_len=7)
    query = torch.cat([case.query, poisoned(2, 16, 576, dtype=torch.bfloat16)])
    tensors = (query, *case.tensors[1:])
    options = case.call(max_seq_len_q=4, return_lse=True)
    with pytest.raises(ValueError, match="query"):
        one_shot(*tensors, **options)
    out, lse = one_shot(*tensors, **options | {"validate": False})
    rows = len(case.query)
    assert_exact(out[:rows], expected_of(case)[0])
    assert (out[rows:] == 0).all() and (lse[rows:] == -math.inf).all()


def test_without_validation_negative_lengths_are_empty_and_short_ones_masked() -> None:
    case = make_case("uniform", (2, 0), q_lens=4)
    lengths = torch.tensor([2, -7], dtype=torch.int32)
    wrapper = planned(case)
    out, lse = wrapper.run(*case.tensors[:3], lengths, return_lse=True, validate=False)
    expected, expected_lse = expected_of(case, "base2")
    assert_exact(out, expected)
    assert_close(out, lse, expected, expected_lse, lse_mode="base2")
    assert (out[0, :2] == 0).all() and (lse[0, :2] == -math.inf).all() and lse[0, 2:].isfinite().all()


@pytest.mark.parametrize("q_lens", [2, (2, 0, 3, 1)])
def test_without_validation_long_lengths_are_cut(q_lens: int | Sequence[int]) -> None:
    """At max_kv_len, and at what a table row can hold: as kernels do."""
    for longest, capacity in ((200, 200), (256, 1000)):
        case = make_case("uniform", [longest] * 3 + [70], q_lens=q_lens)
        wrapper = planned(case, max_kv_len=capacity)
        lengths = torch.tensor([longest + 1, 2**31 - 1, longest, 70], dtype=torch.int32)
        out, lse = wrapper.run(*case.tensors[:3], lengths, **case.run(return_lse=True, validate=False))
        assert_close(out, lse, *expected_of(case, "base2"), lse_mode="base2")


def test_outputs_that_require_grad_are_written() -> None:
    for case in (make_case("uniform", LENGTHS), make_case("uniform", (), max_kv_len=128)):
        out = torch.zeros(*case.query.shape[:-1], 512, dtype=torch.bfloat16, requires_grad=True)
        lse = torch.zeros(case.query.shape[:-1], requires_grad=True)
        planned(case, batch_size=4).run(*case.tensors, out=out, lse=lse)
        assert_exact(out.detach(), expected_of(case)[0])


# --- plan and run ---


def test_run_before_plan() -> None:
    wrapper = mla_cute.MLADecodeWrapper()
    case = make_case("uniform", (5,))
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(*case.tensors)
    with pytest.raises(RuntimeError, match="plan"):
        _ = wrapper.kernel


def test_a_failed_plan_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("uniform", LENGTHS)
    wrapper = planned(case)
    good = wrapper.run(*case.tensors)
    small = torch.zeros(32, dtype=torch.int8)
    for change, error in (
        ({"page_size": 48}, ValueError),
        ({"batch_size": True}, TypeError),
        ({"kv_data_type": torch.float16}, NotImplementedError),
        ({"workspace_buffer": small}, ValueError),
        ({"device": "meta"}, ValueError),
    ):
        with pytest.raises(error):
            wrapper.plan(**case.plan() | change)
        assert torch.equal(wrapper.run(*case.tensors), good)
    monkeypatch.setattr(launch.Prepared, "bind", lambda *_: 1 / 0)  # as if memory had run out
    with pytest.raises(ZeroDivisionError):
        wrapper.plan(**case.plan(batch_size=1))
    assert torch.equal(wrapper.run(*case.tensors), good)


def test_a_new_plan_replaces_the_old_one() -> None:
    first, second = make_case("uniform", (5, 70)), make_case("uniform", (9,), q_lens=(3,), page_size=16)
    wrapper = planned(first)
    wrapper.plan(**second.plan())
    assert_exact(wrapper.run(*second.tensors, **second.run()), expected_of(second)[0])
    with pytest.raises(ValueError):
        wrapper.run(*first.tensors, **first.run())


def test_lse_needs_a_plan_that_has_it() -> None:
    case = make_case("uniform", (5,))
    wrapper = planned(case, lse_mode="none")
    for options in ({"return_lse": True}, {"lse": torch.zeros(1, 1, 16)}):
        for validate in (True, False):
            with pytest.raises(ValueError, match="lse"):
                wrapper.run(*case.tensors, validate=validate, **options)


def test_a_fixed_plan_ignores_offsets_without_validation() -> None:
    case = make_case("uniform", (5, 9))
    offsets = torch.zeros(7, dtype=torch.int32)
    out = planned(case).run(*case.tensors, qo_indptr=offsets, validate=False)
    assert_exact(out, expected_of(case)[0])


def test_kernel_names_the_reference() -> None:
    assert "reference" in planned(make_case("uniform", (5,))).kernel
    with pytest.raises(AttributeError):
        planned(make_case("uniform", (5,))).kernel = "mine"


def test_batch_invariance_is_the_references() -> None:
    case = make_case("uniform", LENGTHS)
    assert_exact(planned(case, batch_invariant=True).run(*case.tensors), expected_of(case)[0])


# --- workspace ---


def test_workspace_of_the_caller() -> None:
    case = make_case("uniform", LENGTHS)
    geometry = (len(LENGTHS), 16, 512, 64, 64, case.max_kv_len)
    size = mla_cute.get_batch_mla_decode_workspace_size(*geometry, device="cpu")
    for dtype in (torch.int8, torch.uint8):
        workspace = torch.full((size,), -1 if dtype == torch.int8 else 255, dtype=dtype)
        out = planned(case, workspace_buffer=workspace).run(*case.tensors)
        assert_exact(out, expected_of(case)[0])
        assert_exact(one_shot(*case.tensors, workspace_buffer=workspace), expected_of(case)[0])
    small = torch.zeros(size - 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="workspace_buffer"):
        planned(case, workspace_buffer=small)
    with pytest.raises(ValueError, match="workspace_buffer"):
        one_shot(*case.tensors, workspace_buffer=small)


def test_workspace_size_without_a_gpu_is_the_largest() -> None:
    size = mla_cute.get_batch_mla_decode_workspace_size
    case = make_case("uniform", LENGTHS)
    problem = api.problem_of(Call(*case.tensors, None, 1.0, 1.0, None, None), 1, 4096, "causal", torch.bfloat16, "none")
    for sms in (1, 78, 132, 148, 160):
        for config in dispatch.shipped():
            assert make_plan(problem, config, sms).workspace_bytes <= size(4, 16, 512, 64, 64, 4096, device="cpu")
        for heads in (5, 16, 40, 128):
            invariant = dataclasses.replace(problem, num_heads=heads, batch_invariant=True)
            plan = make_plan(invariant, dispatch.select(invariant, (9, 0)), sms)
            assert plan.workspace_bytes == size(4, heads, 512, 64, 64, 4096, batch_invariant=True, device="cpu")
    if not torch.cuda.is_available():
        assert size(4, 16, 512, 64, 64, 4096) == size(4, 16, 512, 64, 64, 4096, device="cpu")


# --- what a GPU would do ---


@pytest.mark.parametrize("requirement", ["validate", "workspace_buffer", "max_kv_len", "max_seq_len_q"])
def test_capture_of_the_one_shot_function(requirement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "capturing", lambda device: True)
    case = make_case("uniform", (5, 7), q_lens=(1, 1))
    complete = case.call(validate=False, workspace_buffer=torch.zeros(1 << 24, dtype=torch.int8))
    assert_exact(one_shot(*case.tensors, **complete), expected_of(case)[0])
    lacking = complete | {requirement: True if requirement == "validate" else None}
    with pytest.raises(RuntimeError, match=requirement):
        one_shot(*case.tensors, **lacking)


def test_capture_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("uniform", (5, 7))
    wrapper = planned(case)
    monkeypatch.setattr(api, "capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="validate"):
        wrapper.run(*case.tensors)
    assert_exact(wrapper.run(*case.tensors, validate=False), expected_of(case)[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("device", [0, "cuda", "cuda:1", torch.device("cuda")])
def test_no_gpu(device: int | str | torch.device) -> None:
    case = make_case("uniform", (5,))
    with pytest.raises(mla_cute.UnsupportedProblem, match="GPU"):
        planned(case, device=device)
    with pytest.raises(mla_cute.UnsupportedProblem, match="GPU"):
        mla_cute.get_batch_mla_decode_workspace_size(1, 16, 512, 64, 64, 64, device=device)
