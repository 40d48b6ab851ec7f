"""The roofline: each case's rate over its operations a byte, under what this machine copies and multiplies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mla_cute.bench.report import Measurement
from mla_cute.bench.timing import Rates


def problem(prefix: Path) -> str | None:
    """Why no roofline can be written there, to be known before an hour of measuring."""
    if not prefix.parent.is_dir():
        return f"there is no folder {str(prefix.parent)!r}"
    return None if find_spec("matplotlib") else "needs matplotlib: pip install 'mla_cute[bench]'"


def roofline(prefix: Path, measured: Sequence[Measurement], rates: Rates, gpu: str) -> None:
    """Write PREFIX.png and PREFIX.svg; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="FLOP / byte", ylabel="TFLOP/s")
    axes.set_title(f"MLA decode on {gpu}: {rates}")
    intensity = [m.case.flops / m.case.bytes for m in measured]
    ends = sorted([min(intensity) / 2, rates.gemm / rates.copy, max(intensity) * 2])
    axes.plot(ends, [min(x * rates.copy, rates.gemm) / 1e12 for x in ends], color="black", label="copy, gemm")
    peers = [(x, m, m.anchor.expected(rates)[0]) for x, m in zip(intensity, measured, strict=True) if m.anchor]
    rate = [m.case.flops / seconds / 1e12 for _, m, seconds in peers]
    axes.scatter([x for x, *_ in peers], rate, s=30, facecolors="none", edgecolors="tab:red", label="best other kernel")
    axes.scatter(intensity, [m.flop_rate / 1e12 for m in measured], s=12, color="tab:blue", label="mla_cute", zorder=3)
    top: dict[int, float] = {}  # of the labels of points of about the same intensity, which stack up
    for x, m in sorted(zip(intensity, measured, strict=True), key=lambda point: point[1].flop_rate):
        column = round(math.log2(x))
        top[column] = max(m.flop_rate / 1e12, 1.05 * top.get(column, 0.0))
        axes.text(x * 1.02, top[column], str(m.case), fontsize=6, va="center")
    axes.grid(which="both", alpha=0.2)
    axes.legend(loc="lower right")
    for kind in ("png", "svg"):
        figure.savefig(f"{prefix}.{kind}", dpi=150)
