"""Arithmetic that decode and combine share."""

import cutlass.cute as cute
from cutlass import Float32


def shift_of(c, ref, scale):
    """What P, the sum and O of a row with reference `ref` are relative to, in log2 units."""
    return ref * scale - c.lift


@cute.jit
def row_result(shift, total, args):
    """(factor of O, LSE) of a finished row. One that saw no token (total 0) gets factor 0 and LSE -inf."""
    empty = total == 0.0
    gain = Float32(0.0) if empty else args.out_scale * cute.arch.rcp_approx(total)
    lse = -Float32.inf if empty else (shift + cute.math.log2(total, fastmath=True)) * args.lse_scale
    return gain, lse
