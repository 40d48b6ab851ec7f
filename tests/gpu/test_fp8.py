"""What only an e4m3 cache brings: its quantisation, the ranges of its queries; and scales in tensors, with every dtype.

The other files run their cases with e4m3 too, see `each_kernel` and `INPUTS` in harness.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mla_cute.problem import KV_LORA_RANK, MASKS, PAGE_SIZES
from mla_cute.reference import decode_reference
from mla_cute.testing import Case, make_case, stored

from .harness import INPUTS, Inputs, each_kernel, launch, launch_and_check, planned, same_bits

FP8_INPUTS = {name: inputs for name, inputs in INPUTS.items() if inputs["kv_dtype"] == torch.float8_e4m3fn}
each_fp8 = pytest.mark.parametrize("inputs", FP8_INPUTS.values(), ids=FP8_INPUTS)
each_wide_query = pytest.mark.parametrize(
    "inputs", [i for i in FP8_INPUTS.values() if i["dtype"].itemsize == 2], ids=[n for n in FP8_INPUTS if "over" in n]
)
fp8_rows = pytest.mark.parametrize("rows", [16, 32, 64], ids="{} rows".format)
SCALE = 1 / 24
Scaled = Callable[[int, int], int]
Edit = Callable[[Tensor, Tensor, Tensor], None]  # of query, pages and block table


def quantised(
    inputs: Inputs, lengths: list[int], rows: int, device: torch.device, edit: Edit
) -> tuple[Case, Tensor, Tensor]:
    """A case of normal data that `edit` may change, quantised as documented; and query and cache as they were."""
    base = make_case("random", lengths, num_heads=rows, **inputs, device=device)
    generator = torch.Generator(device).manual_seed(1)
    query, keys = (
        torch.randn(t.shape, generator=generator, device=device, dtype=torch.float64)
        for t in (base.query, base.kv_cache)
    )
    edit(query, keys, base.block_tables)
    q_scale = float(query.abs().max()) / 448 if inputs["dtype"].itemsize == 1 else 1.0
    k_scale = float(keys.abs().max()) / 448
    case = replace(
        base,
        query=stored(query / q_scale, inputs["dtype"]),
        kv_cache=stored((keys / k_scale).where(~base.kv_cache.float().isnan(), math.nan), inputs["kv_dtype"]),
        bmm1_scale=SCALE * q_scale * k_scale,
        bmm2_scale=k_scale,
    )
    return case, query, keys


@pytest.mark.parametrize("batch", [1, 2, 7, 64])
@fp8_rows
@each_fp8
def test_e7_batches(inputs: Inputs, rows: int, batch: int, device: torch.device, scaled: Scaled) -> None:
    lengths = [(37 * b + 129) % scaled(400, 40) + 3 for b in range(batch)]
    for index, page in enumerate(PAGE_SIZES):
        tokens = index % 3 + 1
        case = make_case(
            ("random", "select")[index % 2],
            lengths,
            q_lens=[(b + batch) % (tokens + 1) for b in range(batch - 1)] + [tokens] if index % 4 < 2 else tokens,
            num_heads=rows // tokens,
            page_size=page,
            mask_type=MASKS[(index + batch) % 2],
            **inputs,
            device=device,
        )
        for ctas, out_dtype in ((None, torch.bfloat16), (7, torch.float16)):
            launch_and_check(case, ctas=ctas, out_dtype=out_dtype)


@pytest.mark.parametrize("latent, rope", [(0.1, 1.0), (1.0, 0.1), (0.01, 3.0), (30.0, 1.0)])
@fp8_rows
@each_fp8
def test_e6_latent_and_rope_of_different_ranges(
    inputs: Inputs, rows: int, latent: float, rope: float, device: torch.device
) -> None:
    """One scale for both parts: nothing saturates, and the error is that of 3 mantissa bits."""

    def edit(query: Tensor, keys: Tensor, tables: Tensor) -> None:
        keys.clamp_(-1, 1)[..., :KV_LORA_RANK] *= latent
        keys[..., KV_LORA_RANK:] *= rope
        query[..., :KV_LORA_RANK] /= max(1.0, latent)

    case, query, keys = quantised(inputs, [1000, 129, 64], rows, device, edit)
    out, _ = launch_and_check(case)
    exact, _ = decode_reference(query, keys, *case.tensors[2:], bmm1_scale=SCALE, compute=torch.float64)
    assert float((out.double() - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("ctas", [None, 1])
@fp8_rows
@each_fp8
def test_a_sharp_maximum_and_a_long_low_tail(
    inputs: Inputs, rows: int, ctas: int | None, device: torch.device, scaled: Scaled
) -> None:
    """The first token, whose value is small, has a score from 4 to 20 above the others, by head."""

    def edit(query: Tensor, keys: Tensor, tables: Tensor) -> None:
        sink = torch.zeros_like(keys[0, 0])
        sink[0], sink[-1] = 0.25, 4
        keys[..., -1] = 0
        keys[tables[:, 0].long(), 0] = sink
        query[..., -1] = torch.linspace(4, 20, rows, device=device) / (4 * SCALE)

    case, _, _ = quantised(inputs, [scaled(20_000, 2000), 65], rows, device, edit)
    launch_and_check(case, ctas=ctas, out_dtype=torch.float16)


@pytest.mark.parametrize("largest", [1e30, 1e-30])
@fp8_rows
def test_bf16_queries_far_from_one(rows: int, largest: float, device: torch.device) -> None:
    """fp16 could not hold them: what the kernel takes out of a row, it puts back into the scores."""

    def edit(query: Tensor, keys: Tensor, tables: Tensor) -> None:
        query *= largest

    case, _, _ = quantised(FP8_INPUTS["bf16 over e4m3"], [1000, 65, 1], rows, device, edit)
    launch_and_check(replace(case, bmm1_scale=case.bmm1_scale / largest))


@fp8_rows
@each_wide_query
def test_query_rows_of_different_magnitudes(inputs: Inputs, rows: int, device: torch.device) -> None:
    """From scores that are all alike to one that decides alone; rows of zeros among them."""
    powers = torch.linspace(-24 if inputs["dtype"] == torch.bfloat16 else -8, 4, rows)

    def edit(query: Tensor, keys: Tensor, tables: Tensor) -> None:
        query *= (2.0 ** powers.double()).to(device)[:, None]
        query[..., 1::3, :] = 0

    case, _, _ = quantised(inputs, [1000, 65, 1], rows, device, edit)
    for ctas in (None, 5):
        launch_and_check(case, ctas=ctas, lse_relative=2e-6)


@fp8_rows
@each_wide_query
def test_query_lanes_of_different_magnitudes(inputs: Inputs, rows: int, device: torch.device) -> None:
    """Within a row: small lanes keep their bits beside large ones, whose products here are 0."""
    factor = 2.0**-24 if inputs["dtype"] == torch.bfloat16 else 2.0**-12

    def edit(query: Tensor, keys: Tensor, tables: Tensor) -> None:
        query[..., 7] = 2.0
        query[..., :7] *= factor
        query[..., 8:] *= factor
        keys[..., 7] = 0

    case, _, _ = quantised(inputs, [1000, 65, 1], rows, device, edit)
    launch_and_check(replace(case, bmm1_scale=case.bmm1_scale / factor))


@fp8_rows
@each_fp8
def test_queries_of_zeros(inputs: Inputs, rows: int, device: torch.device) -> None:
    case, _, _ = quantised(inputs, [1000, 65, 1], rows, device, lambda query, keys, tables: None)
    _, lse = launch_and_check(replace(case, query=torch.zeros_like(case.query)), lse_mode="basee")
    assert lse is not None
    expected = torch.tensor([1000.0, 65.0, 1.0], device=device).log().view(3, 1, 1).expand_as(lse)
    torch.testing.assert_close(lse, expected, rtol=1e-6, atol=1e-5)


@each_kernel
def test_scales_in_tensors(inputs: Inputs, rows: int, device: torch.device) -> None:
    """Powers of two give the bits that numbers give; a wrapper reads them anew at each run."""
    case = make_case("random", [1000, 0, 65], num_heads=rows, **inputs, device=device)
    power = 2.0 ** round(math.log2(case.bmm1_scale))
    scales = [torch.zeros((), device=device), torch.zeros(3, device=device)[1:2]]
    wrapper = planned(case)
    for one, other in ((power, 0.25), (power / 4, 2.0), (power, 0.25)):
        numbers = replace(case, bmm1_scale=one, bmm2_scale=other)
        expected, expected_lse = launch(numbers)
        for scale, value in zip(scales, (one, other), strict=True):
            scale.fill_(value)
        for names in (("bmm1_scale", "bmm2_scale"), ("bmm1_scale",), ("bmm2_scale",)):
            tensors = dict(zip(("bmm1_scale", "bmm2_scale"), scales, strict=True))
            given = numbers.run(return_lse=True) | {name: tensors[name] for name in names}
            for validate in (True, False):
                out, lse = wrapper.run(*case.tensors, **given, validate=validate)
                assert expected_lse is not None
                assert same_bits(out, expected) and same_bits(lse, expected_lse), (names, validate)
