"""Large pools, batches, query counts and contexts, with closed-form answers; small ones of the same form on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from mla_cute.problem import HEAD_DIM, KV_LORA_RANK, MAX_KV_LEN
from mla_cute.testing import Case

from .harness import BF16, FP8, ROWS, Inputs, each_kernel, launch
from .oracle import Rows, Sequences

Scaled = Callable[[Any, Any], Any]


def launch_and_agree(
    sequences: Sequences, case: Case, *, sequence: torch.Tensor | None = None, picking: bool = False, **options: Any
) -> None:
    out, lse = launch(case, **options)
    assert sequences.agrees(out, lse, Rows.of(case, sequence), picking=picking)


@pytest.mark.big
@pytest.mark.parametrize("inputs", [BF16, FP8], ids=["bf16", "e4m3"])
def test_b1_offsets_past_32_bits(inputs: Inputs, device: torch.device, scaled: Scaled) -> None:
    """Pages on both sides of 2**31 bytes, 2**31 elements and 2**32 elements of the cache."""
    pages = scaled([1, 29127, 29128, 58254, 58255, 116508, 116509, 116599], [1, 27, 28, 54, 55, 108, 109, 116])
    pool = torch.full((pages[-1] + 1, 64, HEAD_DIM), math.nan, dtype=inputs["kv_dtype"], device=device)
    ids = torch.tensor(pages, device=device)
    each = Sequences(device, **inputs, count=8, length=64, picks=(0, 17, 63), pool_factor=1)
    each.place(pool, ids)
    across = Sequences(device, **inputs, count=1, length=512, picks=range(5, 512, 32), pool_factor=1, seed=1)
    for sequences, lengths in ((each, [64] * 8), (across, [512])):
        sequences.place(pool, ids)
        for picking, heads in product((True, False), ROWS):
            launch_and_agree(sequences, sequences.case(lengths, num_heads=heads, picking=picking), picking=picking)


@pytest.mark.big
def test_b17_cache_is_a_view_into_a_larger_allocation(device: torch.device, scaled: Scaled) -> None:
    """One layer of a cache of all layers: pages lie far apart, and the view spans more than 2**31 elements."""
    pages, layers = scaled((1000, 61), (20, 3))
    allocation = torch.full((pages, layers, 64, HEAD_DIM), math.nan, dtype=torch.bfloat16, device=device)
    sequences = Sequences(device, count=2, length=300, picks=(0, 170, 299), pool_factor=1)
    order = torch.randperm(pages - 1, device=device, generator=torch.Generator(device).manual_seed(0))
    ids = order[: len(sequences.tokens)]
    ids[0] = pages - 1  # the farthest
    for layer in (0, layers - 1):
        sequences.place(allocation[:, layer], ids)
        for picking, heads in product((True, False), ROWS):
            case = sequences.case([300, 257], num_heads=heads, picking=picking)
            launch_and_agree(sequences, case, picking=picking)


@pytest.mark.big
@pytest.mark.parametrize("packed", [False, True], ids=["fixed", "packed"])
@pytest.mark.parametrize("heads", [16, 128])
def test_query_and_output_past_31_bits(heads: int, packed: bool, device: torch.device, scaled: Scaled) -> None:
    """More than 2**31 elements each. A row sees one token: out is its value, LSE its score, which differs by row."""
    batch = scaled(32_832 * 128 // heads, 65)
    request = torch.arange(batch + 1, device=device)
    sequences = Sequences(device, count=1021, length=1, page_size=16, pool_factor=1)
    owner = request[:-1] % 1021
    form: dict[str, Any] = {"q_lens": request.to(torch.int32), "total_q": batch} if packed else {}
    lengths = torch.ones(batch, dtype=torch.int32, device=device)
    case = sequences.case(lengths, num_heads=heads, sequence=owner, **form)
    factor = 1 + (request[:-1, None] + torch.arange(heads, device=device)) % 3
    case.query.view(batch, heads, HEAD_DIM)[..., -1] = factor.to(case.query.dtype)
    out, lse = launch(case)
    assert lse is not None
    token = sequences.tokens[:, 0]
    for first in range(0, batch, 4096):  # bounds the memory of the comparison
        part = slice(first, first + 4096)
        seen = token[owner[part], None]
        assert bool((out.view(batch, heads, KV_LORA_RANK)[part] == seen[..., :KV_LORA_RANK]).all()), first
        score = seen[..., -1].float() * factor[part]
        assert bool(((lse.view(batch, heads)[part] - score).abs() <= 1e-5).all()), first


def test_a_table_row_for_more_than_31_bits_of_tokens(device: torch.device) -> None:
    """Counted in 32 bits, the capacity of this row would be negative."""
    sequences = Sequences(device, count=1, length=300, page_size=256)
    case = sequences.case([300])
    table = torch.full((1, 8_400_000), -1, dtype=torch.int32, device=device)
    table[:, :2] = case.block_tables
    for longest in (case.max_kv_len, MAX_KV_LEN):
        launch_and_agree(sequences, replace(case, block_tables=table, max_kv_len=longest))


BATCHES = (16_384, 16_385, 16_600, 17_000, 65_535, 65_536, 70_001)


@pytest.mark.big
@pytest.mark.parametrize("batch", BATCHES)
def test_f1_f3_batches(batch: int, device: torch.device, scaled: Scaled) -> None:
    """Each request returns the one token it sees. 1021 is prime: no power of two hides a wrapped index."""
    batch = scaled(batch, batch // 500)
    sequences = Sequences(device, count=1021, length=1, page_size=16, pool_factor=1)
    owner = torch.arange(batch, device=device) % 1021
    case = sequences.case(torch.ones(batch, dtype=torch.int32, device=device), sequence=owner)
    launch_and_agree(sequences, case, sequence=owner)


@pytest.mark.big
@pytest.mark.parametrize("mask, length", [("dense", 1), ("dense", 100), ("causal", 70_123)])
def test_f1_f3_one_request_with_many_query_rows(mask: str, length: int, device: torch.device, scaled: Scaled) -> None:
    rows = scaled(70_000, 70)
    length = scaled(length, min(length, 133))
    sequences = Sequences(device, count=1, length=length, pool_factor=2)
    indptr = torch.tensor([0, rows], dtype=torch.int32, device=device)
    case = sequences.case([length], q_lens=indptr, total_q=rows, max_seq_len_q=rows, mask_type=mask)
    launch_and_agree(sequences, case)


@pytest.mark.parametrize("tokens", [32, 128, 1024])
def test_c10_many_query_tokens(tokens: int, device: torch.device) -> None:
    sequences = Sequences(device, count=1, length=1500)
    for heads in (1, 16, 128) if device.type == "cuda" else (2,):
        for length in (tokens, 1500):
            for mask in ("causal", "dense"):
                case = sequences.case([length], q_lens=tokens, num_heads=heads, mask_type=mask)
                launch_and_agree(sequences, case)


@pytest.mark.big
@pytest.mark.parametrize("inputs", [BF16, FP8], ids=["bf16", "e4m3"])
def test_f7_a_million_tokens(inputs: Inputs, device: torch.device, scaled: Scaled) -> None:
    length = scaled(1_000_000, 10_000)
    picks = (0, length // 2 - 1, length // 2, scaled(524_288, 5_243), length - 1)
    sequences = Sequences(device, **inputs, count=1, length=length, picks=picks)
    for picking, heads in product((True, False), ROWS):
        launch_and_agree(sequences, sequences.case([length], num_heads=heads, picking=picking), picking=picking)


@pytest.mark.big
def test_f8_workspace_of_many_requests(device: torch.device, scaled: Scaled) -> None:
    """Whatever the batch, the kernel stays inside the workspace it asked for: launch() checks the guards."""
    batch, length = scaled((16_384, 300), (64, 150))
    sequences = Sequences(device, count=61, length=length, page_size=32)
    random = torch.Generator(device).manual_seed(0)
    owner = torch.arange(batch, device=device) % 61
    lengths = torch.randint(0, length + 1, (batch,), device=device, generator=random, dtype=torch.int32)
    for heads in ROWS:
        launch_and_agree(sequences, sequences.case(lengths, num_heads=heads, sequence=owner), sequence=owner)


@pytest.mark.parametrize("ctas", [None, 33, 64, 132, 200])
def test_f12_many_splits_of_one_request(ctas: int | None, device: torch.device, scaled: Scaled) -> None:
    length = scaled(200_000, 2_000)
    sequences = Sequences(device, count=1, length=length, picks=(0, 63, 64, length // 3, length - 1), pool_factor=2)
    for heads, tokens in ((16, 1), (8, 3), (64, 1), (40, 3)):
        for picking in (True, False):
            case = sequences.case([length], num_heads=heads, q_lens=tokens, picking=picking)
            launch_and_agree(sequences, case, picking=picking, ctas=ctas)


@each_kernel
def test_long_contexts_of_several_requests(rows: int, inputs: Inputs, device: torch.device, scaled: Scaled) -> None:
    """Lengths around powers of two, replicated rows included, in one batch."""
    lengths = scaled([1, 64, 131_072, 131_073, 262_144, 0], [1, 64, 1024, 1025, 2048, 0])
    picks = (0, 63, 64, lengths[2] - 1, lengths[2])
    sequences = Sequences(device, **inputs, count=1, length=max(lengths), picks=picks, pool_factor=2)
    shared = torch.zeros(len(lengths), dtype=torch.long, device=device)
    for picking in (True, False):
        case = sequences.case(lengths, num_heads=rows, sequence=shared, picking=picking)
        launch_and_agree(sequences, case, sequence=shared, picking=picking)
        launch_and_agree(sequences, replace(case, mask_type="dense"), sequence=shared, picking=picking)
