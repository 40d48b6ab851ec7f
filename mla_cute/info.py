"""What `python -m mla_cute info` shows: facts about this machine that decide whether and how kernels run."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
from typing import Any

import mla_cute
from mla_cute import bundle, cache, compile, device, dispatch

WHEELS = ("apache-tvm-ffi", "cuda-python", "nvidia-cutlass-dsl")


def collect() -> dict[str, dict[str, str]]:
    """Named facts, and the state of each shipped kernel. Needs no GPU and no DSL, and compiles nothing."""
    problem = _bundle_problem()
    return {"facts": _facts(problem), "kernels": _kernels(bundles=problem is None)}


def _bundle_problem() -> str | None:
    try:
        bundle.names()
    except bundle.BundleError as error:
        return f"{error}. First uses of kernels fail with this; below is where they would come from without bundles"
    return None


def _facts(bundle_problem: str | None) -> dict[str, str]:
    import torch

    bundles = ", ".join(map(str, device.aot_dirs())) or "none (MLA_CUTE_AOT_DIR is unset)"
    return {
        "mla_cute": mla_cute.__version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        **{name: cache.version(name) or "not installed" for name in sorted({*WHEELS, *_cutlass_wheels()})},
        "run-time library": str(device.dsl_runtime() or "libcute_dsl_runtime.so is not there: no kernel can be loaded"),
        "driver": _driver(),
        **_gpus(),
        "cache folder": str(cache.folder()),
        "bundles": bundle_problem or bundles,
    }


def _cutlass_wheels() -> set[str]:
    """The DSL's parts; and nvidia-cutlass, another package that provides `import cutlass` and hides the DSL's."""
    names = {str(dist.metadata["Name"]).lower().replace("_", "-") for dist in importlib.metadata.distributions()}
    return {name for name in names if name.startswith("nvidia-cutlass")}


def _driver() -> str:
    """The newest CUDA version that the driver serves. Asks without creating a context."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return "none (libcuda.so.1 is not there)"
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}" if status == 0 else f"error {status}"


def _gpus() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {"GPU": "none that torch sees: CPU tensors are served by the reference"}
    gpus = {}
    for index in range(torch.cuda.device_count()):
        chosen = torch.device("cuda", index)
        major, minor = device.capability(chosen)
        gpus[f"GPU {index}"] = (
            f"{torch.cuda.get_device_name(chosen)}, compute capability {major}.{minor} "
            f"({device.arch_of((major, minor))}), {device.sm_count(chosen)} SMs"
        )
    return gpus


def _kernels(bundles: bool) -> dict[str, str]:
    """Kernel name -> where it would come from."""
    states: dict[str, Any] = {}
    for config in dispatch.shipped():
        try:
            states[config.name] = compile.where(config, bundles)
        except bundle.BundleError as error:  # of this kernel alone
            states[config.name] = str(error)
    return states
