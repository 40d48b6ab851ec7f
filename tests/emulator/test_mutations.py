"""A kernel with one mistake in its PTX is caught, each time, and by the word that names the mistake."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mla_cute.testing import assert_close, expected_of

from .build import compiled
from .cases import Problem, run, table
from .launcher import Kernel, emulated
from .machine import Fault

SEEDS = 3
WRONG = "wrong result"  # no checker's word: the comparison with the reference
KERNEL, FEW = "sm90_r64_bf16_p64", "sm90_r8_bf16_p64"

Mutation = Callable[[str], str]


def edit(
    pattern: str, replacement: str | Callable[[re.Match[str]], str], site: int = 0, every: bool = False
) -> Mutation:
    """Replace the site-th match, or every one. The pattern has to match: a mutation of nothing is no test."""

    def mutate(ptx: str) -> str:
        matches = list(re.finditer(pattern, ptx, flags=re.M))
        assert matches, f"no place in the PTX matches {pattern!r}"
        for match in reversed(matches if every else [matches[site]]):
            new = match.expand(replacement) if isinstance(replacement, str) else replacement(match)
            ptx = ptx[: match.start()] + new + ptx[match.end() :]
        return ptx

    return mutate


def counted(change: int, value: int) -> Mutation:
    """Change the count of the first mbarrier that is initialised for `value` arrivals."""

    def mutate(ptx: str) -> str:
        register = re.search(rf"mov\.b32 \t(%r\d+), {value};\n\s*mbarrier\.init", ptx)
        assert register, f"no mbarrier is initialised for {value} arrivals"
        pattern = rf"(mbarrier\.init\.shared\.b64 \t\[[^]]*\]), {register[1]};"
        return edit(pattern, rf"\1, {value + change};")(ptx)

    return mutate


def with_value(pattern: str, change: str, site: int = 0) -> Mutation:
    """Let an instruction see its last operand, a register named `value` in the pattern, changed."""

    def replacement(match: re.Match[str]) -> str:
        text, value = match[0], match["value"]
        changed = f"{{ .reg .b32 other; {change.format(value)} "
        return changed + text.replace(value, "other") + " }"

    return edit(pattern, replacement, site)


TRY = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[[^]]*\], (?P<value>%r\d+), 10000000;"
EXPECT = r"mbarrier\.arrive\.expect_tx\.shared\.b64 %rd\d+, \[[^]]*\], (?P<value>%r\d+);"
LINE = r"[^\n]*\n"
WAIT = r"\{\s*\.reg \.pred\s+P1;\s*LAB_WAIT:\s*mbarrier\.try_wait\.parity[^}]*\}"
GAP = r"(?:[ \t]*(?://[^\n]*)?\n)*[ \t]*"


STEPS = Problem((300, 100), 1)
SPLIT = Problem((513, 40), 5)
UNEVEN = Problem((90, 33), 2, q_lens=2, spread=True)


@dataclass(frozen=True)
class Mistake:
    mutate: Mutation
    kinds: tuple[str, ...]  # of the report
    kernel: str = KERNEL
    problem: Problem = STEPS


MISTAKES = {
    "P without a proxy fence": Mistake(
        edit(rf"(stmatrix{LINE}{GAP})fence\.proxy\.async{LINE}", r"\1\n"), ("missing proxy fence",)
    ),
    "cleared rows without a proxy fence": Mistake(
        edit(rf"fence\.proxy\.async{LINE}(\s*bar\.sync)", r"\1", every=True), ("missing proxy fence",)
    ),
    "copied query rows without a proxy fence": Mistake(
        edit(rf"(cp\.async\.wait_all;{LINE}(?:\s*//{LINE})?)\s*fence\.proxy\.async{LINE}", r"\1"),
        ("missing proxy fence",),
        problem=UNEVEN,
    ),
    "O without a proxy fence": Mistake(
        edit(rf"(stmatrix[^\n]*\+\d+\]{LINE}{GAP})fence\.proxy\.async{LINE}", r"\1\n", every=True),
        ("missing proxy fence",),
    ),
    "mbarriers without a fence": Mistake(edit(rf"fence\.mbarrier_init{LINE}", "\n"), ("missing proxy fence",)),
    "mbarriers without a barrier": Mistake(
        edit(r"bar\.sync \t0;", "", every=True), ("race", "uninitialised shared memory")
    ),
    "an mbarrier for one more": Mistake(counted(1, 4), ("deadlock",)),
    "an mbarrier for one less": Mistake(counted(-1, 4), ("race", "missing wait")),
    "a query mbarrier for one more": Mistake(counted(1, 8), ("deadlock",)),
    "a query mbarrier for one less": Mistake(
        counted(-1, 8), ("race", "barrier count"), problem=Problem((300, 100, 20), 1)
    ),
    "a flipped phase": Mistake(with_value(TRY, "xor.b32 other, {0}, 1;", 4), ("deadlock", "race", "missing wait")),
    "a flipped phase before a product": Mistake(
        with_value(rf"{TRY}(?=[^}}]*\}}{GAP}wgmma\.fence)", "xor.b32 other, {0}, 1;"), ("missing wait", "deadlock")
    ),
    "expect_tx short": Mistake(
        with_value(EXPECT, "sub.s32 other, {0}, 16;"),
        ("transaction count",),
    ),
    "expect_tx too much": Mistake(
        with_value(EXPECT, "add.s32 other, {0}, 16;"),
        ("deadlock",),
    ),
    "a slot filled before it is free": Mistake(
        edit(rf"{WAIT}((?:{GAP}(?!mbarrier\.try_wait)[^\n]*\n){{0,6}}?\s*mbarrier\.arrive\.expect_tx)", r"\1"),
        ("race", "barrier count", "missing wait"),
    ),
    "data read before it is there": Mistake(edit(rf"{WAIT}({GAP}wgmma\.fence)", r"\1"), ("missing wait",)),
    "a page id off by one": Mistake(
        with_value(r"cp\.async\.bulk\.tensor\.5d[^\n]*, (?P<value>%r\d+)\}\][^\n]*;", "add.s32 other, {0}, 1;"),
        (WRONG,),
    ),
    "no wait for wgmma": Mistake(
        edit(r"wgmma\.wait_group\.sync\.aligned \t0;", "", every=True), ("accumulator in flight", "race")
    ),
    "a wait for one group too few": Mistake(
        edit(r"wgmma\.wait_group\.sync\.aligned \t0;", "wgmma.wait_group.sync.aligned 1;", every=True),
        ("accumulator in flight", "race"),
    ),
    "no commit of wgmma": Mistake(
        edit(r"wgmma\.commit_group\.sync\.aligned;", "", every=True), ("accumulator in flight", "race", "missing wait")
    ),
    "no wgmma.fence": Mistake(edit(r"wgmma\.fence\.sync\.aligned;", "", every=True), ("missing wgmma.fence",)),
    "O filled over before it is stored": Mistake(
        edit(r"cp\.async\.bulk\.wait_group\.read \t0;", "", every=True), ("race", "missing wait")
    ),
    "no wait for copied query rows": Mistake(edit(r"cp\.async\.wait_all;", ""), ("missing wait",), problem=UNEVEN),
    "combine does not wait for decode": Mistake(
        edit(r"griddepcontrol\.wait;", "", every=True),
        ("grid dependency", "uninitialised global memory"),
        problem=SPLIT,
    ),
    "combine is told without a fence": Mistake(
        edit(r"fence\.acq_rel\.gpu;", "", every=True), ("grid dependency",), problem=SPLIT
    ),
    "combine reads without acquire": Mistake(
        edit(r"ld\.acquire\.gpu\.global", "ld.global"), ("grid dependency",), problem=SPLIT
    ),
    "a named barrier for fewer": Mistake(edit(r"bar\.sync \t1, 256;", "bar.sync 1, 128;"), ("barrier count",)),
    "a named barrier for more": Mistake(
        edit(r"bar\.sync \t(\d), 128;", r"bar.sync \1, 160;", every=True), ("deadlock", "barrier count")
    ),
    "an arrival left out": Mistake(
        edit(r"mbarrier\.arrive\.shared\.b64 %rd\d+, \[[^]]*\], %r\d+;", "", 12), ("deadlock",)
    ),
    "words read, and given back by one lane for all": Mistake(
        edit(rf"(ld\.shared{LINE}{GAP})bar\.warp\.sync \t-1;(\s*elect)", r"\1\2", every=True), ("race",)
    ),
    "P announced by one lane for all": Mistake(
        edit(r"(fence\.proxy\.async[^\n]*\s*)bar\.warp\.sync \t-1;(\s*elect)", r"\1\2", every=True), ("race",)
    ),
    "sums read without a barrier": Mistake(
        edit(r"bar\.sync \t1, 256;", "", every=True), ("race", "uninitialised shared memory")
    ),
    "a segment's word left out": Mistake(
        edit(r"st\.shared\.b32 \t\[%r\d+\+\d+\], %r\d+;", "", 3), ("uninitialised shared memory",)
    ),
    "a store behind its tensor": Mistake(
        edit(r"(st\.global\.v4\.b32 \t\[%rd\d+)\]", r"\1+1048576]", every=True), ("out of bounds",), problem=SPLIT
    ),
    "a load between words": Mistake(
        edit(r"(ld\.shared\.v4\.b32 \t\{[^}]*\}, \[%r\d+\+)(\d+)\]", lambda m: f"{m[1]}{int(m[2]) + 4}]", every=True),
        ("misaligned",),
    ),
    "shared memory behind the end": Mistake(
        edit(r"(cp\.async\.bulk\.tensor\.5d[^\n]*\[%r\d+\+)206848\]", r"\g<1>306176]"), ("out of bounds",)
    ),
    "a descriptor 16 bytes off": Mistake(
        edit(r"or\.b64 \t(%rd\d+), (%rd\d+), 4611687117939081216;", r"or.b64 \1, \2, 4611687117939081217;"), (WRONG,)
    ),
    "a register that nothing sets": Mistake(edit(r"mov\.u32 \t%r\d+, %tid\.x;", ""), ("uninitialised register",)),
    "few rows: P without a proxy fence": Mistake(
        edit(rf"(stmatrix{LINE}{GAP})fence\.proxy\.async{LINE}", r"\1\n"), ("missing proxy fence",), FEW
    ),
    "few rows: votes for fewer": Mistake(
        edit(r"barrier\.cta\.red\.or\.pred p, 4, 128, q;", "barrier.cta.red.or.pred p, 4, 96, q;"), ("deadlock",), FEW
    ),
    "few rows: an mbarrier for one less": Mistake(counted(-1, 4), ("race", "missing wait"), FEW),
}


def outcome(mistake: Mistake, seed: int) -> str:
    """The kind of fault, WRONG, or nothing."""
    config = table()[f"{mistake.kernel} first"][0]
    files = compiled(config)
    mutated = mistake.mutate(files.ptx)
    assert mutated != files.ptx
    own = Kernel(files, seed, mutated)
    case = mistake.problem.case(config)
    try:
        with emulated(lambda _: own):
            out, lse = run(config, mistake.problem, case)
    except Fault as fault:
        print(fault)
        return fault.kind
    ref_out, ref_lse = expected_of(case, mistake.problem.lse_mode)
    try:
        assert_close(out, lse, ref_out, ref_lse, case.query.dtype, mistake.problem.lse_mode)
    except AssertionError:
        return WRONG
    return ""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught_by_its_name(name: str) -> None:
    for seed in range(SEEDS):
        assert outcome(MISTAKES[name], seed) in MISTAKES[name].kinds, f"seed {seed}"
