"""The error table: for each condition the class of the error, and the argument that its message names."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_cute
from mla_cute import validate
from mla_cute.compat import prims_ts_batch_mla_decode_with_kv_cache
from mla_cute.problem import INT32_MAX, MAX_KV_LEN
from mla_cute.testing import Case, make_case

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]
NUMBERS = (True, 1.0, "1", None)
FIXED = make_case("uniform", (40, 17), q_lens=2, num_heads=4, page_size=16, max_kv_len=64)
PACKED = make_case("uniform", (40, 17), q_lens=(1, 2), num_heads=4, page_size=16, max_kv_len=64)
WORKSPACE = mla_cute.get_batch_mla_decode_workspace_size(2, 4, 512, 64, 16, 64, max_seq_len_q=2)


def arguments(case: Case) -> Arguments:
    """Of a whole decode: the geometry that a plan needs, and a run's arguments."""
    names = ("query", "kv_cache", "block_tables", "seq_lens", "qo_indptr")
    plan = case.plan(workspace_buffer=torch.zeros(WORKSPACE, dtype=torch.uint8), lse_mode="base2")
    rows = case.query.shape[:-1]
    run = {"bmm1_scale": 1.0, "bmm2_scale": 1.0, "lse": torch.zeros(rows), "return_lse": False, "validate": True}
    out = torch.zeros(*rows, 512, dtype=torch.bfloat16)
    return plan | {name: getattr(case, name) for name in names} | run | {"out": out}


def pick(given: Arguments, *names: str, **renamed: str) -> Arguments:
    return {name: given[name] for name in names} | {new: given[old] for new, old in renamed.items()}


RUN = ("query", "kv_cache", "block_tables", "seq_lens", "qo_indptr", "bmm1_scale", "bmm2_scale", "out")
DIMS = ("kv_lora_rank", "qk_rope_head_dim", "mask_type", "max_seq_len_q", "workspace_buffer")
PLAN = (*DIMS, "device", "batch_size", "num_heads", "page_size", "max_kv_len", "packed_query", "lse_mode", "validate")
TYPES = ("q_data_type", "kv_data_type", "o_data_type")


def plan(given: Arguments) -> mla_cute.MLADecodeWrapper:
    wrapper = mla_cute.MLADecodeWrapper()
    wrapper.plan(**pick(given, *PLAN, *TYPES))
    return wrapper


def run(given: Arguments) -> object:
    """The plan is that of the unchanged case."""
    wrapper = plan(arguments(PACKED if given["packed_query"] else FIXED))
    return wrapper.run(**pick(given, *RUN, "lse", "return_lse", "validate"))


def one_shot(given: Arguments) -> object:
    more = pick(given, "lse", "return_lse", "lse_mode", "validate", "max_kv_len", out_dtype="o_data_type")
    return mla_cute.batch_mla_decode_with_paged_kv_cache(**pick(given, *RUN, *DIMS), **more)


def standalone(given: Arguments) -> object:
    more = pick(given, max_seq_len="max_kv_len", out_dtype="o_data_type")
    return prims_ts_batch_mla_decode_with_kv_cache(**pick(given, *RUN, *DIMS), **more)


def size(given: Arguments) -> object:
    names = ("batch_size", "num_heads", "kv_lora_rank", "qk_rope_head_dim", "page_size", "max_seq_len_q", "mask_type")
    more = pick(
        given, max_seq_len="max_kv_len", q_dtype="q_data_type", kv_dtype="kv_data_type", out_dtype="o_data_type"
    )
    return mla_cute.get_batch_mla_decode_workspace_size(**pick(given, *names, "device"), **more)


LIVE = (one_shot, run, standalone)
CAREFUL = (one_shot, run)
GEOMETRY = (plan, size)


def refuse(case: Case, entry: Callable[[Arguments], object], change: Arguments, error: type, name: str) -> None:
    with pytest.raises(error, match=name) as caught:
        entry(arguments(case) | change)
    assert caught.type is error or (error is NotImplementedError and caught.type is mla_cute.UnsupportedProblem)


@pytest.mark.parametrize("case", [FIXED, PACKED], ids=["fixed", "packed"])
@pytest.mark.parametrize("entry", [*LIVE, *GEOMETRY])
def test_the_unchanged_arguments_are_accepted(case: Case, entry: Callable[[Arguments], object]) -> None:
    entry(arguments(case))


# --- arguments that are not tensors ---

TYPE_ERRORS = [
    *(
        (name, value, (plan, size))
        for name in ("batch_size", "num_heads", "page_size", "max_kv_len")
        for value in NUMBERS
    ),
    *((name, value, (plan,)) for name in ("max_seq_len_q", "kv_lora_rank", "qk_rope_head_dim") for value in NUMBERS),
    *((name, value, (one_shot,)) for name in ("kv_lora_rank", "qk_rope_head_dim") for value in NUMBERS),
    *((name, value, (one_shot,)) for name in ("max_seq_len_q", "max_kv_len") for value in (True, 2.0, "2")),
    *((name, "bf16", (plan, size)) for name in TYPES),
    ("o_data_type", "bf16", (one_shot, standalone)),
    *((name, v, LIVE) for name in ("bmm1_scale", "bmm2_scale") for v in (True, torch.tensor(1), "1", None, 1j)),
    ("mask_type", 1, (plan, one_shot, standalone, size)),
    ("mask_type", None, (plan, one_shot, standalone, size)),
    ("lse_mode", 2, (plan, one_shot)),
    *(("packed_query", value, (plan,)) for value in (0, 1, None)),
    *(("validate", value, (plan, run, one_shot)) for value in (0, 1, None)),
    *(("return_lse", value, CAREFUL) for value in (0, None)),
    *(("device", value, (plan,)) for value in (True, None, 1.5, "no such device", torch.zeros(1))),
]


@pytest.mark.parametrize(
    ("name", "value", "entry"), [(name, value, entry) for name, value, entries in TYPE_ERRORS for entry in entries]
)
def test_wrong_types(name: str, value: object, entry: Callable[[Arguments], object]) -> None:
    spelled = {"q_data_type": "q_d", "kv_data_type": "kv_d", "o_data_type": "o_data_type|out_dtype"}
    if entry is size and name == "max_kv_len":
        name = "max_seq_len"
        refuse(FIXED, size, {"max_kv_len": value}, TypeError, name)
    elif name == "packed_query":
        refuse(FIXED, entry, {name: value}, TypeError, name)
    else:
        refuse(FIXED, entry, {name: value}, TypeError, spelled.get(name, name))


def test_batch_invariant_is_a_bool() -> None:
    with pytest.raises(TypeError, match="batch_invariant"):
        mla_cute.MLADecodeWrapper().plan(**FIXED.plan(batch_invariant=1))


VALUE_ERRORS = [
    *((name, v, (plan, size)) for name in ("batch_size", "num_heads", "page_size", "max_seq_len_q") for v in (0, -1)),
    *(("max_kv_len", value, (plan, one_shot)) for value in (0, -1)),
    *(("page_size", value, (plan, size)) for value in (1, 8, 48, 512)),
    *(
        (name, v, LIVE)
        for name in ("bmm1_scale", "bmm2_scale")
        for v in (0, -1.0, math.inf, math.nan, 1e-60, 1e39, 10**400)
    ),
    ("mask_type", "CAUSAL", (plan, one_shot, standalone, size)),
    ("lse_mode", "base10", (plan, one_shot)),
    ("lse_mode", "none", (one_shot,)),
    ("device", "meta", (plan, size)),
    ("device", -1, (plan,)),
    ("device", 1000, (plan,)),
    *(("device", f"cuda:{index}", (plan, size)) for index in (128, 200, 2**70)),
    ("bmm1_scale", 3e38, LIVE),  # kernels multiply it by log2(e)
]


@pytest.mark.parametrize(
    ("name", "value", "entry"), [(name, value, entry) for name, value, entries in VALUE_ERRORS for entry in entries]
)
def test_wrong_values(name: str, value: object, entry: Callable[[Arguments], object]) -> None:
    refuse(FIXED, entry, {name: value}, ValueError, name)


def test_old_and_new_name_of_the_query_length() -> None:
    common = (2, 4, 512, 64, 16, 64)
    one = mla_cute.get_batch_mla_decode_workspace_size(*common)
    two = mla_cute.get_batch_mla_decode_workspace_size(*common, seq_len_q=2)
    assert two == mla_cute.get_batch_mla_decode_workspace_size(*common, max_seq_len_q=2, seq_len_q=2) > one
    with pytest.raises(ValueError, match="seq_len_q"):
        mla_cute.get_batch_mla_decode_workspace_size(*common, max_seq_len_q=2, seq_len_q=3)
    with pytest.raises(TypeError, match="seq_len_q"):
        mla_cute.get_batch_mla_decode_workspace_size(*common, seq_len_q=True)
    with pytest.raises(ValueError, match="max_seq_len"):
        mla_cute.get_batch_mla_decode_workspace_size(2, 4, 512, 64, 16, 0)


def test_scales_may_be_any_real_number() -> None:
    for scale in (1, 0.25, Fraction(1, 3)):
        run(arguments(FIXED) | {"bmm1_scale": scale})
    run(arguments(FIXED) | {"bmm2_scale": 3e38})
    for scale, words in ((3e38, ", also when multiplied by log2\\(e\\)"), (1e39, "")):
        refuse(FIXED, run, {"bmm1_scale": scale}, ValueError, f"bmm1_scale must be finite and positive in fp32{words}")


NOT_IMPLEMENTED = [
    *((name, 256, (plan, one_shot, standalone, size)) for name in ("kv_lora_rank", "qk_rope_head_dim")),
    *((name, torch.float32, GEOMETRY) for name in TYPES),
    *((name, dtype, GEOMETRY) for name in TYPES for dtype in (torch.float8_e5m2, torch.uint8)),
    ("o_data_type", torch.float8_e4m3fn, (*GEOMETRY, one_shot, standalone)),
    ("kv_data_type", torch.float16, GEOMETRY),
    ("o_data_type", torch.float32, (one_shot, standalone)),
    ("max_kv_len", MAX_KV_LEN + 1, (plan, one_shot, standalone, size)),
    ("batch_size", INT32_MAX + 1, GEOMETRY),
    ("num_heads", 2**30, GEOMETRY),
]


@pytest.mark.parametrize(
    ("name", "value", "entry"), [(name, value, entry) for name, value, entries in NOT_IMPLEMENTED for entry in entries]
)
def test_what_nothing_serves(name: str, value: object, entry: Callable[[Arguments], object]) -> None:
    spelled = {"q_data_type": "q_d", "kv_data_type": "kv_d", "o_data_type": "o_data_type|out_dtype"}
    refuse(FIXED, entry, {name: value}, NotImplementedError, spelled.get(name, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2, torch.uint8, torch.int8])
@pytest.mark.parametrize("entry", [one_shot, standalone])
def test_input_dtypes(entry: Callable[[Arguments], object], dtype: torch.dtype) -> None:
    hint = r".*e4m3.*\.view\(torch\.float8_e4m3fn\)" if dtype.itemsize == 1 else ""
    for name in ("query", "kv_cache"):
        change = {name: arguments(FIXED)[name].float().nan_to_num().to(dtype)}
        refuse(FIXED, entry, change, NotImplementedError, f"{name}.dtype must be one of .*{dtype}{hint}")
    refuse(FIXED, entry, {"kv_cache": FIXED.kv_cache.half()}, NotImplementedError, "kv_cache")
    refuse(FIXED, entry, {"query": FIXED.query.to(torch.float8_e4m3fn)}, NotImplementedError, "kv_cache.*float8_e4m3fn")


# --- tensors ---


def misaligned(tensor: Tensor, elements: int = 1) -> Tensor:
    buffer = torch.zeros(tensor.numel() + 64, dtype=tensor.dtype)
    return buffer[elements : elements + tensor.numel()].view(tensor.shape).copy_(tensor)


def spread(tensor: Tensor) -> Tensor:
    """The same values, every second element of a larger buffer."""
    return torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)[..., 0].copy_(tensor)


def restrided(name: str, dim: int, stride: int) -> Change:
    def change(given: Arguments) -> Arguments:
        tensor = given[name]
        strides = list(tensor.stride())
        strides[dim] = stride
        buffer = torch.zeros(4 * tensor.numel() + 4096, dtype=tensor.dtype)
        return {name: buffer.as_strided(tensor.shape, strides)}

    return change


def replaced(name: str, by: Callable[[Tensor], object]) -> Change:
    return lambda given: {name: by(given[name])}


METADATA = ("block_tables", "seq_lens", "qo_indptr")
TENSORS = ("query", "kv_cache", *METADATA, "out", "lse")
# entries, form, error, name in the message, change
TENSOR_ERRORS: list[tuple[tuple[Callable[[Arguments], object], ...], Case, type, str, Change]] = [
    *((LIVE, PACKED, TypeError, name, replaced(name, lambda t: t.tolist())) for name in TENSORS[:-1]),
    *((LIVE, PACKED, TypeError, name, replaced(name, lambda t: None)) for name in TENSORS[:4]),
    (CAREFUL, PACKED, TypeError, "lse", replaced("lse", lambda t: t.tolist())),
    *((LIVE, PACKED, TypeError, name, replaced(name, lambda t: t.long())) for name in METADATA),
    *((LIVE, PACKED, TypeError, name, replaced(name, lambda t: t.float())) for name in METADATA),
    (LIVE, PACKED, ValueError, "out", replaced("out", lambda t: t[0])),
    *((LIVE, PACKED, ValueError, f"{name}.* dimensions", replaced(name, lambda t: t[0])) for name in TENSORS[:5]),
    *(
        (LIVE, PACKED, ValueError, name, replaced(name, lambda t: t.to("meta")))
        for name in (*METADATA, "kv_cache", "out")
    ),
    (LIVE, FIXED, ValueError, "query", replaced("query", lambda t: t.to("meta"))),
    (CAREFUL, FIXED, ValueError, "lse", replaced("lse", lambda t: t.to("meta"))),
    ((run,), FIXED, ValueError, "query", replaced("query", lambda t: t.half())),
    ((run,), FIXED, ValueError, "kv_cache", replaced("kv_cache", lambda t: t.half())),
    # query
    (LIVE, FIXED, ValueError, "query", replaced("query", lambda t: t[..., :512])),
    (LIVE, FIXED, ValueError, "query", replaced("query", lambda t: t[:, :0])),
    (LIVE, FIXED, ValueError, "query", replaced("query", lambda t: t[:, :, :0])),
    (LIVE, PACKED, ValueError, "query", replaced("query", lambda t: t[:, :0])),
    (LIVE, FIXED, ValueError, "max_seq_len_q", replaced("query", lambda t: t[:, :1])),
    ((run,), FIXED, ValueError, "num_heads", replaced("query", lambda t: t[:, :, :3])),
    ((run,), FIXED, ValueError, "batch_size", replaced("query", lambda t: torch.cat([t, t]))),
    (LIVE, FIXED, ValueError, "query", replaced("query", misaligned)),
    (LIVE, FIXED, ValueError, "query", replaced("query", spread)),
    (LIVE, FIXED, ValueError, "query", restrided("query", 2, 580)),
    (LIVE, FIXED, ValueError, "query", restrided("query", 0, 576)),
    (LIVE, FIXED, ValueError, "query", restrided("query", 1, 0)),
    # rows beyond requests x capacity
    (LIVE, PACKED, ValueError, "query", replaced("query", lambda t: torch.cat([t, t]))),
    # kv_cache
    (LIVE, FIXED, ValueError, "kv_cache", replaced("kv_cache", lambda t: t[..., :512])),
    (LIVE, FIXED, ValueError, "kv_cache", replaced("kv_cache", lambda t: t[:0])),
    (LIVE, FIXED, ValueError, "kv_cache", replaced("kv_cache", lambda t: t[:, :0])),
    (LIVE, FIXED, ValueError, "kv_cache", replaced("kv_cache", lambda t: t[:, None].expand(-1, 2, -1, -1))),
    (LIVE, FIXED, ValueError, "page_size", replaced("kv_cache", lambda t: t.view(-1, 8, 576))),
    ((run,), FIXED, ValueError, "page_size", replaced("kv_cache", lambda t: torch.cat([t, t], 1))),
    (LIVE, FIXED, ValueError, "kv_cache", replaced("kv_cache", misaligned)),
    (LIVE, FIXED, ValueError, "kv_cache", replaced("kv_cache", spread)),
    (LIVE, FIXED, ValueError, "kv_cache", restrided("kv_cache", 0, 16 * 576 + 4)),
    (LIVE, FIXED, ValueError, "kv_cache", restrided("kv_cache", 1, 576 + 4)),
    (LIVE, FIXED, ValueError, "kv_cache", restrided("kv_cache", 1, 512)),
    # block_tables
    (LIVE, FIXED, ValueError, "block_tables", replaced("block_tables", lambda t: t[:1])),
    (LIVE, FIXED, ValueError, "block_tables", replaced("block_tables", lambda t: t[:, :0])),
    (LIVE, FIXED, ValueError, "block_tables", replaced("block_tables", lambda t: t[:, :3].contiguous())),
    (LIVE, FIXED, ValueError, "block_tables", replaced("block_tables", spread)),
    (LIVE, FIXED, ValueError, "block_tables", replaced("block_tables", lambda t: t[:1].expand(2, -1))),
    # seq_lens, qo_indptr
    (LIVE, FIXED, ValueError, "seq_lens", replaced("seq_lens", lambda t: t[:1])),
    (LIVE, FIXED, ValueError, "seq_lens", replaced("seq_lens", spread)),
    (LIVE, PACKED, ValueError, "qo_indptr", replaced("qo_indptr", spread)),
    (LIVE, PACKED, ValueError, "qo_indptr", replaced("qo_indptr", lambda t: t[:0])),
    ((run,), PACKED, ValueError, "qo_indptr", replaced("qo_indptr", lambda t: torch.arange(4, dtype=t.dtype))),
    ((run,), FIXED, ValueError, "qo_indptr", lambda given: {"qo_indptr": PACKED.qo_indptr, "query": PACKED.query}),
    ((run,), PACKED, ValueError, "qo_indptr", lambda given: {"qo_indptr": None, "query": FIXED.query}),
    ((standalone,), PACKED, ValueError, "max_seq_len_q", lambda given: {"max_seq_len_q": None}),
    ((one_shot, standalone), FIXED, ValueError, "max_seq_len_q", lambda given: {"max_seq_len_q": 3}),
    # out, lse
    (LIVE, FIXED, ValueError, "out", replaced("out", lambda t: t[:1])),
    (LIVE, FIXED, ValueError, "out", replaced("out", lambda t: t.flatten(0, 1))),
    (LIVE, FIXED, ValueError, "out", replaced("out", lambda t: t.half())),
    (LIVE, FIXED, ValueError, "out", replaced("out", spread)),
    (LIVE, FIXED, ValueError, "out", replaced("out", misaligned)),
    (LIVE, FIXED, ValueError, "out", restrided("out", 2, 520)),
    (CAREFUL, FIXED, ValueError, "lse", replaced("lse", lambda t: t[:1])),
    (CAREFUL, FIXED, ValueError, "lse", replaced("lse", lambda t: t.double())),
    (CAREFUL, FIXED, ValueError, "lse", replaced("lse", spread)),
    # workspace
    *(
        ((plan, one_shot, standalone), FIXED, error, "workspace_buffer", replaced("workspace_buffer", change))
        for error, change in (
            (TypeError, lambda t: t.tolist()[:4]),
            (TypeError, lambda t: t.float()),
            (ValueError, lambda t: t[:-1]),
            (ValueError, spread),
            (ValueError, lambda t: misaligned(t, 16)),
            (ValueError, lambda t: t.to("meta")),
        )
    ),
    ((standalone,), FIXED, TypeError, "workspace_buffer", lambda given: {"workspace_buffer": None}),
]


@pytest.mark.parametrize(
    ("entry", "case", "error", "name", "change"),
    [
        pytest.param(entry, case, error, name, change, id=f"{index}-{entry.__name__}-{name}")
        for index, (entries, case, error, name, change) in enumerate(TENSOR_ERRORS)
        for entry in entries
    ],
)
def test_tensors(entry: Callable[[Arguments], object], case: Case, error: type, name: str, change: Change) -> None:
    refuse(case, entry, change(arguments(case)), error, name)


def overlapping() -> list[tuple[str, str]]:
    written = ("out", "lse", "workspace_buffer")
    return [(a, b) for a in written for b in (*TENSORS, "workspace_buffer") if a != b]


@pytest.mark.parametrize(("name", "other"), overlapping())
@pytest.mark.parametrize("entry", LIVE)
def test_outputs_overlap_nothing(entry: Callable[[Arguments], object], name: str, other: str) -> None:
    if entry is standalone and "lse" in (name, other):
        return  # has no lse
    given = arguments(PACKED)
    needed = max(given[n].numel() * given[n].element_size() for n in (name, other))
    memory = torch.zeros(needed + 64, dtype=torch.uint8)
    for argument in (name, other):
        tensor = given[argument]
        given[argument] = memory[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
    if other in METADATA or other == "kv_cache":  # their values must be right until the overlap is seen
        given[other].copy_(arguments(PACKED)[other])
    wrapper = mla_cute.MLADecodeWrapper()
    with pytest.raises(ValueError, match=f"{name}.*{other}|{other}.*{name}"):
        if entry is run:
            wrapper.plan(**pick(given, *PLAN, *TYPES))
            wrapper.run(**pick(given, *RUN, "lse", "return_lse", "validate"))
        else:
            entry(given)


def test_holes_count_as_overlap_and_inputs_may_overlap() -> None:
    given = arguments(FIXED)
    buffer = torch.zeros(2, 2, 4, 576 + 512, dtype=torch.bfloat16)
    query = buffer[..., :576].copy_(given["query"])
    metadata = (given["block_tables"], given["seq_lens"], None)
    validate.check_overlap(validate.Call(query, query, *metadata, 1.0, 1.0, None, None), torch.zeros(0))
    out = buffer.view(-1)[576 : 576 + 512].view(1, 1, 1, 512)
    call = validate.Call(query, given["kv_cache"], *metadata, 1.0, 1.0, out, None)
    with pytest.raises(ValueError, match="out.*query"):
        validate.check_overlap(call, None)


# --- values on the device ---

INT = torch.int32
VALUES: list[tuple[Case, str, Arguments]] = [
    (FIXED, "seq_lens", {"seq_lens": torch.tensor([40, -1], dtype=INT)}),
    (FIXED, "seq_lens", {"seq_lens": torch.tensor([65, 17], dtype=INT)}),
    (FIXED, "seq_lens", {"seq_lens": torch.tensor([40, 1], dtype=INT)}),  # causal, shorter than its 2 query tokens
    (PACKED, "seq_lens", {"seq_lens": torch.tensor([40, 1], dtype=INT)}),
    (FIXED, r"block_tables\[1, 1\]", {"block_tables": torch.tensor([[0, 1, 2, -1], [3, -1, -1, -1]], dtype=INT)}),
    (FIXED, r"block_tables\[0, 2\]", {"block_tables": torch.tensor([[0, 1, 15, -1], [3, 4, 0, 0]], dtype=INT)}),
    (FIXED, "block_tables", {"block_tables": torch.tensor([[0, 1, 2**30, -1], [3, 4, 0, 0]], dtype=INT)}),
    (PACKED, "qo_indptr", {"qo_indptr": torch.tensor([1, 1, 3], dtype=INT)}),
    (PACKED, "qo_indptr", {"qo_indptr": torch.tensor([0, 4, 3], dtype=INT)}),
    (PACKED, "qo_indptr", {"qo_indptr": torch.tensor([0, 1, 2], dtype=INT)}),  # query has a row more
    (PACKED, "qo_indptr", {"qo_indptr": torch.tensor([0, 2, 4], dtype=INT)}),  # query has a row less
    (PACKED, "qo_indptr", {"qo_indptr": torch.tensor([0, 0, 3], dtype=INT)}),  # 3 tokens, capacity 2
    (PACKED, "qo_indptr", {"qo_indptr": torch.tensor([0, 1], dtype=INT)}),  # one offset too few
]


@pytest.mark.parametrize("entry", CAREFUL)
@pytest.mark.parametrize(("case", "name", "change"), VALUES)
def test_values(entry: Callable[[Arguments], object], case: Case, name: str, change: Arguments) -> None:
    refuse(case, entry, change, ValueError, name if "qo_indptr" not in change else "qo_indptr|query")


def test_what_is_not_read_may_hold_anything() -> None:
    given = arguments(PACKED)
    given["block_tables"] = torch.stack([given["block_tables"][0], torch.full((4,), 2**31 - 1, dtype=INT)])
    given["query"], given["out"], given["lse"] = given["query"][:1], given["out"][:1], given["lse"][:1]
    run(given | {"qo_indptr": torch.tensor([0, 1, 1], dtype=INT)})  # no query: no page is read
    given = arguments(FIXED)
    given["block_tables"] = torch.stack([given["block_tables"][0], torch.full((4,), -1, dtype=INT)])
    for entry in LIVE:
        entry(given | {"seq_lens": torch.tensor([40, 0], dtype=INT)})


def test_the_one_shot_function_finds_bounds_that_are_left_out() -> None:
    nothing = {"max_kv_len": None, "max_seq_len_q": None}
    for case in (FIXED, PACKED):
        one_shot(arguments(case) | nothing)
    empty = torch.zeros(3, dtype=INT)
    refuse(PACKED, one_shot, nothing | {"qo_indptr": empty, "query": PACKED.query[:0]}, ValueError, "max_seq_len_q")
    for offsets in ([0, INT32_MAX, 3], [0, 3, INT32_MAX], [-(2**31), 0, 3], []):
        refuse(PACKED, one_shot, nothing | {"qo_indptr": torch.tensor(offsets, dtype=INT)}, ValueError, "qo_indptr")
    for name, case in (("max_kv_len", FIXED), ("max_kv_len", PACKED), ("max_seq_len_q", PACKED)):
        refuse(case, one_shot, {name: None, "validate": False}, ValueError, name)


@pytest.mark.parametrize("names", [TENSORS[:5], *zip(TENSORS[:5], strict=True)], ids="-".join)
def test_no_value_is_read_on_another_device(names: tuple[str, ...]) -> None:
    given = arguments(PACKED)
    away = {name: given[name].to("meta") for name in names}
    for entry in (one_shot, standalone):
        bounds = {"max_kv_len": None, "max_seq_len_q": None} if entry is one_shot else {}
        refuse(PACKED, entry, away | bounds, ValueError, f"({'|'.join(names)}).* be .*(cpu|CPU)")


def test_counts_are_int32() -> None:
    """Stated before any layout is looked at, so views without memory behind them show it."""
    pages = torch.zeros(16, 576, dtype=torch.bfloat16).expand(INT32_MAX + 1, 16, 576)
    refuse(FIXED, run, {"kv_cache": pages}, NotImplementedError, "kv_cache")
    table = torch.zeros(1, 4, dtype=INT).expand(2**29, 4)
    refuse(FIXED, run, {"block_tables": table}, NotImplementedError, "block_tables")
    rows = torch.zeros(1, 4, 576, dtype=torch.bfloat16).expand(2**29, 4, 576)
    refuse(PACKED, run, {"query": rows}, NotImplementedError, "query")
