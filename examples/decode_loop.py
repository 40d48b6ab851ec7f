"""A decode loop as a serving engine runs it: one MLA layer, a paged latent cache, requests that come, grow and go.

    python examples/decode_loop.py                  # the GPU if there is one, else the CPU reference
    python examples/decode_loop.py --device cpu
    python examples/decode_loop.py --kv-dtype e4m3  # an FP8 cache: half the bytes

A request arrives with a prompt, grows by a token a step, and leaves; its pages go back to the allocator and to the
next request. The batch has a fixed number of slots (an idle one has length 0), so the attention is planned once. On a
GPU one step is captured in a CUDA graph and replayed: lengths and block tables change in place, no step plans again.

Every few steps the heads' outputs are compared with plain attention over each request's text: full keys and values
from the weights that were not absorbed, no pages, float32. The program ends with status 1 if one disagrees.

An e4m3 cache holds what the model computes divided by one scale, latent and RoPE lanes alike, and the attention's two
scales multiply it back. A bf16 cache is then kept beside it, to show at the checks what the quantisation costs.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import torch

import mla_cute

LATENT, ROPE = 512, 64  # lanes of a cached token: the compressed KV, then the rotated key that all heads share
NOPE, VALUE, HIDDEN, VOCAB = 128, 128, 256, 512
DTYPE = torch.bfloat16
MAX_PROMPT, MAX_NEW = 320, 96
KV_DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
TOLERANCES = {"bf16": 2e-2, "e4m3": 8e-2}  # relative L2: bf16 query and output, this cache, against float32 throughout
PAGE_SIZES = (16, 32, 64, 128, 256)
SPARE_PAGE = 0  # never handed out: idle slots write their token here


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE: lane pairs (i, i + 32) of `x` [tokens, ..., 64] turned by angles that grow with positions [tokens]."""
    inverse = 10000.0 ** (-torch.arange(0, ROPE, 2, device=x.device) / ROPE)
    angle = positions.float().view(-1, *[1] * (x.dim() - 1)) * inverse
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1).to(x.dtype)


class MLALayer:
    """Multi-head latent attention between an embedding and its transpose: enough of a model to write a text.

    A key is `[w_uk @ latent, rope key]` and a value `w_uv @ latent`. Since q . (w_uk @ latent) = (q @ w_uk) . latent,
    decode takes w_uk into the query and w_uv behind the attention, and makes no keys or values: the latent is both.
    """

    def __init__(self, heads: int, device: torch.device, generator: torch.Generator) -> None:
        def weight(*shape: int, fan_in: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) / math.sqrt(fan_in)).to(device, DTYPE)

        self.embedding = weight(VOCAB, HIDDEN, fan_in=1)
        self.w_q = weight(HIDDEN, heads, NOPE + ROPE, fan_in=HIDDEN)
        self.w_kv = weight(HIDDEN, LATENT + ROPE, fan_in=HIDDEN)
        self.w_uk = weight(heads, NOPE, LATENT, fan_in=LATENT)
        self.w_uv = weight(heads, LATENT, VALUE, fan_in=LATENT)
        self.w_o = weight(heads, VALUE, HIDDEN, fan_in=heads * VALUE)
        self.scale = 1 / math.sqrt(NOPE + ROPE)

    def query(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Absorbed queries [B, 1, H, 576] of the hidden states x [B, HIDDEN]."""
        nope, rope = torch.einsum("bd,dhk->bhk", x, self.w_q).split((NOPE, ROPE), dim=-1)
        absorbed = torch.einsum("bhk,hkl->bhl", nope, self.w_uk)
        return torch.cat((absorbed, rotate(rope, positions)), dim=-1).unsqueeze(1)

    def cache_rows(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the cache keeps of the tokens x [T, HIDDEN]: [T, 576]."""
        latent, rope = (x @ self.w_kv).split((LATENT, ROPE), dim=-1)
        return torch.cat((latent, rotate(rope, positions)), dim=-1)

    def kv_scale(self, dtype: torch.dtype) -> float:
        """What rows are divided by before they are cached: one number, as a score is a sum over all 576 lanes."""
        if dtype == DTYPE:
            return 1.0
        # a model's is found on sample texts; here the rows of all words, and room for RoPE at other positions
        rows = self.cache_rows(self.embedding, torch.arange(VOCAB, device=self.embedding.device))
        return 1.25 * float(rows.abs().max()) / torch.finfo(dtype).max

    def plain_attention(self, text: torch.Tensor) -> torch.Tensor:
        """Head outputs [H, VALUE] of the text's last token in float32: nothing absorbed, nothing paged."""
        x, positions = self.embedding[text].float(), torch.arange(len(text), device=text.device)
        latent, k_rope = (x @ self.w_kv.float()).split((LATENT, ROPE), dim=-1)
        q_nope, q_rope = torch.einsum("d,dhk->hk", x[-1], self.w_q.float()).split((NOPE, ROPE), dim=-1)
        scores = torch.einsum("hk,thk->ht", q_nope, torch.einsum("tl,hkl->thk", latent, self.w_uk.float()))
        scores += rotate(q_rope.unsqueeze(0), positions[-1:])[0] @ rotate(k_rope, positions).T
        values = torch.einsum("tl,hlv->thv", latent, self.w_uv.float())
        return torch.einsum("ht,thv->hv", (scores * self.scale).softmax(dim=-1), values)


class PageAllocator:
    """Hands out the pages of a pool and takes them back; the page freed last is the next to go out."""

    def __init__(self, pages: int) -> None:
        self.free = [page for page in range(pages) if page != SPARE_PAGE]
        self.capacity, self.handed_out = len(self.free), 0

    def take(self) -> int:
        self.handed_out += 1
        return self.free.pop()

    def give_back(self, pages: list[int]) -> None:
        self.free += pages


@dataclass
class Request:
    prompt: torch.Tensor  # token ids, on the host
    total: int  # tokens when it is done
    length: int = 0  # tokens in the cache
    pages: list[int] = field(default_factory=list)


class Engine:
    """The slots, their metadata on host and device, and one decode step over all of them."""

    def __init__(
        self, layer: MLALayer, device: torch.device, batch: int, heads: int, page_size: int, kv_dtype: torch.dtype
    ) -> None:
        max_kv_len = MAX_PROMPT + MAX_NEW
        columns = math.ceil(max_kv_len / page_size)
        pool = max(columns, batch * columns * 2 // 3) + 1  # smaller than the worst case: admission has to wait at times
        self.layer, self.page_size = layer, page_size
        self.allocator = PageAllocator(pool)
        self.slots: list[Request | None] = [None] * batch
        # NaN everywhere: what no request has written must never reach an output. The second is for comparison.
        self.caches = [
            torch.full((pool, page_size, LATENT + ROPE), float("nan"), dtype=dtype, device=device)
            for dtype in dict.fromkeys((kv_dtype, DTYPE))
        ]
        self.kv_scale = layer.kv_scale(kv_dtype)
        self.host_lens = torch.zeros(batch, dtype=torch.int32)
        self.host_tables = torch.full((batch, columns), SPARE_PAGE, dtype=torch.int32)
        self.seq_lens, self.block_tables = self.host_lens.to(device), self.host_tables.to(device)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)  # each slot's newest token
        self.text = torch.zeros(batch, max_kv_len, dtype=torch.int64, device=device)
        self.rows = torch.arange(batch, device=device)
        self.query = torch.empty(batch, 1, heads, LATENT + ROPE, dtype=DTYPE, device=device)
        self.latent_out = torch.empty(batch, 1, heads, LATENT, dtype=DTYPE, device=device)
        self.head_out = torch.empty(batch, heads, VALUE, dtype=DTYPE, device=device)
        self.attention = mla_cute.BatchMLADecodePagedTSWrapper()
        self.attention.plan(
            device, batch, heads, LATENT, ROPE, page_size, max_kv_len,
            max_seq_len_q=1, packed_query=False, q_data_type=DTYPE, kv_data_type=kv_dtype, o_data_type=DTYPE,
        )  # fmt: skip

    def write_cache(self, slot: torch.Tensor | int, positions: torch.Tensor, x: torch.Tensor) -> None:
        """Cache tokens x [T, HIDDEN] at positions [T], in one slot or in a slot each, through the block table."""
        page = self.block_tables[slot, positions // self.page_size].long()
        rows = self.layer.cache_rows(x, positions)
        for cache in self.caches:
            if cache.dtype == DTYPE:
                cache[page, positions % self.page_size] = rows
            else:
                largest = torch.finfo(cache.dtype).max
                stored = (rows.float() / self.kv_scale).clamp(-largest, largest).to(cache.dtype)
                # as bytes, which can be indexed on every device
                cache.view(torch.uint8)[page, positions % self.page_size] = stored.view(torch.uint8)

    def step(self) -> None:
        """Attend with each slot's newest token and choose its next one. Device work only: it can be captured."""
        positions = (self.seq_lens - 1).clamp_min(0).long()
        self.text[self.rows, positions] = self.tokens
        x = self.layer.embedding[self.tokens]
        self.write_cache(self.rows, positions, x)
        self.query.copy_(self.layer.query(x, positions))
        self.attention.run(
            self.query, self.caches[0], self.block_tables, self.seq_lens,
            bmm1_scale=self.layer.scale * self.kv_scale, bmm2_scale=self.kv_scale, out=self.latent_out, validate=False,
        )  # fmt: skip
        self.head_out.copy_(torch.einsum("bhl,hlv->bhv", self.latent_out[:, 0], self.layer.w_uv))
        x = x + torch.einsum("bhv,hvd->bd", self.head_out, self.layer.w_o)
        self.tokens.copy_((x @ self.layer.embedding.T).argmax(dim=-1))

    def schedule(self, waiting: deque[Request]) -> int:
        """Before a step: finished requests go, waiting ones come, all get room for a token. Returns the active ones."""
        for slot in range(len(self.slots)):
            request = self.slots[slot]
            if request and request.length == request.total:
                self.retire(slot, request)
            if self.slots[slot] is None and waiting and self.fits(waiting[0]):
                self.admit(slot, waiting.popleft())
            if request := self.slots[slot]:
                self.grow(slot, request, 1)
        self.publish()
        return sum(request is not None for request in self.slots)

    def fits(self, request: Request) -> bool:
        """Whether the pool can take the request and still hold every admitted one to its end."""
        totals = [request.total, *(admitted.total for admitted in self.slots if admitted)]
        return sum(math.ceil(total / self.page_size) for total in totals) <= self.allocator.capacity

    def retire(self, slot: int, request: Request) -> None:
        self.allocator.give_back(request.pages)
        self.slots[slot] = None
        self.host_lens[slot] = 0
        self.host_tables[slot] = SPARE_PAGE

    def admit(self, slot: int, request: Request) -> None:
        """Cache the prompt but for its last token, which the next step takes."""
        self.slots[slot] = request
        head = request.prompt[:-1].to(self.text.device)
        self.grow(slot, request, len(head))
        self.publish()
        positions = torch.arange(len(head), device=head.device)
        self.write_cache(slot, positions, self.layer.embedding[head])
        self.text[slot, : len(head)] = head
        self.tokens[slot] = request.prompt[-1]

    def grow(self, slot: int, request: Request, tokens: int) -> None:
        """Make room for more tokens: pages as needed, then the length."""
        request.length += tokens
        while len(request.pages) * self.page_size < request.length:
            page = self.allocator.take()
            self.host_tables[slot, len(request.pages)] = page
            request.pages.append(page)
        self.host_lens[slot] = request.length

    def publish(self) -> None:
        """Lengths and tables to the device, at the addresses that the graph reads."""
        self.seq_lens.copy_(self.host_lens)
        self.block_tables.copy_(self.host_tables)

    def worst_error(self) -> float:
        """The largest relative L2 error of a slot's head outputs against plain attention over its text."""
        worst = 0.0
        for slot, request in enumerate(self.slots):
            if request:
                right = self.layer.plain_attention(self.text[slot, : request.length])
                error = (self.head_out[slot].float() - right).norm() / right.norm()
                worst = max(worst, error.nan_to_num(nan=math.inf).item())
        return worst

    def quantisation_error(self) -> float:
        """Relative L2 of the last step's attention against that over the bf16 cache; 0 where that is the only one."""
        if len(self.caches) == 1 or not self.seq_lens.any():
            return 0.0
        wide = mla_cute.batch_mla_decode_with_paged_kv_cache(
            self.query, self.caches[1], self.block_tables, self.seq_lens, bmm1_scale=self.layer.scale
        )
        assert isinstance(wide, torch.Tensor)  # no LSE is asked for
        return float((self.latent_out.float() - wide.float()).norm() / wide.float().norm())


def new_request(generator: torch.Generator) -> Request:
    """A prompt of random length and words, and how long the text may grow."""
    prompt, new = (int(torch.randint(1, most + 1, (), generator=generator)) for most in (MAX_PROMPT, MAX_NEW))
    return Request(torch.randint(VOCAB, (prompt,), generator=generator), total=prompt + new)


def capture(engine: Engine) -> torch.cuda.CUDAGraph:
    """The step as a CUDA graph. Every slot is idle while it is warmed up: only the spare page is written."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        engine.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.step()
    return graph


def decode(engine: Engine, steps: int, check_every: int, generator: torch.Generator) -> tuple[int, float, float, float]:
    """Run the loop. Returns (tokens written, seconds without the checks, worst relative error of the checked steps, and
    worst of them against a bf16 cache)."""
    on_gpu = engine.tokens.is_cuda
    run_step = capture(engine).replay if on_gpu else engine.step
    waiting = deque(new_request(generator) for _ in engine.slots)
    written, seconds, worst, quantised = 0, 0.0, 0.0, 0.0
    for step in range(steps):
        # as many as leave on average: a request stays MAX_NEW / 2 steps
        arrivals = int((torch.rand(len(engine.slots), generator=generator) < 2 / MAX_NEW).sum())
        waiting.extend(new_request(generator) for _ in range(arrivals))
        start = time.perf_counter()
        written += engine.schedule(waiting)
        run_step()
        check = step % check_every == check_every - 1 or step == steps - 1
        if on_gpu and check:
            torch.cuda.synchronize()
        seconds += time.perf_counter() - start
        if check:
            worst = max(worst, engine.worst_error())
            quantised = max(quantised, engine.quantisation_error())
    return written, seconds, worst, quantised


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU, else cpu")
    parser.add_argument("--steps", type=positive, default=128, help="decode steps (default %(default)s)")
    parser.add_argument("--batch", type=positive, default=8, help="slots of the batch (default %(default)s)")
    parser.add_argument("--heads", type=positive, default=16, help="query heads (default %(default)s)")
    parser.add_argument("--page-size", type=int, choices=PAGE_SIZES, default=64, help="tokens a page")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bf16", help="of the cache (default %(default)s)")
    parser.add_argument("--check-every", type=positive, default=20, help="steps between checks (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: must be cpu on this machine, where torch finds no usable GPU, got cuda")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_num_threads(1)  # CPU: the matrices are so small that threads cost more than they bring
    print("device:", torch.cuda.get_device_name() if device.type == "cuda" else "cpu: the reference, not a GPU kernel")

    generator = torch.Generator().manual_seed(args.seed)
    layer = MLALayer(args.heads, device, generator)
    try:
        engine = Engine(layer, device, args.batch, args.heads, args.page_size, KV_DTYPES[args.kv_dtype])
    except mla_cute.UnsupportedProblem as refusal:
        print(f"{refusal}\nThe reference runs on any machine: --device cpu", file=sys.stderr)
        return 2
    print("kernel:", engine.attention.kernel)
    written, seconds, worst, quantised = decode(engine, args.steps, args.check_every, generator)

    pool = engine.allocator
    print(f"tokens: {written} in {seconds:.2f} s = {written / seconds:.0f} tokens/s")
    print(f"pages: {pool.handed_out} handed out from a pool of {pool.capacity}")
    limit = TOLERANCES[args.kv_dtype]
    print(f"worst relative error against plain attention: {worst:.1e} (limit {limit:.0e})")
    if args.kv_dtype != "bf16":
        print(f"worst relative error against a bf16 cache: {quantised:.1e}")
    for request in filter(None, engine.slots):
        pool.give_back(request.pages)
    failures = []
    if not worst <= limit:
        failures.append("the heads' outputs differ from plain attention")
    if len(set(pool.free)) != len(pool.free) or len(pool.free) != pool.capacity:
        failures.append("a page was lost or handed out twice")
    for failure in failures:
        print("FAILED:", failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
