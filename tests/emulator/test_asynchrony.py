"""Barriers, copies, clusters, products: small kernels, right ones and ones with a mistake."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from .machine import Fault
from .snippet import execute

ELEMENT = {torch.uint8: 0, torch.float32: 7, torch.float16: 6, torch.bfloat16: 10}  # as tma.cpp reads them
SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes

WAIT = """
AGAIN{n}: mbarrier.try_wait.parity.shared.b64 %p9, [%r10], {parity};
@%p9 bra GO{n};
bra AGAIN{n};
GO{n}:
"""
INIT = """
mov.b32 %r10, smem;
add.s32 %r11, %r10, 1024;
setp.ne.s32 %p8, %r0, 0;
@%p8 bra READY;
mbarrier.init.shared.b64 [%r10], 1;
fence.mbarrier_init.release.cluster;
READY: bar.sync 0;
"""


def tensor_map(tensor: Tensor, box: Sequence[int], swizzle: int) -> Tensor:
    """The 128 bytes of a tensor map, dimension 0 last in the tensor; 64-byte aligned."""
    sizes, strides = tensor.shape[::-1], [s * tensor.element_size() // 16 for s in tensor.stride()[::-1]]
    rank = tensor.ndim
    flags = 0x40002 | (rank - 1) << 4 | ELEMENT[tensor.dtype] << 7 | SWIZZLE[swizzle] << 13
    lows = [s & 0xFFFFFFFF for s in strides[1:]] + [0] * (5 - rank)
    high = sum((s >> 32) << 4 * k for k, s in enumerate(strides[1:]))
    boxes = [b - 1 for b in box] + [0] * (5 - rank)
    words = [flags, *lows, high, *(s - 1 for s in sizes), *[0] * (5 - rank), boxes[0] << 24]
    words.append(sum(b << 8 * k for k, b in enumerate(boxes[1:])))
    raw = torch.zeros(192, dtype=torch.uint8)
    start = -raw.data_ptr() % 64
    content = struct.pack("<Q", tensor.data_ptr()) + struct.pack(f"<{len(words)}I", *words)
    raw[start : start + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return raw[start : start + 128]


def boxed(tensor: Tensor, at: Sequence[int], box: Sequence[int]) -> Tensor:
    """The box as a tensor copy fetches it, zeros outside; at and box with dimension 0 first."""
    out = torch.zeros(tuple(box[::-1]), dtype=tensor.dtype)
    for index in product(*(range(b) for b in box[::-1])):
        place = [i + a for i, a in zip(index, at[::-1], strict=True)]
        if all(0 <= p < s for p, s in zip(place, tensor.shape, strict=True)):
            out[index] = tensor[tuple(place)]
    return out


def unswizzled(raw: Tensor, swizzle: int) -> Tensor:
    """Bytes of shared memory in the order in which they would lie without swizzle."""
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    at = torch.arange(len(raw))
    return raw[at ^ (((at >> 7) & mask) << 4)]


def fetched(
    tensor: Tensor, at: Sequence[int], box: Sequence[int], swizzle: int, seed: int = 0, wait: str = "0"
) -> Tensor:
    """A box, through a tensor copy into shared memory and from there, unswizzled."""
    elements = torch.Size(box).numel()
    size = elements * tensor.element_size()
    descriptor = tensor_map(tensor, box, swizzle)
    out = torch.zeros(size // 4, dtype=torch.int32)
    body = f"""{INIT}
    @%p8 bra COPIED;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r10], {size};
    mov.b64 %d5, {descriptor.data_ptr()};
    cp.async.bulk.tensor.{len(box)}d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r11],
        [%d5, {{{", ".join(map(str, at))}}}], [%r10];
    COPIED: {WAIT.format(n=1, parity=wait)}
    mov.b32 %r20, %r0;
    NEXT: shl.b32 %r21, %r20, 2; add.s32 %r22, %r11, %r21; ld.shared.b32 %r23, [%r22];
    cvt.u64.u32 %d6, %r21; add.s64 %d7, %d1, %d6; st.global.b32 [%d7], %r23;
    add.s32 %r20, %r20, 32; setp.lt.s32 %p1, %r20, {size // 4}; @%p1 bra NEXT;"""
    execute(body, tensor.view(-1), out, smem=1024 + size, seed=seed)
    return unswizzled(out.view(torch.uint8), swizzle).view(tensor.dtype).view(tuple(box[::-1]))


@pytest.mark.parametrize(
    ("dtype", "shape", "at", "box", "swizzle"),
    [
        (torch.bfloat16, (20, 64), (0, 3), (64, 8), 128),
        (torch.bfloat16, (20, 64), (32, 15), (32, 8), 64),
        (torch.float16, (9, 48), (-4, -2), (16, 4), 32),
        (torch.float32, (9, 40), (20, 5), (32, 8), 128),
        (torch.uint8, (5, 64), (16, 1), (64, 2), 0),
        (torch.bfloat16, (3, 2, 10, 16, 64), (0, 8, 1, 0, 2), (64, 8, 2, 2, 1), 128),
        (torch.bfloat16, (3, 4, 9, 64), (0, 4, 3, 1), (64, 8, 2, 2), 128),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_tensor_copy_fetches_its_box(
    dtype: torch.dtype, shape: tuple[int, ...], at: tuple[int, ...], box: tuple[int, ...], swizzle: int, seed: int
) -> None:
    tensor = torch.randint(1, 100, shape).to(dtype)
    assert torch.equal(fetched(tensor, at, box, swizzle, seed), boxed(tensor, at, box))


def test_data_read_before_it_is_there() -> None:
    with pytest.raises(Fault, match="missing wait"):
        fetched(torch.ones(8, 64).bfloat16(), (0, 0), (64, 8), 128, wait="1")  # the phase before the first is over


def test_a_tensor_map_with_an_unknown_bit() -> None:
    tensor = torch.ones(8, 64).bfloat16()
    descriptor = tensor_map(tensor, (64, 8), 128)
    descriptor[11] = 0x80
    body = f"{INIT} mov.b64 %d5, {descriptor.data_ptr()}; " + (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r11], [%d5, {0, 0}], [%r10];"
    )
    with pytest.raises(Fault, match="tensor map"):
        execute(body, tensor.view(-1))


STORE = """
add.s32 %r12, %r11, {skew};
shl.b32 %r13, %r0, 2; add.s32 %r14, %r12, %r13;
st.shared.b32 [%r14], %r0;
{between}
shl.b32 %r15, %r0, 2; xor.b32 %r15, %r15, 4; add.s32 %r16, %r11, %r15; ld.shared.b32 %r3, [%r16];
cvt.u64.u32 %d5, %r13; add.s64 %d6, %d1, %d5; st.global.b32 [%d6], %r3;
"""
ADDRESS = "mov.b32 %r10, smem; add.s32 %r11, %r10, 1024;"


def test_warps_that_exchange_words_need_a_barrier() -> None:
    crossed = STORE.replace("xor.b32 %r15, %r15, 4", "xor.b32 %r15, %r15, 128")  # the other warp's
    right = execute(ADDRESS + crossed.format(skew=0, between="bar.sync 0;"), threads=64)
    assert right.tolist() == [thread ^ 32 for thread in range(64)]
    with pytest.raises(Fault, match=r"race|uninitialised shared memory"):
        execute(ADDRESS + crossed.format(skew=0, between=""), threads=64)


def test_misaligned_and_out_of_bounds() -> None:
    with pytest.raises(Fault, match=r"misaligned: 4 bytes at smem\+1026"):
        execute(ADDRESS + STORE.format(skew=2, between=""))
    with pytest.raises(Fault, match=r"out of bounds: 4 bytes at smem\+4096; the CTA has 4096"):
        execute(ADDRESS + STORE.format(skew=3072 - 64, between=""))
    with pytest.raises(Fault, match="a write to source, which is an input"):
        execute("st.global.b32 [%d0], %r0;")
    with pytest.raises(Fault, match="uninitialised register: .*comes from memory that was never written"):
        execute("ld.global.b32 %r2, [%d1]; st.global.b32 [%d1], %r2;")


def test_too_few_and_too_many_arrivals() -> None:
    arrive = "mbarrier.arrive.shared.b64 %d5, [%r10];"
    with pytest.raises(Fault, match=r"(?s)deadlock: .*lacks 1 arrivals"):
        execute(INIT + WAIT.format(n=1, parity=0))
    execute(f"{INIT} @%p8 bra ON; {arrive} ON: {WAIT.format(n=1, parity=0)}")
    with pytest.raises(Fault, match="barrier count"):
        execute(f"{INIT} @%p8 bra ON; mbarrier.arrive.shared.b64 %d5, [%r10], 2; ON:")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("waits", [True, False])
def test_a_word_of_a_peer_in_the_cluster(waits: bool, seed: int) -> None:
    barrier = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    body = f"""{ADDRESS}
    mov.u32 %r5, %cluster_ctarank; xor.b32 %r6, %r5, 1;
    shl.b32 %r13, %r0, 2; add.s32 %r14, %r11, %r13;
    mad.lo.s32 %r15, %r5, 100, %r0; st.shared.b32 [%r14], %r15;
    {barrier if waits else ""}
    mapa.shared::cluster.u32 %r16, %r14, %r6; ld.shared::cluster.b32 %r3, [%r16];
    {barrier if waits else ""}
    mad.lo.s32 %r17, %r1, 32, %r0; mul.wide.s32 %d5, %r17, 4; add.s64 %d6, %d1, %d5; st.global.b32 [%d6], %r3;"""
    out = torch.zeros(64, dtype=torch.int32)
    if waits:
        execute(body, out=out, grid=2, cluster=2, seed=seed)
        assert out.tolist() == [100 + lane for lane in range(32)] + list(range(32))
    else:
        with pytest.raises(Fault, match="race|uninitialised shared memory|has ended"):
            execute(body, out=out, grid=2, cluster=2, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_multicast_reaches_both_ctas(seed: int) -> None:
    tensor = torch.randint(1, 100, (8, 64)).bfloat16()
    descriptor = tensor_map(tensor, (64, 8), 128)
    body = f"""{INIT}
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @%p8 bra COPIED;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r10], 1024;
    mov.u32 %r5, %cluster_ctarank; setp.ne.s32 %p7, %r5, 0; @%p7 bra COPIED;
    mov.b64 %d5, {descriptor.data_ptr()}; mov.b16 %h1, 3;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r11],
        [%d5, {{0, 0}}], [%r10], %h1;
    COPIED: {WAIT.format(n=1, parity=0)}
    shl.b32 %r21, %r0, 2; add.s32 %r22, %r11, %r21; ld.shared.b32 %r23, [%r22];
    mad.lo.s32 %r17, %r1, 32, %r0; mul.wide.s32 %d6, %r17, 4; add.s64 %d7, %d1, %d6; st.global.b32 [%d7], %r23;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    out = torch.zeros(64, dtype=torch.int32)
    execute(body, tensor.view(-1), out, grid=2, cluster=2, seed=seed)
    row = tensor[0].view(torch.int32)
    assert torch.equal(out.view(2, 32), row.expand(2, 32))


@pytest.mark.parametrize(("fence", "group"), [(True, True), (False, True), (True, False)])
def test_a_bulk_copy_out_of_shared_memory(fence: bool, group: bool) -> None:
    body = f"""{ADDRESS}
    shl.b32 %r13, %r0, 2; add.s32 %r14, %r11, %r13; add.s32 %r15, %r0, 7; st.shared.b32 [%r14], %r15;
    {"fence.proxy.async.shared::cta;" if fence else ""} bar.warp.sync -1;
    setp.ne.s32 %p1, %r0, 0; @%p1 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r11], 128;
    cp.async.bulk.commit_group;
    {"cp.async.bulk.wait_group.read 0;" if group else ""}
    DONE:"""
    if fence and group:
        assert execute(body, seed=1).tolist() == list(range(7, 39))
    else:
        with pytest.raises(Fault, match="missing wait" if fence else "missing proxy fence"):
            execute(body, seed=1)
