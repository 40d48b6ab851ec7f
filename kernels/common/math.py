"""Arithmetic that decode and combine share."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32


def shift_of(c, ref, scale):
    """What P, the sum and O of a row with reference `ref` are relative to, in log2 units."""
    return ref * scale - c.lift


def half_scale(top):
    """(factor, its inverse), powers of two: what brings numbers up to `top` >= 0 in magnitude into fp16 and back. `top`
    comes to lie in [2**14, 2**15), a tiny one below, so that factor and inverse are normal numbers. Where it is
    infinite, finite numbers below 2**100 lose bits.
    """
    exponent = cutlass.max(top.bitcast(Int32) >> 23, 15)  # biased
    return ((127 + 14 + 127 - exponent) << 23).bitcast(Float32), ((exponent - 14) << 23).bitcast(Float32)


@cute.jit
def scale_by(scale, address):
    """scale times the fp32 in device memory at `address`, if that is not 0."""
    if address != 0:
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
        scale = scale * cute.make_tensor(pointer, cute.make_layout(1))[0]
    return scale


@cute.jit
def row_result(shift, total, args):
    """(factor of O, LSE) of a finished row. One that saw no token (total 0) gets factor 0 and LSE -inf."""
    empty = total == 0.0
    gain = Float32(0.0) if empty else args.out_scale * cute.arch.rcp_approx(total)
    lse = -Float32.inf if empty else (shift + cute.math.log2(total, fastmath=True)) * args.lse_scale
    return gain, lse


@cute.jit
def with_output(args, body: cutlass.Constexpr):
    """body(out), with the output's rows in the dtype that they have: one compiled kernel serves both."""
    if args.out_bf16 != 0:
        body(cute.make_tensor(cute.recast_ptr(args.out.iterator, dtype=BFloat16), args.out.layout))
    else:
        body(cute.make_tensor(cute.recast_ptr(args.out.iterator, dtype=Float16), args.out.layout))
