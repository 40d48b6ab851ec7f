"""Blackwell's row of the dispatch table. No kernel exists yet, so every problem is refused with that reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla_cute.problem import MLAProblem

ARCH = "sm_100a"
CAPABILITIES = ((10, 0), (10, 3))


def refuse(problem: MLAProblem) -> str | None:
    return "no Blackwell kernel exists yet"


def shipped() -> tuple[()]:
    return ()
