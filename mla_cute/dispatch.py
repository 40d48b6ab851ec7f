"""Which kernel serves a problem: the table of kernels per architecture, and the choice among them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Protocol

from mla_cute.errors import UnsupportedProblem
from mla_cute.problem import MLAProblem

# architecture -> config modules, in order of preference. A config module imports neither torch nor cutlass.
KERNELS: dict[str, tuple[str, ...]] = {
    "sm_90a": ("mla_cute.kernels.sm90.config",),
    "sm_100a": ("mla_cute.kernels.sm100.config",),
}


class KernelConfig(Protocol):
    """What the host asks of a config: a frozen dataclass that alone decides what is compiled.

    Its module holds KERNEL, the "module:class" to compile. `name` is a C identifier: file name and exported function.
    """

    @property
    def name(self) -> str: ...
    @property
    def arch(self) -> str: ...
    @property
    def q_dtype(self) -> str: ...  # names of problem.DTYPES
    @property
    def kv_dtype(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def tile_tokens(self) -> int: ...
    @property
    def block_cost(self) -> int: ...
    @property
    def word_rows(self) -> int: ...


def config_modules(arch: str | None = None) -> tuple[ModuleType, ...]:
    """The config modules of one architecture, or of all."""
    names = KERNELS[arch] if arch else [name for row in KERNELS.values() for name in row]
    return tuple(importlib.import_module(name) for name in names)


def shipped(arch: str | None = None) -> tuple[KernelConfig, ...]:
    """Every kernel of one architecture, or of all."""
    return tuple(config for module in config_modules(arch) for config in module.shipped())


def select(problem: MLAProblem, capability: tuple[int, int]) -> KernelConfig:
    """The config that serves `problem` on a GPU of compute capability `capability`.

    Raises UnsupportedProblem with the reason of every kernel when none does.
    """
    reasons = []
    for module in config_modules():
        if capability not in module.CAPABILITIES:
            served = " or ".join(f"{major}.{minor}" for major, minor in module.CAPABILITIES)
            reason = f"needs a GPU of compute capability {served}, this one has {capability[0]}.{capability[1]}"
        else:
            reason = module.refuse(problem)
        if reason is None:
            config: KernelConfig = module.config_for(problem)
            return config
        reasons.append((kernel_label(module), reason))
    raise UnsupportedProblem(
        f"no kernel serves this problem on compute capability {capability[0]}.{capability[1]} ({problem})", reasons
    )


def kernel_label(module: ModuleType) -> str:
    """For people: "sm90.decode" of sm90/config.py, whose kernel is in decode.py; "sm100" while there is none."""
    package = module.__name__.split(".")[-2]
    kernel = getattr(module, "KERNEL", None)
    return f"{package}.{kernel.split(':')[0].split('.')[-1]}" if kernel else package
