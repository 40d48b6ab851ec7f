"""An FP8 cache and scales in tensors: what the entries take, and the results that they give on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from .test_validate import FIXED, GEOMETRY, LIVE, RUN, Arguments, arguments, one_shot, pick, plan, refuse, run


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("entry", [*LIVE, *GEOMETRY])
def test_an_fp8_cache_and_its_queries(entry: Callable[[Arguments], object], q_dtype: torch.dtype) -> None:
    fp8 = {"q_data_type": q_dtype, "kv_data_type": torch.float8_e4m3fn}
    given = arguments(FIXED) | fp8
    given |= {"query": given["query"].to(q_dtype), "kv_cache": given["kv_cache"].to(torch.float8_e4m3fn)}
    if entry is not run:
        entry(given)
        return
    plan(given).run(**pick(given, *RUN, "lse", "return_lse"))
    refuse(FIXED, run, {"kv_cache": given["kv_cache"]}, ValueError, "kv_cache must have dtype torch.bfloat16")


def test_fp8_queries_need_an_fp8_cache() -> None:
    for entry in GEOMETRY:
        words = "kv_data_type.* must have dtype torch.float8_e4m3fn, as query has torch.float8_e4m3fn, got torch.bfl"
        refuse(FIXED, entry, {"q_data_type": torch.float8_e4m3fn}, NotImplementedError, words)


def test_strides_of_an_fp8_cache_are_counted_in_bytes() -> None:
    cache = FIXED.kv_cache.to(torch.float8_e4m3fn)
    for extra, taken in ((16, True), (8, False), (1, False)):
        wide = torch.zeros(*cache.shape[:2], 576 + extra, dtype=torch.uint8).view(torch.float8_e4m3fn)[..., :576]
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
