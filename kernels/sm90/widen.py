"""An e4m3 cache in fp16 products: WGMMA takes tokens and latents as rows of its register operand (A), just widened.

ldmatrix moves pairs of bytes as it would 16-bit numbers, so a lane gets other columns than the fragment wants:

    keys     [token][latent]: a lane gets latents 4t .. 4t+3 of its token (t = lane % 4), and the fragment asks for
             places 2t, 2t+1, 2t+8, 2t+9 of 16. The order of the 16 does not matter as long as the query has it, too:
             place 2t+e of its rows holds latent 4t+e, place 8+2t+e latent 4t+2+e (`widen_query`).
    values   transposed: a lane gets latents 2g, 2g+1 (g = lane // 4) of tokens 2t, 2t+1, in two rows of O^T 8 apart:
             row g of 16 is latent 2g, row g+8 latent 2g+1. The epilogue knows that (`latent_of`).

fp16 holds every e4m3 number. bf16 query rows become fp16 after a power of two of their own has brought their largest
element to 2**15 or just above: what lies within 2**32 of it keeps its bits, and the rest is off by less than 2**-40 of
the largest. The scores of a row are divided by its power of two again, in its `gain`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from ..common.work_device import LANES
from .layouts import CHUNK, query_word

STEP = 32  # columns or tokens that one ldmatrix brings: the depth of two WGMMAs
GROUP_BYTES = 8 * CHUNK  # eight tokens of a chunk


def load_matrices(address, transposed):
    """Four 8 x 8 matrices of byte pairs, whose rows are at each lane's address."""
    how = ".trans" if transposed else ""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16 " + "{{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def lane_offsets(warp, lane):
    """Where in a slot of the ring a lane finds its row of the four matrices. keys: of the first 32 latents of a chunk;
    of the second 32 it is that with bit 5 flipped. values: of the first 32 tokens.
    """
    turn = (lane & 7) >> 1  # the 64-byte swizzle of its row
    line = (lane & 7) * CHUNK
    keys = (2 * warp + (lane >> 3 & 1)) * (GROUP_BYTES * 3) + line + (lane >> 4 ^ turn) * 16
    values = (lane >> 3) * (GROUP_BYTES * 3) + line + (warp ^ turn) * 16
    return keys, values


def fill_fragment(fragment, words, transposed):
    """fp16 A fragment of two WGMMAs from what ldmatrix brought."""
    target = cute.recast_tensor(fragment, Int32)
    for i, raw in enumerate(words):
        four = Int32(cute.arch.prmt(raw, raw, 0x3120)) if transposed else raw  # the bytes of latent 2g first
        for half, pair in enumerate(widened(four)):
            # keys: of registers 0 and 1 (tokens g and g+8) the lower halves, then the upper ones
            target[2 * i + half if transposed else i // 2 * 4 + half * 2 + i % 2] = pair


def widened(word):
    """Four e4m3 numbers as two pairs of fp16. Volatile: were it moved behind the fence before a WGMMA, ptxas would set
    up each WGMMA on its own.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
        write_only_types=[Int32, Int32],
        read_only_args=[word],
    )


@cute.jit
def widen_query(c: cutlass.Constexpr, smem, scale, warp, lane):
    """The query rows in place, a row a warp at a time: to fp16, in the order of the keys' places."""
    groups = c.head_dim // 16  # of latents, in two words of 16 bytes
    for row in cutlass.range(warp, c.rows, c.math_warps, unroll=1):
        raw = [cute.make_rmem_tensor((8,), Int32) for _ in range(2)]  # of groups lane and LANES + lane
        for k in cutlass.range_constexpr(2):
            raw[k].fill(0)
            if lane + k * LANES < groups:
                for j in cutlass.range_constexpr(2):
                    source = word(c, smem, row, (lane + k * LANES) * 2 + j)
                    cute.autovec_copy(source, cute.local_tile(raw[k], (4,), (j,)))
        factor = Float32(1.0)
        if const_expr(c.row_gains):
            factor, gain = row_factor(raw)
            if lane == 0:
                smem.gain[row] = cutlass.max(gain * scale, Float32(2.0**-126))  # 0 x -inf would be NaN
        cute.arch.sync_warp()  # all of the row is read
        for k in cutlass.range_constexpr(2):
            wide = cute.make_rmem_tensor((16,), Float16)
            source = cute.recast_tensor(raw[k], c.q_type)
            if const_expr(c.row_gains):
                wide.store((source.load().to(Float32) * factor).to(Float16))
            else:
                wide.store(source.load().to(Float16))
            pairs = cute.recast_tensor(wide, Int32)
            if lane + k * LANES < groups:
                for j in cutlass.range_constexpr(2):
                    places = cute.make_rmem_tensor((4,), Int32)
                    for t in cutlass.range_constexpr(4):
                        places[t] = pairs[2 * t + j]
                    cute.autovec_copy(places, word(c, smem, row, (lane + k * LANES) * 2 + j))


def word(c, smem, row, index):
    """16 bytes of a query row."""
    address = smem.query.iterator.toint() + query_word(c, row, index)
    return cute.make_tensor(
        cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16), cute.make_layout(4)
    )


@cute.jit
def row_factor(raw):
    """(2**k, 2**-k) for bf16 words of a row, all lanes' together: 2**k brings the largest element to [2**15, 2**16)."""
    top = Int32(0)
    for part in raw:
        for i in cutlass.range_constexpr(cute.size(part)):
            top = cutlass.max(top, cutlass.max(part[i] & 0x7FFFFFFF, (part[i] << 16) & 0x7FFFFFFF))
    top = cute.arch.warp_redux_sync(top, kind="max")
    power = cutlass.min(cutlass.max(269 - (top >> 23), 1), 253)  # 127 + k
    return (power << 23).bitcast(Float32), ((254 - power) << 23).bitcast(Float32)
