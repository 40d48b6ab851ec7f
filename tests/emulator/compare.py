"""The cases on a GPU and in the emulator, side by side.

On a GPU (needs torch, tvm-ffi and compiled kernels, neither a compiler nor cutlass):
    MLA_CUTE_AOT_DIR=DIR python -m tests.emulator.compare --save FILE
Anywhere, from the repository's root:
    python -m tests.emulator.compare --against FILE
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from mla_cute.problem import DTYPES

from .cases import Result, run, table

EXACT = ("uniform", "select")  # kinds whose every product and sum of out is exact: bits must be the same
LSE_TOLERANCE = 2e-5


def on_gpu(names: list[str]) -> dict[str, Result]:
    cases, results = table(), {}
    for name in names:
        config, problem = cases[name]
        out, lse = run(config, problem, problem.case(config, "cuda"))
        results[name] = out.cpu(), None if lse is None else lse.cpu()
        print(f"{name}: {out.isnan().sum().item()} NaN", flush=True)
    return results


def emulated(name: str, seed: int) -> Result:
    from .launcher import emulated, kernel

    config, problem = table()[name]
    with emulated(lambda chosen: kernel(chosen, seed)):
        return run(config, problem, problem.case(config))


def difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Relative L2 distance, and the largest difference of an element."""
    gap = a.double() - b.double()
    return float(gap.norm() / b.double().norm().clamp(min=1e-30)), float(gap.abs().max()) if gap.numel() else 0.0


def row(name: str, ours: Result, theirs: Result) -> tuple[str, bool]:
    """A line of the table, and whether the two agree."""
    config, problem = table()[name]
    out, lse = ours
    same = torch.equal(out.view(torch.int16), theirs[0].view(torch.int16))
    total, worst = difference(out, theirs[0])
    limit = max(DTYPES[config.in_dtype].tolerance, DTYPES[config.out_dtype].tolerance)
    good = same if problem.kind in EXACT else total <= limit
    line = f"{name:44s} out {'same bits' if same else f'L2 {total:.1e}, at most {worst:.1e}':32s}"
    if lse is not None and theirs[1] is not None:
        seen = theirs[1] != -torch.inf
        good &= torch.equal(seen, lse != -torch.inf)
        gap = float((lse[seen] - theirs[1][seen]).abs().max()) if seen.any() else 0.0
        good &= gap <= LSE_TOLERANCE + 1e-6 * float(theirs[1][seen].abs().max() if seen.any() else 0)
        line += f" lse at most {gap:.1e}"
    return line + ("" if good else "   DIFFERS"), good


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.emulator.compare", description=(__doc__ or "").splitlines()[0]
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--save", type=Path, metavar="FILE", help="run on the GPU and keep the results")
    what.add_argument("--against", type=Path, metavar="FILE", help="run in the emulator and compare")
    parser.add_argument("--select", default="", help="only cases with this in their name")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    names = [name for name in table() if options.select in name]
    if options.save:
        torch.save(on_gpu(names), options.save)
        return 0
    saved = torch.load(options.against)
    lines = [row(name, emulated(name, options.seed), saved[name]) for name in names if name in saved]
    print(*(line for line, _ in lines), sep="\n")
    bad = sum(not good for _, good in lines)
    print(f"{len(lines)} cases, {bad} differ, {len(names) - len(lines)} are not in the file")
    return int(bad > 0 or not lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
