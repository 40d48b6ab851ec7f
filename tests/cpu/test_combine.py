"""Arithmetic of partial results (combine.py, common/math.py), compiled for the CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[2]
# largest magnitudes of a half row: those of bf16, of fp32 and in between
TOPS = (0.0, 1e-45, 1e-38, 2.0**-112, 1e-30, 0.7, 1.0, 1.999, 2.0, 65504.0, 1e30, 3.3e38)
# (rows of a slot, parts, blocks, CTAs of combine, batch_invariant) and whether CTAs share. Of 16 rows, at 132 CTAs:
FEW = (
    ((8, 8, 1, 132, 0), 0),  # no part is many
    ((8, 16, 1, 132, 0), 1),  # half a round of pieces
    ((8, 16, 4, 132, 0), 1),  # 2
    ((16, 16, 4, 132, 0), 0),  # 4
    ((16, 33, 4, 132, 0), 1),
    ((32, 33, 4, 132, 0), 0),  # 8
    ((32, 16, 8, 132, 0), 0),  # 16
    ((32, 132, 1, 132, 0), 1),
    ((8, 40, 1, 132, 1), 0),  # batch-invariant: 40 parts, whatever the rows and CTAs
    ((8, 41, 99, 1, 1), 1),
)
MANY = (  # of 64
    ((64, 8, 1, 528, 0), 0),
    ((64, 32, 2, 528, 0), 1),
    ((64, 9, 14, 528, 0), 0),
    ((64, 8, 1, 528, 1), 0),
    ((64, 9, 99, 1, 1), 1),
)


class Answers(NamedTuple):
    scales: list[list[float]]
    many: list[int]
    few: list[int]
    scaled: list[float]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """From a process of its own, as in test_work_device.py."""
    questions: dict[str, Any] = {"tops": TOPS, "64": [q for q, _ in MANY], "16": [q for q, _ in FEW]}
    command = [sys.executable, "-m", "tests.cpu.combine_probe"]
    done = subprocess.run(
        command, input=json.dumps(questions), capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return Answers(*json.loads(done.stdout.splitlines()[-1]))


def test_scales_of_fp16_partial_results(answers: Answers) -> None:
    """Powers of two that undo each other; the largest magnitude stays below fp16's, and near it unless it is tiny."""
    for top, (gain, scale) in zip(TOPS, answers.scales, strict=True):
        assert gain * scale == 1 and math.frexp(scale)[0] == 0.5
        assert scale >= 2.0**-126 and gain >= 2.0**-126, "no denormal"
        fp16 = (torch.tensor(top) * torch.tensor(gain)).half()
        assert fp16 <= 2.0**15 and (fp16 >= 2.0**14 or scale == 2.0**-126)
        assert abs(float(fp16.float() * torch.tensor(scale)) - top) <= 2.0**-11 * top + 1e-45


def test_which_blocks_ctas_share(answers: Answers) -> None:
    assert answers.many == [shared for _, shared in MANY]
    assert answers.few == [shared for _, shared in FEW]


def test_a_scale_in_memory(answers: Answers) -> None:
    assert answers.scaled == [3.0, 0.75], "without an address, and times the 0.25 at one"
