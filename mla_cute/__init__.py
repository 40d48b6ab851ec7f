"""Paged MLA decode kernels in the CUTLASS CuTe DSL, with dispatch, ahead-of-time bundles and a CPU reference.

The public names load on first use: `import mla_cute` imports neither torch nor cutlass and creates no CUDA context.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mla_cute.errors import UnsupportedProblem

if TYPE_CHECKING:
    from mla_cute.api import (
        BatchMLADecodePagedTSWrapper,
        MLADecodeWrapper,
        batch_mla_decode_with_paged_kv_cache,
        get_batch_mla_decode_workspace_size,
        get_prims_ts_batch_mla_decode_workspace_size,
    )
    from mla_cute.reference import merge_states

__version__ = "0.1.0"
__all__ = [
    "batch_mla_decode_with_paged_kv_cache",
    "BatchMLADecodePagedTSWrapper",
    "MLADecodeWrapper",
    "get_batch_mla_decode_workspace_size",
    "get_prims_ts_batch_mla_decode_workspace_size",
    "merge_states",
    "UnsupportedProblem",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "mla_cute.reference" if name == "merge_states" else "mla_cute.api"
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
