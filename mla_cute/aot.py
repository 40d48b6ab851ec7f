"""Ahead-of-time bundles: a folder of compiled kernels, for machines with neither cutlass nor a compiler."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

from mla_cute import bundle, cache, compile
from mla_cute.bundle import BundleError, load

if TYPE_CHECKING:
    from mla_cute.dispatch import KernelConfig

__all__ = ["BundleError", "build", "load"]


def build(
    configs: Sequence[KernelConfig],
    out_dir: str | Path,
    progress: Callable[[KernelConfig], object] | None = None,
    jobs: int = 1,
) -> Path:
    """Compile kernels of one architecture into a bundle: a shared object each, and manifest.json.

    configs: what to compile, as from dispatch.shipped("sm_90a"); each once, however often it is named. No GPU is
        needed.
    out_dir: an empty or new folder, or a bundle, which is replaced. It is written to at the end only.
    progress: called with each config when it is done.
    jobs: compiler processes. Two or more are fresh interpreters, so a script needs its `if __name__ == "__main__"`.

    Returns the folder. Raises ValueError for no configs or several architectures, FileExistsError for a folder that
    holds something else, OSError where there is no C compiler.
    """
    out_dir, configs = Path(out_dir), tuple(dict.fromkeys(configs))
    arches = {config.arch for config in configs}
    if len(arches) != 1:
        raise ValueError(f"configs must be kernels of one architecture, got {sorted(arches) or 'none'}")
    old_manifest = out_dir / bundle.MANIFEST
    if out_dir.exists() and any(out_dir.iterdir()) and not old_manifest.exists():
        raise FileExistsError(f"out_dir {out_dir} is not empty and not a bundle (no {bundle.MANIFEST} in it)")
    cache.c_compiler()  # linking comes last: without one, all the compilation would be in vain
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir, prefix=".build-") as scratch:
        for config in _compiled(configs, Path(scratch), jobs):
            if progress:
                progress(config)
        rows = [_row(config, Path(scratch, f"{config.name}.so")) for config in configs]
        manifest = Path(scratch, bundle.MANIFEST)
        manifest.write_text(json.dumps(bundle.describe(arches.pop(), rows), indent=1) + "\n")
        files = [row["file"] for row in rows]
        for name in [*files, bundle.MANIFEST]:
            os.replace(Path(scratch, name), out_dir / name)
        for stale in out_dir.glob("*.so"):
            if stale.name not in files:
                stale.unlink()
    return out_dir


def _row(config: KernelConfig, shared_object: Path) -> dict[str, str]:
    digest = hashlib.sha256(shared_object.read_bytes()).hexdigest()
    return {"name": config.name, "config": repr(config), "file": shared_object.name, "sha256": digest}


def _compiled(configs: Sequence[KernelConfig], folder: Path, jobs: int) -> Iterator[KernelConfig]:
    """Yields each config once its shared object is in the folder."""
    if jobs == 1:
        for config in configs:
            yield _compile_one(config, folder)
        return
    # not forked: the parent may hold a CUDA context, and the DSL has threads
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_compile_one, config, folder) for config in configs]
        try:
            for done in as_completed(futures):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _compile_one(config: KernelConfig, folder: Path) -> KernelConfig:
    object_file = folder / f"{config.name}.o"
    compile.compile_to(config, object_file)
    cache.link(object_file, object_file.with_suffix(".so"))
    object_file.unlink()
    return config
