"""Who imports whom, read from the sources. Imports inside functions count; those for type checkers alone do not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .toy import run

ROOT = Path(__file__).parents[2]
HOST = ROOT / "mla_cute"
KERNELS = ROOT / "kernels"

# module -> the modules of this package that it may import
ALLOWED = {
    "problem": "",
    "errors": "",
    "device": "",
    "plan": "errors kernels problem",  # of kernels, the partition of work
    "dispatch": "errors problem",
    "validate": "problem",
    "reference": "problem validate",
    "cache": "device kernels",
    "bundle": "cache device",
    "compile": "bundle cache device kernels",
    "launch": "compile device dispatch errors plan problem reference validate",
    "api": "launch plan problem validate",
    "compat": "api launch validate",
    "testing": "problem reference",
    "aot": "bundle cache compile dispatch",
    "info": "bundle cache compile device dispatch",
    "check": "api problem testing",
    "bench": "api bench cache dispatch problem reference testing",
    "cli": "aot bench check dispatch errors info problem",
    "__main__": "cli",
    "__init__": "api errors reference",
}
STDLIB_ONLY = ("problem", "errors")
WITHOUT_TORCH = (
    "problem",
    "errors",
    "device",
    "plan",
    "dispatch",
    "cache",
    "bundle",
    "compile",
    "aot",
    "__init__",
    "cli",
)


def imports(path: Path, package: str, *, top_level: bool = False) -> Iterator[str]:
    """Full names of all that a file imports, `from x import y` as x.y."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in tree.body if top_level else ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            origin = ".".join([*parents, node.module or ""]).strip(".") if node.level else node.module or ""
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def host_modules() -> list[tuple[str, Path, str]]:
    """(name in ALLOWED, file, package)"""
    files = [(path.stem, path, "mla_cute") for path in sorted(HOST.glob("*.py"))]
    return files + [("bench", path, "mla_cute.bench") for path in sorted((HOST / "bench").glob("*.py"))]


def kernel_modules() -> list[tuple[str, Path]]:
    """(full name, file)"""
    return [
        (".".join(["mla_cute", "kernels", *path.relative_to(KERNELS).with_suffix("").parts]), path)
        for path in sorted(KERNELS.rglob("*.py"))
    ]


def tops(names: Iterator[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize(("name", "path", "package"), host_modules(), ids=lambda value: str(value).split("/")[-1])
def test_host_modules(name: str, path: Path, package: str) -> None:
    assert name in ALLOWED, f"{name} is new: say in ALLOWED what it may import"
    own = {found.split(".")[1] for found in imports(path, package) if found.startswith("mla_cute.")}
    assert own <= set(ALLOWED[name].split()), f"{path.name} may not import {own - set(ALLOWED[name].split())}"
    foreign = tops(imports(path, package))
    if name != "compile":
        assert not foreign & {"cutlass", "cuda"}
    if name in STDLIB_ONLY:
        assert foreign <= {"__future__", "collections", "dataclasses", "mla_cute"}
    if name in WITHOUT_TORCH:
        assert "torch" not in tops(imports(path, package, top_level=True))
    assert not tops(imports(path, package, top_level=True)) & {"cutlass", "tvm_ffi", "triton", "matplotlib"}


@pytest.mark.parametrize(("name", "path"), kernel_modules(), ids=lambda value: str(value).split("/")[-1])
def test_kernel_modules(name: str, path: Path) -> None:
    package = name.removesuffix(".__init__") if name.endswith("__init__") else name.rpartition(".")[0]
    found = list(imports(path, package))
    assert "torch" not in tops(iter(found)), "kernels know nothing of torch"
    for imported in found:
        if imported.startswith("mla_cute"):
            assert imported.startswith("mla_cute.kernels."), f"{name} imports {imported} of the host side"
            for arch in ("sm90", "sm100"):
                if f".kernels.{arch}." in imported + ".":
                    assert f".kernels.{arch}." in name, f"{name} imports {imported} of another architecture"
    if path.name in ("config.py", "work.py", "abi.py", "__init__.py"):
        allowed = {"__future__", "collections", "dataclasses", "enum", "typing", "math"}
        assert tops(imports(path, package, top_level=True)) <= allowed, f"{name} is read where there is no DSL"


def test_environment_switches_are_read_in_one_module() -> None:
    for _, path, _ in host_modules():
        if path.name not in ("device.py", "compile.py"):  # compile sets the DSL's own CUTE_DSL_ARCH
            assert not re.search(r"\benviron\b|\bgetenv\b", path.read_text()), f"{path.name} reads the environment"
    assert "MLA_CUTE" not in "".join(re.findall(r"environ.*", (HOST / "compile.py").read_text()))


def test_import_is_light() -> None:
    """Under a second, with neither torch, cutlass nor a kernel; the API itself needs no cutlass and no CUDA context."""
    code = """
import sys, time
start = time.perf_counter()
import mla_cute
assert time.perf_counter() - start < 1
loaded = lambda *names: [n for n in sys.modules if n.split(".")[0] in names or n.startswith("mla_cute.kernels")]
assert not loaded("torch", "cutlass", "tvm_ffi", "cuda"), loaded("torch", "cutlass", "tvm_ffi", "cuda")
assert set(mla_cute.__all__) <= set(dir(mla_cute))
for name in mla_cute.__all__:
    getattr(mla_cute, name)
import torch
mla_cute.get_batch_mla_decode_workspace_size(8, 16, 512, 64, 64, 4096, device="cpu")
kernels = "mla_cute.kernels"  # the folder, for the key of the disk cache; the partition, for the size of a launch
assert set(loaded("cutlass", "tvm_ffi")) == {kernels, f"{kernels}.common", f"{kernels}.common.work"}
assert not torch.cuda.is_initialized()
print("light")
"""
    assert run(code) == "light"
