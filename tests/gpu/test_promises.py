"""What the documentation promises of runs without validation and of a workspace that several wrappers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_cute.testing import make_case

from .harness import check, launch, planned, same_bits, workspace_bytes
from .oracle import Rows, Sequences


@pytest.mark.parametrize("max_kv_len, cut", [(200, 200), (1000, 256)], ids=["at max_kv_len", "at the table's width"])
@pytest.mark.parametrize("q_lens", [2, (2, 1, 3, 0, 1)], ids=str)
def test_lengths_outside_the_plan_are_cut(max_kv_len: int, cut: int, q_lens: Any, device: torch.device) -> None:
    case = make_case("random", [0, 0, cut, cut, 70], q_lens=q_lens, num_heads=40, device=device)
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
        sequences.case([7, 1999, 640, 129], num_heads=scaled(24, 3), q_lens=3),
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
