"""The kernels' partition (work_device.py), compiled for the CPU and held against its plain twin (work.py)."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mla_cute.kernels.common.work import best_team, partition

CASES = 120
Found = tuple[list[tuple[int, ...]], int]  # segments; entries of split_info that combine reads


def cases() -> list[dict[str, Any]]:
    rng = random.Random(1)
    made: list[dict[str, Any]] = []
    for _ in range(CASES):
        batch, ctas = rng.randint(1, 40), rng.choice([1, 2, 7, 132])
        equal = rng.randint(1, 9000)
        ragged = [rng.choice([0, -1, 1, rng.randint(1, 3000)]) for _ in range(batch)]
        packed = rng.random() < 0.5
        q_len = rng.choice([1, 2, 5])
        q_lens = [rng.choice([0, 1, 1, rng.randint(1, 40)]) for _ in range(batch)] if packed else [q_len] * batch
        heads = rng.choice([1, 16, 20, 128])
        rows, tile_tokens = ((64, 128), (16, 64))[len(made) % 4 == 0]
        made.append(
            {
                "kv_lens": [equal] * batch if rng.random() < 0.3 else ragged,
                "q_lens": q_lens,
                "heads": heads,
                "ctas": ctas,
                "team": best_team(-(-max(*q_lens, 1) * heads // rows), ctas),
                "rows": rows,
                "tile_tokens": tile_tokens,
                "packed": packed,
                "batch_invariant": False,
            }
        )
    for case in made[: CASES // 3]:
        case["kv_lens"] = [n * rng.choice([1, 1, 7, 60]) for n in case["kv_lens"]]
        case["team"] = best_team(-(-max(*case["q_lens"], 1) * case["heads"] // case["rows"]), case["ctas"], even=True)
        case["batch_invariant"] = True
    return made


@pytest.fixture(scope="module")
def results() -> list[Found]:
    """From a process of its own: the compiler is 3 seconds to import and has one architecture a process."""
    command = [sys.executable, str(Path(__file__).with_name("work_probe.py"))]
    done = subprocess.run(command, input=json.dumps(cases()), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [([tuple(row) for row in rows], entries) for rows, entries in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.parametrize("index", range(CASES))
def test_device_partition_equals_its_twin(results: list[Found], index: int) -> None:
    case = cases()[index]
    sizes = {name: case[name] for name in ("team", "rows", "tile_tokens", "batch_invariant")}
    segments, splits = partition(case["kv_lens"], case["q_lens"], case["heads"], case["ctas"], **sizes)
    found, entries = results[index]
    assert [row[:7] for row in found] == [(cta, *piece) for cta, mine in enumerate(segments) for piece in mine]
    for cta, *_, first, last, steps, slot, parts in found:
        begins_and_is_cut = first == 0 and last < steps
        split = splits[slot if case["batch_invariant"] else cta]
        assert parts == (split.parts if split and begins_and_is_cut else 0)
    if any(splits):
        assert entries == len(splits)
    elif case["batch_invariant"]:
        assert entries == 0
