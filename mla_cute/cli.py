"""The command line: info, check, aot build, aot list, bench. Results go to stdout, progress to stderr."""

from __future__ import annotations

import fnmatch
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

import mla_cute
from mla_cute import aot, dispatch
from mla_cute.problem import DTYPES, INPUT_DTYPES

ARCHES = click.Choice(sorted(dispatch.KERNELS))
DTYPE = click.Choice(list(DTYPES))
JSON = click.option("--json", "json_file", type=click.File("w"), help="Write the results to this file as JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(mla_cute.__version__)
def main() -> None:
    """Kernels for MLA decode (DeepSeek, Kimi) over a paged KV cache.

    Start with `info` (what is here) and `check` (does it compute right answers).
    """


@main.command()
@JSON
def info(json_file: Any) -> None:
    """Show what is here, and where each kernel would come from.

    Lists the GPU, the driver, the packages found and the shipped kernels. Needs neither a GPU nor the CuTe DSL, and
    compiles nothing. "needs compilation" means that the first use of the kernel takes 5 to 20 seconds; the result is
    kept in the cache folder.
    """
    from mla_cute.info import collect

    facts = collect()
    width = max(len(name) for name in [*facts["facts"], *facts["kernels"]])
    for name, value in facts["facts"].items():
        click.echo(f"{name:{width}}  {value}")
    click.echo("kernels")
    for name, state in facts["kernels"].items():
        click.echo(f"  {name:{width}}  {state}")
    _write(json_file, facts)


@main.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Default: the GPU if there is one, else the CPU.")
@click.option("--select", metavar="PATTERN", default="*", help="Only cases whose name matches, e.g. '*heads'.")
@JSON
def check(device: str | None, select: str, json_file: Any) -> None:
    """Compute a table of cases, and compare the answers.

    Each case is compared with a plain fp64 formula. On a GPU this checks the kernels (compiling those that are not
    there yet, 5 to 20 seconds a kernel), without one the reference implementation. Prints a line a case. Exit status
    0: all passed, 1: not all.
    """
    import torch

    from mla_cute import check as table

    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch sees no GPU here")
    cases = [row for row in table.rows() if fnmatch.fnmatch(row.name, select)]
    if not cases:
        raise click.BadParameter(f"{select!r} matches no case", param_hint="--select")
    what = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else "the reference implementation on the CPU"
    click.echo(f"checking {what}: {len(cases)} cases")
    results = []
    for row in cases:
        result = table.run(row, chosen)
        results.append(result)
        error = "" if math.isnan(result.error) else f"  error {result.error:.1e}"
        click.echo(f"{'FAIL' if result.problem else 'pass'}  {result.name:46}{error}  {result.seconds:6.2f} s")
        if result.problem:
            click.echo(f"      {result.problem}")
    failed = sum(result.problem is not None for result in results)
    click.echo(f"{len(results) - failed} passed, {failed} failed")
    _write(json_file, {"device": what, "results": [vars(result) for result in results]})
    raise SystemExit(1 if failed else 0)


@main.group(name="aot")
def aot_group() -> None:
    """Compile kernels ahead of time.

    For servers that must not wait for a compiler (5 to 20 seconds a kernel), and for machines without one. A machine
    that loads a bundle needs neither a compiler nor cutlass, but apache-tvm-ffi and the CuTe DSL's run-time library
    libcute_dsl_runtime.so, which MLA_CUTE_DSL_RUNTIME names where nvidia-cutlass-dsl is not installed.
    """


def _by_dtype(command: Callable[..., None]) -> Callable[..., None]:
    """The options that choose kernels by their dtypes."""
    for name, what, names in (
        ("kv", "caches", list(DTYPES)),
        ("q", "queries", list(DTYPES)),
    ):
        words = f"Only kernels for {what} of that type; repeatable."
        command = click.option(f"--{name}-dtype", type=click.Choice(names), multiple=True, help=words)(command)
    return command


@aot_group.command(name="list")
@click.option("--arch", type=ARCHES, help="Only those of one GPU architecture; sm_90a is Hopper.")
@_by_dtype
@JSON
def aot_list(arch: str | None, json_file: Any, **dtypes: Sequence[str]) -> None:
    """List the kernels that this version ships."""
    configs = [config for config in dispatch.shipped(arch) if _has_dtypes(config, dtypes)]
    if not configs:
        click.echo(f"no such kernel exists for {arch or 'any architecture'} yet", err=True)
    for config in configs:
        click.echo(f"{config.name}  {config.arch}  {config!r}")
    _write(json_file, [{"name": config.name, "arch": config.arch, "config": repr(config)} for config in configs])


@aot_group.command(name="build")
@click.option("--arch", type=ARCHES, required=True, help="GPU architecture; sm_90a is Hopper.")
@click.option("--select", "patterns", metavar="PATTERN", multiple=True, help="Only kernels of that name; repeatable.")
@_by_dtype
@click.option("-o", "--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to write.")
@click.option("--jobs", type=click.IntRange(1), help="Compiler processes, 1 GB each. Default: one a core, up to 4.")
def aot_build(arch: str, patterns: Sequence[str], out: Path, jobs: int | None, **dtypes: Sequence[str]) -> None:
    """Compile kernels into a folder for another machine.

    Needs the CuTe DSL and a C compiler, but no GPU. The other machine needs the same versions of mla_cute and
    apache-tvm-ffi, and libcute_dsl_runtime.so of the same CuTe DSL (named by MLA_CUTE_DSL_RUNTIME where
    nvidia-cutlass-dsl is not installed), but neither a compiler nor cutlass. There, name the folder in
    MLA_CUTE_AOT_DIR, or call mla_cute.aot.load. A bundle that is already in the folder is replaced; a folder with
    anything else is refused.

    PATTERN is a kernel's name as `aot list` prints it, in which * stands for anything. Options about different things
    narrow the choice together: --kv-dtype e4m3 --q-dtype bf16 are the kernels of an FP8 cache and bf16 queries.
    """
    configs = _matching(dispatch.shipped(arch), patterns, dtypes, arch)
    jobs = min(jobs or min(4, os.cpu_count() or 1), len(configs))
    with tqdm(total=len(configs), unit="kernel", desc=f"compiling for {arch}") as bar:

        def advance(config: dispatch.KernelConfig) -> None:
            bar.set_postfix_str(config.name, refresh=False)
            bar.update()

        try:
            aot.build(configs, out, advance, jobs)
        except (OSError, RuntimeError) as error:
            raise click.ClickException(str(error)) from error
    click.echo(f"{len(configs)} kernels in {out}")


@main.command()
@click.option("--suite", type=click.Choice(["anchors", "shape", "small", "fp8"]), help="Default: anchors.")
@click.option("--cases", multiple=True, metavar="B,SQ,H,S", help="Requests, query tokens, heads, length; repeatable.")
@click.option("--kv-dtype", type=DTYPE, help="Of the cache, in --cases and anchors. Default: bf16.")
@click.option("--q-dtype", type=DTYPE, help="Of the query. Default: the cache's, bf16 with e4m3.")
@click.option(
    "--plot",
    "prefix",
    metavar="PREFIX",
    type=click.Path(path_type=Path),
    help="Draw the roofline in PREFIX.png and PREFIX.svg. Needs matplotlib.",
)
@JSON
def bench(
    suite: str | None,
    cases: Sequence[str],
    kv_dtype: str | None,
    q_dtype: str | None,
    prefix: Path | None,
    json_file: Any,
) -> None:
    """Measure the kernels on this GPU. Needs one: exit status 2 without.

    Median time of a launch with a cold L2, bf16 if no other dtype is named, pages of 64 in random order. TB/s counts
    the cache once, the query and the output; TFLOP/s counts 2 * rows * S * 1088. "of copy" and "of gemm" are the ratios
    to what this machine reaches in the same run, before and after the rows: a 2 GiB copy (read and write counted) and
    an 8192^3 bf16 matrix product. Every output is compared with the fp32 reference; a wrong one is marked and makes the
    exit status 1.

    The suite "anchors" sets each row beside what FlashMLA, FlashInfer and FlashAttention-3 took on an H200; --cases
    measures others in its place. The suite "shape" measures pairs in turn: unequal lengths, small pages and causal
    queries against an even batch; "over" marks a ratio beyond its limit. The suite "small" sets 1 to 16 requests beside
    the time of their bytes or products at this machine's rates and 8 us. The suite "fp8" measures an e4m3 cache and a
    bf16 one in turn.
    """
    import torch

    from mla_cute.bench import anchors, fp8, plot, report, shape, small
    from mla_cute.bench.cases import parse

    if suite and cases:
        raise click.UsageError("--suite and --cases exclude each other")
    others: dict[str | None, tuple[Any, Any, str]] = {
        "shape": (shape.pairs, shape.compare, shape.HEADER),
        "small": (small.bounds, small.measure, small.HEADER),
        "fp8": (fp8.targets, fp8.measure, fp8.HEADER),
    }
    if suite in others and (kv_dtype or q_dtype):
        raise click.UsageError(f"the suite {suite} has dtypes of its own: --kv-dtype and --q-dtype are for others")
    kv_dtype = kv_dtype or (q_dtype if q_dtype and q_dtype != "e4m3" else "bf16")
    q_dtype = q_dtype or ("bf16" if kv_dtype == "e4m3" else kv_dtype)
    if (q_dtype, kv_dtype) not in INPUT_DTYPES:
        pairs = ", ".join(f"{q} over {kv}" for q, kv in INPUT_DTYPES)
        raise click.UsageError(f"--q-dtype {q_dtype} over --kv-dtype {kv_dtype} is none of {pairs}")
    if prefix and (problem := f"the suite {suite} has no roofline" if suite in others else plot.problem(prefix)):
        raise click.BadParameter(problem, param_hint="--plot")
    try:
        chosen = [parse(text) for text in cases] or list(anchors.load())
        chosen = [replace(case, q_dtype=q_dtype, kv_dtype=kv_dtype) for case in chosen]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--cases") from None
    if not torch.cuda.is_available():
        raise click.UsageError("bench measures a GPU, and torch sees none on this machine")
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_name(device)
    header = f"{anchors.explain()}\n{report.HEADER}"
    make, measure, header = others.get(suite, (lambda: chosen, report.measure, header))
    items = list(make())
    with tqdm(total=len(items), unit="row") as bar:
        results, rates = report.run(items, measure, device, bar.update)
    click.echo(f"{gpu}, which reaches {rates}")
    click.echo(header)
    for result in results:
        click.echo(result.row(rates))
    _write(json_file, report.as_data(results, rates, gpu))
    if prefix:
        plot.roofline(prefix, results, rates, gpu)
    raise SystemExit(0 if all(result.correct for result in results) else 1)


def _has_dtypes(config: dispatch.KernelConfig, dtypes: Mapping[str, Sequence[str]]) -> bool:
    """Each kind of dtype is one of those named, if any are."""
    return all(getattr(config, kind) in names for kind, names in dtypes.items() if names)


def _matching(
    configs: Sequence[dispatch.KernelConfig],
    patterns: Iterable[str],
    dtypes: Mapping[str, Sequence[str]],
    arch: str,
) -> list[dispatch.KernelConfig]:
    if not configs:
        raise click.ClickException(f"no kernel exists for {arch} yet")
    wanted = list(patterns) or ["*"]
    chosen = [config for config in configs if any(fnmatch.fnmatch(config.name, pattern) for pattern in wanted)]
    if chosen and not (chosen := [config for config in chosen if _has_dtypes(config, dtypes)]):
        raise click.UsageError("no kernel has these dtypes, see `aot list`")
    if not chosen:
        names = ", ".join(config.name for config in configs)
        raise click.BadParameter(f"{', '.join(wanted)} matches none of {names}", param_hint="--select")
    return chosen


def _write(json_file: Any, data: object) -> None:
    if json_file:
        json.dump(data, json_file, indent=1)
        json_file.write("\n")
