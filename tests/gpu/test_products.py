"""Products of the categories: a table that covers every pair of levels, and the full products that past bugs asked for.

Random data is compared with the reference in fp64, fixture data with its closed form.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch

from mla_cute import dispatch
from mla_cute.problem import DTYPES, KV_LORA_RANK, LSE_MODES, MASKS, OUT_DTYPES, PAGE_SIZES, MLAProblem
from mla_cute.reference import raw
from mla_cute.testing import assert_lse_close, expected_of, make_case

from .harness import (
    INPUTS,
    ROWS,
    TORCH_DTYPES,
    Inputs,
    each_inputs,
    each_kernel,
    each_rows,
    launch,
    launch_and_check,
    planned,
    same_bits,
)
from .oracle import Rows, Sequences

HEADS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 22, 24, 32, 40, 48, 64, 65, 96, 127, 128)
CTAS = (None, 1, 2, 7, 32, 33, 64, 132, 200)
LEVELS: dict[str, tuple[Any, ...]] = {
    "heads": HEADS,
    "tokens": (1, 2, 3, 4, 8),
    "page": PAGE_SIZES,
    "inputs": tuple(INPUTS),
    "output": OUT_DTYPES,
    "mask": MASKS,
    "form": ("fixed", "packed"),
    "lse": LSE_MODES,
    "ctas": CTAS,
}


def pairwise(levels: dict[str, tuple[Any, ...]], tries: int = 20) -> list[dict[str, Any]]:
    """Rows such that any two levels of different factors meet in one of them; the same rows every time."""
    pick = random.Random(0)
    missing = {((f, x), (g, y)) for f, g in combinations(levels, 2) for x in levels[f] for y in levels[g]}
    order = sorted(missing, key=repr)
    rows = []
    while missing:
        seed = next(pair for pair in order if pair in missing)
        candidates = [{f: pick.choice(levels[f]) for f in levels} | dict(seed) for _ in range(tries)]
        covered = [set(combinations(row.items(), 2)) & missing for row in candidates]
        best = max(range(tries), key=lambda i: len(covered[i]))
        rows.append(candidates[best])
        missing -= covered[best]
    return rows


@pytest.mark.parametrize("row", pairwise(LEVELS), ids=lambda row: "-".join(str(v) for v in row.values()))
def test_every_pair_of_levels(row: dict[str, Any], device: torch.device) -> None:
    page, tokens = row["page"], row["tokens"]
    lengths = [0, tokens, page - 1, page + 1, 257, 1000]
    q_lens = [min(q, length or q) for q, length in zip([2, 1, 0, tokens, tokens, 2], lengths, strict=True)]
    case = make_case(
        "random",
        [max(length, tokens) if length and row["form"] == "fixed" else length for length in lengths],
        q_lens=tokens if row["form"] == "fixed" else q_lens,
        num_heads=row["heads"],
        page_size=page,
        mask_type=row["mask"],
        **INPUTS[row["inputs"]],
        device=device,
    )
    launch_and_check(case, lse_mode=row["lse"], out_dtype=TORCH_DTYPES[row["output"]], ctas=row["ctas"])


@pytest.mark.parametrize("config", dispatch.shipped(), ids=lambda config: config.name)
def test_every_kernel(config: Any, device: torch.device) -> None:
    """Each compiled variant in both masks and forms, with an empty request, whole and ragged tiles, cut and whole."""
    dtype, kv_dtype, out_dtype = (TORCH_DTYPES[d] for d in (config.q_dtype, config.kv_dtype, config.out_dtype))
    problem = MLAProblem(1, config.rows, 1, 64, 64, False, "causal", config.q_dtype, config.kv_dtype, config.out_dtype)
    pages = [page for page in PAGE_SIZES if dispatch.select(replace(problem, page_size=page), (9, 0)) == config]
    for page, tokens, mask, packed in product(pages, (1, 3), MASKS, (False, True)):
        case = make_case(
            "random",
            [0, tokens, 64, 129, 700],
            q_lens=(0, tokens, 1, tokens, 1) if packed else tokens,
            num_heads=config.rows // tokens,
            page_size=page,
            dtype=dtype,
            kv_dtype=kv_dtype,
            mask_type=mask,
            device=device,
        )
        kernel = planned(case, o_data_type=out_dtype).kernel
        assert kernel.split()[0] == config.name or device.type == "cpu"
        for ctas, lse_mode in ((None, "base2"), (3, "basee")):
            launch_and_check(case, out_dtype=out_dtype, lse_mode=lse_mode, ctas=ctas)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_every_number_of_rows(tokens: int, device: torch.device) -> None:
    """Up to one more than the kernels of few rows hold: full and partial blocks of each."""
    for heads in range(1, ROWS[-2] // tokens + 2):
        launch_and_check(make_case("random", [131, 0, 70], q_lens=tokens, num_heads=heads, device=device))


@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8])
@each_kernel
def test_pages_and_query_tokens(tokens: int, page: int, rows: int, inputs: Inputs, device: torch.device) -> None:  # B8
    for length in (17, 129, 4097):
        case = make_case(
            "random",
            [length, 0, length + 31],
            q_lens=tokens,
            num_heads=rows // tokens,
            page_size=page,
            **inputs,
            device=device,
        )
        launch_and_check(case)


@pytest.mark.parametrize("heads", HEADS)
def test_heads_do_not_mix(heads: int, device: torch.device) -> None:  # D1-D4
    """Head h returns the value of the token that it alone picks; the guards stand where head H would be."""
    for inputs in INPUTS.values():
        for tokens in (1, 2, 4):
            case = make_case(
                "select",
                [131, 70],
                select=[2 * j + 1 for j in range(33)],
                q_lens=tokens,
                num_heads=heads,
                **inputs,
                device=device,
            )
            for ctas in (None, 1, 7):
                launch_and_check(case, ctas=ctas)


@pytest.mark.parametrize("ctas", CTAS)
@each_kernel
def test_any_number_of_splits(ctas: int | None, rows: int, inputs: Inputs, device: torch.device) -> None:  # A10
    for length in (1, 64, 65, 128, 129, 1000):
        for batch in (1, 3):
            for kind in ("uniform", "random"):
                launch_and_check(make_case(kind, [length] * batch, num_heads=rows, **inputs, device=device), ctas=ctas)


@each_kernel
def test_few_requests_of_many_parts(
    rows: int, inputs: Inputs, device: torch.device, scaled: Callable[[Any, Any], Any]
) -> None:
    """Around the number of rows from which combine leaves them to warps alone; equal lengths, and one long request."""
    length = scaled(4096, 200)
    for batch in (1, 2, 3, 4, 5, 8, 16):
        for lengths in ([length // 4] * batch, [length] * batch, [4 * length, *[length // 2] * batch]):
            for heads in (rows, 2 * rows - 3):
                case = make_case("random", lengths, num_heads=heads, **inputs, device=device)
                out, lse = launch_and_check(case)
                again, lse_again = launch(case)
                assert lse is not None and lse_again is not None
                assert same_bits(out, again) and same_bits(lse, lse_again), (lengths, heads)


@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("kind", ["uniform", "select", "deepneg", "two"])
@each_rows
def test_fixtures(kind: Any, page: int, rows: int, device: torch.device) -> None:
    """The four oracles, in every dtype and both masks, at lengths around every boundary."""
    lengths = [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000]
    if kind == "two":
        lengths = [2] * 5
    for inputs in INPUTS.values():
        for mask in MASKS:
            case = make_case(kind, lengths, num_heads=rows, page_size=page, mask_type=mask, **inputs, device=device)
            launch_and_check(case, lse_mode="basee")


@each_kernel
def test_skewed_lengths(rows: int, inputs: Inputs, device: torch.device, scaled: Callable[[Any, Any], Any]) -> None:
    """One long request beside many short ones, whatever the number of CTAs."""
    long, short, many = scaled((131_072, 512, 63), (4096, 70, 7))
    sequences = Sequences(
        device, **inputs, count=1, length=long, picks=(0, short - 1, long // 2, long - 1), pool_factor=2
    )
    shared = torch.zeros(many + 1, dtype=torch.long, device=device)
    for position in (0, many):
        lengths = [short] * (many + 1)
        lengths[position] = long
        for picking in (False, True):
            case = sequences.case(lengths, num_heads=rows, sequence=shared, picking=picking)
            for ctas in (None, 1, 33, 132):
                out, lse = launch(case, ctas=ctas)
                assert sequences.agrees(out, lse, Rows.of(case, shared), picking=picking), (position, picking, ctas)


@each_kernel
def test_scores_of_several_hundred(rows: int, inputs: Inputs, device: torch.device) -> None:  # E2
    for length in (256, 4096):
        case = make_case("random", [length, length - 1], num_heads=rows, scale=100.0, **inputs, device=device)
        for ctas in (1, 2, 8, 32):
            # tensor cores truncate where they add: scores of several hundred come out up to 1.4e-6 too small, and
            # those of cuBLAS up to 1.0e-6 (H200)
            launch_and_check(case, ctas=ctas, lse_relative=2e-6)


@pytest.mark.parametrize("sink", [0, -1])
@each_inputs
@each_rows
def test_small_weights_beside_a_sink(
    rows: int, inputs: Inputs, device: torch.device, scaled: Callable[[Any, Any], Any], sink: int
) -> None:
    """One token (an attention sink) has nearly all the weight and the value 0: the answer is in the tiny weights."""
    length = scaled(65_536, 4096)
    case = make_case("uniform", [length], num_heads=rows, **inputs, device=device)
    coarse = inputs["kv_dtype"] == torch.bfloat16  # so are the weights; else they have the bits of fp16
    tokens = torch.zeros(length, 576, device=device)
    tokens[:, :512] = 16  # the smallest output is then still a normal fp16 number
    tokens[sink, :512], tokens[sink, 512] = 0, 1
    pages = tokens.to(case.kv_cache.dtype).view(-1, case.kv_cache.shape[1], 576)
    raw(case.kv_cache)[case.block_tables[0].long()] = raw(pages)
    for score in (8.0, 14.0, 18.0, 20.0):
        case.query.fill_(0)[..., 512] = score
        expected = 16 * (length - 1) / (length - 1 + math.exp(score))
        for ctas in (None, 1):
            out_dtype = torch.bfloat16 if coarse else torch.float16
            out, lse = launch(case, ctas=ctas, lse_mode="basee", out_dtype=out_dtype)
            error = float((out.double() / expected - 1).abs().amax())
            assert error <= (4e-3 if coarse else 1e-3), (score, ctas, error)
            assert lse is not None
            # fp32 sums lose bits of tiny terms beside a large one: 9.7e-5 in one CTA (H200), 1e-6 in many
            assert float((lse - math.log(length - 1 + math.exp(score))).abs().amax()) <= 2e-4


@each_rows
def test_values_of_any_magnitude(rows: int, device: torch.device, scaled: Callable[[Any, Any], Any]) -> None:
    """Of 1e30, of 1e-30, and of both in different parts of a request; each column has a magnitude of its own, too.

    Scores come through the RoPE lanes; in the last request they give the small values all the weight.
    """
    length = scaled(8192, 1024)
    case = make_case("random", [length] * 4, num_heads=rows, scale=4.0, device=device, pool_factor=1)
    case.query[..., : KV_LORA_RANK + 1] = 0
    case.query[3, ..., KV_LORA_RANK] = 192 * 24
    early = torch.arange(length, device=device) < length // 2
    large, small = torch.full((length,), 1e30, device=device), torch.full((length,), 1e-30, device=device)
    factors = (large, small, torch.where(early, large, small), torch.where(early, small, large))
    columns = 2.0 ** -(torch.arange(KV_LORA_RANK, device=device) % 16)
    for pages, factor in zip(case.block_tables.long(), factors, strict=True):
        tokens = case.kv_cache[pages].flatten(0, 1).float()
        tokens[:, :KV_LORA_RANK] *= factor[:, None] * columns
        tokens[:, KV_LORA_RANK] = early.float()
        case.kv_cache[pages] = tokens.view(case.kv_cache[pages].shape).to(case.kv_cache.dtype)
    ref_out, ref_lse = expected_of(case, "base2")
    for ctas in (None, 7, 33, 200):
        out, lse = launch(case, ctas=ctas)
        error = (out.double() - ref_out).norm(dim=2) / ref_out.norm(dim=2)  # of a column of a request
        assert float(error.amax()) <= 4 * DTYPES["bf16"].tolerance, ctas
        assert lse is not None
        assert_lse_close(lse, ref_lse, "base2", relative=2e-6)
