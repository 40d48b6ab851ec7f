"""An FP8 cache and scales in tensors: what the entries take, their results on the CPU, and the cases that tests use."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mla_cute.kernels.common import abi

from mla_cute import launch
from mla_cute.testing import assert_close, assert_exact, expected_of, make_case, padded, reference_of

from .test_api import planned
from .test_launch import call_of, problem_of, recorder
from .test_validate import FIXED, GEOMETRY, LIVE, RUN, Arguments, arguments, one_shot, pick, plan, refuse, run
from .toy import run as run_child

E4M3 = torch.float8_e4m3fn
Q_DTYPES = (torch.bfloat16, torch.float16, E4M3)


@pytest.mark.parametrize("q_dtype", Q_DTYPES)
@pytest.mark.parametrize("entry", [*LIVE, *GEOMETRY])
def test_an_fp8_cache_and_its_queries(entry: Callable[[Arguments], object], q_dtype: torch.dtype) -> None:
    fp8 = {"q_data_type": q_dtype, "kv_data_type": E4M3}
    given = arguments(FIXED) | fp8
    given |= {"query": given["query"].to(q_dtype), "kv_cache": given["kv_cache"].to(E4M3)}
    if entry is not run:
        entry(given)
        return
    plan(given).run(**pick(given, *RUN, "lse", "return_lse"))
    refuse(FIXED, run, {"kv_cache": given["kv_cache"]}, ValueError, "kv_cache must have dtype torch.bfloat16")


def test_fp8_queries_need_an_fp8_cache() -> None:
    for entry in GEOMETRY:
        words = "kv_data_type.* must have dtype torch.float8_e4m3fn, as query has torch.float8_e4m3fn, got torch.bfl"
        refuse(FIXED, entry, {"q_data_type": E4M3}, NotImplementedError, words)


def test_strides_of_an_fp8_cache_are_counted_in_bytes() -> None:
    cache = FIXED.kv_cache.to(E4M3)
    for extra, taken in ((16, True), (8, False), (1, False)):
        wide = torch.zeros(*cache.shape[:2], 576 + extra, dtype=torch.uint8).view(E4M3)[..., :576]
        given = arguments(FIXED) | {"kv_cache": wide}
        if taken:
            one_shot(given)
        else:
            with pytest.raises(ValueError, match="kv_cache must have a stride of a multiple of 16 bytes"):
                one_shot(given)


def test_scales_in_tensors() -> None:
    """The same bits as from numbers; one element of a larger tensor will do; nothing written may lie over them."""
    for values in ((0.5, 0.25), (0.125, 3.0)):
        numbers = dict(zip(("bmm1_scale", "bmm2_scale"), values, strict=True))
        expected = arguments(FIXED) | numbers
        given = arguments(FIXED) | {name: torch.full((9,), value)[3:4] for name, value in numbers.items()}
        for entry in LIVE:
            entry(expected)
            entry(given)
            assert torch.equal(expected["out"], given["out"]) and torch.equal(expected["lse"], given["lse"])
        entry(given | {"bmm1_scale": given["bmm1_scale"][0]})
        assert torch.equal(expected["out"], given["out"])
    given["bmm2_scale"] = given["lse"].view(-1)[:1].fill_(1.0)
    with pytest.raises(ValueError, match="lse must not overlap bmm2_scale"):
        one_shot(given)


def test_a_scale_in_a_tensor_is_read_by_each_run() -> None:
    case = make_case("random", (70, 5), q_lens=2)
    wrapper = planned(case)
    scales = {"bmm1_scale": torch.ones(()), "bmm2_scale": torch.ones(1)}
    for values in ((0.5, 2.0), (0.03, 0.25)):
        for tensor, value in zip(scales.values(), values, strict=True):
            tensor.fill_(value)
        for validate in (True, False):
            out, lse = wrapper.run(*case.tensors, **scales, return_lse=True, validate=validate)
            numbers = {name: tensor.item() for name, tensor in scales.items()}
            expected, expected_lse = wrapper.run(*case.tensors, **numbers, return_lse=True)
            assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    with pytest.raises(TypeError, match="bmm1_scale must be a real number or a tensor of one, got '1'"):
        wrapper.run(*case.tensors, bmm1_scale="1", validate=False)


@pytest.mark.parametrize("name", ["bmm1_scale", "bmm2_scale"])
def test_scales_in_tensors_that_are_refused(name: str) -> None:
    for wrong in (torch.ones(2), torch.ones(1, 1), torch.ones(0), torch.ones(1, device="meta")):
        for entry in LIVE:
            refuse(FIXED, entry, {name: wrong}, ValueError, name)
    for dtype in (torch.float64, torch.bfloat16, torch.int32):
        for entry in LIVE:
            refuse(FIXED, entry, {name: torch.ones(1, dtype=dtype)}, TypeError, name)
    for value in (0.0, -1.0, math.inf, math.nan, *((3e38,) if name == "bmm1_scale" else ())):
        for entry in (one_shot, run):  # the careful ones: the stand-alone one reads no value that is on the device
            refuse(FIXED, entry, {name: torch.full((1,), value)}, ValueError, name)


@pytest.mark.parametrize("kind", ["uniform", "select", "deepneg", "two"])
@pytest.mark.parametrize("q_dtype", Q_DTYPES)
def test_fixtures_are_exact_in_e4m3(kind: Any, q_dtype: torch.dtype) -> None:
    lengths, how = (257, 65, 4, 0), {"q_lens": (2, 1, 3, 1), "num_heads": 66, "select": [-1, 0, 7, 1000]}
    case = make_case(kind, lengths, dtype=q_dtype, kv_dtype=E4M3, **how)  # type: ignore[arg-type]
    wide = make_case(kind, lengths, dtype=torch.bfloat16, **how)  # type: ignore[arg-type]
    assert torch.equal(case.query.float(), wide.query.float())
    torch.testing.assert_close(case.kv_cache.float(), wide.kv_cache.float(), rtol=0, atol=0, equal_nan=True)
    out, lse = reference_of(case, "base2", torch.float32, torch.float16)
    assert_exact(out, expected_of(case)[0])
    assert_close(out, lse, *expected_of(case, "base2"), E4M3, "base2")


@pytest.mark.parametrize("q_dtype", Q_DTYPES)
def test_random_data_are_quantised_by_one_scale(q_dtype: torch.dtype) -> None:
    """Near the data of 16 bits, in units that the two scales take back; saturated nowhere."""
    how = {"num_heads": 5, "scale": 3.0, "bmm2_scale": 0.5}
    case = make_case("random", (300, 70), dtype=q_dtype, kv_dtype=E4M3, **how)  # type: ignore[arg-type]
    wide = make_case("random", (300, 70), dtype=torch.bfloat16, **how)  # type: ignore[arg-type]
    unit = case.bmm2_scale / wide.bmm2_scale
    owned = ~wide.kv_cache.isnan()
    error = case.kv_cache[owned].float() * unit - wide.kv_cache[owned].float()
    assert 0.01 < float(error.norm() / wide.kv_cache[owned].float().norm()) < 0.03, "of 3 mantissa bits"
    assert 250 < float(case.kv_cache[owned].float().abs().max()) < 448
    assert (case.kv_cache.view(torch.uint8)[~owned] == 0x7F).all(), "NaN where nobody owns an element"
    q_unit = case.bmm1_scale / wide.bmm1_scale / unit
    torch.testing.assert_close(case.query.float() * q_unit, wide.query.float(), rtol=0.07, atol=1e-3)
    error = reference_of(case)[0] - reference_of(wide)[0]
    assert float(error.norm() / reference_of(wide)[0].norm()) < 0.06, "attention of the quantised data"


def test_holes_are_nan_in_e4m3() -> None:
    for unowned in (math.nan, math.inf, -math.inf):
        case = make_case("uniform", (5,), kv_dtype=E4M3, unowned=unowned)
        assert case.kv_cache.isnan().any()
    assert not make_case("uniform", (5,), kv_dtype=E4M3, unowned=0.0).kv_cache.isnan().any()
    wide = torch.as_strided(padded(case.kv_cache, 2, 64), (len(case.kv_cache), 64, 640), (64 * 640, 640, 1))
    assert wide[..., 576:].isnan().all()


@pytest.mark.parametrize("q_dtype", Q_DTYPES)
def test_what_a_kernel_of_an_fp8_cache_is_given(q_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("random", (70, 5), q_lens=(1, 2), dtype=q_dtype, kv_dtype=E4M3)
    prepared, received = recorder(problem_of(case), ctas=2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: prepared.device.index)
    out = case.query[..., :512].to(torch.bfloat16, memory_format=torch.contiguous_format)
    launch.run(prepared, prepared.bind(None), call_of(case, out=out), False)
    given = dict(zip(abi.ARGUMENTS, received, strict=True))
    assert given["packed_query"] is case.query and given["out_address"] == out.data_ptr()
    assert given["kv_cache"] is case.kv_cache
    assert str(given["query"].dtype) == str(q_dtype)[6:], "what stands in its place has its type"
    assert given["scale_log2"] == pytest.approx(case.bmm1_scale * math.log2(math.e))
    assert given["out_scale"] == case.bmm2_scale


def test_launchers_take_tensors_of_e4m3_and_addresses() -> None:
    """Through tvm-ffi: torch's tensors, as in a run, and converted ones, as a plan keeps them."""
    printed = run_child(f"from {__package__} import fp8_probe; fp8_probe.main()")
    plain, converted, refused = json.loads(printed.splitlines()[-1])
    assert plain == converted == [0, 2**40 + 5, 4, 16 * 592, 0]
    assert "expected dtype=float8_e4m3fn" in refused
