// Loads, stores, atomics, cp.async, addresses: PTX ISA 9.7.9 (data movement), 9.7.13 (atom, red).
#include <algorithm>
#include <set>

#include "emu.h"

namespace {

enum Space : uint32_t { GLOBAL, SHARED, CLUSTER, PARAM, GENERIC_SPACE };
enum Bit : uint32_t { ACQUIRE = 8, RELEASE = 16 };

// Where a lane's access lies: an access of shared memory, or an address.
bool to_shared(Warp& w, uint32_t space, uint64_t address, uint32_t bytes, uint32_t lane, Access& a) {
    if (space == GENERIC_SPACE && address >> 56 == 1) { space = CLUSTER; }
    if (space != SHARED && space != CLUSTER) return false;
    a = shared_at(w, uint32_t(address), bytes, bytes, space == CLUSTER, lane);
    return true;
}

uint64_t address_of(const Instr& i, const uint32_t* base, bool wide, int l) {
    return wide ? lane<uint64_t>(base, l) + i.imm : uint32_t(base[l] + i.imm);
}

// n: space | flags; m: bytes of an element | elements << 8 | sign << 16 | wide address << 17 | container bytes << 20
struct Shape {
    uint32_t space, flags, element, count, bytes, container;
    bool sign, wide;
    explicit Shape(const Instr& i)
        : space(i.n & 7),
          flags(i.n),
          element(i.m & 255),
          count(i.m >> 8 & 255),
          bytes(element * count),
          container(i.m >> 20),
          sign(i.m >> 16 & 1),
          wide(i.m >> 17 & 1) {}
};

void load(Warp& w, const Instr& i) {
    Shape s(i);
    const uint32_t* base = w.in(i.a[0]);
    uint8_t data[LANES][16];
    uint32_t stamp = w.stamp(), undefined[4] = {};
    for (int l = 0; l < LANES; l++) {
        if (!(w.exec >> l & 1)) continue;
        uint64_t address = address_of(i, base, s.wide, l);
        Access a;
        if (s.space == PARAM) {
            uint64_t at = address - (uint64_t)w.cta->launch->params;
            if (at + s.bytes > w.kernel->param_bytes) fault("out of bounds", "a parameter at byte %lld", (long long)at);
            memcpy(data[l], (void*)address, s.bytes);
        } else if (to_shared(w, s.space, address, s.bytes, l, a)) {
            note_read(w, a, Proxy::generic, stamp);
            memcpy(data[l], &a.cta->smem[a.at], s.bytes);
        } else {
            aligned_global(address, s.bytes, s.bytes);
            for (uint32_t k = 0; k < s.count; k++) {  // of a vector some elements may be undefined, and not used
                bool none = false;
                const uint8_t* p =
                    global_read(w, address + k * s.element, s.element, s.element, s.flags & ACQUIRE, &none);
                memcpy(data[l] + k * s.element, p, s.element);
                undefined[k] |= uint32_t(none) << l;
            }
        }
    }
    if (s.flags & ACQUIRE) w.acquired = true;
    for (uint32_t k = 0; k < s.count; k++) {
        if (i.list[k] == ALL) continue;
        uint64_t v[LANES];
        for (int l = 0; l < LANES; l++) {
            v[l] = 0;
            memcpy(&v[l], data[l] + k * s.element, s.element);
            if (s.sign && s.element < 8) v[l] = uint64_t(int64_t(v[l] << (64 - 8 * s.element)) >> (64 - 8 * s.element));
        }
        uint32_t low[LANES];
        for (int l = 0; l < LANES; l++) low[l] = s.container == 2 ? v[l] & 0xffff : v[l];
        if (s.container == 8) write(w, i.list[k], v);
        else write(w, i.list[k], low);
        w.def[i.list[k]] &= ~undefined[k];
    }
}

void store(Warp& w, const Instr& i) {
    Shape s(i);
    const uint32_t* base = w.in(i.a[0]);
    uint8_t data[LANES][16];
    for (uint32_t k = 0; k < s.count; k++) {
        const uint32_t* v = w.in(i.list[k]);
        for (int l = 0; l < LANES; l++) memcpy(data[l] + k * s.element, v + (s.container == 8 ? 2 * l : l), s.element);
    }
    if (s.flags & RELEASE) w.cta->launch->fences[w.global_id] = ++w.fences;
    uint32_t stamp = w.stamp();
    for (int l = 0; l < LANES; l++) {
        if (!(w.exec >> l & 1)) continue;
        uint64_t address = address_of(i, base, s.wide, l);
        Access a;
        if (to_shared(w, s.space, address, s.bytes, l, a)) {
            note_write(w, a, Proxy::generic, stamp, data[l]);
            memcpy(&a.cta->smem[a.at], data[l], s.bytes);
        } else global_write(w, address, s.bytes, s.bytes, data[l]);
    }
}

enum AtomOp : uint32_t { A_ADD, A_MIN, A_MAX, A_AND, A_OR, A_XOR, A_EXCH, A_CAS, A_INC, A_DEC };
template <class T> T atomic(uint32_t op, T old, T b, T c) {
    switch (op) {
        case A_ADD: return old + b;
        case A_MIN: return std::min(old, b);
        case A_MAX: return std::max(old, b);
        case A_EXCH: return b;
        case A_CAS: return old == b ? c : old;
        default: break;
    }
    if constexpr (std::is_integral_v<T>) {
        if (op == A_AND) return old & b;
        if (op == A_OR) return old | b;
        if (op == A_XOR) return old ^ b;
        if (op == A_INC) return old >= b ? 0 : old + 1;
        return old == 0 || old > b ? b : old - 1;
    }
    return old;
}

template <class T> void atom(Warp& w, const Instr& i) {  // imm, a[0]: address; a[1]: old value or ALL; a[2], a[3]
    uint32_t space = i.n & 7, op = i.m & 255;
    bool wide = i.m >> 17 & 1;
    const uint32_t *base = w.in(i.a[0]), *b = w.in(i.a[2]), *c = op == A_CAS ? w.in(i.a[3]) : b;
    T out[LANES] = {};
    if (i.n & RELEASE) w.cta->launch->fences[w.global_id] = ++w.fences;
    if (i.n & ACQUIRE) w.acquired = true;
    for (int l = 0; l < LANES; l++) {
        if (!(w.exec >> l & 1)) continue;
        uint64_t address = address_of(i, base, wide, l);
        Access a;
        bool shared = to_shared(w, space, address, sizeof(T), l, a);
        uint8_t* p;
        Region* r = nullptr;
        if (shared) p = &a.cta->smem[a.at];
        else {
            aligned_global(address, sizeof(T), sizeof(T));
            r = &region_at(machine(w), address, sizeof(T));
            if (!r->writable) fault("out of bounds", "an atomic on %s, which is an input", r->name.c_str());
            p = (uint8_t*)address;
        }
        memcpy(&out[l], p, sizeof(T));
        T v = atomic(op, out[l], lane<T>(b, l), lane<T>(c, l));
        if (shared) {
            note_read(w, a, Proxy::generic, w.stamp());
        }  // atomics race with nothing but plain accesses: not modelled
        else
            for (size_t k = 0; k < sizeof(T) / 4; k++) r->shadow[(p - r->begin) / 4 + k] = shadow_of(w);
        memcpy(p, &v, sizeof(T));
    }
    if (i.a[1] != ALL) write(w, i.a[1], out);
}

// ---- cp.async: in the generic proxy, 16, 8 or 4 bytes a lane (9.7.9.25.3)
// --------------------------------------------

void cp_async(Warp& w, const Instr& i) {  // n: bytes; a: target, source, size read or ALL; m: the source's offset
    const uint32_t *to = w.in(i.a[0]), *from = w.in(i.a[1]), *size = i.a[2] == ALL ? nullptr : w.in(i.a[2]);
    struct Copy {
        uint32_t at;
        uint64_t from;
        uint32_t bytes;
    };
    auto copies = std::make_shared<std::vector<Copy>>();
    for (int l = 0; l < LANES; l++) {
        if (!(w.exec >> l & 1)) continue;
        Access a = shared_at(w, to[l] + uint32_t(i.imm), i.n, i.n, false, l);
        note_write(w, a, Proxy::generic, w.stamp(CPASYNC, w.cp_next), nullptr);
        uint32_t bytes = size ? std::min(size[l], i.n) : i.n;
        uint64_t address = lane<uint64_t>(from, l) + int32_t(i.m);
        if (bytes) global_read(w, address, bytes, bytes == i.n ? i.n : 1, false);
        copies->push_back({a.at, address, bytes});
    }
    Cta* cta = w.cta;
    uint32_t whole = i.n;
    w.copies.push_back({w.cp_next, [cta, copies, whole] {
                            for (auto& c : *copies) {
                                memset(&cta->smem[c.at], 0, whole);
                                memcpy(&cta->smem[c.at], (void*)c.from, c.bytes);
                            }
                        }});
    if (machine(w).chance(machine(w).policy.now)) {
        w.copies.back().read();
        w.copies.pop_back();
    }
}

void cp_commit(Warp& w, const Instr&) { w.cp_next++; }
void cp_wait(Warp& w, const Instr& i) {  // n: groups that may be under way; m: wait_all
    uint32_t upto = i.m ? w.cp_next : w.cp_next - 1 - std::min(w.cp_next - 1, i.n);
    finish_copies(w, upto);
    if (i.m) w.cp_next++;
}

void prefetch(Warp&, const Instr&) {}

void add_constant(Warp& w, const Instr& i) {  // cvta: between a space and generic addresses
    const uint32_t* a = w.in(i.a[1]);
    uint64_t out[LANES];
    for (int l = 0; l < LANES; l++) out[l] = lane<uint64_t>(a, l) + uint64_t(i.imm);
    write(w, i.a[0], out);
}

void mapa(Warp& w, const Instr& i) {  // n: 1 for 32-bit shared::cluster addresses
    const uint32_t *a = w.in(i.a[1]), *rank = w.in(i.a[2]);
    uint64_t wide[LANES];
    uint32_t narrow[LANES];
    for (int l = 0; l < LANES; l++) {
        uint32_t at = i.n ? a[l] : uint32_t(lane<uint64_t>(a, l));
        narrow[l] = (rank[l] + 1) << RANK_SHIFT | (at & ((1u << RANK_SHIFT) - 1));
        wide[l] = SHARED_WINDOW | narrow[l];
    }
    if (i.n) write(w, i.a[0], narrow);
    else write(w, i.a[0], wide);
}

bool qualifiers(Decoder& d, uint32_t& n, uint32_t& count) {
    static const std::set<std::string> harmless = {"weak",    "relaxed", "volatile", "gpu",  "sys",  "cta",
                                                   "cluster", "ca",      "cg",       "cs",   "cv",   "lu",
                                                   "wb",      "wt",      "nc",       "sync", "async"};
    n = GENERIC_SPACE;
    count = 1;
    for (size_t k = 1; k < d.op.size(); k++) {
        const std::string& p = d.op[k];
        if (p == "global") n = (n & ~7u) | GLOBAL;
        else if (p == "shared" || p == "shared::cta") n = (n & ~7u) | SHARED;
        else if (p == "shared::cluster") n = (n & ~7u) | CLUSTER;
        else if (p == "param") n = (n & ~7u) | PARAM;
        else if (p == "acquire") n |= ACQUIRE;
        else if (p == "release") n |= RELEASE;
        else if (p == "acq_rel") n |= ACQUIRE | RELEASE;
        else if (p == "v2") count = 2;
        else if (p == "v4") count = 4;
        else if (type_of(p) != Type::none || harmless.count(p) || p.rfind("L1::", 0) == 0 || p.rfind("L2::", 0) == 0) {
        } else return false;
    }
    return true;
}

bool is_wide(const Operand& memory, uint32_t space) {
    const Operand& base = memory.items.at(0);
    return space == GLOBAL || space == PARAM || space == GENERIC_SPACE ||
           (base.kind == Operand::reg && bits_of(base.type) == 64);
}

bool decode_ldst(Decoder& d, bool is_load) {
    Instr& i = d.out;
    Type t = d.type();
    uint32_t count;
    if (!qualifiers(d, i.n, count) || t == Type::none || bits_of(t) == 128) return false;
    const Operand& memory = d.args.at(is_load ? 1 : 0);
    const Operand& value = d.args.at(is_load ? 0 : 1);
    bool wide = is_wide(memory, i.n & 7);
    i.a[0] = d.address(memory, wide);
    uint32_t element = bits_of(t) / 8, container = 0;
    auto one = [&](const Operand& o) {
        if (o.kind == Operand::none) {
            i.list.push_back(ALL);
            return;
        }
        Type as = o.kind == Operand::reg ? o.type : t;  // a wider register takes a narrow value
        if (bits_of(as) < bits_of(t)) fault("PTX", "line %u: %s is too narrow", i.line, o.name.c_str());
        container = bits_of(as) == 64 ? 8 : bits_of(as) == 32 ? 4 : 2;
        i.list.push_back(d.slot(o, as));
    };
    if (value.kind == Operand::list)
        for (auto& o : value.items) one(o);
    else one(value);
    if (i.list.size() != count) return false;
    bool sign = t == Type::s8 || t == Type::s16 || t == Type::s32 || t == Type::s64;
    i.m = element | count << 8 | uint32_t(sign) << 16 | uint32_t(wide) << 17 | container << 20;
    i.fn = is_load ? load : store;
    return true;
}

bool decode_atom(Decoder& d, bool red) {
    static const std::map<std::string, uint32_t> ops = {
        {"add", A_ADD}, {"min", A_MIN},   {"max", A_MAX}, {"and", A_AND}, {"or", A_OR},
        {"xor", A_XOR}, {"exch", A_EXCH}, {"cas", A_CAS}, {"inc", A_INC}, {"dec", A_DEC}};
    Instr& i = d.out;
    Type t = d.type();
    uint32_t op = ALL, count;
    std::vector<std::string> kept;
    for (auto& p : d.op) {
        auto f = ops.find(p);
        if (f != ops.end()) op = f->second;
        else kept.push_back(p);
    }
    d.op = kept;
    if (op == ALL || !qualifiers(d, i.n, count) || count != 1) return false;
    const Operand& memory = d.args.at(red ? 0 : 1);
    bool wide = is_wide(memory, i.n & 7);
    i.a[0] = d.address(memory, wide);
    i.a[1] = red || d.args[0].kind == Operand::none ? ALL : d.slot(0, t);
    i.a[2] = d.slot(red ? 1 : 2, t);
    if (op == A_CAS) i.a[3] = d.slot(3, t);
    i.m = op | uint32_t(wide) << 17;
    i.fn = t == Type::s32                     ? atom<int32_t>
           : t == Type::u32 || t == Type::b32 ? atom<uint32_t>
           : t == Type::u64 || t == Type::b64 ? atom<uint64_t>
           : t == Type::f32                   ? atom<float>
                                              : nullptr;
    return i.fn;
}

}  // namespace

void finish_copies(Warp& w, uint32_t group) {
    while (!w.copies.empty() && w.copies.front().group <= group) {
        w.copies.front().read();
        w.copies.pop_front();
    }
    uint32_t& seen = w.known.seen[w.agent + CPASYNC];
    seen = std::max(seen, group);
}

bool decode_memory(Decoder& d) {
    Instr& i = d.out;
    const std::string& op = d.op[0];
    if (op == "ld" || op == "ldu") return decode_ldst(d, true);
    if (op == "st" && !d.has("async")) return decode_ldst(d, false);
    if (op == "atom" || op == "red") return decode_atom(d, op == "red");
    if (op == "cvta") {
        if (d.has("to")) i.imm = d.has("shared") ? -int64_t(SHARED_WINDOW) : 0;
        else i.imm = d.has("shared") ? int64_t(SHARED_WINDOW) : 0;
        i.a[0] = d.slot(0, Type::b64);
        i.a[1] = d.slot(1, Type::b64);
        i.fn = add_constant;
        return d.has("global") || d.has("shared") || d.has("param") || d.has("const");
    }
    if (op == "mapa") {
        i.n = d.has("shared::cluster");
        Type t = i.n ? Type::b32 : Type::b64;
        i.a[0] = d.slot(0, t);
        i.a[1] = d.slot(1, t);
        i.a[2] = d.slot(2, Type::b32);
        i.fn = mapa;
        return true;
    }
    if (op == "prefetch" || op == "prefetchu" || op == "applypriority" || op == "discard") {
        i.fn = prefetch;
        return op[0] == 'p';
    }
    if (op == "cp" && d.has("async") && !d.has("bulk")) {
        if (d.has("commit_group")) {
            i.fn = cp_commit;
            return true;
        }
        if (d.has("wait_all")) {
            i.fn = cp_wait;
            i.m = 1;
            return true;
        }
        if (d.has("wait_group")) {
            i.fn = cp_wait;
            i.n = d.args.at(0).bits;
            return true;
        }
        if (!(d.has("ca") || d.has("cg")) || !d.has("global") || d.has("mbarrier")) return false;
        size_t last = d.args.size();
        for (auto& p : d.op)
            if (p == "L2::cache_hint") last--;
        i.a[1] = d.address(d.args.at(1), true);
        i.m = uint32_t(i.imm);
        i.a[0] = d.address(d.args.at(0), false);
        i.n = d.args.at(2).bits;
        i.a[2] = last > 3 ? d.slot(3, Type::b32) : ALL;
        i.fn = cp_async;
        return i.n == 4 || i.n == 8 || i.n == 16;
    }
    return false;
}
