"""Ahead-of-time bundles: made, loaded without cutlass or a compiler, and refused when they do not fit."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mla_cute import aot, bundle, cache, compile
from mla_cute.cli import main

from .toy import ToyConfig, run

BUILD = """
from mla_cute import aot
from cpu.toy import ToyConfig
done = []
aot.build([ToyConfig(number) for number in {numbers}], {folder!r}, done.append, jobs={jobs})
print(sorted(config.name for config in done))
"""


def test_the_command_builds_what_loads_without_cutlass_or_a_compiler(tmp_path: Path) -> None:
    name = "sm90_r64_bf16_p64"
    arguments = ["aot", "build", "--arch", "sm_90a", "--select", name, "-o", str(tmp_path / "bundle")]
    run(f"from mla_cute.cli import main; main({arguments!r})")
    load = f"""
import sys
assert "cutlass" not in sys.modules
sys.modules["cutlass"] = None  # an import of it fails
from mla_cute import compile, dispatch
config = next(config for config in dispatch.shipped() if config.name == {name!r})
print(compile.where(config), callable(compile.get(config)), compile.compile_count())
try:
    compile.get(config)(1)
except TypeError as error:
    print("the kernel answers:", "query" in str(error))
"""
    environment = {"PATH": "", "CC": "", "MLA_CUTE_CACHE_DIR": tmp_path / "cache"}
    assert run(load, **environment, MLA_CUTE_AOT_DIR=tmp_path / "bundle") == "bundle True 0\nthe kernel answers: True"
    explicit = f"from mla_cute import aot; print(aot.load({str(tmp_path / 'bundle')!r}))\n"
    assert run(explicit + load, **environment).startswith(f"('{name}',)\nbundle True 0")
    assert not (tmp_path / "cache").exists()


def test_a_bundle_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "bundle"
    assert run(BUILD.format(numbers=[1, 2], folder=str(folder), jobs=2)) == "['toy_1', 'toy_2']"
    assert {file.name for file in folder.iterdir()} == {"toy_1.so", "toy_2.so", "manifest.json"}
    assert run(BUILD.format(numbers=[3], folder=str(folder), jobs=1)) == "['toy_3']"
    assert {file.name for file in folder.iterdir()} == {"toy_3.so", "manifest.json"}
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = hashlib.sha256((folder / "toy_3.so").read_bytes()).hexdigest()
    row = {"name": "toy_3", "config": "ToyConfig(number=3)", "file": "toy_3.so", "sha256": digest}
    assert (manifest["arch"], manifest["kernels"]) == ("sm_90a", [row])


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_config_that_is_named_twice_is_built_once(jobs: int, tmp_path: Path) -> None:
    assert run(BUILD.format(numbers=[2, 1, 2], folder=str(tmp_path), jobs=jobs)) == "['toy_1', 'toy_2']"
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [row["name"] for row in manifest["kernels"]] == ["toy_2", "toy_1"]


def test_old_kernels_stay_until_the_new_bundle_is_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(config: ToyConfig, scratch: Path) -> ToyConfig:
        (scratch / f"{config.name}.so").write_bytes(b"new kernel")
        return config

    def fail(source: Path, target: Path) -> None:
        if target.name == bundle.MANIFEST:
            raise OSError("no space left")
        replace(source, target)

    replace = os.replace
    monkeypatch.setattr(aot, "_compile_one", fake)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        aot.build([ToyConfig(2)], folder)
    assert aot.load(folder) == ("toy_1",)
    monkeypatch.setattr(os, "replace", replace)
    aot.build([ToyConfig(2)], folder)
    assert aot.load(folder) == ("toy_2",) and not (folder / "toy_1.so").exists()


def test_a_folder_with_anything_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match=f"out_dir {tmp_path} is not empty and not a bundle"):
        aot.build([ToyConfig()], tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_without_a_c_compiler_nothing_is_compiled_or_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc -O2")
    before = compile.compile_count()
    with pytest.raises(OSError, match="no C compiler: '/nowhere/cc' is not there; install one or name it in CC"):
        aot.build([ToyConfig()], tmp_path / "out")
    assert compile.compile_count() == before and not (tmp_path / "out").exists()


def test_a_bundle_has_one_architecture(tmp_path: Path) -> None:
    class Other(ToyConfig):
        arch = "sm_100a"

    with pytest.raises(ValueError, match=r"configs must be kernels of one architecture, got \['sm_100a', 'sm_90a'\]"):
        aot.build([ToyConfig(), Other()], tmp_path / "out")
    with pytest.raises(ValueError, match="configs must be .* got none"):
        aot.build([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle whose kernel is never mapped, so that any bytes do."""
    monkeypatch.setattr(bundle, "_kernels", {})
    (tmp_path / "toy_1.so").write_bytes(b"kernel")
    digest = hashlib.sha256(b"kernel").hexdigest()
    rows = [{"name": "toy_1", "config": repr(ToyConfig()), "file": "toy_1.so", "sha256": digest}]
    (tmp_path / bundle.MANIFEST).write_text(json.dumps(bundle.describe("sm_90a", rows)))
    return tmp_path


def edit(folder: Path, *path: str | int, value: object) -> None:
    manifest: Any = json.loads((folder / bundle.MANIFEST).read_text())
    place = manifest
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    (folder / bundle.MANIFEST).write_text(json.dumps(manifest))


def test_a_bundle_that_fits_is_loaded(folder: Path) -> None:
    assert aot.load(folder) == ("toy_1",)
    assert bundle.find(ToyConfig()) == folder / "toy_1.so"
    assert compile.where(ToyConfig()) == "bundle"
    assert bundle.find(ToyConfig(2)) is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("versions", "apache-tvm-ffi"), "0.0.1", "apache-tvm-ffi: built with 0.0.1, here is "),
        (("versions", "nvidia-cutlass-dsl"), "4.0.0", "nvidia-cutlass-dsl: built with 4.0.0, here is "),
        (("versions", "cuda"), "cu12", "cuda: built with cu12, here is cu13"),
        (("sources",), "0", "sources: built from other kernel sources"),
        (("format",), 0, "format: 0 in the manifest, this version reads 1"),
        (("kernels", 0, "sha256"), "0", "sha256 of toy_1.so: 0 in the manifest, "),
        (("kernels", 0, "file"), "gone.so", r"sha256 of gone.so: .* unreadable \(No such file"),
        (("kernels",), None, "manifest.json cannot be read"),
        (("kernels", 0), {}, "manifest.json cannot be read"),
        (("versions",), {}, "manifest.json cannot be read"),
    ],
)
def test_what_does_not_fit_is_named(path: tuple[str | int, ...], value: object, message: str, folder: Path) -> None:
    edit(folder, *path, value=value)
    with pytest.raises(aot.BundleError, match=message) as caught:
        aot.load(folder)
    assert str(folder) in str(caught.value)
    assert bundle.names() == ()


def test_damaged_files_are_named(folder: Path) -> None:
    (folder / "toy_1.so").write_bytes(b"kerne")
    with pytest.raises(aot.BundleError, match=r"sha256 of toy_1\.so"):
        aot.load(folder)
    (folder / bundle.MANIFEST).write_text("{")
    with pytest.raises(aot.BundleError, match="cannot be read"):
        aot.load(folder)
    with pytest.raises(aot.BundleError, match="is not a bundle: it has no manifest.json"):
        aot.load(folder / "elsewhere")


def test_another_architecture_or_config_of_the_same_name_is_refused(folder: Path) -> None:
    edit(folder, "arch", value="sm_100a")
    aot.load(folder)
    with pytest.raises(aot.BundleError, match="for sm_100a in the manifest, but toy_1 is .* for sm_90a here"):
        bundle.find(ToyConfig())


def test_a_bare_runtime_library_has_no_version_to_compare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = cache.versions()
    monkeypatch.setattr(cache, "versions", lambda: versions | {"nvidia-cutlass-dsl": None, "cuda": None})
    assert aot.load(folder) == ("toy_1",)


def test_the_command_is_not_misled(tmp_path: Path) -> None:
    from click.testing import CliRunner

    def build(*arguments: str) -> str:
        result = CliRunner().invoke(main, ["aot", "build", "-o", str(tmp_path / "out"), *arguments])
        assert result.exit_code != 0
        return result.output

    assert "'sm_80' is not one of" in build("--arch", "sm_80")
    assert "no kernel exists for sm_100a yet" in build("--arch", "sm_100a")
    assert "no kernel has these dtypes" in build("--arch", "sm_90a", "--q-dtype", "e4m3", "--kv-dtype", "bf16")
    assert "nothing* matches none of sm90_r64_bf16_p16" in build("--arch", "sm_90a", "--select", "nothing*")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").touch()
    assert "is not empty and not a bundle" in build("--arch", "sm_90a")
