"""The core's interface: a module of PTX, its launches, and a fault as an exception."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from .build import core

REPORT_BYTES = 1 << 14
MAX_STEPS = 400_000_000  # instructions of warps: far beyond any test


class Fault(AssertionError):
    """What a checker found. kind: one of the words that the checkers use, such as "deadlock" or "race"."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind, self.what = kind, what


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32),
        ("smem", ctypes.c_uint32),
        ("dependent", ctypes.c_uint32),
        ("params", ctypes.c_char_p),
    )


class _Region(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("written", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
    )


@dataclass(frozen=True)
class Region:
    """Global memory that a launch may touch. written: what it holds may be read before a kernel writes it."""

    begin: int
    bytes: int
    writable: bool
    name: str
    written: bool = False


@dataclass(frozen=True)
class Launch:
    """One kernel launch. params: the parameters' bytes, one behind the other. dependent: programmatic (PDL)."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: bytes
    smem: int = 0
    cluster: int = 1
    dependent: bool = False


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(core()))
    library.emulator_module.restype = ctypes.c_void_p
    library.emulator_module.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
    library.emulator_free.argtypes = (ctypes.c_void_p,)
    library.emulator_params.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint32), ctypes.c_int)
    return library


def _fault(report: ctypes.Array[ctypes.c_char]) -> Fault:
    kind, _, what = report.value.decode(errors="replace").partition("\n")
    return Fault(kind, what)


@dataclass
class Module:
    """Decoded PTX. Fault "unknown opcode" or "PTX" where it cannot be."""

    ptx: str
    steps: int = field(default=0, init=False)  # instructions of warps in the last run

    def __post_init__(self) -> None:
        report = ctypes.create_string_buffer(REPORT_BYTES)
        self._handle = _library().emulator_module(self.ptx.encode(), report, REPORT_BYTES)
        if not self._handle:
            raise _fault(report)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            _library().emulator_free(self._handle)

    def param_sizes(self, kernel: str) -> list[int]:
        sizes = (ctypes.c_uint32 * 128)()
        count = _library().emulator_params(self._handle, kernel.encode(), sizes, 128)
        if count < 0:
            raise KeyError(f"the PTX has no kernel {kernel}")
        return list(sizes[:count])

    def run(
        self, launches: Sequence[Launch], regions: Sequence[Region], seed: int = 0, max_steps: int = MAX_STEPS
    ) -> None:
        """Run launches that follow one another in a stream. Raises Fault."""
        requests = (_Launch * len(launches))()
        for request, one in zip(requests, launches, strict=True):
            request.kernel = one.kernel.encode()
            request.grid[:], request.block[:] = one.grid, one.block
            request.cluster, request.smem, request.dependent = one.cluster, one.smem, one.dependent
            request.params = one.params
        memory = (_Region * len(regions))()
        for place, region in zip(memory, regions, strict=True):
            place.begin, place.bytes, place.name = region.begin, region.bytes, region.name.encode()
            place.writable, place.written = region.writable, region.written
        report, steps = ctypes.create_string_buffer(REPORT_BYTES), ctypes.c_uint64()
        failed = _library().emulator_run(
            ctypes.c_void_p(self._handle),
            requests,
            len(launches),
            memory,
            len(regions),
            ctypes.c_uint64(seed),
            ctypes.c_uint64(max_steps),
            ctypes.byref(steps),
            report,
            ctypes.c_size_t(REPORT_BYTES),
        )
        self.steps = steps.value
        if failed:
            raise _fault(report)
