"""batch_invariant=True: a request's bits are its own, whatever it is planned and run with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_cute.problem import MASKS
from mla_cute.reference import raw
from mla_cute.testing import Case, make_case

from .harness import BF16, FP8, INPUTS, MIXED, Inputs, Result, check, launch, planned, same_bits

LENGTHS = (1, 2048, 2049, 14_000, 131_072, 140_001)  # cut into 1, 1, 2, 7, 64 and 64 parts


def pick(case: Case, requests: Sequence[int], max_kv_len: int | None = None) -> Case:
    """These requests of the case, in this order."""
    device, query, indptr = case.query.device, case.query, case.qo_indptr
    index = torch.tensor(requests, device=device)
    if indptr is None:
        query = raw(query)[index].view(query.dtype)
    else:
        first = indptr.tolist()
        query = torch.cat([raw(query)[first[b] : first[b + 1]] for b in requests]).view(query.dtype)
        indptr = torch.tensor([0, *(first[b + 1] - first[b] for b in requests)], device=device)
        indptr = indptr.cumsum(0, dtype=torch.int32)
    return replace(
        case,
        query=query,
        block_tables=case.block_tables[index],
        seq_lens=case.seq_lens[index],
        qo_indptr=indptr,
        max_kv_len=case.max_kv_len if max_kv_len is None else max_kv_len,
    )


def rows_of(case: Case, result: Result, position: int) -> Result:
    out, lse = result
    assert lse is not None
    if case.qo_indptr is None:
        return out[position], lse[position]
    first, end = case.qo_indptr[position : position + 2].tolist()
    return out[first:end], lse[first:end]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("heads", "inputs"), [(16, BF16), (128, BF16), (16, FP8)], ids=["16 heads", "128 heads", "16 heads e4m3"]
)
@pytest.mark.parametrize("form", ["one token", "two tokens", "packed"])
def test_a_request_keeps_its_bits(
    form: str, heads: int, inputs: Inputs, mask: str, device: torch.device, scaled: Callable[[Any, Any], Any]
) -> None:
    """Alone, amid others and at other places, planned for more requests and longer ones, on other numbers of CTAs."""
    rng = random.Random(0)
    lengths = list(scaled(LENGTHS, (1, 70, 300)))
    own, batch = len(lengths), scaled(64, 9)
    lengths += [rng.choice([0, 1, rng.randint(1, scaled(9000, 200))]) for _ in range(batch - own)]
    ragged = [(2, 1, 3)[b % 3] if b < own else rng.randint(0, 3) for b in range(batch)]
    q_lens: Any = {"one token": 1, "two tokens": 2, "packed": ragged}[form]
    case = make_case(
        "random",
        lengths,
        q_lens=q_lens,
        num_heads=scaled(heads, 3),
        mask_type=mask,
        **inputs,
        device=device,
        pool_factor=1,
    )
    options: dict[str, Any] = {"batch_invariant": True, "validate": False}
    alone = [pick(case, [b], max(1, lengths[b])) for b in range(own)]
    expected = [rows_of(one, launch(one, **options), 0) for one in alone]

    def agree(batch: Case, requests: Sequence[int], result: Result) -> None:
        for position, request in enumerate(requests):
            if request < own:
                for got, want in zip(rows_of(batch, result, position), expected[request], strict=True):
                    assert got is not None and want is not None
                    assert same_bits(got, want), f"{lengths[request]} tokens at {position} of {len(requests)}"

    out, lse = launch(case, **options)
    check(case, out, lse)
    agree(case, range(batch), (out, lse))
    others, places = list(range(own, batch)), list(range(batch))
    rng.shuffle(places)
    orders = [places, *([*others[:3], b, *others[-3:]] for b in range(own))]
    for requests in orders:
        some = pick(case, requests)
        for ctas in (None, 7, 200):
            agree(some, requests, launch(some, ctas=ctas, **options))
    wrapper = planned(case, batch_invariant=True)
    for b, one in enumerate(alone):
        agree(one, [b], wrapper.run(*one.tensors, **one.run(return_lse=True, validate=False)))


@pytest.mark.parametrize("page, inputs", [(16, BF16), (256, INPUTS["fp16"]), (64, MIXED)], ids=["16", "256", "64 e4m3"])
def test_every_number_of_parts_is_right(
    page: int, inputs: Inputs, device: torch.device, scaled: Callable[[Any, Any], Any]
) -> None:
    """Lengths at both ends of each number of parts up to 20, and of 41: combine takes both of its ways."""
    lengths = [2048 * parts + more for parts in scaled([*range(1, 20), 41], [1]) for more in (0, 1)]
    for heads, tokens in ((16, 1), (100, 1), (40, 3)):
        for mask in MASKS:
            case = make_case(
                "random",
                lengths,
                q_lens=tokens,
                num_heads=scaled(heads, 2),
                page_size=page,
                **inputs,
                mask_type=mask,
                device=device,
                pool_factor=1,
            )
            out, lse = launch(case, batch_invariant=True)
            check(case, out, lse)
