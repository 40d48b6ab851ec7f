from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path

import pytest
import torch

from mla_cute import device
from mla_cute.errors import UnsupportedProblem
from mla_cute.problem import DTYPES, HEAD_DIM, MAX_KV_LEN, PAGE_SIZES, MLAProblem


def problem(**changes: object) -> MLAProblem:
    base = MLAProblem(8, 16, 1, 4096, 64, False, "causal", "bf16", "bf16", "bf16")
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_constants() -> None:
    assert PAGE_SIZES == (16, 32, 64, 128, 256)
    assert HEAD_DIM == 576
    assert MAX_KV_LEN == 2**31 - 32768
    for name, dtype in DTYPES.items():
        assert dtype.name == name
        assert getattr(torch, dtype.torch_name).itemsize == dtype.bytes


def test_a_problem_is_a_frozen_key() -> None:
    assert problem() == problem() and hash(problem()) == hash(problem())
    assert problem() != problem(batch_invariant=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem().batch_size = 2  # type: ignore[misc]


def test_unsupported_problem_lists_every_reason() -> None:
    error = UnsupportedProblem("no kernel", [("sm90.decode", "wrong GPU"), ("sm100", "none yet")])
    assert isinstance(error, NotImplementedError)
    assert error.reasons == (("sm90.decode", "wrong GPU"), ("sm100", "none yet"))
    assert str(error).splitlines() == ["no kernel", "  sm90.decode: wrong GPU", "  sm100: none yet"]
    assert pickle.loads(pickle.dumps(error)).args == error.args


def test_environment_switches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MLA_CUTE_CACHE_DIR", "MLA_CUTE_AOT_DIR", "MLA_CUTE_NO_COMPILE", "MLA_CUTE_DSL_RUNTIME"):
        monkeypatch.delenv(name, raising=False)
    assert device.cache_dir().name == "mla_cute"
    assert device.aot_dirs() == ()
    assert device.may_compile()
    library = device.dsl_runtime()
    assert library is not None and library.parts[-3:] == ("cu13", "lib", "libcute_dsl_runtime.so")

    monkeypatch.setenv("MLA_CUTE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MLA_CUTE_AOT_DIR", os.pathsep.join(["/a", "", "/b"]))
    monkeypatch.setenv("MLA_CUTE_NO_COMPILE", "1")
    monkeypatch.setenv("MLA_CUTE_DSL_RUNTIME", "/lib.so")
    assert device.cache_dir() == tmp_path
    assert device.aot_dirs() == (Path("/a"), Path("/b"))
    assert not device.may_compile()
    assert device.dsl_runtime() == Path("/lib.so")


def test_architecture_names() -> None:
    assert [device.arch_of(c) for c in ((9, 0), (10, 0), (10, 3))] == ["sm_90a", "sm_100a", "sm_103a"]
