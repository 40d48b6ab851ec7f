"""What users of paged MLA decode kernels have reported, a test or more for each.

The letter of a test's id is its subject: A padding and empty requests, B page tables and strides, C several query
tokens, D heads, E LSE and scales, F batches, contexts and workspace, G graphs and determinism, H devices and
compilation; the number only tells reports of one subject apart. Others are in test_products.py (splits, pages x query
tokens, heads, large scores), test_cuda.py (graphs, streams, synchronisation), test_large.py (addresses past 2**31,
batches of 70,000, long contexts), test_invariance.py (batch-invariant results), test_processes.py (hangs, memory
errors), test_fp8.py (e4m3, scales in tensors) and tests/cpu.

Not covered yet: pages of 1 to 8 tokens, torch.compile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import mla_cute
import mla_cute.compile
from mla_cute.problem import HEAD_DIM, MASKS, PAGE_SIZES
from mla_cute.reference import merge_states, raw
from mla_cute.testing import Case, assert_close, make_case, padded, poisoned, reference_of

from .harness import Inputs, check, each_inputs, each_kernel, each_rows, launch, launch_and_check, planned, same_bits
from .oracle import Rows, Sequences

decode: Any = mla_cute.batch_mla_decode_with_paged_kv_cache
BOUNDARIES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000)


def int32(*values: Any, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# A. Padding, tails, empty requests


@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("unowned", [math.nan, math.inf, -math.inf])
@each_kernel
def test_a1_memory_of_others_stays_out(
    unowned: float, page: int, rows: int, inputs: Inputs, device: torch.device
) -> None:
    for kind in ("uniform", "select"):
        launch_and_check(
            make_case(kind, [13, 65, 127], num_heads=rows, page_size=page, unowned=unowned, **inputs, device=device)
        )


@pytest.mark.parametrize("mask", MASKS)
@each_kernel
def test_a2_tail_of_zeros_is_not_counted(mask: str, rows: int, inputs: Inputs, device: torch.device) -> None:
    for page in PAGE_SIZES:
        case = make_case(
            "uniform", BOUNDARIES, unowned=0.0, num_heads=rows, page_size=page, mask_type=mask, **inputs, device=device
        )
        launch_and_check(case)


@pytest.mark.parametrize("unused_page", [-1, 2**31 - 1])
@pytest.mark.parametrize("q_lens", [1, 4, (1, 1, 1, 1), (4, 4, 4, 4), (2, 3, 4, 0)], ids=str)
@each_kernel
def test_a4_a6_empty_requests(q_lens: Any, unused_page: int, rows: int, inputs: Inputs, device: torch.device) -> None:
    heads = rows // (q_lens if isinstance(q_lens, int) else max(q_lens))
    for kind in ("uniform", "random"):
        for validate in (True, False):
            case = make_case(
                kind, [100, 0, 64, 0], q_lens=q_lens, num_heads=heads, unused_page=unused_page, **inputs, device=device
            )
            launch_and_check(case, validate=validate)


@each_kernel
def test_a5_all_requests_empty(rows: int, inputs: Inputs, device: torch.device) -> None:
    case = make_case("uniform", [0] * 16, num_heads=rows, **inputs, device=device)
    launch_and_check(case)
    out, lse = decode(*case.tensors, return_lse=True)  # the largest length, 0, is the bound here
    check(case, out, lse)
    with pytest.raises(ValueError, match="block_tables"):
        decode(case.query, case.kv_cache, case.block_tables[:, :0], case.seq_lens, max_kv_len=64)


@pytest.mark.parametrize("lse_mode", ["base2", "basee"])
def test_a8_empty_shard_has_no_weight(lse_mode: str, device: torch.device) -> None:
    case = make_case("random", [100, 300], device=device)
    out, lse = launch(case, lse_mode=lse_mode)
    empty_out, empty_lse = launch(replace(case, seq_lens=torch.zeros_like(case.seq_lens)), lse_mode=lse_mode)
    assert lse is not None and empty_lse is not None and bool((empty_lse == -math.inf).all())
    for outs, lses in (((out, empty_out), (lse, empty_lse)), ((empty_out, out), (empty_lse, lse))):
        merged, merged_lse = merge_states(outs, lses, lse_mode)
        assert same_bits(merged, out) and same_bits(merged_lse, lse)


@pytest.mark.parametrize("lse_mode", ["base2", "basee"])
@each_kernel
def test_shards_merge_to_the_whole(lse_mode: str, rows: int, inputs: Inputs, device: torch.device) -> None:
    """Two disjoint halves of the keys, cut at a page of each request."""
    case = make_case("random", [1000, 129, 64, 5], num_heads=rows, **inputs, device=device)
    cut = 2
    head = replace(case, seq_lens=case.seq_lens.clamp(max=64 * cut))
    tail = replace(
        case,
        seq_lens=(case.seq_lens - 64 * cut).clamp(min=0),
        block_tables=case.block_tables[:, cut:].contiguous(),
        max_kv_len=case.max_kv_len - 64 * cut,
    )
    shards = [launch(part, lse_mode=lse_mode) for part in (head, tail)]
    merged, lse = merge_states([out for out, _ in shards], [lse for _, lse in shards if lse is not None], lse_mode)
    check(case, merged, lse, lse_mode)


@each_kernel
def test_a9_rows_that_see_nothing(rows: int, inputs: Inputs, device: torch.device) -> None:
    for form in (4, (4,)):
        case = make_case("random", [2], q_lens=form, num_heads=rows // 4, **inputs, device=device)
        with pytest.raises(ValueError, match="seq_lens"):
            launch(case)
        out, lse = launch_and_check(case, validate=False)
        assert lse is not None
        assert not out.view(4, -1)[:2].any() and bool((lse.view(4, -1)[:2] == -math.inf).all())


def test_a12_no_requests_or_no_rows(device: torch.device) -> None:
    case = make_case("random", [64, 64], device=device)
    empty = (case.query[:0], case.kv_cache, case.block_tables[:0], case.seq_lens[:0])
    assert decode(*empty, max_kv_len=64).shape == (0, 1, 16, 512)
    out, lse = planned(case).run(*empty, return_lse=True)
    assert out.shape == (0, 1, 16, 512) and lse.shape == (0, 1, 16)
    rows = (case.query[:0, 0], *case.tensors[1:])
    for indptr in (int32(0, 0, 0, device=device), int32(0, device=device)):
        assert decode(*rows, qo_indptr=indptr, max_seq_len_q=1, max_kv_len=64).shape == (0, 16, 512)


# B. Page tables, page sizes, strides


def test_b3_table_narrower_than_the_pool(device: torch.device) -> None:
    launch_and_check(make_case("select", [150, 190], table_width=3, pool_factor=167, device=device))


@each_kernel
def test_b4_page_order_changes_no_bit(rows: int, inputs: Inputs, device: torch.device) -> None:
    sequences = Sequences(device, **inputs, count=2, length=300, pool_factor=4)
    pages = len(sequences.tokens)
    lengths, order = [300, 171], torch.arange(pages, device=device)
    expected = launch(sequences.case(lengths, q_lens=2, num_heads=rows // 2))
    for placed in (order, order.flip(0) + 7, 2 * order + 1):
        sequences.place(torch.full_like(sequences.kv_cache, math.nan), placed)
        for got, want in zip(launch(sequences.case(lengths, q_lens=2, num_heads=rows // 2)), expected, strict=True):
            assert got is not None and want is not None and same_bits(got, want)


def test_b4_shared_prefix_pages(device: torch.device) -> None:
    sequences = Sequences(device, count=1, length=300, pool_factor=4)
    case = sequences.case([300, 171], sequence=torch.zeros(2, dtype=torch.long, device=device))
    spare = torch.ones(len(case.kv_cache), dtype=torch.bool, device=device)
    spare[case.block_tables[0].long()] = False
    copies = spare.nonzero().flatten()[: case.block_tables.shape[1]]
    case.kv_cache[copies] = sequences.tokens
    apart = replace(case, block_tables=torch.stack([case.block_tables[0], copies.int()]))
    for shared, separate in zip(launch(case), launch(apart), strict=True):
        assert shared is not None and separate is not None and same_bits(shared, separate)


@pytest.mark.parametrize("page", [1, 2, 4, 8, 24, 48, 512])
def test_b6_other_page_sizes_are_refused(page: int, device: torch.device) -> None:
    case = make_case("uniform", [100], page_size=page, device=device)
    allowed = ", ".join(map(str, PAGE_SIZES))
    with pytest.raises(ValueError, match=allowed):
        decode(*case.tensors)
    with pytest.raises(ValueError, match=allowed):
        planned(case)


@each_inputs
def test_b7_b16_one_cache_in_pages_of_every_size(inputs: Inputs, device: torch.device) -> None:
    """A contiguous sequence is a paged one with an arange table."""
    case = make_case("random", [1000], page_size=16, permute="identity", pool_factor=16, **inputs, device=device)
    expected, _ = launch_and_check(case)
    for page in PAGE_SIZES:
        table = torch.arange(-(-1000 // page), dtype=torch.int32, device=device)[None]
        paged = replace(case, kv_cache=case.kv_cache.view(-1, page, HEAD_DIM), block_tables=table)
        out, _ = launch_and_check(paged)
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=2e-4)


def strided(case: Case) -> dict[str, Case]:
    return {
        "query lanes": replace(case, query=padded(case.query, -1, 64)),
        "query heads": replace(case, query=padded(case.query, -2, 16)),
        "query tokens": replace(case, query=padded(case.query, -3, 3)),
        "cache pages": replace(case, kv_cache=padded(case.kv_cache, 1, 16)),
        "cache tokens": replace(case, kv_cache=padded(case.kv_cache, 2, 64)),
        "table rows": replace(case, block_tables=padded(case.block_tables, 1, 5)),
    }


@pytest.mark.parametrize("q_lens", [2, (2, 0, 3, 1)], ids=str)
@each_kernel
def test_b10_b11_strides(q_lens: Any, rows: int, inputs: Inputs, device: torch.device) -> None:
    for page in (16, 64, 256):
        case = make_case(
            "random",
            [70, 64, 257, 1],
            q_lens=q_lens,
            num_heads=rows // 3,
            page_size=page,
            mask_type="dense",
            **inputs,
            device=device,
        )
        expected = launch_and_check(case)
        for name, other in strided(case).items():
            for got, want in zip(launch(other), expected, strict=True):
                assert got is not None and want is not None and same_bits(got, want), name


def test_b10_strides_that_are_refused(device: torch.device) -> None:
    case = make_case("random", [70, 64, 257], device=device)
    by_head = case.query.transpose(0, 2).contiguous().transpose(0, 2)
    by_lane = case.query.transpose(2, 3).contiguous().transpose(2, 3)
    for query in (by_head, by_lane):
        with pytest.raises(ValueError, match="query"):
            launch(replace(case, query=query))


def test_b14_metadata_of_the_wrong_type_or_place(device: torch.device) -> None:
    case = make_case("random", [70, 64], q_lens=(1, 2), device=device)
    wrapper = planned(case)
    for name in ("block_tables", "seq_lens", "qo_indptr"):
        wide = replace(case, **{name: getattr(case, name).long()})
        with pytest.raises(TypeError, match=name):
            wrapper.run(*wide.tensors, **wide.run())
        if device.type == "cuda":
            away = replace(case, **{name: getattr(case, name).cpu()})
            with pytest.raises(ValueError, match=name):
                wrapper.run(*away.tensors, **away.run())


@pytest.mark.parametrize("page_id", [2**30, -1])
def test_b15_foreign_page_in_a_live_column(page_id: int, device: torch.device) -> None:
    case = make_case("random", [70, 64], device=device)
    wrapper = planned(case)
    case.block_tables[0, 1] = page_id
    with pytest.raises(ValueError, match="block_tables"):
        wrapper.run(*case.tensors, **case.run())


# C. Several query tokens a request


@each_kernel
def test_c2_table_at_the_end_of_an_allocation(rows: int, inputs: Inputs, device: torch.device) -> None:
    """A row of the table is a request: the index of a query token, of 3 each, leads past the table."""
    sequences = Sequences(device, **inputs, count=256, length=128, page_size=16)
    random = torch.Generator(device).manual_seed(0)
    lengths = torch.randint(3, 129, (256,), device=device, generator=random, dtype=torch.int32)
    case = sequences.case(lengths, num_heads=rows // 3, q_lens=3)
    # 12 MiB: a block of its own in torch's allocator
    alone = torch.full((3 << 20,), -1, dtype=torch.int32, device=device)
    table = alone[-case.block_tables.numel() :].view_as(case.block_tables).copy_(case.block_tables)
    case = replace(case, block_tables=table)
    assert sequences.agrees(*launch(case), Rows.of(case))


@each_kernel
def test_c3_each_row_has_its_own_bound(rows: int, inputs: Inputs, device: torch.device) -> None:
    for token in range(66, 70):
        for form in (4, (4,)):
            launch_and_check(
                make_case("select", [70], q_lens=form, num_heads=rows // 4, select=token, **inputs, device=device)
            )


def test_c4_output_is_given_back(device: torch.device) -> None:
    for q_lens, shape in ((3, (2, 3, 16, 512)), ((3, 1), (4, 16, 512))):
        case = make_case("random", [70, 64], q_lens=q_lens, device=device)
        out = poisoned(*shape, dtype=torch.bfloat16, device=device)
        lse = poisoned(*shape[:-1], dtype=torch.float32, device=device)
        result, result_lse = decode(*case.tensors, **case.call(out=out, lse=lse, return_lse=True))
        assert result is out and result_lse is lse
        check(case, out, lse)


def test_c6_capacity_of_query_tokens(device: torch.device) -> None:
    case = make_case("random", [70, 64], q_lens=(1, 3), device=device)
    with pytest.raises(ValueError, match="qo_indptr"):
        launch(replace(case, max_seq_len_q=2))
    launch_and_check(replace(case, max_seq_len_q=8))


@each_kernel
def test_c7_rows_beyond_the_last_request(rows: int, inputs: Inputs, device: torch.device) -> None:
    case = make_case("random", [70, 64], q_lens=(1, 3), num_heads=rows // 3, **inputs, device=device)
    query = torch.cat([raw(case.query), raw(torch.full_like(case.query[:2], math.nan))]).view(case.query.dtype)
    more = replace(case, query=query)
    fewer = replace(case, query=case.query[:-1])
    for wrong in (more, fewer):
        with pytest.raises(ValueError, match="qo_indptr"):
            launch(wrong)
    out, lse = launch(more, validate=False)
    assert lse is not None
    check(case, out[:4], lse[:4])
    assert not out[4:].any() and bool((lse[4:] == -math.inf).all())


def test_c8_indptr_without_its_end(device: torch.device) -> None:
    case = make_case("random", [70, 64], q_lens=(1, 3), device=device)
    assert case.qo_indptr is not None
    with pytest.raises(ValueError, match="qo_indptr"):
        decode(*case.tensors, qo_indptr=case.qo_indptr[:-1], max_seq_len_q=8)


@each_inputs
@each_rows
def test_c9_causal_bound_of_each_request(rows: int, inputs: Inputs, device: torch.device) -> None:
    for kind in ("random", "uniform"):
        q_lens = (1, 3, 0, 8)
        launch_and_check(make_case(kind, [5, 3, 9, 8], q_lens=q_lens, num_heads=rows // 8, **inputs, device=device))


@each_kernel
def test_c11_dense_rows_see_all(rows: int, inputs: Inputs, device: torch.device) -> None:
    case = make_case("uniform", [3], q_lens=8, num_heads=rows // 8, mask_type="dense", **inputs, device=device)
    out, _ = launch_and_check(case)
    assert bool((out == out[:, :1]).all())


# E. LSE and scales


@pytest.mark.parametrize("lse_mode, unit", [("basee", 1.0), ("base2", math.log(2))])
@each_kernel
def test_e1_base_of_the_lse(lse_mode: str, unit: float, rows: int, inputs: Inputs, device: torch.device) -> None:
    lengths = [1, 5, 100, 257, 1000]
    for q_lens in (1, (1,) * 5):
        for ctas in (1, 8):
            case = make_case("uniform", lengths, q_lens=q_lens, num_heads=rows, **inputs, device=device)
            _, lse = launch(case, lse_mode=lse_mode, ctas=ctas)
            assert lse is not None
            expected = torch.tensor([math.log(n) / unit for n in lengths], device=device)
            torch.testing.assert_close(lse.view(5, rows)[:, 3], expected, rtol=1e-6, atol=1e-5)


def test_e8_natural_exponential(device: torch.device) -> None:
    out, lse = launch_and_check(make_case("two", [2], device=device), lse_mode="basee")
    assert lse is not None
    assert float(out[0, 0, 0, 0]) == pytest.approx(-0.26894 - 0.73106 * 15 / 16, rel=2**-7)
    assert float(lse[0, 0, 0]) == pytest.approx(1.313262, abs=1e-5)


@pytest.mark.parametrize("ctas", [None, 1, 7])
@each_kernel
def test_e9_output_scale(ctas: int | None, rows: int, inputs: Inputs, device: torch.device) -> None:
    case = make_case("random", [1000, 65], num_heads=rows, **inputs, device=device)
    out, lse = launch(case, ctas=ctas)
    for factor in (0.5, 2.0):
        scaled_out, scaled_lse = launch(replace(case, bmm2_scale=factor * case.bmm2_scale), ctas=ctas)
        assert lse is not None and scaled_lse is not None
        assert same_bits(scaled_out, out * factor) and same_bits(scaled_lse, lse)


def test_e10_scales_are_arguments(device: torch.device) -> None:
    case = make_case("random", [1000, 65], device=device)
    wrapper = planned(case)
    compiled = mla_cute.compile.compile_count()
    for scale in (0.5, 0.25, 0.04):
        scaled_case = replace(case, bmm1_scale=scale, bmm2_scale=1 / scale)
        out, lse = wrapper.run(*case.tensors, **scaled_case.run(return_lse=True))
        check(scaled_case, out, lse)
    assert mla_cute.compile.compile_count() == compiled


# G, H. Determinism, batches, kernels


@pytest.mark.parametrize("ctas", [None, 7])
@each_kernel
def test_g8_runs_repeat_bit_for_bit(ctas: int | None, rows: int, inputs: Inputs, device: torch.device) -> None:
    case = make_case("random", [5000, 0, 64, 1001, 777], q_lens=2, num_heads=rows // 2, **inputs, device=device)
    wrapper = planned(case, ctas=ctas)
    out, lse = wrapper.run(*case.tensors, **case.run(return_lse=True))
    for _ in range(100 if device.type == "cuda" else 3):
        again, again_lse = wrapper.run(*case.tensors, **case.run(return_lse=True, validate=False))
        assert same_bits(again, out) and same_bits(again_lse, lse)


@each_kernel
def test_g9_bound_of_the_lengths(rows: int, inputs: Inputs, device: torch.device) -> None:
    """The bound may change the split, so the last bit, and nothing more."""
    case = make_case(
        "uniform", [256, 100, 17], num_heads=rows, table_width=2048, max_kv_len=256, **inputs, device=device
    )
    for bound in (256, 4096, 131_072):
        launch_and_check(replace(case, max_kv_len=bound))


@each_kernel
def test_fewer_requests_than_planned(rows: int, inputs: Inputs, device: torch.device) -> None:
    case = make_case("random", [1000, 64, 130, 7], q_lens=2, num_heads=rows // 2, **inputs, device=device)
    wrapper = planned(case)
    for live in (3, 1):
        part = replace(case, query=case.query[:live])
        out, lse = wrapper.run(*part.tensors, **part.run(return_lse=True))
        part = replace(part, block_tables=case.block_tables[:live], seq_lens=case.seq_lens[:live])
        check(part, out, lse)


def test_h6_no_compilation_while_serving(device: torch.device, scaled: Callable[[Any, Any], Any]) -> None:
    count = scaled(500, 20)
    sequences = Sequences(device, count=64, length=512, page_size=16)
    random = torch.Generator(device).manual_seed(1)
    warm = planned(sequences.case([1] * 64))
    compiled = mla_cute.compile.compile_count()
    good = []
    for batch in torch.randint(1, 65, (count,), generator=torch.Generator().manual_seed(1)).tolist():
        lengths = torch.randint(0, 513, (batch,), device=device, generator=random, dtype=torch.int32)
        order = torch.randint(0, 64, (batch,), device=device, generator=random)
        case = sequences.case(lengths, sequence=order)
        out, lse = warm.run(*case.tensors, **case.run(return_lse=True, validate=False))
        good.append(sequences.agrees(out, lse, Rows.of(case, order)))
        planned(case)
    assert bool(torch.stack(good).all())
    assert mla_cute.compile.compile_count() == compiled


def test_h7_the_kernel_is_named(device: torch.device) -> None:
    kernel = str(planned(make_case("random", [64], page_size=16, device=device)).kernel)
    assert ("reference" if device.type == "cpu" else "bf16_bf16_p16") in kernel


def test_reference_precisions_agree(device: torch.device) -> None:
    """The oracle itself, on this device."""
    case = make_case("random", [1000, 3], q_lens=3, device=device)
    out, lse = reference_of(case, compute=torch.float32)
    assert_close(out.to(torch.float16), lse, *reference_of(case))
