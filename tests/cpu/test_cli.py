"""The command line on a machine without a GPU, and what it shows and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import mla_cute
from mla_cute import check, dispatch
from mla_cute.cli import main
from mla_cute.problem import MLAProblem

from .toy import run

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("command", ["", "info", "check", "bench", "aot", "aot build", "aot list"])
def test_every_command_explains_itself(command: str) -> None:
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output
    commands = result.output.partition("Commands:")[2].splitlines()
    assert not any(line.endswith("...") for line in commands), "a summary is cut off"


def test_the_module_runs() -> None:
    code = "import runpy, sys; sys.argv = ['mla_cute', '--version']; runpy.run_module('mla_cute', run_name='__main__')"
    assert run(code).startswith("python -m mla_cute, version ")


def test_info_needs_neither_gpu_nor_dsl(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["cutlass"] = None
from mla_cute.cli import main
main(["info", "--json", {str(tmp_path / "info.json")!r}])
"""
    shown = run(code, MLA_CUTE_CACHE_DIR=tmp_path / "cache", MLA_CUTE_AOT_DIR="")
    facts = json.loads((tmp_path / "info.json").read_text())
    for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi", "driver", "cache folder"):
        assert name in facts["facts"]
        assert name in shown
    assert facts["facts"]["cache folder"] == str(tmp_path / "cache")
    assert facts["kernels"] == {config.name: "needs compilation" for config in dispatch.shipped()}
    assert not (tmp_path / "cache").exists()


def test_info_shows_a_bundle_that_does_not_fit(tmp_path: Path) -> None:
    code = "from mla_cute.cli import main; main(['info'])"
    shown = run(code, MLA_CUTE_CACHE_DIR=tmp_path, MLA_CUTE_AOT_DIR=tmp_path).splitlines()
    complaints = [line for line in shown if "is not a bundle" in line]
    assert len(complaints) == 1 and complaints[0].startswith("bundles ")
    assert sum(line.endswith("needs compilation") for line in shown) == len(dispatch.shipped())


def test_aot_list_prints_the_shipped_kernels(tmp_path: Path) -> None:
    listed = invoke("aot", "list", "--json", str(tmp_path / "list.json"))
    names = [config.name for config in dispatch.shipped()]
    assert [line.split()[0] for line in listed.output.splitlines()] == names
    assert [row["name"] for row in json.loads((tmp_path / "list.json").read_text())] == names
    assert invoke("aot", "list", "--arch", "sm_100a").output == "no such kernel exists for sm_100a yet\n"
    for options, kinds in (
        (("--kv-dtype", "e4m3"), {"kv_dtype": ("e4m3",)}),
        (
            ("--q-dtype", "bf16", "--q-dtype", "e4m3", "--kv-dtype", "e4m3"),
            {"q_dtype": ("bf16", "e4m3"), "kv_dtype": ("e4m3",)},
        ),
        (("--q-dtype", "fp16", "--kv-dtype", "e4m3"), {"q_dtype": ("fp16",), "kv_dtype": ("e4m3",)}),
    ):
        found = [line.split()[0] for line in invoke("aot", "list", *options).output.splitlines()]
        matching = [
            c.name for c in dispatch.shipped() if all(getattr(c, kind) in names for kind, names in kinds.items())
        ]
        assert found == matching and 0 < len(found) < len(names)


def test_check_passes_on_the_cpu(tmp_path: Path) -> None:
    result = invoke("check", "--device", "cpu", "--json", str(tmp_path / "check.json"))
    assert result.exit_code == 0, result.output
    rows = list(check.rows())
    assert result.output.count("\npass  ") == len(rows) == len({row.name for row in rows})
    assert f"{len(rows)} passed, 0 failed" in result.output
    written = json.loads((tmp_path / "check.json").read_text())
    assert [row["name"] for row in written["results"]] == [row.name for row in rows]


def test_check_covers_every_shipped_kernel() -> None:
    used = set()
    for row in check.rows():
        types, page_size = (row.q_dtype, row.kv_dtype, row.out_dtype), row.case.get("page_size", 64)
        heads = row.case.get("num_heads", 16)
        used.add(dispatch.select(MLAProblem(1, heads, 1, 64, page_size, False, "causal", *types), (9, 0)))
    assert used == set(dispatch.shipped("sm_90a"))


def test_check_fails_where_answers_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*tensors: torch.Tensor, **arguments: Any) -> object:
        out, lse = mla_cute.batch_mla_decode_with_paged_kv_cache(*tensors, **arguments)
        return out.mul_(1.01), lse

    monkeypatch.setattr(check, "batch_mla_decode_with_paged_kv_cache", wrong)
    result = invoke("check", "--device", "cpu", "--select", "page size 64")
    assert result.exit_code == 1
    assert "FAIL  page size 64" in result.output
    assert "AssertionError: relative L2 error" in result.output
    assert "0 passed, 1 failed" in result.output


@without_gpu
def test_what_cannot_be_done_is_an_error_of_usage() -> None:
    for arguments, words in (
        (("check", "--device", "cuda"), "torch sees no GPU"),
        (("check", "--select", "nothing"), "'nothing' matches no case"),
    ):
        result = invoke(*arguments)
        assert (result.exit_code, words in " ".join(result.output.split())) == (2, True), result.output
