"""Every shipped kernel, whole, from the public functions to the outputs, against the reference in fp64.

EMULATOR_SEEDS=N runs each case with seeds 0 to N - 1; without it, with one.
"""

from __future__ import annotations

import os
from zlib import crc32

import pytest
import torch
from _pytest.mark import ParameterSet

from mla_cute import dispatch, launch
from mla_cute.api import problem_of
from mla_cute.problem import MLAProblem
from mla_cute.testing import Case, assert_close, assert_exact, assert_lse_close, expected_of
from mla_cute.validate import Call

from .build import compiled
from .cases import run, table
from .launcher import CAPABILITY, Kernel, emulated, kernel

CASES = table()
SEEDS = int(os.environ.get("EMULATOR_SEEDS", "0"))


def seeds(name: str) -> range:
    """Seed 0 is a middle way, 1 completes everything late, 2 at once, others throw dice."""
    if SEEDS:
        return range(SEEDS)
    return range(crc32(name.encode()) % 8, crc32(name.encode()) % 8 + 1)


def problem_of_case(case: Case) -> MLAProblem:
    call = Call(*case.tensors, case.qo_indptr, 1.0, 1.0, None, None)
    return problem_of(call, case.max_seq_len_q, case.max_kv_len, case.mask_type, torch.bfloat16, "none")


def cases() -> list[ParameterSet]:
    """Each kernel's in one worker, which compiles and decodes it."""
    return [
        pytest.param(name, seed, marks=pytest.mark.xdist_group(f"emulator {name.split()[0]}"))
        for name in CASES
        for seed in seeds(name)
    ]


@pytest.mark.parametrize(("name", "seed"), cases())
def test_a_kernel_agrees_with_the_reference(name: str, seed: int) -> None:
    config, problem = CASES[name]
    case = problem.case(config)
    with emulated(lambda chosen: kernel(chosen, seed)):
        out, lse = run(config, problem, case)
    unit = problem.lse_mode if lse is not None else "basee"
    ref_out, ref_lse = expected_of(case, unit)
    if case.out_value is None:
        assert_close(out, lse, ref_out, ref_lse, case.kv_cache.dtype, unit, q_dtype=case.query.dtype)
        return
    assert_exact(out, ref_out)
    assert lse is not None
    assert_lse_close(lse, ref_lse, unit, q_dtype=case.query.dtype)


def test_the_bits_do_not_depend_on_the_interleaving() -> None:
    """Work is cut from the lengths and combined in a fixed order: eight interleavings, one result."""
    config, problem = CASES["sm90_r64_bf16_p64 split"]
    case = problem.case(config)
    results = []
    for seed in range(8):
        with emulated(lambda chosen, seed=seed: kernel(chosen, seed)):  # type: ignore[misc]
            results.append(run(config, problem, case)[0])
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_both_launches_are_taken_from_the_launcher() -> None:
    config, problem = CASES["sm90_r64_bf16_p64 first"]
    own = Kernel(compiled(config))
    with emulated(lambda _: own):
        run(config, problem, problem.case(config))
    decode, combine = own.launches
    assert decode.grid == (problem.ctas, 1, 1)
    assert decode.block == (config.threads, 1, 1)
    assert config.smem_bytes <= decode.smem <= config.smem_bytes + 6144
    assert (decode.dependent, combine.dependent) == (False, True)
    assert own.module.steps > 10_000


def test_the_first_launch_has_no_tokens() -> None:
    """What launch.prepare does to load a kernel's CUDA module: a request of length 0."""
    config, problem = CASES["sm90_r64_bf16_p64 first"]
    own, load = Kernel(compiled(config)), launch._load
    with emulated(lambda _: own):
        load(launch._prepare(problem_of_case(problem.case(config)), torch.device("cpu"), None))
    assert [one.grid[0] for one in own.launches] == [1, 128]


def test_a_case_reaches_its_kernel() -> None:
    for config, problem in CASES.values():
        assert dispatch.select(problem_of_case(problem.case(config)), CAPABILITY) == config


def test_every_kernel_has_a_case() -> None:
    assert {config for config, _ in CASES.values()} == set(dispatch.shipped())
