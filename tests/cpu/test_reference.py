"""The reference against loops over rows in numpy, and the closed forms of the fixture cases against the reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mla_cute import reference
from mla_cute.reference import decode_reference, merge_states
from mla_cute.testing import (
    Case,
    Guarded,
    assert_close,
    assert_exact,
    expected_of,
    make_case,
    padded,
    poisoned,
    reference_of,
)

E4M3 = torch.float8_e4m3fn
FORMS: list[int | Sequence[int]] = [1, 3, (2, 0, 5, 1)]


def by_hand(case: Case, base: float = math.e) -> tuple[np.ndarray, np.ndarray]:
    """One row, one head at a time, in fp64."""
    query = case.query.double().flatten(0, -3).numpy()
    cache = case.kv_cache.double().reshape(-1, *case.kv_cache.shape[-2:]).numpy()
    page_size = cache.shape[1]
    offsets = range(0, len(query) + 1, case.max_seq_len_q) if case.qo_indptr is None else case.qo_indptr.tolist()
    out, lse = np.zeros((*query.shape[:2], 512)), np.full(query.shape[:2], -np.inf)
    for b, length in enumerate(case.seq_lens.tolist()):
        keys = [cache[int(case.block_tables[b, t // page_size]), t % page_size] for t in range(length)]
        tokens = offsets[b + 1] - offsets[b]
        for i in range(tokens):
            seen = length if case.mask_type == "dense" else max(0, length - tokens + i + 1)
            for h in range(query.shape[1] if seen else 0):
                row = offsets[b] + i
                scores = np.array([case.bmm1_scale * np.dot(query[row, h], keys[t]) for t in range(seen)])
                peak = scores.max()
                weights = np.exp(scores - peak)
                out[row, h] = case.bmm2_scale * sum(w * keys[t][:512] for t, w in enumerate(weights)) / weights.sum()
                lse[row, h] = (peak + math.log(weights.sum())) / math.log(base)
    return out.reshape(*case.query.shape[:-1], 512), lse.reshape(case.query.shape[:-1])


@pytest.mark.parametrize("mask_type", ["dense", "causal"])
@pytest.mark.parametrize("q_lens", FORMS)
@pytest.mark.parametrize(
    ("page_size", "dtype", "kv_dtype"),
    [(16, torch.bfloat16, None), (64, torch.float16, None), (64, torch.bfloat16, E4M3), (16, E4M3, E4M3)],
)
def test_against_loops_in_numpy(
    mask_type: str, q_lens: int | Sequence[int], page_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    case = make_case(
        "random",
        (70, 16, 2, 0),  # the third is shorter than its queries
        q_lens=q_lens,
        mask_type=mask_type,
        num_heads=3,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        bmm2_scale=0.7,
        scale=5.0,
    )
    for lse_mode, base in (("basee", math.e), ("base2", 2.0)):
        out, lse = reference_of(case, lse_mode)
        hand_out, hand_lse = by_hand(case, base)
        np.testing.assert_allclose(out.numpy(), hand_out, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse.numpy(), hand_lse, rtol=1e-12, atol=1e-13)
    out, lse = reference_of(case, compute=torch.float32, out_dtype=case.out_dtype)
    assert_close(out, lse, torch.from_numpy(hand_out), torch.from_numpy(by_hand(case)[1]))


def test_chunks_of_rows_and_tokens_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("random", (300, 0, 5), q_lens=(7, 2, 9), num_heads=3, page_size=16, mask_type="causal")
    whole = reference_of(case)
    monkeypatch.setattr(reference, "CHUNK_TOKENS", 32)
    monkeypatch.setattr(reference, "CHUNK_SCORES", 2 * 32 * 3)
    for got, expected in zip(reference_of(case), whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["uniform", "select", "deepneg", "two"])
@pytest.mark.parametrize("mask_type", ["dense", "causal"])
@pytest.mark.parametrize("q_lens", FORMS)
def test_closed_forms(kind: str, mask_type: str, q_lens: int | Sequence[int]) -> None:
    case = make_case(
        kind,  # type: ignore[arg-type]
        (257, 65, 4, 0),
        q_lens=q_lens,
        mask_type=mask_type,
        num_heads=66,
        page_size=32,
        select=[-1, 0, 7, 1000],
        bmm2_scale=0.5,
    )
    for lse_mode in ("basee", "base2"):
        expected, expected_lse = expected_of(case, lse_mode)
        out, lse = reference_of(case, lse_mode, torch.float32, torch.bfloat16)
        assert_close(out, lse, expected, expected_lse, lse_mode=lse_mode)
        assert_exact(out, expected)


def test_known_numbers() -> None:
    out, lse = expected_of(make_case("two", [2], num_heads=1))
    assert float(lse) == pytest.approx(1.313262, abs=1e-6)
    assert float(out[..., 0]) == pytest.approx(0.26894142 * -1 + 0.73105858 * -15 / 16, abs=1e-8)
    lengths = [1, 5, 100, 257, 1000]
    case = make_case("uniform", lengths, num_heads=1)
    natural = [0, 1.609438, 4.605170, 5.549076, 6.907755]
    assert reference_of(case)[1].flatten().tolist() == pytest.approx(natural, abs=1e-6)
    binary = [0, 2.321928, 6.643856, 8.005625, 9.965784]
    assert reference_of(case, "base2")[1].flatten().tolist() == pytest.approx(binary, abs=1e-6)
    _, lse = expected_of(make_case("deepneg", [100], num_heads=1))
    assert float(lse) == pytest.approx(math.log(100) - 262144 / 24, abs=1e-9)
    value, _ = expected_of(make_case("select", [100], select=71, num_heads=1))
    assert float(value[..., 0]) == ((71 + 5 * 2) % 32 - 16) / 16


def test_nothing_but_owned_tokens_is_read() -> None:
    results = []
    for unowned, unused in ((math.nan, -1), (math.inf, 2**31 - 1), (0.0, 0)):
        case = make_case("random", (13, 65, 0, 127), unowned=unowned, unused_page=unused, table_width=9)
        results.append(reference_of(case))
    for out, lse in results:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
    assert results[0][0].isfinite().all()


def test_rows_and_requests_that_see_nothing() -> None:
    case = make_case("random", (5, 0), q_lens=(1, 1))
    query = torch.cat([case.query, poisoned(2, 16, 576, dtype=torch.bfloat16)])  # rows beyond qo_indptr[-1]
    lengths = torch.tensor([5, -3], dtype=torch.int32)
    out, lse = decode_reference(query, case.kv_cache, case.block_tables, lengths, qo_indptr=case.qo_indptr)
    assert (out[1:] == 0).all() and (lse[1:] == -math.inf).all()
    assert out[0].isfinite().all() and lse[0].isfinite().all()
    for q_lens in (2, ()):
        empty = make_case("random", (), q_lens=q_lens)
        assert reference_of(empty)[0].numel() == 0


@pytest.mark.parametrize("lse_mode", ["base2", "basee"])
def test_merging_halves_gives_the_whole(lse_mode: str) -> None:
    case = make_case("random", (128, 64), page_size=16, mask_type="dense", q_lens=2, scale=10.0)
    whole = reference_of(case, lse_mode)
    left = dataclasses.replace(case, seq_lens=case.seq_lens // 4)
    tables = [row[int(n) // 16 :] for row, n in zip(case.block_tables, left.seq_lens, strict=True)]
    rest = torch.stack([torch.nn.functional.pad(t, (0, 8 - len(t)), value=-1) for t in tables])
    right = dataclasses.replace(case, seq_lens=case.seq_lens - left.seq_lens, block_tables=rest)
    parts = [reference_of(part, lse_mode, torch.float32, torch.float32) for part in (left, right)]
    out, lse = merge_states([part[0] for part in parts], [part[1] for part in parts], lse_mode)
    assert_close(out, lse, *whole, torch.bfloat16, lse_mode)


def test_merging_with_an_empty_shard_changes_no_bit() -> None:
    out, lse = reference_of(make_case("random", (100,)), "base2", torch.float32, torch.bfloat16)
    nothing = torch.full_like(lse, -math.inf)
    merged, merged_lse = merge_states([poisoned(*out.shape, dtype=out.dtype), out], [nothing, lse])
    assert torch.equal(merged, out) and torch.equal(merged_lse, lse)
    merged, merged_lse = merge_states([out, out], [nothing, nothing])
    assert (merged == 0).all() and torch.equal(merged_lse, nothing)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"lse_mode": "base10"}, ValueError, "lse_mode must be one of 'base2', 'basee', got 'base10'"),
        ({"lse_mode": "none"}, ValueError, "lse_mode must be one of 'base2', 'basee', got 'none'"),
        ({"lse_mode": 2}, TypeError, "lse_mode must be a str, got 2"),
        ({"outs": None}, TypeError, "outs must be a sequence of tensors, got None"),
        ({"lses": [torch.zeros(2, 4), 1.0]}, TypeError, r"lses\[1\] must be a torch.Tensor, got float"),
        ({"outs": [], "lses": []}, ValueError, "outs must have at least one tensor, got 0"),
        ({"lses": [torch.zeros(2, 4)]}, ValueError, "lses must have 2 tensors, as outs has, got 1"),
        ({"outs": [torch.zeros(2, 4, 64)] * 2}, ValueError, r"outs\[0\] must have 512 .* got \[2, 4, 64\]"),
        (
            {"outs": [torch.zeros(2, 4, 512), torch.zeros(1, 4, 512)]},
            ValueError,
            r"outs\[1\] must have shape \[2, 4, 512\], .* got \[1, 4, 512\]",
        ),
        ({"lses": [torch.zeros(2, 4, 1)] * 2}, ValueError, r"lses\[0\] must have shape \[2, 4\], .* got \[2, 4, 1\]"),
    ],
)
def test_merging_refuses_what_does_not_fit(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    right: dict[str, Any] = {"outs": [torch.zeros(2, 4, 512)] * 2, "lses": [torch.zeros(2, 4)] * 2}
    merge_states(**right)
    with pytest.raises(error, match=message):
        merge_states(**right | changed)


def test_comparisons_refuse_what_is_wrong() -> None:
    case = make_case("random", (100, 0, 70))
    expected, expected_lse = reference_of(case)
    out, lse = expected.bfloat16(), expected_lse.float()
    assert_close(out, lse, expected, expected_lse)
    for row, value, named in ((0, math.nan, "NaN"), (1, 0.001, "not 0"), (2, 1.0, "relative L2")):
        wrong = out.clone()
        wrong[row, 0, 3] = value
        with pytest.raises(AssertionError, match=named):
            assert_close(wrong, lse, expected, expected_lse)
    for row, value in ((0, 5e-5), (1, 0.0), (2, math.nan)):
        wrong = lse.clone()
        wrong[row] = 0 if row == 1 else wrong[row] + value
        with pytest.raises(AssertionError, match="lse"):
            assert_close(out, wrong, expected, expected_lse)
    with pytest.raises(AssertionError):
        assert_exact(out * 1.01, out.double())


def test_guards_and_padding() -> None:
    guarded = Guarded((3, 4), torch.float32)
    guarded.tensor.zero_()
    assert guarded.intact()
    guarded.bytes[guarded.end] = 0
    assert not guarded.intact()
    view = padded(torch.ones(2, 3), 1, 2)
    assert view.stride() == (5, 1) and (view == 1).all()
