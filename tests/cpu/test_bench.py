"""The benchmark on a machine without a GPU: its data, its tables, its plot, from made-up times."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from mla_cute.bench import anchors, cases, fp8, plot, report, shape, small
from mla_cute.bench.cases import BenchCase
from mla_cute.bench.timing import Rates
from mla_cute.cli import main

CPU = torch.device("cpu")
RECORDED = Rates(copy=4.243e12, gemm=706.6e12)
ANCHORS = anchors.load()
MEMORY, COMPUTE, FIXED, VARLEN = (
    next(anchor for case, anchor in ANCHORS.items() if str(case) == name)
    for name in ("64,1,16,4096", "64,1,128,4096", "1,1,16,4096", "varlen 64,1,16,8192")
)


def measurement(case: BenchCase, seconds: float, error: float = 1e-3) -> report.Measurement:
    return report.Measurement(case, seconds, error, "kernel")


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def test_cases_are_counted_as_the_anchors_are() -> None:
    rows = json.loads(Path(anchors.__file__).with_name("anchors.json").read_text())["cases"]
    assert len(rows) == len(ANCHORS) == 30
    for row, (case, anchor) in zip(rows, ANCHORS.items(), strict=True):
        assert (case.bytes, case.flops) == (row["bytes"], row["flop"]), str(case)
        assert len(case.lengths) == case.batch_size
        assert set(anchors.PEERS) <= set(anchor.readings)
        assert str(case).startswith("varlen") or cases.parse(str(case)) == case


def test_best_readings() -> None:
    assert [MEMORY.best(peer) for peer in anchors.PEERS] == pytest.approx([94.59e-6, 89.47e-6, 93.6e-6])
    assert VARLEN.best("flashmla") == pytest.approx(162.66e-6)


def expected(anchor: anchors.Anchor, rates: Rates) -> Any:
    return anchor.expected(rates)


def test_anchors_scale_by_the_rate_that_bounds_them() -> None:
    for anchor, name, first in ((MEMORY, "copy", 89.47e-6), (COMPUTE, "gemm", 125.73e-6)):
        faster = Rates(**{"copy": 4.243e12, "gemm": 706.6e12, name: 1.25 * getattr(RECORDED, name)})
        assert expected(anchor, faster) == (pytest.approx(first / 1.25), name)
    slower = Rates(RECORDED.copy / 2, RECORDED.gemm / 2)  # those of unknown rates stay as they are, and win
    assert expected(MEMORY, slower) == (pytest.approx(93.6e-6), "none")
    assert expected(COMPUTE, RECORDED) == (pytest.approx(122.08e-6), "none")
    assert expected(FIXED, Rates(1e13, 1e15)) == (pytest.approx(19.46e-6), "none")


def test_table_has_aligned_columns() -> None:
    rows = [measurement(case, 50e-6).row(RECORDED) for case in (*ANCHORS, cases.parse("2,2,16,130"))]
    assert {row.index("  kernel") for row in rows} == {report.HEADER.index("  kernel")}
    assert {shape.HEADER.index(" limit") + 6} == {len(row(pair, 1.0)) for pair in shape.pairs()}
    assert measurement(MEMORY.case, 44.735e-6).row(RECORDED).endswith("    89.5      copy  2.000  kernel")


def row(pair: shape.Pair, ratio: float, error: float = 1e-3) -> str:
    case, base = (measurement(each, 1e-4, error) for each in (pair.case, pair.base))
    return shape.Comparison(pair, case, base, ratio).row(RECORDED)


def test_shape_compares_equal_work() -> None:
    pairs = list(shape.pairs())
    assert {pair.limit for pair in pairs} == {1.05, 1.03}
    for pair in pairs:
        assert (pair.case.bytes, pair.case.flops) == (pair.base.bytes, pair.base.flops), pair.name
        assert max(pair.base.lengths) - min(pair.base.lengths) <= 1 or pair.base.mask_type == "dense"
        if pair.case.seq_len_q == 2:
            assert all(length % 64 for length in pair.case.lengths)
    assert len({pair.name for pair in pairs}) == len(pairs)
    assert row(pairs[0], 1.06).endswith(" 1.060   1.05  over")
    assert row(pairs[0], 1.0, math.nan).endswith("WRONG")


@pytest.fixture
def fake_times(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Launches are timed at 1, 2, 3, ... us, the machine has the anchors' rates; gives the launches."""
    launches: list[Any] = []

    def median_seconds(launch: object) -> float:
        launches.append(launch)
        return len(launches) * 1e-6

    for module in (report, shape):
        monkeypatch.setattr(module, "median_seconds", median_seconds)
    monkeypatch.setattr(report, "measure_rates", lambda device: RECORDED)
    monkeypatch.setattr(shape, "REST_SECONDS", 0)
    return launches


def test_measure_compares_what_it_timed(fake_times: list[Any]) -> None:
    case = cases.parse("2,2,16,130")
    (measured,), mean = report.run([case], report.measure, CPU)
    assert len(fake_times) == 1
    assert mean == RECORDED
    assert measured.correct
    assert "WRONG" not in measured.row(mean)
    assert measured.bandwidth == case.bytes / 1e-6
    fake_times[0].arguments["out"] = torch.empty_like(fake_times[0].out)  # its output stays as it was filled
    assert math.isnan(fake_times[0].error())
    broken = measurement(case, 1e-6, math.nan)
    assert not broken.correct
    assert broken.row(mean).endswith("WRONG")


def test_compare_takes_turns(fake_times: list[Any]) -> None:
    base = BenchCase(2, 2, 8, 100, mask_type="dense")
    pair = shape.Pair("tails", BenchCase(2, 2, 8, 100, (67, 133)), base, 1.03)
    (compared,), _ = report.run([pair], shape.compare, CPU)
    assert compared.correct
    assert fake_times == fake_times[:2] * shape.ROUNDS
    assert shape.ROUNDS >= 5
    assert compared.ratio == pytest.approx(7 / 8)  # of rounds 1/2, 3/4, ..., 13/14
    assert compared.as_data(RECORDED)["case"]["seq_lens"] == (67, 133)


def test_fp8_measures_three_pairs_of_dtypes_in_turn(fake_times: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target = fp8.Target(BenchCase(2, 2, 8, 100), limit=20e-6, peer=90e-6)
    types = [(case.q_dtype, case.kv_dtype) for case in target.cases]
    assert types == [("bf16", "e4m3"), ("e4m3", "e4m3"), ("bf16", "bf16")]
    (outcome,), _ = report.run([target], fp8.measure, CPU)
    assert outcome.correct and fake_times == fake_times[:3] * shape.ROUNDS
    tensors = [launch.data for launch in fake_times[:3]]
    assert [str(case.query.dtype)[6:] for case in tensors] == ["bfloat16", "float8_e4m3fn", "bfloat16"]
    assert [str(case.kv_cache.dtype)[6:] for case in tensors] == ["float8_e4m3fn", "float8_e4m3fn", "bfloat16"]
    assert [round(each.seconds * 1e6) for each in outcome.measured] == [10, 11, 12]
    row = outcome.row(RECORDED)
    assert row.split()[:7] == ["2,2,8,100", "20.0", "10.0", "11.0", "12.0", "90.0", "1.200"]
    assert {"over", "WRONG"}.isdisjoint(row.split()) and len(row) == len(fp8.HEADER.splitlines()[-1])
    assert fp8.Outcome(fp8.Target(target.base, 10.5e-6, 1.0), outcome.measured).row(RECORDED).endswith("  over")
    wrong = measurement(target.base, 1e-6, math.nan)
    broken = fp8.Outcome(target, (outcome.measured[0], wrong, outcome.measured[2]))
    assert not broken.correct and broken.row(RECORDED).endswith("WRONG")
    assert outcome.as_data(RECORDED)["e4m3"]["kv_dtype"] == "e4m3"
    assert len(list(fp8.targets())) == 7


def test_bytes_of_an_fp8_case() -> None:
    tokens, rows = 128 * 8192, 128 * 16
    mixed, same, wide = fp8.Target(BenchCase(128, 1, 16, 8192), 1.0, 1.0).cases
    assert mixed.bytes == tokens * 576 + rows * (576 * 2 + 512 * 2)
    assert same.bytes == tokens * 576 + rows * (576 + 512 * 2)
    assert wide.bytes == tokens * 576 * 2 + rows * (576 * 2 + 512 * 2)
    assert mixed.flops == same.flops == wide.flops


def test_small_bounds_follow_the_slower_of_bytes_and_products() -> None:
    for case, seconds in (
        (BenchCase(1, 1, 8, 131072), BenchCase(1, 1, 8, 131072).bytes / RECORDED.copy),
        (BenchCase(16, 1, 128, 131072), BenchCase(16, 1, 128, 131072).flops / (0.85 * RECORDED.gemm)),
    ):
        bound = small.Bound(case)
        assert bound.seconds(RECORDED) == pytest.approx(seconds + 8e-6)
        for factor, over in ((1.59, False), (1.61, True)):
            found = small.Bounded(bound, measurement(case, factor * bound.seconds(RECORDED)))
            assert found.ratio(RECORDED) == pytest.approx(factor)
            assert found.row(RECORDED).endswith("  over") == over
    assert {bound.case.num_heads for bound in small.bounds()} == {8, 16, 32, 64, 128}


def test_bench_prints_and_writes(fake_times: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(report, "measure", lambda case, device: measurement(case, 44.735e-6))
    file = tmp_path / "bench.json"
    result = bench("--suite", "anchors", "--json", str(file), "--plot", str(tmp_path / "roof.1"))
    assert result.exit_code == 0, result.output
    assert "a GPU, which reaches copy 4.24 TB/s, gemm 707 TFLOP/s" in result.output
    assert result.output.count("  kernel\n") == len(ANCHORS) + 1
    written = json.loads(file.read_text())
    assert [each["kv_len"] for each in written["cases"]] == [case.kv_len for case in ANCHORS]
    anchor = next(each for each in written["cases"] if each["bytes"] == MEMORY.case.bytes)["anchor"]
    assert (anchor["ratio"], anchor["scaled_by"]) == (pytest.approx(2), "copy")
    assert (tmp_path / "roof.1.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "roof.1.svg").read_text()

    wrong = measurement(MEMORY.case, 1e-6, math.nan)
    monkeypatch.setattr(shape, "compare", lambda pair, device: shape.Comparison(pair, wrong, wrong, 1.0))
    result = bench("--suite", "shape")
    assert (result.exit_code, result.output.count("WRONG")) == (1, len(list(shape.pairs()))), result.output
    result = bench("--suite", "small")
    assert (result.exit_code, result.output.count("131072")) == (0, 25), result.output
    monkeypatch.setattr(fp8, "measure", lambda target, device: fp8.Outcome(target, (wrong, wrong, wrong)))
    result = bench("--suite", "fp8")
    assert (result.exit_code, result.output.count("WRONG")) == (1, 7), result.output
    monkeypatch.setattr(report, "measure", lambda case, device: measurement(case, 1e-5))
    for options, types in (
        (("--kv-dtype", "e4m3"), ("bf16", "e4m3")),
        (("--kv-dtype", "e4m3", "--q-dtype", "e4m3"), ("e4m3", "e4m3")),
        (("--q-dtype", "fp16"), ("fp16", "fp16")),
        (("--kv-dtype", "fp16"), ("fp16", "fp16")),
        ((), ("bf16", "bf16")),
    ):
        result = bench("--cases", "2,1,16,100", *options, "--json", str(file))
        (case,) = json.loads(file.read_text())["cases"]
        assert (result.exit_code, case["q_dtype"], case["kv_dtype"]) == (0, *types), result.output


def test_what_cannot_be_done_is_an_error_of_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for arguments, words in (
        ((), "bench measures a GPU, and torch sees none"),
        (("--cases", "1,2,3"), "a case is batch,query_tokens,heads,kv_len"),
        (("--cases", "1,9,16,8"), "query_tokens <= kv_len"),
        (("--suite", "shapes"), "'anchors', 'shape', 'small'"),
        (("--suite", "fp8", "--kv-dtype", "e4m3"), "has dtypes of its own"),
        (("--q-dtype", "e4m3"), "--q-dtype e4m3 over --kv-dtype bf16 is none of"),
        (("--q-dtype", "bf16", "--kv-dtype", "fp16"), "is none of bf16 over bf16"),
        (("--suite", "shape", "--cases", "1,1,16,64"), "exclude each other"),
        (("--suite", "shape", "--plot", "p"), "no roofline"),
        (("--plot", str(tmp_path / "none" / "p")), "there is no folder"),
        (("--plot", str(tmp_path / "p")), "needs matplotlib: pip install 'mla_cute[bench]'"),
    ):
        result = bench(*arguments)
        assert (result.exit_code, words in " ".join(result.output.split())) == (2, True), result.output


def test_plot_of_cases_without_anchors(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.roofline(tmp_path / "p", [measurement(cases.parse("2,2,16,130"), 1e-5)], RECORDED, "a GPU")
    assert {path.name for path in tmp_path.iterdir()} == {"p.png", "p.svg"}
