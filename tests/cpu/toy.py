"""A config whose kernel takes the arguments of every kernel and compiles in half a second; and Python in a child."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

KERNEL = f"{__package__}.toy_kernel:Toy"


@dataclass(frozen=True)
class ToyConfig:
    number: int = 1

    arch: ClassVar[str] = "sm_90a"
    q_dtype: ClassVar[str] = "bf16"
    kv_dtype: ClassVar[str] = "bf16"
    head_dim: ClassVar[int] = 576
    latent: ClassVar[int] = 512
    rows: ClassVar[int] = 64
    tile_tokens: ClassVar[int] = 128
    block_cost: ClassVar[int] = 2
    word_rows: ClassVar[int] = 32

    @property
    def name(self) -> str:
        return f"toy_{self.number}"


def child(code: str, *before: str, **environment: object) -> subprocess.Popen[str]:
    """Start Python on `code`, which may import this package. before: a command that runs it, such as env."""
    packages = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MLA_CUTE_", "CUTE_DSL_"))}
    variables |= {"PYTHONPATH": packages} | {name: str(value) for name, value in environment.items()}
    command = [*before, sys.executable, "-c", code]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(code: str, **environment: object) -> str:
    """What `code` prints, in a child; AssertionError if it fails."""
    process = child(code, **environment)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip()
