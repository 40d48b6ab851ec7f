"""The table of kernels and the choice among them."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools

import pytest
from mla_cute.kernels.sm90.config import FEW_ROWS, SMEM_LIMIT, DecodeConfig

from mla_cute import dispatch
from mla_cute.errors import UnsupportedProblem
from mla_cute.problem import INPUT_DTYPES, LSE_MODES, MASKS, OUT_DTYPES, PAGE_SIZES, MLAProblem

from .toy import run

PROBLEM = MLAProblem(4, 16, 1, 4096, 64, False, "causal", "bf16", "bf16", "bf16")
HOPPER, BLACKWELL = (9, 0), (10, 0)


def test_every_supported_problem_gets_a_shipped_kernel() -> None:
    shipped = set(dispatch.shipped("sm_90a"))
    seen = set()
    heads, tokens = (1, 2, 8, 12, 16, 17, 24, 32, 33, 40, 64, 128), (1, 2, 3, 4, 8)
    for inputs, out_dtype, page_size, h, sq in itertools.product(INPUT_DTYPES, OUT_DTYPES, PAGE_SIZES, heads, tokens):
        problem = MLAProblem(4, h, sq, 4096, page_size, False, "causal", *inputs, out_dtype)
        seen.add(dispatch.select(problem, HOPPER))
    assert seen == shipped, "a kernel is shipped that no problem selects, or selected but not shipped"


def test_the_config_depends_on_nothing_that_changes_between_batches() -> None:
    """Of the heads and query tokens of a request only how many rows a block needs."""
    config = dispatch.select(PROBLEM, HOPPER)
    for changes in (
        {"batch_size": 4097, "max_kv_len": 10**6},
        {"num_heads": 3, "max_seq_len_q": 5},
        {"packed": True},
        *({"mask_type": mask} for mask in MASKS),
        *({"lse_mode": mode} for mode in LSE_MODES),
    ):
        assert dispatch.select(dataclasses.replace(PROBLEM, **changes), HOPPER) == config  # type: ignore[arg-type]


def test_every_kernel_is_well_named_and_has_its_files() -> None:
    names = [config.name for config in dispatch.shipped()]
    assert len(set(names)) == len(names) <= 100
    assert all(name.isidentifier() for name in names)
    for arch in dispatch.KERNELS:
        for module in dispatch.config_modules(arch):
            assert arch == module.ARCH
            for config in module.shipped():
                assert config.arch == arch
                assert eval(repr(config), vars(module)) == config, "cache and bundles take the repr for the config"
                assert importlib.util.find_spec(module.KERNEL.split(":")[0])


@pytest.mark.parametrize(
    ("heads", "tokens", "rows"),
    [(1, 1, 8), (8, 1, 8), (3, 3, 16), (16, 1, 16), (17, 1, 32), (8, 4, 32), (11, 3, 64), (64, 1, 64), (128, 8, 64)],
)
def test_the_smallest_hopper_kernel_that_holds_a_request(heads: int, tokens: int, rows: int) -> None:
    for packed in (False, True):
        problem = dataclasses.replace(PROBLEM, num_heads=heads, max_seq_len_q=tokens, packed=packed)
        assert dispatch.select(problem, HOPPER) == DecodeConfig("bf16", "bf16", 64, rows)


@pytest.mark.parametrize("q_dtype", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize(("heads", "rows"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (128, 64)])
def test_hopper_kernels_of_an_fp8_cache(q_dtype: str, heads: int, rows: int) -> None:
    for page_size, page_rows in zip(PAGE_SIZES, (16, 16, 64, 64, 64), strict=True):
        problem = dataclasses.replace(
            PROBLEM, num_heads=heads, page_size=page_size, q_dtype=q_dtype, kv_dtype="e4m3", out_dtype="fp16"
        )
        config = dispatch.select(problem, HOPPER)
        assert config == DecodeConfig(q_dtype, "e4m3", page_rows, rows)
        inputs = "e4m3" if q_dtype == "e4m3" else f"{q_dtype}_e4m3"
        assert config.name == f"sm90_r{rows}_{inputs}_p{page_rows}"


@pytest.mark.parametrize("rows", [*FEW_ROWS, 64])
def test_hopper_resources(rows: int) -> None:
    config = DecodeConfig("bf16", "bf16", 64, rows)
    assert config.smem_bytes + 6144 <= SMEM_LIMIT
    math_threads = 32 * config.math_warps
    registers = (config.threads - math_threads) * config.producer_regs + math_threads * config.consumer_regs
    assert registers * config.blocks_per_sm <= 65_536


def test_hopper_rows_are_a_wgmma_side() -> None:
    with pytest.raises(ValueError, match="rows must be"):
        DecodeConfig("bf16", "bf16", 64, 40)


def test_a_refusal_names_every_kernel_and_reason() -> None:
    with pytest.raises(UnsupportedProblem, match="sm90.decode: query dtype fp8") as caught:
        dispatch.select(dataclasses.replace(PROBLEM, q_dtype="fp8"), HOPPER)
    assert [kernel for kernel, _ in caught.value.reasons] == ["sm90.decode", "sm100"]
    for wrong in ({"q_dtype": "e4m3"}, {"kv_dtype": "fp16"}, {"out_dtype": "e4m3"}):
        with pytest.raises(UnsupportedProblem, match=f"sm90.decode: .*{next(iter(wrong.values()))}"):
            dispatch.select(dataclasses.replace(PROBLEM, **wrong), HOPPER)  # type: ignore[arg-type]
    assert "compute capability 10.0 or 10.3, this one has 9.0" in str(caught.value)
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (11, 0), (12, 0)])
def test_another_gpu_is_refused_by_its_capability(capability: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedProblem) as caught:
        dispatch.select(PROBLEM, capability)
    here = f"{capability[0]}.{capability[1]}"
    assert f"compute capability {here}" in str(caught.value)
    assert len(caught.value.reasons) == sum(map(len, dispatch.KERNELS.values()))
    assert all(reason.endswith(f"this one has {here}") for _, reason in caught.value.reasons)


def test_blackwell_has_its_row_and_refuses_with_a_reason() -> None:
    with pytest.raises(UnsupportedProblem) as caught:
        dispatch.select(PROBLEM, BLACKWELL)
    assert dict(caught.value.reasons)["sm100"] == "no Blackwell kernel exists yet"
    assert dispatch.shipped("sm_100a") == ()


def test_choosing_imports_no_cutlass() -> None:
    code = "import sys; from mla_cute import dispatch; dispatch.shipped(); print('cutlass' in sys.modules)"
    assert run(code) == "False"
