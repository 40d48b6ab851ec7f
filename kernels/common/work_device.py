"""Twin of work.py for the kernels: the same partition, from the live lengths, by every CTA for itself."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Span(NamedTuple):
    """Steps [start, end) of `total`; the first lies in `request`, whose own steps begin at `before`."""

    start: Int32
    end: Int32
    total: Int32
    request: Int32
    before: Int32


class Request(NamedTuple):
    kv_len: Int32
    q_first: Int32  # its first query token; 0 in fixed mode, where the batch index says which
    q_len: Int32


class Segment(NamedTuple):
    request: Int32
    kv_len: Int32
    q_first: Int32
    q_len: Int32
    block: Int32
    first: Int32
    last: Int32
    steps: Int32
    begin: Int32  # the block's first step on the line


@cute.jit
def cta_start(total: Int32, ctas: Int32, cta: Int32) -> Int32:
    each = total // ctas
    return cta * each + cutlass.min(cta, total - each * ctas)


@cute.jit
def cta_of(total: Int32, ctas: Int32, step: Int32) -> Int32:
    each = total // ctas
    rest = total - each * ctas
    head = rest * (each + 1)
    owner = step // (each + 1)
    if step >= head:
        owner = rest + (step - head) // cutlass.max(each, 1)
    return owner


@cute.jit
def load_request(args, index: Int32) -> Request:
    """Lengths of a request. A length below 0 counts as 0, one beyond the table or the plan is cut: no page id is read past its row."""
    b = cutlass.min(index, args.batch - 1)
    kv_len = cutlass.min(cutlass.max(args.seq_lens[b], 0), args.max_kv_len)
    q_first, q_len = Int32(0), args.seq_len_q
    if args.seq_len_q == 0:
        q_first = args.qo_indptr[b]
        q_len = args.qo_indptr[b + 1] - q_first
    return Request(kv_len, q_first, q_len)


def shape_of(c, args, request):
    """(blocks, steps) of a request."""
    return (request.q_len * args.heads + c.rows - 1) // c.rows, (request.kv_len + c.tile_tokens - 1) // c.tile_tokens


def steps_of(c, args, b):
    blocks, steps = shape_of(c, args, load_request(args, b))
    return blocks * steps


@cute.jit
def find_span(c: cutlass.Constexpr, args, s_scan: cute.Tensor, tid: Int32, cta: Int32) -> Span:
    """Block-wide scan over the requests; all threads of the CTA call it, and leave it behind a CTA barrier.
    `request` and `before` mean nothing where start == end."""
    lane, warp_idx = tid % 32, tid // 32
    warps = c.threads // 32
    chunk = (args.batch + c.threads - 1) // c.threads
    low = cutlass.min(tid * chunk, args.batch)
    high = cutlass.min(low + chunk, args.batch)
    own = Int32(0)
    for b in cutlass.range(low, high, unroll=1):
        own += steps_of(c, args, b)
    before = own
    for e in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(before, offset=1 << e)
        if lane >= (1 << e):
            before += other
    if lane == 31:
        s_scan[warp_idx] = before
    cute.arch.sync_threads()
    before -= own
    total = Int32(0)
    for w in cutlass.range_constexpr(warps):
        if w < warp_idx:
            before += s_scan[w]
        total += s_scan[w]
    start = cta_start(total, args.num_ctas, cta)
    end = cta_start(total, args.num_ctas, cta + 1)
    if (start < end) & (before <= start) & (start < before + own):
        b = low
        steps = steps_of(c, args, b)
        while before + steps <= start:
            before += steps
            b += 1
            steps = steps_of(c, args, b)
        s_scan[warps] = b
        s_scan[warps + 1] = before
    cute.arch.sync_threads()
    return Span(start, end, total, s_scan[warps], s_scan[warps + 1])


@cute.jit
def walk(c: cutlass.Constexpr, args, span: Span, body: cutlass.Constexpr, state):
    """state = body(segment, state) for each segment of a span that is not empty; returns the last state."""
    pos, b, before = span.start, span.request, span.before
    now = load_request(args, b)
    later = load_request(args, b + 1)  # fetched one request ahead: the loop never waits for a length
    while pos < span.end:
        blocks, steps = shape_of(c, args, now)
        while pos - before >= blocks * steps:
            before += blocks * steps
            b += 1
            now = later
            later = load_request(args, b + 1)
            blocks, steps = shape_of(c, args, now)
        block = (pos - before) // steps
        begin = before + block * steps
        first = pos - begin
        last = cutlass.min(steps, span.end - begin)
        state = body(Segment(b, now.kv_len, now.q_first, now.q_len, block, first, last, steps, begin), state)
        pos += last - first
    return state


def live_rows(c, args, seg):
    """Rows of the segment's block that exist; c.rows but for a request's last block."""
    return cutlass.min(seg.q_len * args.heads - seg.block * c.rows, c.rows)


def first_row(c, args, seg):
    """The block's first row in the output, seen as [rows, latent]."""
    token = seg.q_first + (seg.request * args.seq_len_q)  # seq_len_q is 0 in packed mode
    return token * args.heads + seg.block * c.rows


def visible(c, args, seg):
    """KV tokens that the block's first and its last row see. Causal is bottom-right: token i of n sees kv_len - n + i + 1."""
    hidden = (seg.q_len - 1) * args.causal
    first = seg.kv_len - hidden + args.causal * (seg.block * c.rows // args.heads)
    row = seg.block * c.rows + live_rows(c, args, seg) - 1
    return first, seg.kv_len - hidden + args.causal * (row // args.heads)


def last_step(c, args, seg):
    """End of the steps that a row of the block sees: those past it are not loaded."""
    _, last = visible(c, args, seg)
    return cutlass.min(seg.last, (last + c.tile_tokens - 1) // c.tile_tokens)
