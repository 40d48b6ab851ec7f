"""Paged MLA decode for Hopper: 64 or fewer query rows a CTA, split-KV over a persistent grid.

    S = scale Q K^T (Q: 64 x 576, K: tokens x 576),  P = softmax S,  O = P V,  V = the first 512 columns of K

Grid: one CTA an SM; each takes an even piece of the batch's work (common/work.py), so it walks over a few segments,
each one block of rows times some steps. With 64 rows a step is a pair of 64-token tiles, with 384 threads:
    warp 0         KV producer: TMA gathers by page id into 4 half tiles of 32 KB and 2 rope tiles of 8 KB   (load.py)
    warps 1-2      query rows of the next block; rows without tokens                                         (load.py)
    warp 3         scheduler: finds the segments; the first is found by warps 0-3 each             (common/schedule.py)
    warps 4-7      scores and softmax of tile a, O columns 0-255                                             (attend.py)
    warps 8-11     scores and softmax of tile b, O columns 256-511
With 8 to 32 rows a step is one tile, three pieces of 24 KB in a ring of 7 or 8, and warps 4-7 do all the math with
tokens or latents as the tall side of each product: attend_swapped.py. So it is with an e4m3 cache for all rows, but
warps 4-11 share a pair of tiles (pieces of 12 KB in a ring of 9 to 15), and values are widened on their way: widen.py.
`combine` follows in the same launch call. Registers and shared memory: config.py; the overlap: the timeline in
attend.py.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..combine import THREADS, arguments, combine
from ..common import work_device as work
from ..common.bundle import bundle
from ..common.math import scale_by
from ..common.schedule import AHEAD, WORDS, publish_all
from ..common.work import HEAD_WORDS
from .attend import attend as attend_rows
from .attend_swapped import attend as attend_swapped
from .config import DecodeConfig
from .layouts import CHUNK, DTYPES, cache_view, one_query, query_view, rows_at, slot_layout, swizzled, tiled_mma
from .load import fill_empty, load_kv, load_query, prefetch_table


class Decode:
    def __init__(self, config: DecodeConfig):
        self.c = bundle(
            **{k: getattr(config, k) for k in dir(config) if not k.startswith("_")},
            dtype=DTYPES[config.compute],
            q_type=DTYPES[config.q_dtype],
            # as the query comes to shared memory: 16-bit rows are moved as they are, whatever their bits mean
            q_place=DTYPES[config.compute if config.q_bytes == 2 else config.q_dtype],
            kv_type=DTYPES[config.kv_dtype],
            part_dtype=DTYPES[config.part_type],
        )

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        packed_query: cute.Tensor,
        kv_cache: cute.Tensor,
        block_tables: cute.Tensor,
        seq_lens: cute.Tensor,
        qo_indptr: cute.Tensor,
        part_out: cute.Tensor,
        part_stat: cute.Tensor,
        split_info: cute.Tensor,
        batch: Int32,
        seq_len_q: Int32,
        causal: Int32,
        max_kv_len: Int32,
        slot_rows: Int32,
        num_ctas: Int32,
        team: Int32,
        batch_invariant: Int32,
        out_bf16: Int32,
        out_address: Int64,
        lse_address: Int64,
        scale1_address: Int64,
        scale2_address: Int64,
        scale_log2: Float32,
        out_scale: Float32,
        lse_scale: Float32,
        stream: cuda.CUstream,
    ):
        c = self.c
        query = one_query(query, packed_query, seq_len_q == 0, c.q_place)
        total = query.shape[0] * query.shape[1] * query.shape[2]  # rows
        out = rows_at(out_address, c.dtype, (total, c.latent), 16)  # of 16-bit words: see with_output
        lse = rows_at(lse_address, Float32, (total,), 4)
        load, cache = cpasync.CopyBulkTensorTileG2SOp(), cache_view(kv_cache, c.page_rows)
        rows, even_rows = query_view(query)
        boxes = {name: (8, CHUNK, ring.columns // CHUNK, c.page_rows // 8) for name, ring in c.rings.items()}
        atoms = {name: cpasync.make_tiled_tma_atom(load, cache, swizzled(c.kv_type, b), b) for name, b in boxes.items()}
        box = (c.rows, CHUNK, c.head_dim // CHUNK)
        atoms["query"] = cpasync.make_tiled_tma_atom(load, rows, swizzled(c.q_place, box), box)
        if const_expr(not c.swapped):
            box, columns = (c.rows, CHUNK, c.half // CHUNK), c.latent // CHUNK
            out_rows = cute.make_tensor(
                out.iterator,
                cute.make_layout((total, CHUNK, columns), stride=(c.latent, 1, CHUNK)),
            )
            store = cpasync.CopyBulkTensorTileS2GOp()
            atoms["out"] = cpasync.make_tiled_tma_atom(store, out_rows, swizzled(c.dtype, box), box)
        given = bundle(
            query=query,
            even_rows=even_rows,
            block_tables=block_tables,
            seq_lens=seq_lens,
            qo_indptr=qo_indptr,
            out=out,
            lse=lse,
            part_out=cute.make_tensor(cute.recast_ptr(part_out.iterator, dtype=c.part_dtype), part_out.layout),
            part_stat=part_stat,
            split_info=split_info,
            batch=batch,
            seq_len_q=seq_len_q,
            causal=causal,
            max_kv_len=max_kv_len,
            page_size=kv_cache.shape[1],
            slot_rows=slot_rows,
            num_ctas=num_ctas,
            team=team,
            batch_invariant=batch_invariant,
            out_bf16=out_bf16,
            max_entries=(cute.size(split_info) - HEAD_WORDS) // 4,
            divisors=work.divisors(num_ctas, team, query.shape[2]),
            scale1_address=scale1_address,
            scale2_address=scale2_address,
            scale_log2=scale_log2,
            out_scale=out_scale,
            lse_scale=lse_scale,
        )
        tma = bundle(**{prefix + name: atoms[name][i] for name in atoms for i, prefix in enumerate(("", "m_"))})
        layouts, mmas = bundle(**tile_layouts(c)), bundle(**tiled_mmas(c))
        self.kernel(tma, given, layouts, mmas).launch(
            grid=[num_ctas, 1, 1],
            block=[c.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=c.blocks_per_sm,
            preferred_smem_carveout=100 if c.combine_beside else None,
        )
        merge_ctas = cutlass.max(num_ctas * c.merge_ctas, c.least_merge_ctas)
        combine(c, arguments(given, merge_ctas)).launch(
            grid=[merge_ctas, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=max(c.merge_ctas, 2),  # beside decode it has half of the registers
            preferred_smem_carveout=100 if c.combine_beside else 25,  # 100: as decode
        )

    @cute.kernel
    def kernel(self, tma, given, layouts, mmas):
        c = self.c
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = SmemAllocator()
        bars = bundle(**{name: allocator.allocate_array(Int64, count) for name, count in barrier_counts(c).items()})
        smem = bundle(
            segments=allocator.allocate_tensor(Int32, cute.make_layout((WORDS, AHEAD)), byte_alignment=16),
            **{
                name: allocator.allocate_tensor(dtype, layout, byte_alignment=16)
                for name, (dtype, layout) in row_numbers(c).items()
            },
            **{
                name: allocator.allocate_tensor(
                    layout_type(c, name), layout.outer, byte_alignment=1024, swizzle=layout.inner
                )
                for name, layout in layouts._asdict().items()
            },
        )
        width = given.page_size // c.page_rows - 1
        table_tokens = given.block_tables.shape[1].to(Int64) * given.page_size.to(Int64)  # passes 2**31 in a wide table
        args = bundle(
            **given._replace(max_kv_len=cutlass.min(given.max_kv_len.to(Int64), table_tokens).to(Int32))._asdict(),
            heads=given.query.shape[2],
            total_q=given.query.shape[1],  # packed: of all requests
            page_mask=width,  # copies of a page - 1; pages hold a power of two of them
            page_shift=cute.arch.popc(width),
            cta=cta,
        )
        words = work.read_ahead(args)  # a memory latency before they are needed
        prefetch_table(c, given.block_tables, given.batch, cta, tid)
        if warp_idx == 4:
            init_barriers(c, bars)
            cute.arch.mbarrier_init_fence()
            for name in (*c.rings, "query"):
                cpasync.prefetch_descriptor(getattr(tma, name))
        if warp_idx < 4:
            cute.arch.sync_threads()  # the barriers are made
            cute.arch.setmaxregister_decrease(c.producer_regs)
            # Each of these warps finds the first segment for itself, on a sub-partition of its own.
            line, place = work.find_line(c, args, cta, words)
            first = work.next_segment(c, args, line, place)
            if warp_idx == 0:
                load_kv(c, tma, smem, bars, args, first[0])
            else:
                if warp_idx == c.scheduler_warp:
                    publish_all(c, bars, smem.segments, args, line, first)
                else:
                    load_query(c, tma, smem, bars, args, tid - 32, first[0])
                fill_empty(c, args, cta, tid - 32)
        else:
            cute.arch.sync_threads()
            cute.arch.setmaxregister_increase(c.consumer_regs)
            # here: the other warps, which find the first tokens to load, do not wait for scales in device memory
            args = args._replace(
                scale_log2=scale_by(args.scale_log2, args.scale1_address),
                out_scale=scale_by(args.out_scale, args.scale2_address),
            )
            attend = attend_swapped if c.swapped else attend_rows
            if const_expr(c.math_warps == 8):
                if warp_idx < 8:
                    attend(c, 0, mmas, smem, bars, args, tid - 128)
                else:
                    attend(c, 1, mmas, smem, bars, args, tid - 256)
            else:
                attend(c, 0, mmas, smem, bars, args, tid - 128)


def tile_layouts(c):
    """Shared memory of the query, the KV rings and, where it does not lie over the rope columns, P."""
    rings = {name: slot_layout(c, ring.columns, ring.slots) for name, ring in c.rings.items()}
    p = {"p": swizzled(c.dtype, (c.rows, c.tile, c.tiles))} if c.swapped else {}
    return {"query": swizzled(c.q_place, (c.rows, c.head_dim)), **rings, **p}


def layout_type(c, name):
    return c.q_place if name == "query" else c.kv_type if name in c.rings else c.dtype


def row_numbers(c):
    """Each warpgroup's scale of scores, and of a row the reference and each warpgroup's sum; swapped form: see
    attend_swapped.py.
    """
    row = cute.make_layout((c.rows,))
    if c.swapped:
        warps = cute.make_layout((c.rows, c.math_warps), stride=(c.math_warps, 1))
        gain = {"gain": (Float32, row)} if c.row_gains else {}
        one = dict.fromkeys(("high", "shift", "alpha"), (Float32, row))
        return {"limit": (Int32, row), **one, **gain, "top": (Float32, warps), "sum": (Float32, warps)}
    return {
        "scale": (Float32, cute.make_layout((2,))),
        "ref": (Float32, row),
        "sum": (Float32, cute.make_layout((c.rows, 2, 2))),
    }


def tiled_mmas(c):
    if c.fp8:
        widened = tiled_mma(c.dtype, c.rows, a="RMEM")
        return {"qk": widened if c.widen_keys else tiled_mma(c.kv_type, c.rows), "pv": widened}
    if c.few:
        return {"qk": tiled_mma(c.dtype, c.rows), "pv": tiled_mma(c.dtype, c.rows, a_major="MN")}
    return {
        "qk": tiled_mma(c.dtype, c.tile),
        "pv": tiled_mma(c.dtype, c.half, "MN"),
        "pv_own": tiled_mma(c.dtype, c.half, "MN", "RMEM"),
    }


def barrier_counts(c):
    """Barriers of each kind."""
    rings = {f"{name}_{kind}": ring.slots for name, ring in c.rings.items() for kind in ("full", "empty")}
    rings |= {"segment_full": AHEAD, "segment_empty": AHEAD}
    return {"query_full": 1, "query_empty": 1, **rings, **({} if c.swapped else {"scored": 2, "p_full": 2})}


def init_barriers(c, bars):
    """Arrivals a phase: one expect_tx for TMA, else one a warp. A slot and P have one reading or writing warpgroup."""
    arrivals = {f"{name}_full": 1 for name in (*c.rings, "segment")}
    arrivals |= {"query_full": c.query_warps, "query_empty": c.math_warps}
    arrivals["segment_empty"] = 1 + c.query_warps + c.math_warps
    if c.swapped:
        arrivals["third_empty"] = c.math_warps
    with cute.arch.elect_one():
        for name, count in barrier_counts(c).items():
            for i in range(count):
                cute.arch.mbarrier_init(getattr(bars, name) + i, arrivals.get(name, 4))
