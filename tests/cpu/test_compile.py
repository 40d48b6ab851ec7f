"""What compilation gives: resources of the shipped kernels, one compilation a config, clear errors."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_cute import dispatch

from .toy import child, run

REGISTERS = 65_536  # of an SM
SERIALIZED = re.compile(r"C75\d\d")  # setmaxnreg ignored, wgmma serialized: ptxas says it in remarks alone

# A launch fills {grid, block, bytes of dynamic shared memory, stream, attributes, their number}.
LAUNCH = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"


def launch_values(host_code: str, member: str) -> list[int]:
    """The constants that launches store in a member of their configuration."""
    values = []
    for function in host_code.split("llvm.func @"):
        constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i\d+\)", function))
        for slot in re.findall(rf"(%\w+) = llvm\.getelementptr %\w+\[{member}\] : .*{LAUNCH}", function):
            values += [int(constants[name]) for name in re.findall(rf"llvm\.store (%\w+), {slot} :", function)]
    return values


@pytest.mark.parametrize("config", dispatch.shipped(), ids=lambda config: config.name)
def test_no_spills_no_serialization_and_within_limits(
    config: dispatch.KernelConfig, compiled: Callable[[dispatch.KernelConfig], Any]
) -> None:
    files = compiled(config)
    remarks = " ".join(files.remarks.split())  # the DSL wraps lines where there is a warning
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", remarks)
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", remarks)]
    assert spills == [("0", "0", "0")] * len(registers), remarks
    assert set(re.findall(r"entry function '\w+' for '(\w+)'", remarks)) == {config.arch}
    assert not SERIALIZED.search(remarks), remarks

    threads, shared = launch_values(files.host_code, "0, 1, 0"), launch_values(files.host_code, "0, 2")
    assert len(threads) == len(shared) == len(registers) > 0
    assert max(registers) <= REGISTERS // max(threads) // 8 * 8
    limit = sys.modules[type(config).__module__].SMEM_LIMIT
    assert 0 < max(shared) <= limit, f"{max(shared)} bytes of shared memory, a CTA has {limit}"
    assert files.object_file.read_bytes()[:4] == b"\x7fELF"


def test_one_compilation_a_config_from_many_threads(tmp_path: Path) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
from mla_cute import compile
from cpu.toy import ToyConfig
configs = [ToyConfig(number % 3) for number in range(12)]
with ThreadPoolExecutor(12) as pool:
    kernels = list(pool.map(compile.get, configs))
assert all(kernel is compile.get(config) for kernel, config in zip(kernels, configs))
print(len({id(kernel) for kernel in kernels}), compile.compile_count(), compile.where(ToyConfig(1)))
"""
    assert run(code, MLA_CUTE_CACHE_DIR=tmp_path) == "3 3 memory"


def test_the_architecture_is_the_configs_whatever_the_environment_says(tmp_path: Path) -> None:
    code = """
import os
before = os.environ["CUTE_DSL_ARCH"]
if {first}:
    import cutlass
from mla_cute import compile
from cpu.toy import ToyConfig
compile.compile_to(ToyConfig(), {path!r}, remarks=True)
assert os.environ["CUTE_DSL_ARCH"] == before
"""
    for first in (False, True):
        path = str(tmp_path / f"{first}.o")
        process = child(code.format(first=first, path=path), CUTE_DSL_ARCH="sm_100a")
        _, remarks = process.communicate(timeout=300)
        assert process.returncode == 0, remarks
        assert re.findall(r"entry function '\w+' for '(\w+)'", remarks) == ["sm_90a"]


NO_CUTLASS = "import sys; sys.modules['cutlass'] = None\n"
GET = """
from mla_cute import compile
from cpu.toy import ToyConfig
try:
    compile.get(ToyConfig())
except RuntimeError as error:
    print(error, compile.compile_count(), 'cutlass.cute' in sys.modules)
"""


@pytest.mark.parametrize(
    ("before", "environment", "why"),
    [
        ("import sys", {"MLA_CUTE_NO_COMPILE": "1"}, "MLA_CUTE_NO_COMPILE is set"),
        (NO_CUTLASS, {}, "the CuTe DSL cannot be imported"),
    ],
    ids=["forbidden", "no DSL"],
)
def test_an_error_names_the_kernel_and_how_to_build_a_bundle(
    before: str, environment: dict[str, str], why: str, tmp_path: Path
) -> None:
    message = run(f"{before}\n{GET}", MLA_CUTE_CACHE_DIR=tmp_path, **environment)
    assert message.startswith(f"kernel toy_1 would have to be compiled, but {why}")
    assert "python -m mla_cute aot build --arch sm_90a --select toy_1 -o DIR" in message
    assert str(tmp_path) in message
    assert message.endswith("0 False"), "nothing was compiled, nor the compiler loaded"


def test_a_stored_kernel_needs_no_cutlass(tmp_path: Path) -> None:
    get = "from mla_cute import compile\nfrom cpu.toy import ToyConfig\nprint(compile.where(ToyConfig()), end=' ')\n"
    get += "compile.get(ToyConfig())\nprint(compile.compile_count())"
    assert run(get, MLA_CUTE_CACHE_DIR=tmp_path) == "needs compilation 1"
    assert run(NO_CUTLASS + get, MLA_CUTE_CACHE_DIR=tmp_path, MLA_CUTE_NO_COMPILE=1) == "cache 0"


def test_a_missing_runtime_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_cute import compile, device

    monkeypatch.setattr(device, "dsl_runtime", lambda: None)
    compile._load_runtime.cache_clear()
    with pytest.raises(RuntimeError, match=r"libcute_dsl_runtime\.so.*MLA_CUTE_DSL_RUNTIME"):
        compile.load(tmp_path / "kernel.so", "kernel")
