"""Facts about GPUs, and every environment switch of the package.

MLA_CUTE_CACHE_DIR      folder of compiled kernels (default: the user's cache folder)
MLA_CUTE_AOT_DIR        folders of ahead-of-time bundles, separated as in PATH
MLA_CUTE_NO_COMPILE     1: never compile at run time; a kernel in neither bundle nor cache is an error
MLA_CUTE_DSL_RUNTIME    path of libcute_dsl_runtime.so (default: the one of the installed nvidia-cutlass-dsl)
CC                      the C compiler that links what the disk cache and bundles hold (default: cc)

Importing this module imports neither torch nor cutlass and does not touch a GPU.
"""

from __future__ import annotations

import os
import shlex
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LARGEST_SM_COUNT = 160  # no GPU this package knows has more; sizes computed without a GPU are upper bounds


def cache_dir() -> Path:
    if folder := os.environ.get("MLA_CUTE_CACHE_DIR"):
        return Path(folder).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("mla_cute")


def aot_dirs() -> tuple[Path, ...]:
    folders = os.environ.get("MLA_CUTE_AOT_DIR", "").split(os.pathsep)
    return tuple(Path(folder).expanduser() for folder in folders if folder)


def may_compile() -> bool:
    return os.environ.get("MLA_CUTE_NO_COMPILE", "0") in ("", "0")


def c_compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "")) or ["cc"]


def dsl_runtime() -> Path | None:
    """libcute_dsl_runtime.so, which a compiled kernel needs at load; None if there is none. Does not import cutlass."""
    if path := os.environ.get("MLA_CUTE_DSL_RUNTIME"):
        return Path(path).expanduser()
    spec = find_spec("nvidia_cutlass_dsl")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        # cu13 alone: the project builds and ships kernels of that flavour
        if (library := Path(root) / "cu13/lib/libcute_dsl_runtime.so").is_file():
            return library
    return None


def arch_of(capability: tuple[int, int]) -> str:
    """The compiler's name of a compute capability with its architecture-specific instructions: (9, 0) is "sm_90a"."""
    major, minor = capability
    return f"sm_{major}{minor}a"


def index_of(device: torch.device) -> int:
    """The CUDA index of a device; the current one where it names none."""
    import torch

    return torch.cuda.current_device() if device.index is None else device.index


def capability(device: torch.device) -> tuple[int, int]:
    return _properties(index_of(device))[0]


def sm_count(device: torch.device) -> int:
    return _properties(index_of(device))[1]


@cache
def _properties(index: int) -> tuple[tuple[int, int], int]:
    import torch

    properties = torch.cuda.get_device_properties(index)  # leaves the current device as it is
    return (properties.major, properties.minor), properties.multi_processor_count
