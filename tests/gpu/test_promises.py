"""What the documentation promises of runs without validation, of workspaces and of all ways to call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import mla_cute
from mla_cute import compat
from mla_cute.testing import make_case, poisoned

from .harness import (
    FP8,
    ROWS,
    Inputs,
    check,
    each_kernel,
    launch,
    launch_and_check,
    planned,
    same_bits,
    workspace_bytes,
)
from .oracle import Rows, Sequences

decode: Any = mla_cute.batch_mla_decode_with_paged_kv_cache


@pytest.mark.parametrize("max_kv_len, cut", [(200, 200), (1000, 256)], ids=["at max_kv_len", "at the table's width"])
@pytest.mark.parametrize("q_lens", [2, (2, 1, 3, 0, 1)], ids=str)
@each_kernel
def test_lengths_outside_the_plan_are_cut(
    rows: int, inputs: Inputs, max_kv_len: int, cut: int, q_lens: Any, device: torch.device
) -> None:
    case = make_case("random", [0, 0, cut, cut, 70], q_lens=q_lens, num_heads=rows // 3, **inputs, device=device)
    case = replace(case, max_kv_len=max_kv_len)
    wild = torch.tensor([-1, -(2**31), cut + 1, 2**31 - 1, 70], dtype=torch.int32, device=device)
    for ctas in (None, 7):
        out, lse = launch(case, ctas=ctas, validate=False)
        wild_out, wild_lse = launch(replace(case, seq_lens=wild), ctas=ctas, validate=False)
        assert lse is not None and wild_lse is not None
        check(case, out, lse)
        assert same_bits(wild_out, out) and same_bits(wild_lse, lse)


def test_two_wrappers_take_turns_in_one_workspace(device: torch.device, scaled: Callable[[Any, Any], Any]) -> None:
    """Nothing is waited for before all rounds are launched."""
    sequences = Sequences(device, count=4, length=2000)
    cases = [
        sequences.case([2000, 1, 1300, 0], num_heads=scaled(128, 5)),
        sequences.case([7, 1999, 640, 129], num_heads=scaled(8, 3), q_lens=3),
    ]
    size = max(workspace_bytes(case) for case in cases)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
    wrappers = [planned(case, workspace_buffer=workspace) for case in cases]
    results = [
        wrapper.run(*case.tensors, **case.run(return_lse=True, validate=False))
        for _ in range(scaled(50, 2))
        for case, wrapper in zip(cases, wrappers, strict=True)
    ]
    rows = [Rows.of(case) for case in cases]
    good = [sequences.agrees(out, lse, rows[turn % 2]) for turn, (out, lse) in enumerate(results)]
    assert bool(torch.stack(good).all()), "wrong turns: " + str((~torch.stack(good)).nonzero().flatten().tolist())


@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x7F], ids=hex)
def test_f9_workspace_needs_no_initialisation(fill: int, device: torch.device) -> None:
    """Plans share a workspace that is dirtied before every call: as fp32 with 0, NaN, 3e38."""
    cases = [make_case("random", [1000, 0, 70], num_heads=rows, device=device) for rows in ROWS]
    cases += [make_case("random", [700, 65], num_heads=rows, **FP8, device=device) for rows in (16, 64)]
    cases.append(make_case("random", [300], num_heads=100, device=device))
    workspace = torch.empty(max(workspace_bytes(case) for case in cases), dtype=torch.uint8, device=device)
    wrappers = [planned(case, workspace_buffer=workspace) for case in cases]
    first = [wrapper.run(*case.tensors, **case.run()) for wrapper, case in zip(wrappers, cases, strict=True)]
    for _ in range(3):
        for wrapper, case, expected in zip(wrappers, cases, first, strict=True):
            workspace.fill_(fill)
            out, lse = wrapper.run(*case.tensors, **case.run(return_lse=True))
            check(case, out, lse)
            assert same_bits(out, expected)


def test_f8_workspace_that_is_too_small(device: torch.device) -> None:
    case = make_case("random", [1000], device=device)
    small = torch.empty(workspace_bytes(case) - 1, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="workspace"):
        planned(case, workspace_buffer=small)


@pytest.mark.parametrize("q_lens", [1, 3, (1, 0, 3)], ids=str)
@each_kernel
def test_all_paths_give_the_same_bits(q_lens: Any, rows: int, inputs: Inputs, device: torch.device) -> None:
    case = make_case("random", [1000, 64, 130], q_lens=q_lens, num_heads=rows // 3, **inputs, device=device)
    expected, expected_lse = launch_and_check(case)
    assert expected_lse is not None
    buffer = torch.full((workspace_bytes(case),), 0xFF, dtype=torch.uint8, device=device)
    query, kv_cache, tables, lengths = case.tensors
    paged = (query, kv_cache[:, None], tables, lengths)
    given = {"out": poisoned(*expected.shape, dtype=expected.dtype, device=device)}
    shim = {name: value for name, value in case.call().items() if name not in ("max_kv_len",)}
    results = {
        "one-shot": decode(*case.tensors, **case.call()),
        "one-shot, unchecked": decode(*case.tensors, **case.call(validate=False)),
        "one-shot, own buffers": decode(*case.tensors, **case.call(workspace_buffer=buffer, **given)).clone(),
        "4-D cache": decode(*paged, **case.call()),
        "wrapper": planned(case, lse_mode="none").run(*case.tensors, **case.run()),
        "wrapper, unchecked": planned(case).run(*case.tensors, **case.run(validate=False)),
        "wrapper, 4-D cache": planned(case).run(*paged, **case.run()),
        "standalone": compat.prims_ts_batch_mla_decode_with_kv_cache(
            query, kv_cache, buffer, 512, 64, tables, lengths, case.max_kv_len, **shim
        ),
    }
    for name, out in results.items():
        assert same_bits(out, expected), name
    out, lse = decode(*case.tensors, **case.call(return_lse=True))
    assert same_bits(out, expected) and same_bits(lse, expected_lse)
