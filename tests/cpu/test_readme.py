"""README.md and CONTRIBUTING.md do what they say: code runs, commands parse, tables and links agree with the tree."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from mla_cute import device, dispatch, problem
from mla_cute.cli import main

ROOT = Path(__file__).resolve().parents[2]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


def blocks(file: Path, language: str) -> list[str]:
    """The fenced blocks of a language, moved down to their lines so that a traceback points into the file."""
    text = file.read_text()
    fences = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, fence.start(1)) + fence[1] for fence in fences]


def commands() -> list[str]:
    lines = chain.from_iterable(block.split("\n") for file in (README, CONTRIBUTING) for block in blocks(file, "shell"))
    return sorted({line for line in lines if line})


def cli(arguments: str) -> str:
    result = CliRunner().invoke(main, shlex.split(arguments))
    assert result.exit_code == 0, f"{arguments}: {result.output}"
    return result.output


@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=needs_gpu)])
def test_python_blocks_run_in_order(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in blocks(README, "python"):
        exec(compile(block, str(README), "exec"), names)
    assert names["device"] == ("cuda" if on_gpu else "cpu")
    kernel, error = capsys.readouterr().out.splitlines()
    assert ("reference" in kernel) != on_gpu
    assert re.search(r"page_size.*16.*256.*48", error)


@pytest.mark.parametrize("command", commands())
def test_shell_commands_exist(command: str) -> None:
    program, *words = shlex.split(command.replace(".venv/bin/", ""))
    if words[0] == "dev.py":
        assert words[1] in runpy.run_path(str(ROOT / "dev.py"))["TASKS"]
    elif words[:2] == ["-m", "pytest"]:
        assert all((ROOT / path).is_dir() for path in words[2:])
    elif words[:2] == ["-m", "tests.emulator.compare"]:
        importlib.import_module("emulator.compare").parser().parse_args(words[2:])
    else:
        assert (program, words[:2]) == ("python", ["-m", "mla_cute"])
        cli(shlex.join([*words[2:], "--help"]))  # parses the options too; what the commands do is test_cli's


@pytest.mark.skipif(find_spec("cutlass") is None, reason="building a bundle needs the CuTe DSL")
def test_bundle_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle recipe from listing to loading, with one kernel of the many."""
    monkeypatch.chdir(tmp_path)
    by_dtype, built, listed = (command.split("mla_cute ")[1] for command in commands() if " aot " in command)  # sorted
    assert "--kv-dtype" in by_dtype
    kernel = cli(listed).split()[0]
    cli(f"{built} --select {kernel}")
    (load,) = blocks(README, "python no-run")
    exec(compile(load, str(README), "exec"), {})


@pytest.mark.parametrize("file", [README, CONTRIBUTING], ids=lambda file: file.name)
def test_links_and_paths_exist(file: Path) -> None:
    text = file.read_text()
    paths = [*re.findall(r"\]\((?!https?:)([^)#]+)\)", text), *re.findall(r"`((?:examples|tests)/[\w./]+)`", text)]
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_support_matrix_agrees_with_the_code() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in README.read_text().splitlines()]
    table = {row[0].split(" (")[0].split(":")[0]: row[1:] for row in rows if len(row) == 7}
    for gpu in ("Hopper", "none"):
        inputs, outputs, pages, masks, _, _ = (cell.removesuffix(" (reference)").split(", ") for cell in table[gpu])
        assert inputs == [q if q == kv else f"{q} over {kv}" for q, kv in problem.INPUT_DTYPES]
        assert outputs == list(problem.OUT_DTYPES)
        assert pages == [str(size) for size in problem.PAGE_SIZES]
        assert masks == list(problem.MASKS)
    assert f"There are {len(dispatch.shipped('sm_90a'))} kernels for Hopper" in README.read_text()
    assert bool(dispatch.shipped("sm_100a")) == ("no kernel yet" not in table["Blackwell"][0])


def test_environment_table_is_complete() -> None:
    documented = re.findall(r"^\| `(MLA_CUTE_\w+|CC)` \|", README.read_text(), re.MULTILINE)
    read = re.findall(r"""environ(?:\.get\(|\[)["'](\w+)["']""", Path(device.__file__).read_text())
    assert sorted(documented) == sorted(set(read))
