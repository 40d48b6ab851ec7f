"""Arithmetic that decode and combine share."""

import cutlass.cute as cute
from cutlass import Float32


@cute.jit
def row_result(ref, total, args):
    """(factor of O, LSE) of a finished row, from its reference in log2 units and its sum relative to it. A row that
    saw no token (total 0) gets factor 0 and LSE -inf.
    """
    empty = total == 0.0
    gain = Float32(0.0) if empty else args.out_scale * cute.arch.rcp_approx(total)
    lse = -Float32.inf if empty else (ref + cute.math.log2(total, fastmath=True)) * args.lse_scale
    return gain, lse
