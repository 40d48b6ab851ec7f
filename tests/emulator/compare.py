"""Run cases in the emulator beside the reference, or beside what a GPU gave.

In the emulator, against the reference in fp64:
    .venv/bin/python -m tests.emulator.compare --select NAME
On a GPU, with torch, tvm-ffi and a bundle, without a compiler or cutlass; then in the emulator, against what was kept:
    MLA_CUTE_AOT_DIR=DIR python -m tests.emulator.compare --save FILE
    .venv/bin/python -m tests.emulator.compare --against FILE
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from mla_cute.problem import DTYPES
from mla_cute.testing import Case, expected_of

from .cases import Problem, Result, run, table

EXACT = ("uniform", "select")  # kinds whose every product and sum of out is exact: bits must be the same
LSE_TOLERANCE = 2e-5
FP8_TOLERANCE = 1e-3  # with an e4m3 query: a GPU's tensor cores keep some 13 bits of its products, the emulator all


def parser() -> argparse.ArgumentParser:
    summary, _, usage = (__doc__ or "").partition("\n")
    shape = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser("python -m tests.emulator.compare", None, summary, usage, formatter_class=shape)
    other = options.add_mutually_exclusive_group()
    other.add_argument("--save", type=Path, metavar="FILE", help="run on the GPU and keep the results")
    other.add_argument("--against", type=Path, metavar="FILE", help="compare with kept results")
    options.add_argument("--select", default="", metavar="NAME", help="only cases with this in their name")
    options.add_argument("--seed", type=int, default=0, help="of the interleaving: 1 is late, 2 at once")
    options.add_argument(
        "--ptx", type=Path, metavar="FILE", help="PTX to run instead of the kernel's own, edited by hand"
    )
    return options


def on_gpu(names: list[str]) -> dict[str, Result]:
    results = {}
    for name in names:
        config, problem = table()[name]
        out, lse = run(config, problem, problem.case(config, "cuda"))
        results[name] = out.cpu(), None if lse is None else lse.cpu()
        print(f"{name}: {int(out.isnan().sum())} NaN", flush=True)
    return results


def emulated(config: Any, problem: Problem, case: Case, seed: int, ptx: Path | None) -> Result:
    from .build import compiled
    from .launcher import Kernel, emulated, kernel

    own = Kernel(compiled(config), seed, ptx.read_text()) if ptx else kernel(config, seed)
    with emulated(lambda _: own):
        return run(config, problem, case)


def line(name: str, ours: Result, theirs: Result, reference: bool) -> tuple[str, bool]:
    """A line of the table, and whether the two agree."""
    config, problem = table()[name]
    (out, lse), (other_out, other_lse) = ours, theirs
    same = out.dtype == other_out.dtype and torch.equal(out.view(torch.int16), other_out.view(torch.int16))
    gap = out.double() - other_out.double()
    total, worst = float(gap.norm() / other_out.double().norm().clamp(min=1e-30)), float(gap.abs().max())
    good = total <= max(DTYPES[config.kv_dtype].tolerance, DTYPES[problem.out_dtype].tolerance)
    if problem.kind in EXACT and not reference:
        good = same
    text = f"{name:42s} out {'same bits' if same else f'L2 {total:.1e}, at most {worst:.1e}':28s}"
    if lse is not None and other_lse is not None:
        seen = other_lse != -torch.inf
        distance = (lse[seen].double() - other_lse[seen].double()).abs()
        good &= torch.equal(seen, lse != -torch.inf)
        tolerance = FP8_TOLERANCE if config.q_dtype == "e4m3" else LSE_TOLERANCE
        good &= bool((distance <= tolerance / 0.693 + 1e-6 * other_lse[seen].abs()).all())
        text += f" lse at most {float(distance.max()) if len(distance) else 0:.1e}"
    return text + ("" if good else "   DIFFERS"), good


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    names = [name for name in table() if options.select in name]
    if options.save:
        torch.save(on_gpu(names), options.save)
        return 0
    saved = torch.load(options.against) if options.against else None
    names = [name for name in names if saved is None or name in saved]
    bad = 0
    for name in names:
        config, problem = table()[name]
        case = problem.case(config)
        ours = emulated(config, problem, case, options.seed, options.ptx)
        theirs = (
            expected_of(case, problem.lse_mode if ours[1] is not None else "basee") if saved is None else saved[name]
        )
        text, good = line(name, ours, theirs, saved is None)
        print(text, flush=True)
        bad += not good
    print(f"{len(names)} cases, {bad} differ")
    return int(bad > 0 or not names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
