"""From the public functions to the emulator: CPU tensors pose as a Hopper GPU's, a kernel's own launcher is called, and
what it hands to the driver runs here.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from mla_cute.kernels.common.abi import ARGUMENTS
from torch import Tensor

from mla_cute import dispatch, launch
from mla_cute.launch import Prepared
from mla_cute.plan import make_plan
from mla_cute.problem import KV_LORA_RANK, MLAProblem

from .build import Compiled, compiled
from .machine import Launch, Module, Region

CAPABILITY, SM_COUNT = (9, 0), 4
INPUTS = ("query", "packed_query", "kv_cache", "block_tables", "seq_lens", "qo_indptr")
CUDA = 2  # DLPack's device type
CODES = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32), torch.int32: (0, 32)}
CODES[torch.float8_e4m3fn] = 10, 8
CLUSTER, PROGRAMMATIC = 4, 6  # ids of launch attributes


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Config(ctypes.Structure):
    """cudaLaunchConfig_t"""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    )


class _Attribute(ctypes.Structure):
    """cudaLaunchAttribute"""

    _fields_ = (("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class Posing:
    """A CPU tensor that says through DLPack that it is a GPU's."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        count = tensor.ndim
        self.shape = (ctypes.c_int64 * count)(*tensor.shape)
        self.strides = (ctypes.c_int64 * count)(*tensor.stride())
        code, bits = CODES[tensor.dtype]
        self.managed = _DLTensor(
            data=tensor.data_ptr(),
            ndim=count,
            code=code,
            bits=bits,
            lanes=1,
            shape=ctypes.addressof(self.shape),
            strides=ctypes.addressof(self.strides),
        )
        self.managed.device[:] = (CUDA, 0)

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0


def span(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor, and bytes to behind its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size() if tensor.numel() else 0


def regions(arguments: dict[str, Any]) -> list[Region]:
    """Memory that a launch may touch: inputs to read, the rest to write and to read what was written. An argument
    that stands in for another one is the first bytes of a section of the workspace and adds nothing."""
    tensors = [(*span(tensor), name) for name, tensor in arguments.items() if isinstance(tensor, Tensor)]
    out: list[Region] = []
    for begin, size, name in sorted(tensors, key=lambda one: (one[2] in INPUTS, -one[1])):
        if size and not any(r.begin < begin + size and begin < r.begin + r.bytes for r in out):
            out.append(Region(begin, size, name not in INPUTS, name))
    rows = arguments["packed_query" if arguments["seq_len_q"] == 0 else "query"].shape[:-1].numel()
    sizes = {"out_address": 2 * KV_LORA_RANK * rows, "lse_address": 4 * rows}
    for name, value in arguments.items():
        if name.endswith("_address") and value:
            out.append(Region(value, sizes.get(name, 4), name in sizes, name))
    return out


@dataclass
class Kernel:
    """A compiled kernel as launch.py calls one. ptx: other text than the compiler's, for mutations."""

    files: Compiled
    seed: int = 0
    ptx: str | None = None

    def __post_init__(self) -> None:
        import tvm_ffi

        self.module = Module(self.files.ptx if self.ptx is None else self.ptx)
        self._function = tvm_ffi.load_module(str(self.files.launcher))[self.files.name]
        self._library = ctypes.CDLL(str(self.files.launcher))

    def __call__(self, *arguments: Any) -> None:
        import tvm_ffi

        launches: list[Launch] = []
        signature = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(_Config), ctypes.POINTER(ctypes.c_void_p))
        sink = signature(lambda name, config, params: launches.append(self._captured(name.decode(), config[0], params)))
        posing = [Posing(a) if isinstance(a, Tensor) else a for a in arguments]
        self._library.mla_emulator_sink(sink)
        try:
            self._function(*(tvm_ffi.from_dlpack(a) if isinstance(a, Posing) else a for a in posing))
        finally:
            self._library.mla_emulator_sink(None)
        self.launches = launches
        self.module.run(launches, regions(dict(zip(ARGUMENTS, arguments, strict=True))), self.seed)

    def _captured(self, name: str, config: _Config, params: Any) -> Launch:
        sizes = self.module.param_sizes(name)
        count = config.attribute_count
        attributes = (_Attribute * count).from_address(config.attributes) if count else ()
        values = {a.id: list(a.value) for a in attributes}
        return Launch(
            kernel=name,
            grid=tuple(config.grid),
            block=tuple(config.block),
            smem=config.smem,
            cluster=values.get(CLUSTER, [1])[0],
            dependent=bool(values.get(PROGRAMMATIC, [0])[0]),
            params=b"".join(ctypes.string_at(params[k], size) for k, size in enumerate(sizes)),
        )


_kernels: dict[str, Kernel] = {}


def kernel(config: Any, seed: int = 0) -> Kernel:
    """The kernel of a config, decoded once a process; the seed holds until it is asked for again."""
    if config.name not in _kernels:
        _kernels[config.name] = Kernel(compiled(config))
    _kernels[config.name].seed = seed
    return _kernels[config.name]


@contextlib.contextmanager
def emulated(load: Callable[[Any], Kernel] = kernel, sm_count: int = SM_COUNT) -> Iterator[None]:
    """Within the block the public functions send CPU tensors through the emulator, as a Hopper GPU of sm_count SMs."""

    def size(problem: MLAProblem, device: torch.device) -> Any:
        return make_plan(problem, dispatch.select(problem, CAPABILITY), sm_count)

    def prepare(problem: MLAProblem, device: torch.device, ctas: int | None) -> Prepared:
        config = dispatch.select(problem, CAPABILITY)
        return Prepared(problem, device, size(problem, device), config.name, load(config))

    with (
        mock.patch.object(launch, "size", size),
        mock.patch("mla_cute.api.size", size),
        mock.patch.object(launch, "_prepare", prepare),
        mock.patch.object(launch, "converted", lambda tensor: tensor),
        mock.patch.object(launch, "_load", lambda prepared: None),
        mock.patch.object(torch.accelerator, "current_device_index", lambda: None),
    ):
        yield
