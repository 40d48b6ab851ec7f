"""CUDA graphs, streams, synchronisation, allocation and devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_cute
from mla_cute.problem import KV_LORA_RANK
from mla_cute.testing import Case, make_case, poisoned

from .harness import Inputs, bits, check, each_kernel, launch_and_check, planned, same_bits, workspace_bytes
from .oracle import Rows, Sequences

pytestmark = pytest.mark.cuda
cuda: Any = torch.cuda  # streams have no types
decode: Any = mla_cute.batch_mla_decode_with_paged_kv_cache


@dataclass(frozen=True)
class Call:
    """A case, and caller-owned results."""

    case: Case
    wrapper: Any  # planned, for this case
    out: Tensor
    lse: Tensor

    @staticmethod
    def of(case: Case, **plan: Any) -> Call:
        shape, device = case.query.shape[:-1], case.query.device
        out = poisoned(*shape, KV_LORA_RANK, dtype=case.out_dtype, device=device)
        return Call(case, planned(case, **plan), out, poisoned(*shape, dtype=torch.float32, device=device))

    def __call__(self) -> None:
        self.wrapper.run(*self.case.tensors, **self.case.run(out=self.out, lse=self.lse, validate=False))

    def poison(self) -> None:
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)

    def differs(self, other: Call) -> Tensor:
        """On the device, without a synchronisation."""
        return (bits(self.out) != bits(other.out)).any() | (bits(self.lse) != bits(other.lse)).any()


def capture(call: Callable[[], None], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """Without a run before it: plan() has loaded the kernel."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


@pytest.mark.parametrize("tokens", [1, 3])
@each_kernel
def test_g1_lengths_grow_between_replays(tokens: int, rows: int, inputs: Inputs, device: torch.device) -> None:
    sequences = Sequences(device, **inputs, count=5, length=400)
    case = sequences.case([1, 60, 0, 190, 128], q_lens=tokens, num_heads=rows // tokens)
    captured, eager = Call.of(case), Call.of(case)
    graph = capture(captured)
    grow = torch.tensor([1, 1, 0, 1, 1], dtype=torch.int32, device=device)
    wrong, different = [], []
    for _ in range(200):
        case.seq_lens.add_(grow)
        captured.poison()
        graph.replay()
        eager()
        different.append(captured.differs(eager))
        wrong.append(~sequences.agrees(captured.out, captured.lse, Rows.of(case)))
    assert not torch.stack(different).nonzero().flatten().tolist(), "replays that differ from the eager run"
    assert not torch.stack(wrong).nonzero().flatten().tolist(), "wrong replays"


@each_kernel
def test_g3_fewer_live_requests_than_captured(rows: int, inputs: Inputs, device: torch.device) -> None:
    sequences = Sequences(device, **inputs, count=8, length=500)
    case = sequences.case([500, 3, 64, 65, 300, 128, 1, 257], num_heads=rows)
    call = Call.of(case)
    graph = capture(call)
    for live in range(8, -1, -1):
        case.seq_lens[live:] = 0
        case.block_tables[live:] = -1
        call.poison()
        graph.replay()
        assert sequences.agrees(call.out, call.lse, Rows.of(case)), live


@each_kernel
def test_g4_indptr_changes_between_replays(rows: int, inputs: Inputs, device: torch.device) -> None:
    sequences = Sequences(device, **inputs, count=3, length=300)
    indptr = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    case = sequences.case([300, 65, 100], q_lens=indptr, total_q=3, max_seq_len_q=3, num_heads=rows // 3)
    captured, eager = Call.of(case), Call.of(case)
    graph = capture(captured)
    for offsets in ([0, 3, 3, 3], [0, 0, 3, 3], [0, 0, 1, 3], [0, 1, 1, 2], [0, 1, 2, 3]):
        indptr.copy_(torch.tensor(offsets))
        captured.poison()
        graph.replay()
        eager()
        assert not captured.differs(eager), offsets
        assert sequences.agrees(captured.out, captured.lse, Rows.of(case)), offsets


@each_kernel
def test_g1_tables_and_cache_change_between_replays(rows: int, inputs: Inputs, device: torch.device) -> None:
    sequences = Sequences(device, **inputs, count=4, length=300)
    case = sequences.case([300, 65, 100, 7], num_heads=rows)
    call = Call.of(case)
    graph = capture(call)
    moved = case.block_tables.clone()
    for shift in range(1, 4):  # request b reads the pages of sequence b + shift
        case.block_tables.copy_(moved.roll(-shift, 0))
        call.poison()
        graph.replay()
        owner = torch.arange(4, device=device).add(shift) % 4
        assert sequences.agrees(call.out, call.lse, Rows.of(case, owner)), shift


@each_kernel
def test_g1_scales_in_tensors_change_between_replays(rows: int, inputs: Inputs, device: torch.device) -> None:
    case = make_case("random", [1000, 0, 65], num_heads=rows, **inputs, device=device)
    call = Call.of(case)
    scales = {"bmm1_scale": torch.ones((), device=device), "bmm2_scale": torch.ones(1, device=device)}
    given = case.run(out=call.out, lse=call.lse, validate=False) | scales

    def launch() -> None:
        call.wrapper.run(*case.tensors, **given)

    torch.cuda.set_sync_debug_mode("error")
    try:
        launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = capture(launch)
    for one, other in ((1.0, 1.0), (0.5, 2.0), (3.0, 0.3), (1.0, 1.0)):
        now = replace(case, bmm1_scale=one * case.bmm1_scale, bmm2_scale=other * case.bmm2_scale)
        scales["bmm1_scale"].fill_(now.bmm1_scale)
        scales["bmm2_scale"].fill_(now.bmm2_scale)
        call.poison()
        graph.replay()
        check(now, call.out, call.lse)


@pytest.mark.parametrize("captured_long", [False, True])
@each_kernel
def test_f4_f6_capture_short_replay_long_and_back(
    captured_long: bool, rows: int, inputs: Inputs, device: torch.device
) -> None:
    short, long = [1] * 5, [1, 64, 131_072, 131_073, 262_144]
    picks = (0, 63, 64, 65_535, 131_071, 131_072, 131_073, 262_143)
    sequences = Sequences(device, **inputs, count=1, length=262_144, picks=picks, pool_factor=2)
    shared = torch.zeros(5, dtype=torch.long, device=device)
    for picking in (True, False):
        first = long if captured_long else short
        case = sequences.case(first, num_heads=rows, sequence=shared, picking=picking)
        call = Call.of(case)
        graph = capture(call)
        for lengths in (short, long, long[::-1], short):
            case.seq_lens.copy_(torch.tensor(lengths))
            call.poison()
            graph.replay()
            assert sequences.agrees(call.out, call.lse, Rows.of(case, shared), picking=picking), (picking, lengths)


@each_kernel
def test_g10_two_wrappers_on_two_streams(rows: int, inputs: Inputs, device: torch.device) -> None:
    sequences = Sequences(device, **inputs, count=24, length=2000)
    random = torch.Generator(device).manual_seed(0)
    calls, wrong = [], []
    for _ in range(2):
        lengths = torch.randint(0, 2001, (24,), device=device, generator=random, dtype=torch.int32)
        calls.append(Call.of(sequences.case(lengths, num_heads=rows)))
    streams = [cuda.Stream(device) for _ in calls]
    seen = [Rows.of(call.case) for call in calls]
    torch.cuda.synchronize()
    for _ in range(200):
        for stream, call, visible in zip(streams, calls, seen, strict=True):
            with torch.cuda.stream(stream):
                call.poison()
                call()
                wrong.append(~sequences.agrees(call.out, call.lse, visible))
    torch.cuda.synchronize()
    assert not torch.stack(wrong).any()


@pytest.mark.parametrize("in_graph", [False, True])
def test_h2_runs_on_the_current_stream(in_graph: bool, device: torch.device) -> None:
    """The query is written late on a side stream; a launch on any other stream reads NaN."""
    sequences = Sequences(device, count=4, length=300)
    case = sequences.case([300, 65, 100, 7])
    good_query, call, side = case.query.clone(), Call.of(case), cuda.Stream(device)
    call()
    rows, wrong = Rows.of(case), []
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        launched = capture(call, side).replay if in_graph else call
        for _ in range(50):
            case.query.fill_(math.nan)
            call.poison()
            cuda._sleep(20_000_000)
            case.query.copy_(good_query)
            launched()
            wrong.append(~sequences.agrees(call.out, call.lse, rows))
    torch.cuda.synchronize()
    assert not torch.stack(wrong).any()


def allocations(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device)["allocation.all.allocated"])


@pytest.mark.parametrize("q_lens", [2, (1, 0, 3)], ids=str)
@each_kernel
def test_g7_no_synchronisation_no_allocation(q_lens: Any, rows: int, inputs: Inputs, device: torch.device) -> None:
    case = make_case("random", [1000, 64, 130], q_lens=q_lens, num_heads=rows // 3, **inputs, device=device)
    wrapped = Call.of(case)
    workspace = torch.empty(workspace_bytes(case), dtype=torch.uint8, device=device)
    own = replace(wrapped, out=wrapped.out.clone(), lse=wrapped.lse.clone())

    def one_shot() -> None:
        given = case.call(workspace_buffer=workspace, out=own.out, lse=own.lse, validate=False)
        decode(*case.tensors, **given)

    for run in (wrapped, one_shot):
        run()
        torch.cuda.synchronize()
        before = allocations(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(10):
                run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert allocations(device) == before
    check(case, wrapped.out, wrapped.lse)
    assert not wrapped.differs(own)


def test_one_shot_in_a_graph(device: torch.device) -> None:
    case = make_case("random", [1000, 64, 130], q_lens=2, device=device)
    expected, _ = launch_and_check(case)
    workspace = torch.empty(workspace_bytes(case), dtype=torch.uint8, device=device)
    results: list[Tensor] = []
    graph = capture(
        lambda: results.append(decode(*case.tensors, **case.call(workspace_buffer=workspace, validate=False)))
    )
    results[-1].fill_(math.nan)  # allocated by the graph's pool
    graph.replay()
    assert same_bits(results[-1], expected)


def test_one_shot_that_cannot_be_captured(device: torch.device) -> None:
    case = make_case("random", [70], device=device)
    workspace = torch.empty(workspace_bytes(case), dtype=torch.uint8, device=device)
    decode(*case.tensors)
    graph, scratch = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
    with torch.cuda.graph(graph):
        scratch.add_(1)
        with pytest.raises(RuntimeError):
            decode(*case.tensors, **case.call(workspace_buffer=workspace))
        with pytest.raises(RuntimeError):
            decode(*case.tensors, **case.call(validate=False))


def test_h1_tensors_on_another_device(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1 - torch.cuda.current_device())
    case = make_case("random", [1000, 64, 0, 130], q_lens=2, device=other)
    expected, _ = launch_and_check(case)
    assert torch.cuda.current_device() == device.index
    for validate in (True, False):
        out, lse = decode(*case.tensors, **case.call(return_lse=True, validate=validate))
        assert torch.cuda.current_device() == device.index
        check(case, out, lse)
        assert same_bits(out, expected)
    with torch.cuda.device(other):
        graph = capture(call := Call.of(case))
        call.poison()
        graph.replay()
        torch.cuda.synchronize(other)
    assert same_bits(call.out, expected)
    with pytest.raises(ValueError, match="kv_cache"):
        launch_and_check(replace(case, query=case.query.to(device)))


def test_current_device_is_kept(device: torch.device) -> None:
    case = make_case("random", [70], device=device)
    before = torch.cuda.current_device()
    launch_and_check(case)
    decode(*case.tensors)
    assert torch.cuda.current_device() == before
