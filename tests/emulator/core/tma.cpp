// Bulk copies and tensor copies: PTX ISA 9.7.9.25.5 (cp.async.bulk), 9.7.9.27 (tensor copies), 5.5 (tensors: tiles,
// bounds, swizzle). A copy is asked for in its instruction and happens when the scheduler likes; until then its target
// is poison.
//
// The tensor map is as our launchers write it (the layout was found by varying one field at a time):
//   words 0-1   global address
//   word 2      bits 4-6 rank - 1; bits 7-11 element: 0 8-bit, 2 and 7 32-bit, 6 fp16, 10 bf16; bits 13-14 swizzle:
//   none, 32,
//               64, 128 bytes
//   words 3-6   strides of dimensions 1 to 4 in units of 16 bytes, their bits 32-35 in the nibbles of word 7
//   words 8-12  sizes - 1
//   word 13     bits 24-31 box size of dimension 0, - 1; below them the element strides - 1
//   word 14     box sizes of dimensions 1 to 4, - 1
#include "emu.h"

namespace {

struct TensorMap {
    uint64_t base, stride[5];
    uint32_t rank, element, swizzle, size[5], box[5];
};

TensorMap read_map(uint64_t address) {
    if (address % 64)
        fault("misaligned", "a tensor map at %#llx needs an alignment of 64", (unsigned long long)address);
    uint32_t word[16];
    memcpy(word, (const void*)address, sizeof word);
    static const std::map<uint32_t, uint32_t> elements = {{0, 1}, {2, 4}, {7, 4}, {6, 2}, {10, 2}};
    TensorMap m;
    memcpy(&m.base, word, 8);
    m.rank = (word[2] >> 4 & 7) + 1;
    auto element = elements.find(word[2] >> 7 & 31);
    if (m.rank > 5 || element == elements.end() || (word[2] & ~(0x70u | 0xf80u | 0x6000u | 0x200000u)) != 0x40002 ||
        word[13] & 0xffffff)
        fault("tensor map", "word 2 is %#x and word 13 %#x, of which the emulator does not know some bits", word[2],
              word[13]);
    m.element = element->second;
    m.swizzle = word[2] >> 13 & 3;
    m.stride[0] = m.element;
    for (int k = 1; k < 5; k++)
        m.stride[k] = (uint64_t(word[2 + k]) | uint64_t(word[7] >> 4 * (k - 1) & 15) << 32) * 16;
    for (int k = 0; k < 5; k++) m.size[k] = word[8 + k] + 1;
    m.box[0] = (word[13] >> 24) + 1;
    for (int k = 1; k < 5; k++) m.box[k] = (word[14] >> 8 * (k - 1) & 255) + 1;
    static const uint32_t spans[] = {256 * 16, 32, 64, 128};
    if (m.box[0] * m.element % 16 || (m.swizzle && m.box[0] * m.element > spans[m.swizzle]))
        fault("tensor map", "a box of %u bytes in its first dimension, with a swizzle of %u bytes",
              m.box[0] * m.element, spans[m.swizzle]);
    return m;
}

uint32_t box_bytes(const TensorMap& m) {
    uint32_t bytes = m.element;
    for (uint32_t k = 0; k < m.rank; k++) bytes *= m.box[k];
    return bytes;
}

struct Box {  // one copy
    TensorMap map;
    int32_t at[5];
};

// each(global address of a row of the box or 0 outside the tensor, its elements in bounds [first, end), offset in the
// box)
template <class F> void rows_of(const Box& b, F each) {
    const TensorMap& m = b.map;
    uint32_t inner = m.box[0] * m.element, index[5] = {}, offset = 0;
    int64_t first = std::max<int64_t>(0, -int64_t(b.at[0])),
            end = std::min<int64_t>(m.box[0], int64_t(m.size[0]) - b.at[0]);
    for (;; offset += inner) {
        uint64_t address = m.base + int64_t(b.at[0]) * m.element;
        bool inside = first < end;
        for (uint32_t k = 1; k < m.rank; k++) {
            int64_t x = int64_t(b.at[k]) + index[k];
            inside &= x >= 0 && x < int64_t(m.size[k]);
            address += x * m.stride[k];
        }
        each(inside ? address : 0, first, end, offset);
        uint32_t k = 1;
        for (; k < m.rank && ++index[k] == m.box[k]; k++) index[k] = 0;
        if (k >= m.rank) return;
    }
}

// Bits 4-6 of an address in shared memory by its bits 7-9: as many as the mode has (5.5.7).
inline uint32_t swizzled(uint32_t address, uint32_t mode) {
    static const uint32_t masks[] = {0, 1, 3, 7};
    return address ^ ((address >> 7 & masks[mode]) << 4);
}

Box box_of(Warp& w, const Instr& i, int l, uint32_t rank) {  // list: coordinates
    Box b;
    uint64_t map = lane<uint64_t>(w.in(i.a[1]), l);
    b.map = read_map(map);
    if (b.map.rank != rank) fault("tensor map", "of rank %u in a copy of rank %u", b.map.rank, rank);
    for (uint32_t k = 0; k < 5; k++) b.at[k] = k < rank ? int32_t(w.in(i.list[k])[l]) : 0;
    return b;
}

std::string issued(Warp& w) { return describe(w, w.now.pc - 1); }

struct Target {
    Cta* cta;
    uint32_t at, bar, phase;
};

// The CTAs that a copy into shared memory reaches, each with the mbarrier that it signals; their memory becomes poison.
std::vector<Target> targets(Warp& w, uint32_t to, uint32_t bar, uint32_t bytes, uint32_t align, uint32_t multicast) {
    std::vector<Target> out;
    Access a = shared_at(w, to, bytes, align, true), b = shared_at(w, bar, 8, 8, true);
    auto& ctas = w.cta->cluster->ctas;
    for (uint32_t rank = 0; rank < ctas.size(); rank++) {
        if (multicast ? !(multicast >> rank & 1) : ctas[rank].get() != a.cta) continue;
        Cta* cta = ctas[rank].get();
        MBarrier& at = mbarrier_at(w, {multicast ? cta : b.cta, b.at, 8});
        if (!at.fenced)
            fault("missing proxy fence",
                  "the mbarrier at smem+%u was initialised without fence.mbarrier_init or fence.proxy.async", b.at);
        note_write(w, {cta, a.at, bytes}, Proxy::async, at.agent << CLOCK_BITS | (at.phase + 1), nullptr);
        memset(&cta->smem[a.at], 0xff, bytes);
        out.push_back({cta, a.at, b.at, at.phase});
        if (!multicast && b.cta != cta)
            fault("barrier count", "a copy that signals the mbarrier of another CTA is not modelled");
    }
    if (multicast >> ctas.size())
        fault("out of bounds", "a multicast to CTAs %#x of a cluster of %zu", multicast, ctas.size());
    return out;
}

void tensor_load(Warp& w,
                 const Instr& i) {  // a: target, map, mbarrier, multicast or ALL; m: offset of the mbarrier; n: rank
    const uint32_t *to = w.in(i.a[0]), *bar = w.in(i.a[2]), *cast = i.a[3] == ALL ? nullptr : w.in(i.a[3]);
    for (int l = 0; l < LANES; l++) {
        if (!(w.exec >> l & 1)) continue;
        Box b = box_of(w, i, l, i.n);
        uint32_t bytes = box_bytes(b.map);
        auto reached = targets(w, to[l] + uint32_t(i.imm), bar[l] + i.m, bytes, 128, cast ? cast[l] & 0xffff : 0);
        Warp* warp = &w;
        std::string where = issued(w);
        machine(w).async(w.cta->cluster, [=] {
            machine(*warp).place = where;
            rows_of(b, [&](uint64_t address, int64_t first, int64_t end, uint32_t offset) {
                uint32_t e = b.map.element, inner = b.map.box[0] * e;
                std::vector<uint8_t> row(inner, 0);
                if (address) {
                    global_read(*warp, address + first * e, uint32_t(end - first) * e, 1, false);
                    memcpy(&row[first * e], (void*)(address + first * e), (end - first) * e);
                }
                for (auto& t : reached)
                    for (uint32_t k = 0; k < inner; k += 16)
                        memcpy(&t.cta->smem[swizzled(t.at + offset + k, b.map.swizzle)], &row[k], 16);
            });
            for (auto& t : reached) complete_tx(*t.cta, t.bar, bytes, t.phase);
        });
    }
}

void add_bulk(Warp& w, std::function<void()> read) {
    w.bulks.push_back({w.bulk_next, std::move(read)});
    if (machine(w).chance(machine(w).policy.now)) {
        w.bulks.back().read();
        w.bulks.pop_back();
        machine(w).place.clear();
    }
}

void tensor_store(Warp& w, const Instr& i) {  // a: source, map
    const uint32_t* from = w.in(i.a[0]);
    const Instr* last = nullptr;
    Box before{};
    uint32_t source = 0;
    for (int l = 0; l < LANES; l++) {
        if (!(w.exec >> l & 1)) continue;
        Box b = box_of(w, i, l, i.n);
        if (last && source == from[l] && !memcmp(before.at, b.at, sizeof b.at)) continue;  // the same by several lanes
        last = &i;
        before = b;
        source = from[l];
        uint32_t bytes = box_bytes(b.map);
        Access a = shared_at(w, from[l] + uint32_t(i.imm), bytes, 128, false, l);
        note_read(w, a, Proxy::async, w.stamp(BULK, w.bulk_next));
        Warp* warp = &w;
        std::string where = issued(w);
        add_bulk(w, [=] {
            machine(*warp).place = where;
            rows_of(b, [&](uint64_t address, int64_t first, int64_t end, uint32_t offset) {
                if (!address) return;
                uint32_t e = b.map.element, inner = b.map.box[0] * e;
                std::vector<uint8_t> row(inner);
                for (uint32_t k = 0; k < inner; k += 16)
                    memcpy(&row[k], &a.cta->smem[swizzled(a.at + offset + k, b.map.swizzle)], 16);
                global_write(*warp, address + first * e, uint32_t(end - first) * e, 1, &row[first * e]);
            });
        });
    }
}

void bulk_load(
    Warp& w,
    const Instr& i) {  // a: target, source, bytes, mbarrier; n: 1 from shared memory; m: offset of the mbarrier
    const uint32_t *to = w.in(i.a[0]), *from = w.in(i.a[1]), *size = w.in(i.a[2]), *bar = w.in(i.a[3]);
    for (int l = 0; l < LANES; l++) {
        if (!(w.exec >> l & 1)) continue;
        uint32_t bytes = size[l];
        if (bytes % 16) fault("misaligned", "a bulk copy of %u bytes, which 16 does not divide", bytes);
        auto reached = targets(w, to[l] + uint32_t(i.imm), bar[l] + i.m, bytes, 16, 0);
        Warp* warp = &w;
        std::string where = issued(w);
        uint64_t address = i.n ? from[l] : lane<uint64_t>(from, l);
        Access a{};
        if (i.n) {
            a = shared_at(w, from[l], bytes, 16, false);
            note_read(w, a, Proxy::async,
                      reached[0].cta->mbarriers[reached[0].bar].agent << CLOCK_BITS | (reached[0].phase + 1));
        }
        bool shared = i.n;
        machine(w).async(w.cta->cluster, [=] {
            machine(*warp).place = where;
            const uint8_t* p = shared ? &a.cta->smem[a.at] : global_read(*warp, address, bytes, 16, false);
            for (auto& t : reached) memcpy(&t.cta->smem[t.at], p, bytes);
            for (auto& t : reached) complete_tx(*t.cta, t.bar, bytes, t.phase);
        });
    }
}

void bulk_store(Warp& w, const Instr& i) {  // a: source, target, bytes
    const uint32_t *from = w.in(i.a[0]), *to = w.in(i.a[1]), *size = w.in(i.a[2]);
    for (int l = 0; l < LANES; l++) {
        if (!(w.exec >> l & 1)) continue;
        uint32_t bytes = size[l];
        if (bytes % 16) fault("misaligned", "a bulk copy of %u bytes, which 16 does not divide", bytes);
        Access a = shared_at(w, from[l] + uint32_t(i.imm), bytes, 16, false, l);
        note_read(w, a, Proxy::async, w.stamp(BULK, w.bulk_next));
        uint64_t address = lane<uint64_t>(to, l) + int32_t(i.m);
        Warp* warp = &w;
        std::string where = issued(w);
        add_bulk(w, [=] {
            machine(*warp).place = where;
            global_write(*warp, address, bytes, 16, &a.cta->smem[a.at]);
        });
    }
}

void bulk_commit(Warp& w, const Instr&) { w.bulk_next++; }
void bulk_wait(Warp& w, const Instr& i) { finish_bulk_reads(w, w.bulk_next - 1 - std::min(w.bulk_next - 1, i.n)); }
void nothing(Warp&, const Instr&) {}

}  // namespace

void finish_bulk_reads(Warp& w, uint32_t group) {
    while (!w.bulks.empty() && w.bulks.front().group <= group) {
        w.bulks.front().read();
        w.bulks.pop_front();
    }
    machine(w).place.clear();
    uint32_t& seen = w.known.seen[w.agent + BULK];
    seen = std::max(seen, group);
}

bool decode_tma(Decoder& d) {
    Instr& i = d.out;
    if (d.op[0] == "prefetch" || (d.op[0] == "cp" && d.has("prefetch"))) {
        i.fn = nothing;
        return true;
    }
    if (d.op[0] != "cp" || !d.has("async") || !d.has("bulk") || d.op[1] != "async") return false;
    if (d.has("commit_group")) {
        i.fn = bulk_commit;
        return true;
    }
    if (d.has("wait_group")) {
        i.n = d.args.at(0).bits;
        i.fn = bulk_wait;
        return true;
    }
    bool hint = d.has("L2::cache_hint"), load = d.op.size() > 3 && (d.has("mbarrier::complete_tx::bytes"));
    if (d.has("tensor")) {
        if (d.has("im2col") || d.has("tile::gather4") || d.has("cta_group::1") || d.has("cta_group::2")) return false;
        for (uint32_t r = 1; r <= 5; r++)
            if (d.has(text("%ud", r).c_str())) i.n = r;
        const Operand& map = d.args.at(load ? 1 : 0);
        if (!i.n || map.kind != Operand::mem || map.items.size() != 2 || map.items[1].items.size() != i.n) return false;
        for (auto& o : map.items[1].items) i.list.push_back(d.slot(o, Type::b32));
        i.a[1] = d.address(map, true);
        if (i.imm) return false;
        if (load) {
            i.a[2] = d.address(d.args.at(2), false);
            i.m = uint32_t(i.imm);
        }
        i.a[0] = d.address(d.args.at(load ? 0 : 1), false);
        i.a[3] = d.has("multicast::cluster") ? d.slot(3, Type::b16) : ALL;
        i.fn = load ? tensor_load : d.has("bulk_group") ? tensor_store : nullptr;
        (void)hint;
        return i.fn;
    }
    if (d.has("multicast::cluster")) return false;
    if (load) {
        i.n = !d.has("global");
        i.a[3] = d.address(d.args.at(3), false);
        i.m = uint32_t(i.imm);
        i.a[1] = d.address(d.args.at(1), !i.n);
        if (i.imm) return false;
        i.a[0] = d.address(d.args.at(0), false);
        i.a[2] = d.slot(2, Type::b32);
        i.fn = bulk_load;
        return true;
    }
    if (!d.has("bulk_group")) return false;
    i.a[1] = d.address(d.args.at(0), true);
    i.m = uint32_t(i.imm);
    i.a[0] = d.address(d.args.at(1), false);
    i.a[2] = d.slot(2, Type::b32);
    i.fn = bulk_store;
    return true;
}
