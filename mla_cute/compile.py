"""config -> callable: from memory, an ahead-of-time bundle, the disk cache, or the compiler, in this order.

The one module that imports cutlass, and only when it has to compile: a kernel from a bundle or the cache needs tvm-ffi
and the DSL's run-time library alone.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_cute import bundle, cache, device

if TYPE_CHECKING:
    from mla_cute.dispatch import KernelConfig

Launch = Callable[..., Any]

_lock = threading.RLock()  # the DSL's tracer is one object a process and not thread-safe
_kernels: dict[KernelConfig, Launch] = {}
_compiled: list[str] = []  # names, in order


def get(config: KernelConfig) -> Launch:
    """The launch function of a kernel. Thread-safe; the same object for the same config.

    Raises BundleError for a bundle that does not fit, RuntimeError where compilation is needed and not possible.
    """
    kernel = _kernels.get(config)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(config) or _bundled(config) or _cached(config)
            _kernels[config] = kernel
    return kernel


def compile_count() -> int:
    """How many kernels this process has compiled."""
    return len(_compiled)


def where(config: KernelConfig, bundles: bool = True) -> str:
    """Where get() would find a kernel now: "memory", "bundle", "cache" or "needs compilation".

    bundles: False answers as if there were none.
    """
    if config in _kernels:
        return "memory"
    if bundles and bundle.find(config):
        return "bundle"
    return "cache" if cache.intact(cache.entry(config, options(config))) else "needs compilation"


def options(config: KernelConfig) -> str:
    """The DSL's options. --gpu-arch holds even if cutlass was imported for another architecture before."""
    return f"--enable-tvm-ffi --gpu-arch {config.arch}"


def compile_kernel(config: KernelConfig, remarks: bool = False) -> Any:
    """Compile anew. `remarks` makes ptxas print registers, spills and warnings.

    The result is callable like get()'s, and has export_to_c(path, function_name=...).
    """
    with _lock:
        cute, fake_arguments = _import_dsl(config)
        module, name = sys.modules[type(config).__module__].KERNEL.split(":")
        kernel = getattr(importlib.import_module(module), name)(config)
        _compiled.append(config.name)
        return cute.compile(kernel, *fake_arguments(config), options=options(config) + " remarks{ptx}" * remarks)


def compile_to(config: KernelConfig, object_file: str | Path, remarks: bool = False) -> None:
    """Compile anew and write the object file; its function is named config.name."""
    _export(compile_kernel(config, remarks), config, object_file)


def load(shared_object: Path, name: str) -> Launch:
    """Map a linked kernel. Its undefined symbols are those of tvm-ffi and of the DSL's run-time library."""
    _load_runtime()
    import tvm_ffi

    return tvm_ffi.load_module(str(shared_object))[name]


def _export(kernel: Any, config: KernelConfig, object_file: str | Path) -> None:
    kernel.export_to_c(str(object_file), function_name=config.name)


@functools.cache
def _load_runtime() -> ctypes.CDLL:
    """Its symbols must be global: the kernels name no library that they need."""
    library = device.dsl_runtime()
    if library is None:
        raise RuntimeError(
            "libcute_dsl_runtime.so, which every kernel needs, is not there: install nvidia-cutlass-dsl[cu13], or name "
            "the file in MLA_CUTE_DSL_RUNTIME"
        )
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _bundled(config: KernelConfig) -> Launch | None:
    path = bundle.find(config)
    return load(path, config.name) if path else None


def _cached(config: KernelConfig) -> Launch:
    """From the disk, compiled first if need be: once for all processes that ask at the same time."""
    path = cache.entry(config, options(config))
    kernel: Launch | None = None
    if not cache.intact(path):
        with cache.locked(path) as writable:
            if not cache.intact(path):
                kernel = compile_kernel(config)
                if not writable or not cache.store(path, lambda file: _export(kernel, config, file)):
                    return kernel
    try:
        return load(path, config.name)
    except (OSError, RuntimeError) as error:  # a folder mounted noexec, or a loader that refuses the file
        cache.warn_once(f"the stored kernel {path} cannot be mapped ({error}): this process compiles its own")
        return kernel or compile_kernel(config)


def _import_dsl(config: KernelConfig) -> tuple[Any, Callable[[KernelConfig], tuple[Any, ...]]]:
    if not device.may_compile():
        raise RuntimeError(_refusal(config, "MLA_CUTE_NO_COMPILE is set"))
    if "cutlass" not in sys.modules:
        _import_for(config.arch)
    try:
        import cutlass.cute as cute

        from mla_cute.kernels.common.abi import fake_arguments
    except ImportError as error:
        raise RuntimeError(_refusal(config, f"the CuTe DSL cannot be imported ({error})")) from error
    return cute, fake_arguments


def _import_for(arch: str) -> None:
    """Import cutlass for one architecture: it reads CUTE_DSL_ARCH then and never again (unset, it asks device 0)."""
    before = os.environ.get("CUTE_DSL_ARCH")
    os.environ["CUTE_DSL_ARCH"] = arch
    try:
        importlib.import_module("cutlass")
    except ImportError:
        pass  # reported by the caller, with the kernel's name
    finally:
        if before is None:
            del os.environ["CUTE_DSL_ARCH"]
        else:
            os.environ["CUTE_DSL_ARCH"] = before


def _refusal(config: KernelConfig, why: str) -> str:
    return (
        f"kernel {config.name} would have to be compiled, but {why}. It is in no loaded bundle "
        f"({', '.join(bundle.names()) or 'none is loaded'}), and the cache {cache.folder()} has none that loads. "
        f"Where the DSL is, `python -m mla_cute aot build --arch {config.arch} --select {config.name} -o DIR` makes a "
        "bundle; name its folder in MLA_CUTE_AOT_DIR or pass it to mla_cute.aot.load"
    )
