"""Ahead-of-time bundles, the reading side: a folder of shared objects and a manifest, checked before any is loaded."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mla_cute
from mla_cute import cache, device

if TYPE_CHECKING:
    from mla_cute.dispatch import KernelConfig

MANIFEST = "manifest.json"
FORMAT = 1

_kernels: dict[str, Kernel] = {}


class BundleError(RuntimeError):
    """A bundle that is damaged, or was built for something else than what is installed here."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of a loaded bundle."""

    arch: str
    config: str
    path: Path


def describe(arch: str, kernels: list[dict[str, str]]) -> dict[str, Any]:
    """The manifest of a bundle built here and now; `kernels` are rows of name, config, file and sha256."""
    return {
        "format": FORMAT,
        "arch": arch,
        "mla_cute": mla_cute.__version__,
        "sources": cache.fingerprint(),
        "versions": cache.versions(),
        "kernels": kernels,
    }


def load(folder: str | Path) -> tuple[str, ...]:
    """Make the kernels of a bundle available to this process. Returns their names.

    Every file is checked against the manifest now; a kernel is mapped when it is first used. Raises BundleError naming
    what does not fit. Folders in MLA_CUTE_AOT_DIR are loaded by themselves at the first use of a kernel.
    """
    folder = Path(folder).resolve()
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        differences = _differences(manifest)
        arch, rows = manifest["arch"], manifest["kernels"]
        loaded = {row["name"]: Kernel(arch, row["config"], folder / row["file"]) for row in rows}
        sums = {row["file"]: row["sha256"] for row in rows}
    except FileNotFoundError:
        raise BundleError(f"{folder} is not a bundle: it has no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{folder / MANIFEST} cannot be read: {error!r}") from error
    for file, expected in sums.items():
        try:
            actual = hashlib.sha256((folder / file).read_bytes()).hexdigest()
        except OSError as error:
            actual = f"unreadable ({error.strerror})"
        if actual != expected:
            differences.append(f"sha256 of {file}: {expected} in the manifest, {actual} on disk")
    if differences:
        raise BundleError(f"bundle {folder} does not fit: {'; '.join(differences)}. Build it with this installation")
    _kernels.update(loaded)
    return tuple(loaded)


def find(config: KernelConfig) -> Path | None:
    """The shared object of a kernel in the loaded bundles, or None."""
    _load_folders(device.aot_dirs())
    kernel = _kernels.get(config.name)
    if kernel is None:
        return None
    if (kernel.arch, kernel.config) != (config.arch, repr(config)):
        raise BundleError(
            f"{kernel.path} is {kernel.config} for {kernel.arch} in the manifest, "
            f"but {config.name} is {config!r} for {config.arch} here"
        )
    return kernel.path


def names() -> tuple[str, ...]:
    """The kernels of all loaded bundles."""
    _load_folders(device.aot_dirs())
    return tuple(_kernels)


def _differences(manifest: Mapping[str, Any]) -> list[str]:
    """What was built for something else. A version that is unknown here (a bare run-time library) passes."""
    if manifest["format"] != FORMAT:
        return [f"format: {manifest['format']} in the manifest, this version reads {FORMAT}"]
    differences = []
    for name, here in cache.versions().items():
        built = manifest["versions"][name]
        if here is not None and here != built:
            differences.append(f"{name}: built with {built}, here is {here}")
    if manifest["sources"] != cache.fingerprint():
        built, here = manifest["mla_cute"], mla_cute.__version__
        differences.append(f"sources: built from other kernel sources (mla_cute {built}, here is {here})")
    return differences


@functools.cache
def _load_folders(folders: tuple[Path, ...]) -> None:
    for folder in folders:
        load(folder)
