"""What the emulator runs: its core, compiled on first use, and each kernel's PTX and launcher, of one compilation."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from mla_cute import cache
from mla_cute.dispatch import KernelConfig

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / ".pytest_cache" / "emulator"  # what is built stays between runs
FLAGS = "-std=c++17 -O2 -ftree-vectorize -march=native -ffp-contract=off -fno-math-errno -fPIC -Wall -Wextra"
COMPILE = """
import json, sys
from mla_cute import compile, dispatch
config = next(config for config in dispatch.shipped() if config.name == sys.argv[1])
kernel = compile.compile_kernel(config, remarks=True)
kernel.export_to_c(sys.argv[2], function_name=config.name)
print(json.dumps(str(kernel.ir_module)))
"""


@dataclass(frozen=True)
class Compiled:
    """Files of one compilation. remarks: what ptxas said; host_code: MLIR of the launcher."""

    name: str
    folder: Path

    @property
    def object_file(self) -> Path:
        return self.folder / "kernel.o"

    @property
    def launcher(self) -> Path:
        """A shared object, with the emulator's driver inside it."""
        driver = HERE / "driver.c"
        key = (self.folder / "stamp").read_text(), driver.read_bytes(), cache.c_compiler()
        return _build(f"{self.name}-launcher", key, lambda target: link(self.object_file, driver, target)) / "kernel.so"

    @property
    def ptx(self) -> str:
        return (self.folder / "kernel.ptx").read_text()

    @property
    def remarks(self) -> str:
        return (self.folder / "remarks.txt").read_text()

    @property
    def host_code(self) -> str:
        return str(json.loads((self.folder / "host_code.json").read_text()))


def _build(name: str, key: object, make: Callable[[Path], None]) -> Path:
    """The folder of what `make` writes, made anew when the key changes; once for all processes."""
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    target, stamp = FOLDER / name, FOLDER / name / "stamp"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(FOLDER / f"{name}.lock"):
        if not stamp.exists() or stamp.read_text() != digest:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            make(target)
            stamp.write_text(digest)
    return target


def _run(command: Sequence[str], what: str, **more: Any) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, check=False, capture_output=True, text=True, **more)
    if result.returncode:
        raise RuntimeError(f"{what} failed: {' '.join(command)}\n{result.stderr[-4000:]}")
    return result


@functools.cache
def core() -> Path:
    """The emulator's shared library. RuntimeError where no C++ compiler is there: its tests do not skip for that."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise RuntimeError(
            f"the emulator needs a C++17 compiler, {compiler!r} is not there: install g++, or name one in CXX"
        )
    sources = sorted((HERE / "core").glob("*.cpp"))
    texts = [file.read_bytes() for file in (*sources, *sorted((HERE / "core").glob("*.h")))]

    def make(target: Path) -> None:
        objects = [str(target / f"{source.stem}.o") for source in sources]
        commands = [[compiler, *FLAGS.split(), "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda command: _run(command, "compiling the emulator"), commands))
        _run([compiler, "-shared", "-o", str(target / "emulator.so"), *objects], "linking the emulator")

    return _build("core", (compiler, FLAGS, platform.node(), texts), make) / "emulator.so"


@functools.cache
def compiled(config: KernelConfig) -> Compiled:
    """Compile a kernel, once for all processes and for as long as its sources stay as they are."""
    key = cache.fingerprint(), repr(config), sorted(cache.versions().items()), COMPILE
    return Compiled(config.name, _build(config.name, key, lambda target: _compile(config, target)))


def _compile(config: KernelConfig, target: Path) -> None:
    result = Compiled(config.name, target)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MLA_CUTE_", "CUTE_DSL_"))}
    variables |= {"CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DUMP_DIR": str(result.folder)}
    command = [sys.executable, "-c", COMPILE, config.name, str(result.object_file)]
    process = _run(command, f"compiling {config.name}", env=variables, timeout=300)
    (result.folder / "remarks.txt").write_text(process.stderr)
    (result.folder / "host_code.json").write_text(process.stdout.splitlines()[-1])
    (ptx,) = result.folder.glob("*.ptx")
    ptx.rename(result.folder / "kernel.ptx")


def link(object_file: Path, driver: Path, target: Path) -> None:
    """The driver is linked in and hidden, so that no other library's can take its place."""
    command = [*cache.c_compiler(), "-shared", "-fPIC", "-Wl,-Bsymbolic", "-o", str(target / "kernel.so")]
    _run([*command, str(object_file), str(driver)], "linking a launcher")
