"""Small problems that together reach every path of a kernel, alike for the emulator and for a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import mla_cute
from mla_cute.dispatch import shipped
from mla_cute.plan import forced_ctas
from mla_cute.problem import KV_LORA_RANK
from mla_cute.testing import Case, make_case, padded, poisoned
from mla_cute.validate import TORCH_DTYPES

Result = tuple[Tensor, Tensor | None]
Config = Any  # of a kernels/*/config.py


@dataclass(frozen=True)
class Problem:
    """One launch. lengths: tokens of each request. heads: None fills the kernel's rows with q_lens' longest. ctas:
    forced, so that all machines cut the work alike. spread: heads lie apart, so that rows are no longer even."""

    lengths: tuple[int, ...]
    ctas: int
    q_lens: int | tuple[int, ...] = 1
    heads: int | None = None
    page_factor: int = 1  # times the rows of a copy; above 1 for 64 rows alone
    kind: str = "random"
    lse_mode: str = "base2"
    out_dtype: str = "bf16"
    spread: bool = False
    plan: dict[str, Any] = field(default_factory=dict)
    make: dict[str, Any] = field(default_factory=dict)

    def case(self, config: Config, device: torch.device | str = "cpu") -> Case:
        """Made on the CPU, so that every device gets the same numbers."""
        longest = self.q_lens if isinstance(self.q_lens, int) else max(self.q_lens)
        case = make_case(
            self.kind,  # type: ignore[arg-type]
            self.lengths,
            q_lens=self.q_lens,
            num_heads=self.heads or max(1, config.rows // longest),
            page_size=config.page_rows * self.page_factor,
            dtype=TORCH_DTYPES[config.q_dtype],
            kv_dtype=TORCH_DTYPES[config.kv_dtype],
            **self.make,
        )
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(case).items() if isinstance(value, Tensor)
        }
        case = replace(case, **moved)
        return replace(case, query=padded(case.query, -2, 3)) if self.spread else case


# Of every kernel: tails, a request without tokens, several requests to a CTA; both output types.
FIRST = {"first": Problem((100, 0, 131), 2), "fp16": Problem((70, 64, 0, 129), 2, out_dtype="fp16")}

# Of each number of rows, with one page size and dtype.
PROBLEMS = {
    "whole tiles": Problem((128, 256), 1, lse_mode="basee"),
    "one token": Problem((1, 2, 63), 1, lse_mode="none", out_dtype="fp16"),
    "split": Problem((513, 40), 5),
    "split of one": Problem((700,), 4, lse_mode="basee", out_dtype="fp16"),
    "causal": Problem((3, 130, 0), 3, q_lens=3),
    "packed": Problem((70, 10, 200), 2, q_lens=(2, 0, 3), out_dtype="fp16"),
    "uneven rows": Problem((90, 33), 2, q_lens=2, spread=True),
    "large pages": Problem((200, 65), 3, page_factor=4),
    "dense": Problem((5, 140), 2, q_lens=2, make={"mask_type": "dense"}),
    "many segments": Problem((10, 64, 3, 70, 0, 5, 130, 1), 1, lse_mode="basee"),
    "exact": Problem((129, 64, 300), 4, kind="select", out_dtype="fp16", make={"select": (-1, 0, 17)}),
    "table": Problem((64, 100), 2, make={"table_width": 9, "unused_page": 1 << 30, "permute": "reversed"}),
}
# Of the kernels with 64 rows, whose requests may have several blocks; and long ones.
MORE = {
    "blocks": Problem((150, 70), 3, q_lens=2, heads=70),
    "teams": Problem((300, 10), 4, heads=128),
}
# As many parts of a block as one warp of combine does not merge alone.
PARTS = {"many parts": Problem((1400,), 11)}
FEW_PARTS = {"many parts": Problem((2800,), 44)}
INVARIANT = Problem((1100, 2100, 64), 4, plan={"batch_invariant": True})


def table() -> dict[str, tuple[Config, Problem]]:
    """All cases by name."""
    out: dict[str, tuple[Config, Problem]] = {}
    fully = {f"sm90_r{n}" for n in ("64_bf16_p64", "64_fp16_p16", "32_bf16_p32", "32_fp16_p64")}
    fully |= {f"sm90_r{n}" for n in ("16_fp16_p64", "16_bf16_p16", "8_bf16_p64", "8_fp16_p32")}
    fully |= {f"sm90_r{n}" for n in ("64_bf16_e4m3_p64", "16_bf16_e4m3_p16", "64_e4m3_p16", "32_e4m3_p64")}
    configs: tuple[Config, ...] = shipped()
    for config in configs:
        out |= {f"{config.name} {name}": (config, problem) for name, problem in FIRST.items()}
        if config.name not in fully:
            continue
        for name, problem in (PROBLEMS | (FEW_PARTS if config.few else MORE | PARTS)).items():
            if problem.page_factor == 1 or config.page_rows == 64:
                out[f"{config.name} {name}"] = config, problem
        if config.q_dtype == "bf16":
            out[f"{config.name} invariant"] = config, INVARIANT
    return out


def run(config: Config, problem: Problem, case: Case) -> Result:
    """The public plan and run, on the case's device, with out and LSE full of NaN beforehand."""
    query, dtype = case.query, TORCH_DTYPES[problem.out_dtype]
    out = poisoned(*query.shape[:-1], KV_LORA_RANK, dtype=dtype, device=query.device)
    lse = poisoned(*query.shape[:-1], dtype=torch.float32, device=query.device) if problem.lse_mode != "none" else None
    wrapper = mla_cute.BatchMLADecodePagedTSWrapper()
    with forced_ctas(problem.ctas):
        wrapper.plan(**case.plan(lse_mode=problem.lse_mode, o_data_type=dtype, **problem.plan))
    assert wrapper.kernel.split()[0] == config.name, f"{wrapper.kernel} serves it, not {config.name}"
    wrapper.run(*case.tensors, **case.run(out=out, lse=lse))
    return out, lse
