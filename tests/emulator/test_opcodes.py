"""Opcodes on their own, against torch or numbers from the PTX ISA."""

from __future__ import annotations

import math

import pytest
import torch

from .machine import Fault
from .snippet import WORDS, execute, of_words


def floats(values: list[float]) -> list[int]:
    return [word & 0xFFFFFFFF for word in torch.tensor(values).view(torch.int32).tolist()]


def as_floats(words: list[int]) -> list[float]:
    return torch.tensor(words, dtype=torch.int64).to(torch.uint32).view(torch.float32).tolist()


BIG, MINUS = 0x80000000, 0xFFFFFFFF


@pytest.mark.parametrize(
    ("body", "words", "expected"),
    [
        ("add.s32 %r3, %r2, 1;", [MINUS, 5], [0, 6]),
        ("mul.hi.u32 %r3, %r2, %r2;", [MINUS], [0xFFFFFFFE]),
        ("mul.hi.s32 %r3, %r2, %r2;", [MINUS], [0]),
        ("div.s32 %r3, %r2, -7;", [100, MINUS], [(-14) & MINUS, 0]),
        ("rem.s32 %r3, %r2, 7;", [100, (-100) & MINUS], [2, (-2) & MINUS]),
        ("shl.b32 %r3, %r2, 32;", [5], [0]),
        ("shr.u32 %r3, %r2, 40;", [BIG], [0]),
        ("shr.s32 %r3, %r2, 40;", [BIG], [MINUS]),
        ("min.s32 %r3, %r2, 1;", [MINUS, 3], [MINUS, 1]),
        ("min.u32 %r3, %r2, 1;", [MINUS], [1]),
        ("min.relu.s32 %r3, %r2, 5;", [MINUS, 3, 9], [0, 3, 5]),
        ("popc.b32 %r3, %r2;", [0xF0F0], [8]),
        ("clz.b32 %r3, %r2;", [1, 0], [31, 32]),
        ("bfe.s32 %r3, %r2, 4, 4;", [0xF0, 0x70], [MINUS, 7]),
        ("bfi.b32 %r3, 15, %r2, 4, 4;", [0], [0xF0]),
        ("prmt.b32 %r3, %r2, 0x77665544, 0x4321;", [0x33221100], [0x44332211]),
        ("prmt.b32 %r3, %r2, 0, 0x8888;", [0x80], [MINUS]),
        ("lop3.b32 %r3, %r2, 12, 10, 0x96;", [6], [6 ^ 12 ^ 10]),
        ("shf.l.wrap.b32 %r3, %r2, 1, 4;", [0xF0000000], [0x1F]),
        ("setp.lt.s32 %p1, %r2, 0; selp.b32 %r3, 7, 9, %p1;", [MINUS, 1], [7, 9]),
        ("setp.lt.u32 %p1, %r2, 5; selp.b32 %r3, 7, 9, %p1;", [MINUS, 1], [9, 7]),
        ("setp.gt.and.s32 %p1|%p2, %r2, 3, %p3; selp.b32 %r3, 1, 0, %p1;", [4], None),
        ("cvt.s64.s32 %d5, %r2; shr.u64 %d5, %d5, 32; cvt.u32.u64 %r3, %d5;", [MINUS, 1], [MINUS, 0]),
        ("cvt.u16.u32 %h1, %r2; cvt.s32.s16 %r3, %h1;", [0x18000], [0xFFFF8000]),
        ("cvt.s8.s32 %h1, %r2; cvt.s32.s16 %r3, %h1;", [0x80], [0xFFFFFF80]),
        ("mov.b32 {%h1, %h2}, %r2; mov.b32 %r3, {%h2, %h1};", [0x12345678], [0x56781234]),
        ("mul.wide.s16 %r3, %h1, 2;", [0], None),
        ("div.u32 %r3, 6, %r2;", [0, 4], [MINUS, 1]),
        (
            "{ .reg .pred p; setp.eq.s32 p, %r2, 0; @p bra IN; mov.b32 %r3, 1; bra OUT; IN: mov.b32 %r3, 2; OUT: }",
            [0, 9],
            [2, 1],
        ),
    ],
)
def test_integers(body: str, words: list[int], expected: list[int] | None) -> None:
    if expected is None:
        with pytest.raises(Fault, match="uninitialised register"):
            of_words(body, words)
    else:
        assert of_words(body, words) == expected


@pytest.mark.parametrize(
    ("body", "values", "expected"),
    [
        ("fma.rn.f32 %r3, %r2, %r2, 0fBF800000;", [1.0 + 2**-23], [2**-22 + 2**-46]),
        ("max.f32 %r3, %r2, 0f40000000;", [math.nan, 3.0], [2.0, 3.0]),
        ("add.ftz.f32 %r3, %r2, 0f00000000;", [1e-40], [0.0]),
        ("add.f32 %r3, %r2, 0f00000000;", [1e-40], [1e-40]),
        ("ex2.approx.ftz.f32 %r3, %r2;", [3.0, -math.inf], [8.0, 0.0]),
        ("lg2.approx.ftz.f32 %r3, %r2;", [8.0, 0.0], [3.0, -math.inf]),
        ("rcp.approx.ftz.f32 %r3, %r2;", [4.0, 0.0], [0.25, math.inf]),
        ("div.rn.f32 %r3, %r2, 0f40400000;", [1.0], [torch.tensor(1.0).div(3).item()]),
        ("cvt.rzi.s32.f32 %r4, %r2; cvt.rn.f32.s32 %r3, %r4;", [-2.7, 1e20], [-2.0, 2147483648.0]),
    ],
)
def test_floats(body: str, values: list[float], expected: list[float]) -> None:
    assert as_floats(of_words(body, floats(values))) == [torch.tensor(value).item() for value in expected]


VALUES = [
    0.0,
    -0.0,
    1.0,
    1.0009765,
    65504.0,
    65519.0,
    65520.0,
    1e-7,
    2**-24,
    2**-25,
    3e38,
    math.inf,
    -math.inf,
    448.0,
    460.0,
    0.0137,
    -17.3,
]


@pytest.mark.parametrize(("name", "dtype"), [("bf16x2", torch.bfloat16), ("f16x2", torch.float16)])
def test_rounding_to_16_bits(name: str, dtype: torch.dtype) -> None:
    words = of_words(f"cvt.rn.{name}.f32 %r3, 0f3F800000, %r2;", floats(VALUES))
    low = torch.tensor([word & 0xFFFF for word in words], dtype=torch.int32).to(torch.int16).view(dtype)
    assert torch.equal(low, torch.tensor(VALUES).to(dtype))
    assert {word >> 16 for word in words} == {int(torch.tensor(1.0, dtype=dtype).view(torch.int16))}


def test_every_e4m3_number_widens_to_fp16_and_back() -> None:
    body = "cvt.u16.u32 %h1, %r2; cvt.rn.f16x2.e4m3x2 %r3, %h1;"
    for first in range(0, 256, 32):
        codes = list(range(first, first + 32))
        words = of_words(body, codes)
        got = torch.tensor([word & 0xFFFF for word in words], dtype=torch.int32).to(torch.int16).view(torch.float16)
        expected = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float16)
        assert torch.equal(got.nan_to_num(-1), expected.nan_to_num(-1))


def test_rounding_to_e4m3_saturates() -> None:
    values = [value for value in VALUES if math.isfinite(value)] + [-460.0, 1e-3, 2**-9, 2**-10, 3 * 2**-10]
    words = of_words("cvt.rn.satfinite.e4m3x2.f32 %h1, 0f00000000, %r2; cvt.u32.u16 %r3, %h1;", floats(values))
    expected = torch.tensor(values).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    assert words == expected


def test_bf16_to_fp16_goes_through_fp32() -> None:
    body = "cvt.u16.u32 %h1, %r2; cvt.f32.bf16 %r4, %h1; cvt.rn.f16.f32 %h2, %r4; cvt.u32.u16 %r3, %h2;"
    source = torch.tensor([1.5, -0.007, 3e5, 1e-7]).bfloat16()
    words = of_words(body, [int(v) & 0xFFFF for v in source.view(torch.int16)])
    assert words == [int(v) & 0xFFFF for v in source.half().view(torch.int16)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;", [lane ^ 1 for lane in range(32)]),
        ("shfl.sync.up.b32 %r3, %r2, 2, 0, -1;", [lane if lane < 2 else lane - 2 for lane in range(32)]),
        ("shfl.sync.down.b32 %r3, %r2, 4, 31, -1;", [lane if lane > 27 else lane + 4 for lane in range(32)]),
        ("shfl.sync.idx.b32 %r3, %r2, 3, 0x181f, -1;", [lane // 8 * 8 + 3 for lane in range(32)]),
        ("redux.sync.max.s32 %r3, %r2, -1;", [31] * 32),
        ("setp.gt.s32 %p1, %r2, 29; vote.sync.ballot.b32 %r3, %p1, -1;", [0xC0000000] * 32),
        ("elect.sync %r4|%p1, -1; selp.b32 %r3, 1, 0, %p1;", [1] + [0] * 31),
        (
            "setp.lt.s32 %p1, %r2, 10; @%p1 bra LOW; mov.b32 %r3, 5; bra.uni JOIN; LOW: mov.b32 %r3, 1; JOIN: "
            "shfl.sync.idx.b32 %r3, %r3, 20, 31, -1;",
            [5] * 32,
        ),
    ],
)
def test_exchange_within_a_warp(body: str, expected: list[int]) -> None:
    assert of_words(body, range(32)) == expected


def test_lanes_that_never_meet_are_reported() -> None:
    body = "setp.lt.s32 %p1, %r0, 10; @%p1 bra LOW; bar.warp.sync -1; ret; LOW: nanosleep 5; ret;"
    with pytest.raises(Fault, match="deadlock|divergence"):
        execute("setp.lt.s32 %p1, %r0, 10; @%p1 bra LOW; bar.warp.sync 3; LOW:")
    execute(body)  # lanes that have ended are waited for no more


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix(transposed: bool) -> None:
    trans = ".trans" if transposed else ""
    body = f"""{WORDS}
    mov.b32 %r10, smem;
    shl.b32 %r11, %r0, 4; add.s32 %r12, %r10, %r11;
    stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r12], {{%r2}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 {{%r3}}, [%r12];
    st.global.b32 [%d3], %r3;"""
    source = torch.arange(64, dtype=torch.int16).view(8, 8)
    out = execute(body, source.view(torch.int32).flatten())
    assert torch.equal(out.view(torch.int16).view(8, 8), source.T if transposed else source)


def test_atomics() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    execute("red.global.add.s32 [%d1], %r0;", out=out, threads=64, grid=3)
    assert out.item() == 3 * sum(range(64))


@pytest.mark.parametrize("seed", range(4))
def test_named_barriers_and_reductions(seed: int) -> None:
    body = f"""{WORDS}
    setp.gt.s32 %p1, %r2, 90;
    bar.red.popc.u32 %r3, 1, 128, %p1;
    st.global.b32 [%d3], %r3;"""
    assert execute(body, threads=128, seed=seed).tolist() == [128 - 91] * 128


def test_an_unknown_opcode_stops_it_with_its_text_and_line() -> None:
    with pytest.raises(Fault, match=r"unknown opcode: line \d+: .*`frobnicate\.b32 %r1, %r2;`"):
        execute("frobnicate.b32 %r1, %r2;")
    with pytest.raises(Fault, match="unknown opcode"):  # a known one with a qualifier that is not
        execute("add.cc.u32 %r1, %r0, %r0;")


def test_a_loop_without_end_is_reported() -> None:
    with pytest.raises(Fault, match="livelock"):
        execute("AGAIN: bra AGAIN;", max_steps=1000)
