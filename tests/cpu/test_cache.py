"""Compiled kernels on disk: keys, damage, concurrency, folders that cannot be written."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest

from mla_cute import cache, compile, dispatch, kernels

from .toy import ToyConfig, child, run

GET_TOY = """
import warnings
from mla_cute import compile
from cpu.toy import ToyConfig
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    kernel = compile.get(ToyConfig())
    compile.get(ToyConfig(2))
assert callable(kernel) and kernel is compile.get(ToyConfig())
print(compile.compile_count(), *(w.message for w in caught), sep="|")
"""


def export(text: str) -> Callable[[Path], object]:
    """A stand-in for a kernel's export: an object file that the C compiler makes."""

    def write(path: Path) -> None:
        subprocess.run(["cc", "-x", "c", "-fPIC", "-c", "-", "-o", str(path)], input=text, text=True, check=True)

    return write


def test_an_entry_is_stored_whole_and_any_damage_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "entry.so"
    assert not cache.intact(path)
    assert cache.store(path, export("int answer(void) { return 42; }"))
    assert cache.intact(path)
    assert [file.name for file in tmp_path.iterdir()] == ["entry.so"], "scratch files are left behind"
    whole = path.read_bytes()
    for damaged in (b"", whole[:10], whole[:-1], whole[: len(whole) // 2], whole + b"\0", b"\0" + whole[1:]):
        path.write_bytes(damaged)
        assert not cache.intact(path)
    assert cache.store(path, export("int answer(void) { return 42; }")), "a damaged entry is replaced"
    assert cache.intact(path)


def test_a_truncated_kernel_is_compiled_again(tmp_path: Path) -> None:
    assert run(GET_TOY, MLA_CUTE_CACHE_DIR=tmp_path) == "2"
    assert run(GET_TOY, MLA_CUTE_CACHE_DIR=tmp_path) == "0"
    entries = sorted(tmp_path.glob("*.so"))
    assert len(entries) == 2
    entries[0].write_bytes(entries[0].read_bytes()[:5000])
    assert run(GET_TOY, MLA_CUTE_CACHE_DIR=tmp_path) == "1"
    assert run(GET_TOY, MLA_CUTE_CACHE_DIR=tmp_path) == "0"


def test_an_intact_kernel_that_cannot_be_mapped_is_compiled_in_each_process(tmp_path: Path) -> None:
    assert run(GET_TOY, MLA_CUTE_CACHE_DIR=tmp_path) == "2"
    for entry in (entries := sorted(tmp_path.glob("*.so"))):
        text = b"whole, and no shared object" * 9
        entry.write_bytes(text + hashlib.sha256(text).digest())
        assert cache.intact(entry)
    for _ in range(2):
        compiled, *warnings = run(GET_TOY, MLA_CUTE_CACHE_DIR=tmp_path).split("|")
        assert compiled == "2"
        assert len(warnings) == 2
        assert all(f"{entry} cannot be mapped" in warning for entry, warning in zip(entries, warnings, strict=True))


@pytest.mark.parametrize("failure", [OSError, RuntimeError])
def test_a_kernel_that_was_just_stored_is_not_compiled_again(
    failure: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder that is mounted noexec."""

    def refuse(*_: object) -> None:
        raise failure("failed to map segment")

    def compile_anew(config: ToyConfig) -> Callable[..., None]:
        compiled.append(config)
        return print

    compiled: list[ToyConfig] = []
    monkeypatch.setenv("MLA_CUTE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile, "compile_kernel", compile_anew)
    monkeypatch.setattr(compile, "_export", lambda kernel, config, path: export("int answer;")(path))
    monkeypatch.setattr(compile, "load", refuse)
    for kernels_compiled in (1, 2):  # by the process that stores it, and by the next
        with pytest.warns(RuntimeWarning, match="failed to map segment"):
            cache.warn_once.cache_clear()
            assert compile._cached(ToyConfig()) is print
        assert compiled == [ToyConfig()] * kernels_compiled


def test_eight_processes_on_a_cold_folder_compile_once(tmp_path: Path) -> None:
    code = """
from mla_cute import compile, dispatch
kernel = compile.get(dispatch.shipped("sm_90a")[0])
print(compile.compile_count(), type(kernel).__module__.split(".")[0], callable(kernel))
"""
    children = [child(code, MLA_CUTE_CACHE_DIR=tmp_path) for _ in range(8)]
    printed = []
    for process in children:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        printed.append(out.strip())
    assert sorted(printed) == ["0 tvm_ffi True"] * 7 + ["1 tvm_ffi True"]
    assert len(list(tmp_path.glob("*.so"))) == 1


def test_a_folder_that_cannot_be_made_still_works(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    compiled, *warnings = run(GET_TOY, MLA_CUTE_CACHE_DIR=tmp_path / "file" / "cache").split("|")
    assert compiled == "2"
    assert len(warnings) == 1, "one warning, not one a kernel"
    assert "cannot be written" in warnings[0]


def test_a_read_only_folder_serves_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_CUTE_CACHE_DIR", str(tmp_path))
    path = cache.entry(ToyConfig(), "options")
    assert cache.store(path, export("int answer(void) { return 42; }"))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)  # root, who runs many test machines, may write anywhere
    cache.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="cannot be written"), cache.locked(path) as writable:
        assert not writable
    assert cache.intact(path), "a hit needs no lock"


def test_without_a_c_compiler_the_kernel_runs_and_one_warning_says_so(tmp_path: Path) -> None:
    compiled, *warnings = run(GET_TOY, MLA_CUTE_CACHE_DIR=tmp_path, CC="/nowhere/cc -O2").split("|")
    assert compiled == "2"
    assert len(warnings) == 1
    assert "no C compiler: '/nowhere/cc'" in warnings[0]
    assert not list(tmp_path.glob("*.so"))


def test_a_failing_c_compiler_is_reported_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc")
    with pytest.raises(OSError, match=r"cc -shared .* failed: .*missing\.o"):
        cache.link(tmp_path / "missing.o", tmp_path / "out.so")


def test_the_key_holds_all_that_decides_the_content(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dispatch.shipped("sm_90a")[0]
    keys = {cache.entry(each, compile.options(each)) for each in dispatch.shipped("sm_90a")}
    assert len(keys) == len(dispatch.shipped("sm_90a"))
    base = cache.entry(config, "a")
    assert base == cache.entry(config, "a")
    assert base != cache.entry(config, "b")
    assert base.name.startswith(config.name)
    versions = cache.versions()
    assert set(versions) == {"nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda"}
    for name in versions:
        monkeypatch.setattr(cache, "versions", lambda name=name: versions | {name: "other"})
        assert cache.entry(config, "a") != base


@pytest.mark.parametrize("source", ["compile.py", "kernels/common/abi.py", "kernels/sm90/config.py", "kernels/new.py"])
def test_a_changed_source_changes_the_key(source: str, tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(cache.__file__).parent, tmp_path / "mla_cute", ignore=ignore)
    shutil.copytree(kernels.__path__[0], tmp_path / "mla_cute" / "kernels", ignore=ignore, dirs_exist_ok=True)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from mla_cute import cache
before = cache.fingerprint()
with open({str(tmp_path / "mla_cute" / source)!r}, "a") as file:
    file.write("# a change\\n")
assert cache.fingerprint() == before, "taken once a process"
cache.fingerprint.cache_clear()
print(cache.__file__, cache.fingerprint() != before)
"""
    assert run(code) == f"{tmp_path}/mla_cute/cache.py True"


def test_the_default_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLA_CUTE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "mla_cute"
