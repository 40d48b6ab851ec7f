"""Compiled kernels on disk: what decides their content, the lock of one entry, and files that are whole or absent.

An entry is a shared object followed by the SHA-256 of its bytes (the loader ignores what follows an ELF image), so that
one atomic replace publishes both. A file whose digest does not fit is a miss, found before the dynamic loader maps it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

import mla_cute.kernels
from mla_cute import device

if TYPE_CHECKING:
    from mla_cute.dispatch import KernelConfig

DIGEST_BYTES = hashlib.sha256().digest_size
# The host modules that decide what is compiled. The rest of mla_cute may change without a new compilation.
HOST_SOURCES = ("compile.py", "problem.py")


def sources() -> list[Path]:
    """Every source file that a compiled kernel depends on, from both roots."""
    host, kernels = Path(__file__).parent, Path(mla_cute.kernels.__path__[0])
    return [*(host / name for name in HOST_SOURCES), *sorted(kernels.rglob("*.py"))]


@functools.cache
def fingerprint() -> str:
    """Hash of sources(), taken once a process: a file edited later is not what this process compiles either."""
    digest = hashlib.sha256()
    for path in sources():
        text = path.read_bytes()
        digest.update(f"{path.parent.name}/{path.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def version(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """What a compiled kernel needs unchanged besides its sources: the object file carries no version of its own."""
    return {name: version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")} | {"cuda": _flavour()}


def _flavour() -> str | None:
    """Which build of the DSL's run-time library is used, "cu13"; None if its path does not tell."""
    library = device.dsl_runtime()
    named = re.search(r"/(cu\d+)/", str(library))
    return named[1] if named else None


def folder() -> Path:
    """Where entries live: MLA_CUTE_CACHE_DIR, or the user's cache folder."""
    return device.cache_dir()


def entry(config: KernelConfig, options: str) -> Path:
    """The file of one kernel. Its name holds a hash of everything that decides the content."""
    parts = (fingerprint(), type(config).__module__, repr(config), config.arch, options, sorted(versions().items()))
    return folder() / f"{config.name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.so"


def intact(path: Path) -> bool:
    """Whether the file is there and whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > DIGEST_BYTES and hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the entry's lock against other processes. Yields False, after one warning, in a folder not to be written."""
    lock = filelock.FileLock(path.with_suffix(".lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        warn_once(f"the kernel cache {path.parent} cannot be written ({error}): each process compiles its own kernels")
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def store(path: Path, export: Callable[[Path], object]) -> bool:
    """Publish an entry. `export` writes the object file at the path it is given.

    Returns False, after one warning, if it cannot be linked or written; nothing half-written is ever visible at `path`.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".store-") as scratch:
            object_file, shared_object = Path(scratch, "kernel.o"), Path(scratch, "kernel.so")
            export(object_file)
            link(object_file, shared_object)
            with shared_object.open("r+b") as file:
                digest = hashlib.sha256(file.read()).digest()
                file.write(digest)
            os.replace(shared_object, path)
    except OSError as error:
        warn_once(f"no compiled kernel can be stored in {path.parent} ({error}): each process compiles its own")
        return False
    return True


def c_compiler() -> list[str]:
    """The command of the C compiler. Raises FileNotFoundError where it is not there."""
    command = device.c_compiler()
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"no C compiler: {command[0]!r} is not there; install one or name it in CC")
    return command


def link(object_file: Path, shared_object: Path) -> None:
    """Make the shared object with the C compiler ($CC, or cc). Raises OSError saying what is missing or went wrong."""
    command = [*c_compiler(), "-shared", "-o", str(shared_object), str(object_file)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(command)} failed: {error.stderr.strip()}") from None


@functools.cache
def warn_once(message: str) -> None:
    """A warning that a process prints once, whatever the warning filters."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)
