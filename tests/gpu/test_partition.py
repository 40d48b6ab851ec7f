"""The partition that the kernel makes on the device is the one that kernels/common/work.py makes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from mla_cute.kernels.common.work import HEAD_WORDS, NO_CUT, ONE_GROUP, partition

import mla_cute
from mla_cute import dispatch
from mla_cute.device import capability
from mla_cute.plan import forced_ctas
from mla_cute.testing import make_case

from .harness import BF16, FP8, launch, workspace_bytes

pytestmark = pytest.mark.cuda


def lengths_of(rng: random.Random) -> tuple[list[int], int | list[int]]:
    batch = rng.choice([1, 2, 5, 40, 500])
    equal = rng.randint(1, 9000 if batch < 40 else 900)
    ragged = [rng.choice([0, 1, 128, rng.randint(1, 3000 if batch < 40 else 400)]) for _ in range(batch)]
    kv_lens = [equal] * batch if rng.random() < 0.4 else ragged
    if rng.random() < 0.5:
        return kv_lens, rng.choice([1, 1, 2, 4])
    return kv_lens, [rng.choice([0, 1, 1, 4, 9]) for _ in range(batch - 1)] + [1]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_split_info_equals_the_twin(device: torch.device, seed: int, batch_invariant: bool) -> None:
    rng = random.Random(seed)
    kv_lens, q_lens = lengths_of(rng)
    heads, ctas = rng.choice([1, 8, 16, 20, 64, 128]), rng.choice([None, 1, 7, 132, 200])
    inputs = rng.choice([BF16, FP8])
    case = make_case(
        "uniform", kv_lens, q_lens=q_lens, num_heads=heads, mask_type="dense", **inputs, device=device, pool_factor=1
    )
    bytes_needed = workspace_bytes(case, ctas=ctas, batch_invariant=batch_invariant)
    workspace = torch.full((bytes_needed,), 0x55, dtype=torch.uint8, device=device)
    wrapper = mla_cute.BatchMLADecodePagedTSWrapper()
    with forced_ctas(ctas):
        wrapper.plan(**case.plan(batch_invariant=batch_invariant), workspace_buffer=workspace)
    wrapper.run(*case.tensors, **case.run(), validate=False)
    assert wrapper._prepared is not None
    plan, config = wrapper._prepared.plan, dispatch.select(wrapper._prepared.problem, capability(device))
    section = plan.sections[2]
    info = workspace[section.offset : section.offset + section.bytes].view(torch.int32).tolist()
    q_counts = [q_lens] * len(kv_lens) if isinstance(q_lens, int) else q_lens
    sizes = {"team": plan.team, "rows": config.rows, "tile_tokens": config.tile_tokens}
    _, splits = partition(kv_lens, q_counts, heads, plan.num_ctas, batch_invariant=batch_invariant, **sizes)
    rows = [tuple(info[4 * i : 4 * i + 4]) for i in range(len(splits))]
    assert [row if row[2] else None for row in rows] == splits
    assert info[-HEAD_WORDS] in ((ONE_GROUP, len(splits)) if any(splits) else (NO_CUT, len(splits)))


@pytest.mark.parametrize("offsets", [[0, 5, 2, 10**9, -7], [-(2**31), 2**31 - 1, 0, 0, 3], [9, 9, 0, 4, 1]])
def test_offsets_that_make_no_sense_stay_inside_the_tensors(device: torch.device, offsets: list[int]) -> None:
    """Nobody promises a result for them, but no fault, no hang and no write outside out, lse and workspace either."""
    case = make_case("uniform", [300, 1, 64, 1000], q_lens=[1, 2, 3, 4], num_heads=64, device=device)
    assert case.qo_indptr is not None
    case.qo_indptr.copy_(torch.tensor(offsets, dtype=torch.int32, device=device))
    for ctas, batch_invariant in itertools.product((None, 1, 7), (False, True)):
        launch(case, ctas=ctas, batch_invariant=batch_invariant, validate=False)
        torch.cuda.synchronize()
