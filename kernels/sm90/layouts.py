"""Shared-memory layouts and tiled MMAs of the Hopper kernels, the views that TMA and WGMMA take of them, and rings.

A KV slot lies in shared memory as [8-token group][64-column chunk][8][64] with the swizzle of 64 columns (128 bytes,
e4m3: 64), so that one TMA box walks 128 to 512 contiguous bytes of eight whole rows of the cache before it goes on, and
a page of 16 tokens is one contiguous piece of the slot. V is the same bytes read column-major.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

DTYPES = {"bf16": BFloat16, "fp16": Float16, "e4m3": Float8E4M3FN, "fp32": Float32}
CHUNK = 64  # columns of a swizzled row


def swizzled(dtype, shape, order=None):
    kinds = warpgroup.SmemLayoutAtomKind
    atom = warpgroup.make_smem_layout_atom(kinds.K_SW128 if dtype.width == 16 else kinds.K_SW64, dtype)
    return cute.tile_to_shape(atom, shape, order or tuple(range(len(shape))))


def tiled_mma(dtype, n, b_major="K", a="SMEM", a_major="K"):
    """64 x n per instruction, fp32 accumulators, one warpgroup."""
    return sm90.make_trivial_tiled_mma(
        dtype,
        dtype,
        getattr(OperandMajorMode, a_major),
        getattr(OperandMajorMode, b_major),
        Float32,
        (1, 1, 1),
        (64, n),
        getattr(warpgroup.OperandSource, a),
    )


def slot_layout(c, columns, slots):
    return swizzled(c.kv_type, (c.tile, columns, slots), (1, 0, 2))


def query_word(c, row, word):
    """Where the word-th 16 bytes of a query row lie in shared memory, in bytes."""
    line = CHUNK * c.q_bytes  # swizzled
    words = line // 16
    return word // words * (c.rows * line) + row * line + (word % words ^ row % 8 // (8 // words)) * 16


def copy_view(c, slots, columns):
    """A slot tensor (tile, columns, slots) as (8, 64, chunks, page_rows / 8; copies, slots): boxes of TMA copies."""
    chunks, count = columns // CHUNK, cute.size(slots, mode=[2])
    shape = (8, CHUNK, chunks, c.page_rows // 8, c.tile // c.page_rows, count)
    return cute.composition(
        slots, cute.make_layout(shape, stride=(1, c.tile, c.tile * CHUNK, 8, c.page_rows, c.tile * columns))
    )


def value_view(c, slots):
    """A slot tensor (tile, half, slots) as V: (half, tile, slots). The stride of the slots must be written out."""
    count = cute.size(slots, mode=[2])
    return cute.composition(slots, cute.make_layout((c.half, c.tile, count), stride=(c.tile, 1, c.tile * c.half)))


def output_view(c, slots, slot):
    """A half slot as 64 rows of half of O: (rows, 64, chunks), as TMA stores them."""
    layout = swizzled(c.dtype, (c.rows, CHUNK, c.half // CHUNK))
    pointer = cute.recast_ptr(slots.iterator + slot * (c.tile * c.half), layout.inner, c.dtype)
    return cute.make_tensor(pointer, layout.outer)


def value_blocks(c, slots):
    """A slot tensor (tile, columns, slots) as V^T: (64 latents, tile, chunks, slots)."""
    columns, count = cute.size(slots, mode=[1]), cute.size(slots, mode=[2])
    shape, stride = (CHUNK, c.tile, columns // CHUNK, count), (c.tile, 1, c.tile * CHUNK, c.tile * columns)
    return cute.composition(slots, cute.make_layout(shape, stride=stride))


def place(c, piece, slot, phase):
    """(slot, phase) of a piece of the step whose first piece lies in `slot` of its ring. Where a step fills all slots
    of a ring, every piece has one of its own, and `slot` means nothing.
    """
    if turns_whole(c, piece.ring):
        return piece.slot, phase
    slots, row = c.rings[piece.ring].slots, 0
    if slots % 3 == 0:  # a tile's thirds stay together: one turn of the ring for all
        row = piece.box
    at, phase = wrap(slot, piece.slot - row, slots, phase)
    return at + row, phase


def after_step(c, slot, phase):
    """(slot, phase) of the next step."""
    if all(turns_whole(c, ring) for ring in c.rings):
        return slot, phase ^ 1
    ((_, ring),) = c.rings.items()
    return wrap(slot, len(c.pieces), ring.slots, phase)


def turns_whole(c, ring):
    return sum(piece.ring == ring for piece in c.pieces) == c.rings[ring].slots


def wrap(slot, step, slots, phase):
    """The slot that lies `step` <= slots after `slot` in a ring, and its phase."""
    if step == 0:
        return slot, phase
    over = (slot + step >= slots).to(Int32)
    return slot + step - over * slots, phase ^ over


@cute.jit
def one_query(query, packed, is_packed, dtype: cutlass.Constexpr):
    """query (B, SQ, H, 576), or the packed one as (1, total_q, H, 576); its bits as dtype."""
    dim = query.shape[3]
    address = packed.iterator.toint() if is_packed else query.iterator.toint()
    batch = Int32(1) if is_packed else query.shape[0]
    tokens = packed.shape[0] if is_packed else query.shape[1]
    heads = packed.shape[1] if is_packed else query.shape[2]
    apart = Int64(dim) if is_packed else query.stride[0]
    token = packed.stride[0] if is_packed else query.stride[1]
    head = packed.stride[1] if is_packed else query.stride[2]
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout((batch, tokens, heads, dim), stride=(apart, token, head, 1)))


def rows_at(address, dtype, shape, align):
    """A compact tensor in device memory."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=tuple(range(len(shape)))[::-1]))


@cute.jit
def query_view(query):
    """query (B, SQ, H, 576) as rows (SQ * H, 64, 9, B) for TMA, and whether its rows do lie evenly apart."""
    batch, tokens, heads, dim = query.shape
    apart, token, row = query.stride[0], query.stride[1], query.stride[2]
    if heads == 1:
        row = token
    if batch == 1:  # the strides of such extents may be anything, which TMA does not take
        apart = Int64(dim)
    if (tokens == 1) & (heads == 1):
        row = Int64(dim)
    even = (tokens == 1) | (heads == 1) | (token == row * heads)
    words = 128 // query.element_type.width  # elements of 16 bytes
    strides = (cute.assume(row, divby=words), 1, CHUNK, cute.assume(apart, divby=words))
    return cute.make_tensor(
        query.iterator, cute.make_layout((tokens * heads, CHUNK, dim // CHUNK, batch), stride=strides)
    ), even


def cache_view(kv_cache, page_rows):
    """kv_cache (pages, page_size, 576) as (8, 64, 9, page_size / 8, pages), the order in which a box is walked."""
    pages, page_size, dim = kv_cache.shape
    row = kv_cache.stride[1]
    return cute.make_tensor(
        kv_cache.iterator,
        cute.make_layout(
            (8, CHUNK, dim // CHUNK, page_size // 8, pages),
            stride=(row, 1, CHUNK, 8 * row, kv_cache.stride[0]),
        ),
    )
