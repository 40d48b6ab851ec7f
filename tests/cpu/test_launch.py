"""What the public functions choose for a GPU and hand to its kernel, without one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from mla_cute.kernels.common import abi
from mla_cute.kernels.common.work import HEAD_WORDS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.dlpack import from_dlpack

import mla_cute
from mla_cute import api, compile, dispatch, launch
from mla_cute.plan import LargestTiling, forced_ctas, make_plan
from mla_cute.problem import MLAProblem
from mla_cute.testing import Case, make_case, poisoned
from mla_cute.validate import Call

LENGTHS = (70, 0, 33, 128)
CPU, META = torch.device("cpu"), torch.device("meta")


def call_of(case: Case, **changes: Any) -> Call:
    return Call(*case.tensors, case.qo_indptr, case.bmm1_scale, case.bmm2_scale, None, None)._replace(**changes)


def problem_of(case: Case, lse_mode: str = "none") -> MLAProblem:
    return api.problem_of(call_of(case), case.max_seq_len_q, case.max_kv_len, "causal", torch.bfloat16, lse_mode)


def recorder(problem: MLAProblem, ctas: int) -> tuple[launch.Prepared, list[Any]]:
    """Prepared with a launch that records its arguments, as if on a GPU."""
    received: list[Any] = []
    with forced_ctas(ctas):
        plan = make_plan(problem, LargestTiling(problem.kv_dtype), 132)
    return launch.Prepared(problem, CPU, plan, "recorder", lambda *given: received.extend(given)), received


def test_a_gpu_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launch, "capability", lambda device: (8, 0))
    with pytest.raises(mla_cute.UnsupportedProblem, match=r"8\.0") as caught:
        mla_cute.MLADecodeWrapper().plan(**make_case("uniform", (5,)).plan(device=0))
    modules = dispatch.config_modules()
    assert [kernel for kernel, _ in caught.value.reasons] == [dispatch.kernel_label(module) for module in modules]
    assert all(kernel in str(caught.value) and reason in str(caught.value) for kernel, reason in caught.value.reasons)


@pytest.mark.parametrize("lse_mode", ["none", "base2", "basee"])
@pytest.mark.parametrize("q_lens", [2, (2, 0, 4, 1)])
def test_what_a_kernel_is_given(q_lens: int | Sequence[int], lse_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("random", LENGTHS, q_lens=q_lens, num_heads=5, page_size=16, bmm1_scale=2.0, bmm2_scale=0.5)
    packed = case.qo_indptr is not None
    out = poisoned(*case.query.shape[:-1], 512, dtype=torch.bfloat16)
    lse = None if lse_mode == "none" else torch.zeros(case.query.shape[:-1])
    prepared, received = recorder(problem_of(case, lse_mode), ctas=3)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: prepared.device.index)
    result = launch.run(
        prepared, prepared.bind(None), call_of(case, kv_cache=case.kv_cache[:, None], out=out, lse=lse), False
    )
    assert result is out
    given = dict(zip(abi.ARGUMENTS, received, strict=True))
    form, other = ("packed_", "") if packed else ("", "packed_")
    assert given[form + "query"] is case.query and given["out_address"] == out.data_ptr()
    assert given["lse_address"] == (0 if lse is None else lse.data_ptr())
    assert given["out_bf16"] == 1
    assert given["kv_cache"].shape == case.kv_cache.shape
    assert given["block_tables"] is case.block_tables and given["seq_lens"] is case.seq_lens
    assert given["qo_indptr"] is (case.qo_indptr if packed else given["split_info"])
    given = {name: from_dlpack(value) if hasattr(value, "__dlpack__") else value for name, value in given.items()}
    for prefix in (form, other):
        tensor = given[prefix + "query"]
        assert (tensor.ndim, tensor.dtype) == (4 - (prefix == "packed_"), torch.bfloat16)
    slot_rows = 20 if packed else 10
    for name, elements, dtype in (
        ("part_out", 2 * 3 * slot_rows * 512, torch.int32),
        ("part_stat", 2 * 3 * slot_rows * 8, torch.float32),
        ("split_info", 3 * 4 + HEAD_WORDS, torch.int32),
    ):
        assert given[name].shape == (elements,) and given[name].dtype == dtype
    assert (given["batch"], given["seq_len_q"], given["causal"]) == (4, 0 if packed else 2, 1)
    assert (given["max_kv_len"], given["slot_rows"], given["num_ctas"]) == (128, slot_rows, 3)
    assert given["scale_log2"] == pytest.approx(2 * math.log2(math.e))
    assert (given["out_scale"], given["batch_invariant"]) == (0.5, 0)
    assert given["lse_scale"] == {"none": 0.0, "base2": 1.0, "basee": math.log(2)}[lse_mode]


def test_a_batch_invariant_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("uniform", (5000, 1), num_heads=80)
    prepared, received = recorder(dataclasses.replace(problem_of(case), batch_invariant=True), ctas=8)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: prepared.device.index)
    launch.run(prepared, prepared.bind(None), call_of(case), False)
    given = dict(zip(abi.ARGUMENTS, received, strict=True))
    assert (given["batch_invariant"], given["num_ctas"], given["team"], given["slot_rows"]) == (1, 8, 2, 64)
    parts = 2 * 2 * 3  # requests x blocks x parts of 5,000 tokens
    shapes = [tuple(given[name].shape) for name in ("part_out", "part_stat", "split_info")]
    assert shapes == [(parts * 32 * 512,), (parts * 64 * 8,), (4 * parts + HEAD_WORDS,)]


class Operations(TorchDispatchMode):
    """Names of torch's operations within the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("q_lens", [2, (2, 1)])
def test_a_run_with_its_outputs_given_is_little_more_than_a_launch(
    q_lens: int | Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case("uniform", (5, 7), q_lens=q_lens)
    prepared, received = recorder(problem_of(case, "base2"), ctas=1)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: prepared.device.index)
    bound, call = prepared.bind(None), call_of(case, out=case.query[..., :512].clone(), lse=case.query[..., 0].float())
    with Operations() as done:
        launch.run(prepared, bound, call, False)
    assert received and not done.names


def test_scales_reach_a_kernel_without_waiting_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("uniform", (5, 7))
    prepared, received = recorder(problem_of(case), ctas=1)
    bound, out = prepared.bind(None), case.query[..., :512].clone()
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: prepared.device.index)
    first = abi.ARGUMENTS.index("scale_log2")
    for scale in (2, 2.0):
        launch.run(prepared, bound, call_of(case, bmm1_scale=scale, bmm2_scale=scale), False)
        assert received[first - 2 : first + 2] == [0, 0, 2 * math.log2(math.e), 2.0]
        assert all(type(value) is float for value in received[first:])
        received.clear()
    there, away = torch.full((), 0.5), torch.ones(1, device="meta")  # has no value to wait for: reading it is an error
    for one, other in ((there, away), (away, there), (there, 2.0), (2.0, there), (there, there[None])):
        with Operations() as done:
            launch.run(prepared, bound, call_of(case, bmm1_scale=one, bmm2_scale=other, out=out), False)
        addresses = [scale.data_ptr() if isinstance(scale, torch.Tensor) else 0 for scale in (one, other)]
        numbers = [1.0 if isinstance(scale, torch.Tensor) else scale for scale in (one, other)]
        assert received[first - 2 : first] == addresses and there.data_ptr() in addresses
        assert received[first : first + 2] == [numbers[0] * math.log2(math.e), numbers[1]]
        assert not done.names
        received.clear()


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """torch's meta device stands for a GPU; every launch on it, as arguments by name."""
    launches: list[dict[str, Any]] = []
    kernel = lambda *given: launches.append(dict(zip(abi.ARGUMENTS, given, strict=True)))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: META.index)
    monkeypatch.setattr(launch, "capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "sm_count", lambda device: 132)
    monkeypatch.setattr(compile, "get", lambda config: kernel)
    monkeypatch.setattr(launch, "converted", lambda tensor: tensor)
    monkeypatch.setattr(launch, "_loaded", set())
    launch._prepare.cache_clear()
    yield launches
    launch._prepare.cache_clear()


@pytest.mark.parametrize("q_lens", [2, (1, 3)])
def test_a_kernel_is_launched_on_nothing_when_it_is_prepared(
    q_lens: int | Sequence[int], fake_gpu: list[dict[str, Any]]
) -> None:
    problem = problem_of(make_case("uniform", (300, 20), q_lens=q_lens, page_size=128), "base2")
    prepared = launch.prepare(problem, META, None)
    (given,) = fake_gpu
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    assert all(tensor.device == META for tensor in tensors.values())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "query": (1, 1, 1, 576),
        "packed_query": (1, 1, 576),
        "kv_cache": (1, 128, 576),
        "block_tables": (1, 1),
        "seq_lens": (1,),
        "qo_indptr": (4 + HEAD_WORDS,),
        "part_out": (1024,),
        "part_stat": (16,),
        "split_info": (4 + HEAD_WORDS,),
    }
    assert given["lse_scale"] == 0.0
    numbers = {name: given[name] for name in ("batch", "seq_len_q", "max_kv_len", "slot_rows", "num_ctas", "team")}
    assert set(numbers.values()) == {1}
    assert launch.prepare(problem, META, None) is prepared
    launch.prepare(dataclasses.replace(problem, max_kv_len=4096, num_heads=12), META, None)
    launch.prepare(dataclasses.replace(problem, max_kv_len=4096, batch_invariant=True), META, None)
    assert len(fake_gpu) == 1, "once a kernel and device"
    launch.prepare(dataclasses.replace(problem, page_size=16), META, None)
    launch.prepare(dataclasses.replace(problem, num_heads=5), META, None)
    assert len(fake_gpu) == 3


def test_nothing_is_launched_during_a_capture(fake_gpu: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(make_case("uniform", (300,)))
    monkeypatch.setattr(launch, "capturing", lambda device: True)
    launch.prepare(problem, META, None)
    assert not fake_gpu
    monkeypatch.setattr(launch, "capturing", lambda device: False)
    launch.prepare(problem, META, None)
    assert len(fake_gpu) == 1, "the plan is cached, the kernel not yet loaded"


def test_nothing_is_launched_without_work() -> None:
    for case in (make_case("random", (), max_kv_len=64), make_case("random", (5,), q_lens=(0,))):
        prepared, received = recorder(problem_of(case), ctas=1)
        launch.run(prepared, prepared.bind(None), call_of(case), False)
        assert not received


def test_a_single_page_gets_a_stride_that_tma_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("random", [40, 7], page_size=64, pool_factor=1)
    prepared, received = recorder(problem_of(case), ctas=1)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: prepared.device.index)
    one_page = case.kv_cache.as_strided((1, 64, 576), (1, 576, 1))
    for kv_cache in (one_page, one_page[:, None]):
        launch.run(prepared, prepared.bind(None), call_of(case, kv_cache=kv_cache), False)
        given = received[abi.ARGUMENTS.index("kv_cache")]
        assert given.shape == (1, 64, 576) and given.stride() == (64 * 576, 576, 1)
        received.clear()


def test_plans_are_cached_by_problem_and_forced_ctas() -> None:
    problem = problem_of(make_case("uniform", LENGTHS))
    assert launch.prepare(problem, CPU, None) is launch.prepare(dataclasses.replace(problem), CPU, None)
    with forced_ctas(5):
        assert launch.prepare(problem, CPU, 5).plan.num_ctas == 5
