"""Products of one warpgroup: every swizzle, both majors, A in shared memory and in registers; mistakes around them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from .machine import Fault
from .snippet import execute

ROWS, DEPTH = 64, 16
NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}
B_AT = 8192  # bytes behind A
Place = Callable[[int, int], int]


def layout(lines: int, depth: int, size: int, mn_major: bool, swizzle: int) -> tuple[Place, int]:
    """Where element (line, k) of an operand lies, in bytes, and its descriptor at 0 (PTX ISA 9.7.15.5.1)."""
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    wide = max(swizzle, 16)  # bytes of a line of the repeating pattern
    if not mn_major:
        leading, stride = (128 * lines // 8, 128) if not swizzle else (16, 8 * wide)

        def plain(line: int, k: int) -> int:
            chunk, within = divmod(k * size, 16)
            return line // 8 * stride + line % 8 * wide + chunk * (16 if swizzle else leading) + within
    else:
        per_line = wide // size  # lines that lie side by side
        blocks = lines // per_line
        leading, stride = (8 * wide * 2, 8 * wide) if swizzle else (8 * wide * blocks, 8 * wide)

        def plain(line: int, k: int) -> int:
            block, within = divmod(line, per_line)
            across, down = (leading, stride) if swizzle else (stride, leading)
            return block * across + within * size + k % 8 * wide + k // 8 * down

    def place(line: int, k: int) -> int:
        at = plain(line, k)
        return at ^ ((at >> 7 & mask) << 4)

    return place, mode << 62 | (stride // 16) << 32 | (leading // 16) << 16


def arranged(operand: Tensor, place: Place, room: int) -> Tensor:
    raw = torch.zeros(room, dtype=torch.uint8)
    size = operand.element_size()
    flat = operand.contiguous().view(torch.uint8).view(*operand.shape, size)
    for line in range(operand.shape[0]):
        for k in range(operand.shape[1]):
            at = place(line, k)
            raw[at : at + size] = flat[line, k]
    return raw


def fragments_of_a(a: Tensor) -> Tensor:
    """[4][128 threads] words: rows l / 4 and that + 8 of a warp's 16, then the second half of K."""
    per_word = 4 // a.element_size()
    words = (
        a.contiguous().view(torch.uint8).view(ROWS, -1, 4).clone().view(torch.int32).squeeze(-1)
    )  # [64, K / per_word]
    out = torch.zeros(4, 128, dtype=torch.int32)
    assert words.shape[1] == a.shape[1] // per_word == 8
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for k in range(4):
            out[k, thread] = words[16 * warp + lane // 4 + 8 * (k % 2), lane % 4 + 4 * (k // 2)]
    return out


def result(raw: Tensor, columns: int) -> Tensor:
    """[registers][128 threads] -> [64, columns]"""
    out = torch.zeros(ROWS, columns)
    for i in range(columns // 2):
        for thread in range(128):
            warp, lane = divmod(thread, 32)
            out[16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2] = raw[i, thread]
    return out


def multiply(
    a: Tensor,
    b: Tensor,
    *,
    majors: tuple[bool, bool] = (False, False),
    swizzle: int = 128,
    registers: bool = False,
    seed: int = 0,
    edit: Callable[[str], str] = lambda body: body,
) -> Tensor:
    """a b^T + a b^T by two products of one group; a [64, K], b [N, K]; majors: of A and B, whether MN-major."""
    columns, depth = b.shape
    size = a.element_size()
    place_a, descriptor_a = layout(ROWS, depth, size, majors[0], swizzle)
    place_b, descriptor_b = layout(columns, depth, size, majors[1], swizzle)
    memory = torch.cat([arranged(a, place_a, B_AT), arranged(b, place_b, B_AT)]).view(torch.int32)
    source = torch.cat([memory, fragments_of_a(a).view(-1)])
    count = columns // 2
    accumulator = "{" + ", ".join(f"%r{50 + i}" for i in range(count)) + "}"
    left = "{%r20, %r21, %r22, %r23}" if registers else "%d10"
    majors_text = "" if size == 1 else f", {int(majors[1])}" if registers else f", {int(majors[0])}, {int(majors[1])}"
    name, words = NAMES[a.dtype], len(memory)
    product = f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{name}.{name} {accumulator}, {left}, %d11,"
    body = f"""
    mov.b32 %r10, smem; mov.b32 %r11, %r0;
    COPY: mul.wide.u32 %d4, %r11, 4; add.s64 %d5, %d0, %d4; ld.global.b32 %r12, [%d5];
    shl.b32 %r13, %r11, 2; add.s32 %r14, %r10, %r13; st.shared.b32 [%r14], %r12;
    add.s32 %r11, %r11, 128; setp.lt.s32 %p1, %r11, {words}; @%p1 bra COPY;
    mul.wide.u32 %d4, %r0, 4; add.s64 %d5, %d0, %d4;
    {" ".join(f"ld.global.b32 %r{20 + k}, [%d5+{4 * words + 512 * k}];" for k in range(4))}
    shr.u32 %r15, %r10, 4; cvt.u64.u32 %d6, %r15;
    add.s64 %d10, %d6, {descriptor_a}; add.s64 %d11, %d6, {descriptor_b + B_AT // 16};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    wgmma.fence.sync.aligned;
    setp.ne.s32 %p2, 0, 0; setp.eq.s32 %p3, 0, 0;
    {product} %p2, 1, 1{majors_text};
    {product} %p3, 1, 1{majors_text};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    mul.wide.u32 %d7, %r0, 4; add.s64 %d8, %d1, %d7;
    {" ".join(f"st.global.b32 [%d8+{512 * i}], %r{50 + i};" for i in range(count))}"""
    out = torch.zeros(count, 128)
    execute(edit(body), source, out, threads=128, smem=2 * B_AT, seed=seed)
    return result(out, columns)


def operands(dtype: torch.dtype, columns: int, depth: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(columns)
    a, b = (torch.randint(-8, 9, (n, depth), generator=generator).float() for n in (ROWS, columns))
    return a.to(dtype), b.to(dtype)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("majors", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_operands_in_shared_memory(dtype: torch.dtype, majors: tuple[bool, bool], swizzle: int) -> None:
    a, b = operands(dtype, 64, DEPTH)
    assert torch.equal(multiply(a, b, majors=majors, swizzle=swizzle), 2 * a.float() @ b.float().T)


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_in_registers(mn_major: bool, seed: int) -> None:
    a, b = operands(torch.float16, 64, DEPTH)
    assert torch.equal(multiply(a, b, majors=(False, mn_major), registers=True, seed=seed), 2 * a.float() @ b.float().T)


@pytest.mark.parametrize("registers", [False, True])
def test_e4m3(registers: bool) -> None:
    a, b = operands(torch.float8_e4m3fn, 8, 32)
    assert torch.equal(multiply(a, b, swizzle=32, registers=registers), 2 * a.float() @ b.float().T)


@pytest.mark.parametrize(
    ("line", "instead", "kind"),
    [
        ("fence.proxy.async.shared::cta;", "", "missing proxy fence"),
        ("bar.sync 0;", "", "race|uninitialised"),
        ("wgmma.wait_group.sync.aligned 0;", "", "accumulator in flight"),
        ("wgmma.commit_group.sync.aligned;", "", "accumulator in flight"),
        ("setp.ne.s32 %p2, 0, 0;", "setp.eq.s32 %p2, 0, 0;", "uninitialised register"),
        ("setp.ne.s32 %p2, 0, 0;", "and.b32 %r13, %r0, 1; setp.ne.s32 %p2, %r13, 0;", "divergence"),
        ("wgmma.wait_group.sync.aligned 0;", "st.shared.b32 [%r10], %r0; wgmma.wait_group.sync.aligned 0;", "race"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_mistakes_around_a_product(line: str, instead: str, kind: str, seed: int) -> None:
    a, b = operands(torch.float16, 8, DEPTH)
    with pytest.raises(Fault, match=kind):
        multiply(a, b, seed=seed, edit=lambda body: body.replace(line, instead))
