"""What other decode kernels took on one GPU (anchors.json), and how a time measured here stands beside them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from mla_cute.bench.cases import BenchCase
from mla_cute.bench.timing import Rates

PEERS = {"flashmla": "FlashMLA", "flashinfer_fa3": "FI fa3", "fa3": "FA3"}  # name in the file: heading
RATE = {"memory": "copy", "compute": "gemm"}  # a row's bound: the rate that its times go with


@dataclass(frozen=True)
class Reading:
    """rates: of the machine in the run that gave this time, where they were recorded."""

    seconds: float
    rates: Rates | None


@dataclass(frozen=True)
class Anchor:
    case: BenchCase
    bound: str
    readings: dict[str, tuple[Reading, ...]]  # by peer

    def best(self, peer: str) -> float:
        """Seconds, as read."""
        return min(reading.seconds for reading in self.readings[peer])

    def expected(self, rates: Rates) -> tuple[float, str]:
        """Seconds that the best peer should take on a machine of these rates, and the rate that scaled them.

        A reading is scaled by the row's rate if its run recorded it, else ("none") taken as it is. The least of all
        counts: a machine slower than the anchors' gains nothing on those whose rates are unknown.
        """
        return min(self._scaled(reading, rates) for peer in PEERS for reading in self.readings[peer])

    def _scaled(self, reading: Reading, rates: Rates) -> tuple[float, str]:
        name = RATE.get(self.bound)
        if name is None or reading.rates is None:
            return reading.seconds, "none"
        return reading.seconds * getattr(reading.rates, name) / getattr(rates, name), name

    def as_data(self, seconds: float, rates: Rates) -> dict[str, Any]:
        expected, scaled_by = self.expected(rates)
        peers = {peer: self.best(peer) for peer in PEERS}
        result = {"best": expected, "scaled_by": scaled_by, "ratio": expected / seconds}
        return {"bound": self.bound, "peers": peers, **result}


@cache
def load() -> dict[BenchCase, Anchor]:
    """All anchors, in the order of the table."""
    data = _file()
    recorded = {
        (peer, index): Rates(run["copy_tb_s"] * 1e12, run["gemm_tflops"] * 1e12)
        for run in data["runs"]
        for peer, indices in run["readings"].items()
        for index in indices
    }
    anchors = {}
    for row in data["cases"]:
        case = BenchCase(row["b"], row["sq"], row["h"], row["s"], tuple(row.get("seq_lens", ())))
        readings = {
            peer: tuple(Reading(us * 1e-6, recorded.get((peer, index))) for index, us in enumerate(times))
            for peer, times in row["us"].items()
        }
        anchors[case] = Anchor(case, row["bound"], readings)
    return anchors


def explain() -> str:
    """What the table's columns about other kernels mean."""
    data = _file()
    first = data["runs"][0]
    return (
        f"{', '.join(PEERS.values())}: best reading in us on {data['gpu']}, {data['date']}. best: the least that one of"
        " them should take here.\nscaled by: this run's copy or gemm against that of the reading's run where it was"
        f" recorded ({first['copy_tb_s']:.2f} TB/s, {first['gemm_tflops']:.0f} TFLOP/s), none: as read.\n"
        "ratio: best / us, above 1 is faster."
    )


def _file() -> Any:
    return json.loads(files("mla_cute.bench").joinpath("anchors.json").read_text())
