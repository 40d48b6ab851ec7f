"""A few lines of PTX in a kernel of their own, with one buffer in and one out: for tests of opcodes and checkers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .machine import Launch, Module, Region

HEAD = """
.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry snippet(.param .u64 source, .param .u64 target)
{{
.reg .pred %p<20>;
.reg .b16 %h<40>;
.reg .b32 %r<200>;
.reg .b64 %d<40>;
ld.param.b64 %d0, [source];
ld.param.b64 %d1, [target];
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
{body}
ret;
}}
"""
# %d2: this thread's word of the source, %d3: of the target; %r2 holds the word
WORDS = """
mul.wide.u32 %d4, %r0, 4;
add.s64 %d2, %d0, %d4;
add.s64 %d3, %d1, %d4;
ld.global.b32 %r2, [%d2];
"""


def execute(
    body: str,
    source: Tensor | None = None,
    out: Tensor | None = None,
    *,
    threads: int = 32,
    grid: int = 1,
    cluster: int = 1,
    smem: int = 4096,
    seed: int = 0,
    max_steps: int = 1_000_000,
) -> Tensor:
    """Run the body after HEAD; returns out (int32, one word a thread, unless given)."""
    source = torch.arange(threads, dtype=torch.int32) if source is None else source
    out = torch.zeros(threads, dtype=torch.int32) if out is None else out
    pointers = torch.tensor([source.data_ptr(), out.data_ptr()]).numpy().tobytes()
    launch = Launch("snippet", (grid, 1, 1), (threads, 1, 1), pointers, smem, cluster)
    spans = [(source, "source", False), (out, "target", True)]
    regions = [Region(t.data_ptr(), t.numel() * t.element_size(), rw, name) for t, name, rw in spans]
    Module(HEAD.format(body=body)).run([launch], regions, seed, max_steps)
    return out


def of_words(body: str, words: Sequence[int] | Tensor) -> list[int]:
    """What the body makes of a word in each thread: it reads %r2 and leaves %r3."""
    source = torch.as_tensor(words, dtype=torch.int64).to(torch.uint32).view(torch.int32)
    source = torch.nn.functional.pad(source, (0, 32 - len(source)))
    out = execute(f"{WORDS}{body}\nst.global.b32 [%d3], %r3;", source)
    return [word & 0xFFFFFFFF for word in out.tolist()[: len(words)]]
