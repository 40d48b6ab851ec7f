// Integers, logic, comparisons, moves: PTX ISA 9.7.1, 9.7.2, 9.7.6 to 9.7.9 (mov, selp, prmt, lop3).
#include <type_traits>

#include "emu.h"

namespace {

// ---- operators -----------------------------------------------------------------------------------------------------

template <class T> using Unsigned = std::make_unsigned_t<T>;
template <class T> using Wide = std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                                                   std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;
template <class T> struct Add { static T of(T a, T b) { return T(Unsigned<T>(a) + Unsigned<T>(b)); } };
template <class T> struct Sub { static T of(T a, T b) { return T(Unsigned<T>(a) - Unsigned<T>(b)); } };
template <class T> struct Mul { static T of(T a, T b) { return T(uint64_t(a) * uint64_t(b)); } };
template <class T> struct High {
    static T of(T a, T b) {
        if constexpr (sizeof(T) == 8) return T(std::is_signed_v<T> ? ((__int128)a * b) >> 64 : (__int128)(((unsigned __int128)a * b) >> 64));
        else return T((Wide<T>(a) * Wide<T>(b)) >> (8 * sizeof(T)));
    }
};
template <class T> struct Min { static T of(T a, T b) { return a < b ? a : b; } };
template <class T> struct Max { static T of(T a, T b) { return a > b ? a : b; } };
template <class T> struct And { static T of(T a, T b) { return a & b; } };
template <class T> struct Or { static T of(T a, T b) { return a | b; } };
template <class T> struct Xor { static T of(T a, T b) { return a ^ b; } };
template <class T> struct Div {
    static T of(T a, T b) {
        if (b == 0) fault("division by zero", "an integer is divided by 0");
        return b == T(-1) && std::is_signed_v<T> ? T(0 - Unsigned<T>(a)) : T(a / b);
    }
};
template <class T> struct Rem {
    static T of(T a, T b) {
        if (b == 0) fault("division by zero", "an integer is divided by 0");
        return b == T(-1) && std::is_signed_v<T> ? T(0) : T(a % b);
    }
};
template <class T> struct Neg { static T of(T a) { return T(0 - Unsigned<T>(a)); } };
template <class T> struct Abs { static T of(T a) { return a < 0 ? T(0 - Unsigned<T>(a)) : a; } };
template <class T> struct Not { static T of(T a) { return T(~a); } };

// ---- handlers ------------------------------------------------------------------------------------------------------

template <class T, class F> void unary(Warp& w, const Instr& i) {
    const uint32_t* a = w.in(i.a[1]);
    T out[LANES];
    for (int l = 0; l < LANES; l++) out[l] = F::of(lane<T>(a, l));
    write(w, i.a[0], out);
}

template <class T, class F> void binary(Warp& w, const Instr& i) {
    const uint32_t *a = w.in(i.a[1]), *b = w.in(i.a[2]);
    T out[LANES];
    for (int l = 0; l < LANES; l++) out[l] = F::of(lane<T>(a, l), lane<T>(b, l));
    write(w, i.a[0], out);
}

template <class T, class F> void divide(Warp& w, const Instr& i) {  // lanes that do not run may hold a zero
    const uint32_t *a = w.in(i.a[1]), *b = w.in(i.a[2]);
    T out[LANES] = {};
    for (int l = 0; l < LANES; l++) if (w.exec >> l & 1) out[l] = F::of(lane<T>(a, l), lane<T>(b, l));
    write(w, i.a[0], out);
}

template <class T> void mul_wide(Warp& w, const Instr& i) {
    const uint32_t *a = w.in(i.a[1]), *b = w.in(i.a[2]);
    Wide<T> out[LANES];
    for (int l = 0; l < LANES; l++) out[l] = Wide<T>(lane<T>(a, l)) * Wide<T>(lane<T>(b, l));
    write(w, i.a[0], out);
}

template <class T> void mad_wide(Warp& w, const Instr& i) {
    const uint32_t *a = w.in(i.a[1]), *b = w.in(i.a[2]), *c = w.in(i.a[3]);
    Wide<T> out[LANES];
    for (int l = 0; l < LANES; l++) out[l] = Add<Wide<T>>::of(Wide<T>(lane<T>(a, l)) * Wide<T>(lane<T>(b, l)), lane<Wide<T>>(c, l));
    write(w, i.a[0], out);
}

template <class T, class F> void mad(Warp& w, const Instr& i) {
    const uint32_t *a = w.in(i.a[1]), *b = w.in(i.a[2]), *c = w.in(i.a[3]);
    T out[LANES];
    for (int l = 0; l < LANES; l++) out[l] = Add<T>::of(F::of(lane<T>(a, l), lane<T>(b, l)), lane<T>(c, l));
    write(w, i.a[0], out);
}

template <class T> void shift(Warp& w, const Instr& i) {  // amounts beyond the width give 0, or the sign
    const uint32_t *a = w.in(i.a[1]), *b = w.in(i.a[2]);
    constexpr uint32_t width = 8 * sizeof(T);
    T out[LANES];
    for (int l = 0; l < LANES; l++) {
        T v = lane<T>(a, l);
        uint32_t n = b[l];
        if (i.n) out[l] = n < width ? T(Unsigned<T>(v) << n) : T(0);
        else out[l] = T(v >> (n < width ? n : width - 1) >> (n < width || std::is_signed_v<T> ? 0 : 1));
    }
    write(w, i.a[0], out);
}

enum Compare : uint32_t { EQ, NE, LT, LE, GT, GE };
template <class T> bool compare(uint32_t op, T a, T b) {
    switch (op) {
        case EQ: return a == b;
        case NE: return a != b;
        case LT: return a < b;
        case LE: return a <= b;
        case GT: return a > b;
        default: return a >= b;
    }
}

enum Combine : uint32_t { PLAIN, AND, OR, XOR };
void set_pair(Warp& w, const Instr& i, uint32_t p, uint32_t q) {
    if (i.m & 3) {
        uint32_t c = w.pred(i.a[4]);
        if (i.m & 4) c = ~c;
        p = (i.m & 3) == AND ? p & c : (i.m & 3) == OR ? p | c : p ^ c;
        q = (i.m & 3) == AND ? q & c : (i.m & 3) == OR ? q | c : q ^ c;
    }
    w.set_pred(i.a[0], p);
    if (i.m & 8) w.set_pred(i.a[1], q);
}

template <class T> void setp(Warp& w, const Instr& i) {
    const uint32_t *a = w.in(i.a[2]), *b = w.in(i.a[3]);
    uint32_t p = 0;
    for (int l = 0; l < LANES; l++) p |= uint32_t(compare(i.n, lane<T>(a, l), lane<T>(b, l))) << l;
    set_pair(w, i, p, ~p);
}

// n: comparison | unordered << 3, or 16: num, 17: nan
void setp_float(Warp& w, const Instr& i) {
    const uint32_t *a = w.in(i.a[2]), *b = w.in(i.a[3]);
    uint32_t p = 0;
    for (int l = 0; l < LANES; l++) {
        float x = lane<float>(a, l), y = lane<float>(b, l);
        bool nan = x != x || y != y;
        bool r = i.n >= 16 ? nan == (i.n == 17) : nan ? i.n >> 3 & 1 : compare(i.n & 7, x, y);
        p |= uint32_t(r) << l;
    }
    set_pair(w, i, p, ~p);
}

template <class T> void selp(Warp& w, const Instr& i) {
    uint32_t p = w.pred(i.a[3]), exec = w.exec;
    w.exec = exec & p;  // only what is taken has to be defined
    const uint32_t* a = w.in(i.a[1]);
    w.exec = exec & ~p;
    const uint32_t* b = w.in(i.a[2]);
    w.exec = exec;
    T out[LANES];
    for (int l = 0; l < LANES; l++) out[l] = p >> l & 1 ? lane<T>(a, l) : lane<T>(b, l);
    write(w, i.a[0], out);
}

template <int words> void mov(Warp& w, const Instr& i) {  // carries along that a lane is undefined, or in flight
    const uint32_t* a = w.reg(i.a[1]);
    uint32_t* d = w.reg(i.a[0]);
    uint32_t have = w.def[i.a[1]] & w.exec, tag = w.tag[i.a[1]];
    if (w.exec == ALL) memmove(d, a, words * LANES * 4);
    else for (int l = 0; l < LANES; l++) if (w.exec >> l & 1) memcpy(d + words * l, a + words * l, words * 4);
    w.def[i.a[0]] = (w.def[i.a[0]] & ~w.exec) | have;
    w.tag[i.a[0]] = tag;
    if (tag & PENDING) w.pending_slots.push_back(i.a[0]);
}

void mov_pred(Warp& w, const Instr& i) { w.set_pred(i.a[0], w.pred(i.a[1])); }

void pack(Warp& w, const Instr& i) {  // n parts of m bits
    uint64_t out[LANES] = {};
    for (uint32_t k = 0; k < i.n; k++) {
        const uint32_t* a = w.in(i.list[k]);
        for (int l = 0; l < LANES; l++) {
            uint64_t v = i.m == 64 ? lane<uint64_t>(a, l) : i.m == 32 ? a[l] : a[l] & ((1u << i.m) - 1);
            out[l] |= v << (k * i.m);
        }
    }
    if (i.n * i.m == 64) { write(w, i.a[0], out); return; }
    uint32_t half[LANES];
    for (int l = 0; l < LANES; l++) half[l] = uint32_t(out[l]);
    write(w, i.a[0], half);
}

void unpack(Warp& w, const Instr& i) {
    const uint32_t* a = w.in(i.a[0]);
    uint64_t v[LANES];
    for (int l = 0; l < LANES; l++) v[l] = i.n * i.m == 64 ? lane<uint64_t>(a, l) : a[l];
    for (uint32_t k = 0; k < i.n; k++) {
        if (i.list[k] == ALL) continue;
        uint32_t out[LANES];
        for (int l = 0; l < LANES; l++) out[l] = uint32_t(v[l] >> (k * i.m)) & (i.m == 32 ? ALL : (1u << i.m) - 1);
        write(w, i.list[k], out);
    }
}

template <class F> void pred_op(Warp& w, const Instr& i) { w.set_pred(i.a[0], F::of(w.pred(i.a[1]), w.pred(i.a[2]))); }
void pred_not(Warp& w, const Instr& i) { w.set_pred(i.a[0], ~w.pred(i.a[1])); }

template <class T> struct Popc { static uint32_t of(T a) { return __builtin_popcountll(Unsigned<T>(a)); } };
template <class T> struct Clz { static uint32_t of(T a) { return a ? __builtin_clzll(Unsigned<T>(a)) - (64 - 8 * sizeof(T)) : 8 * sizeof(T); } };
template <class T> struct Ffs { static uint32_t of(T a) {  // bfind: position of the highest bit that differs from the sign
    Unsigned<T> v = std::is_signed_v<T> && a < 0 ? Unsigned<T>(~a) : Unsigned<T>(a);
    return v ? 63 - __builtin_clzll(v) : ALL; } };
template <class T, class F> void count(Warp& w, const Instr& i) {
    const uint32_t* a = w.in(i.a[1]);
    uint32_t out[LANES];
    for (int l = 0; l < LANES; l++) out[l] = F::of(lane<T>(a, l));
    write(w, i.a[0], out);
}
struct Brev { static uint32_t of(uint32_t v) { uint32_t r = 0; for (int k = 0; k < 32; k++) r |= (v >> k & 1) << (31 - k); return r; } };

template <class T> void bfe(Warp& w, const Instr& i) {
    const uint32_t *a = w.in(i.a[1]), *b = w.in(i.a[2]), *c = w.in(i.a[3]);
    T out[LANES];
    for (int l = 0; l < LANES; l++) {
        uint32_t pos = b[l] & 255, len = c[l] & 255, width = 8 * sizeof(T);
        T v = lane<T>(a, l), r = 0;
        T sign = std::is_signed_v<T> && len ? (v >> (pos + len - 1 < width ? pos + len - 1 : width - 1) & 1) : 0;
        for (uint32_t k = 0; k < width; k++) {
            T bit = k < len && pos + k < width ? (v >> (pos + k) & 1) : sign;
            r |= T(Unsigned<T>(bit) << k);
        }
        out[l] = r;
    }
    write(w, i.a[0], out);
}

void bfi(Warp& w, const Instr& i) {
    const uint32_t *a = w.in(i.a[1]), *b = w.in(i.a[2]), *c = w.in(i.a[3]), *d = w.in(i.a[4]);
    uint32_t out[LANES];
    for (int l = 0; l < LANES; l++) {
        uint32_t pos = c[l] & 255, len = d[l] & 255;
        uint64_t mask = pos > 31 ? 0 : (((len > 31 ? 1ull << 32 : 1ull << len) - 1) << pos) & ALL;
        out[l] = uint32_t((b[l] & ~mask) | (((uint64_t)a[l] << pos) & mask));
    }
    write(w, i.a[0], out);
}

void prmt(Warp& w, const Instr& i) {  // 9.7.9.7, the default mode
    const uint32_t *a = w.in(i.a[1]), *b = w.in(i.a[2]), *c = w.in(i.a[3]);
    uint32_t out[LANES];
    for (int l = 0; l < LANES; l++) {
        uint64_t all = (uint64_t)b[l] << 32 | a[l];
        out[l] = 0;
        for (int k = 0; k < 4; k++) {
            uint32_t pick = c[l] >> (4 * k) & 15, byte = uint32_t(all >> (8 * (pick & 7))) & 255;
            out[l] |= (pick & 8 ? (byte >> 7) * 255 : byte) << (8 * k);
        }
    }
    write(w, i.a[0], out);
}

void lop3(Warp& w, const Instr& i) {
    const uint32_t *a = w.in(i.a[1]), *b = w.in(i.a[2]), *c = w.in(i.a[3]), *t = w.in(i.a[4]);
    uint32_t out[LANES];
    for (int l = 0; l < LANES; l++) {
        out[l] = 0;
        for (int k = 0; k < 8; k++)
            if (t[l] >> k & 1) out[l] |= (k & 4 ? a[l] : ~a[l]) & (k & 2 ? b[l] : ~b[l]) & (k & 1 ? c[l] : ~c[l]);
    }
    write(w, i.a[0], out);
}

void shf(Warp& w, const Instr& i) {  // n: 1 left; m: 1 wrap, 0 clamp
    const uint32_t *a = w.in(i.a[1]), *b = w.in(i.a[2]), *c = w.in(i.a[3]);
    uint32_t out[LANES];
    for (int l = 0; l < LANES; l++) {
        uint32_t n = i.m ? c[l] & 31 : (c[l] < 32 ? c[l] : 32);
        uint64_t v = (uint64_t)b[l] << 32 | a[l];
        out[l] = i.n ? uint32_t((v << n) >> 32) : uint32_t(v >> n);
    }
    write(w, i.a[0], out);
}

// ---- choice by type ------------------------------------------------------------------------------------------------

#define PICK(type, F)                                                                                     \
    switch (type) {                                                                                       \
        case Type::u16: case Type::b16: return F(uint16_t);                                               \
        case Type::s16: return F(int16_t);                                                                \
        case Type::u32: case Type::b32: return F(uint32_t);                                               \
        case Type::s32: return F(int32_t);                                                                \
        case Type::u64: case Type::b64: return F(uint64_t);                                               \
        case Type::s64: return F(int64_t);                                                                \
        default: return nullptr;                                                                          \
    }
template <template <class> class Op> Handler pick_binary(Type t) {
#define F(T) binary<T, Op<T>>
    PICK(t, F)
#undef F
}
template <template <class> class Op> Handler pick_unary(Type t) {
#define F(T) unary<T, Op<T>>
    PICK(t, F)
#undef F
}
template <template <class> class Op> Handler pick_divide(Type t) {
#define F(T) divide<T, Op<T>>
    PICK(t, F)
#undef F
}
template <template <class> class Op> Handler pick_mad(Type t) {
#define F(T) mad<T, Op<T>>
    PICK(t, F)
#undef F
}
template <template <class> class Op> Handler pick_count(Type t) {
#define F(T) count<T, Op<T>>
    PICK(t, F)
#undef F
}
Handler pick_shift(Type t) {
#define F(T) shift<T>
    PICK(t, F)
#undef F
}
Handler pick_setp(Type t) {
#define F(T) setp<T>
    PICK(t, F)
#undef F
}
Handler pick_bfe(Type t) {
#define F(T) bfe<T>
    PICK(t, F)
#undef F
}
Handler pick_wide(Type t, bool add) {
    switch (t) {
        case Type::u16: return add ? mad_wide<uint16_t> : mul_wide<uint16_t>;
        case Type::s16: return add ? mad_wide<int16_t> : mul_wide<int16_t>;
        case Type::u32: return add ? mad_wide<uint32_t> : mul_wide<uint32_t>;
        case Type::s32: return add ? mad_wide<int32_t> : mul_wide<int32_t>;
        default: return nullptr;
    }
}

bool decode_setp(Decoder& d, Type t) {
    Instr& i = d.out;
    static const std::map<std::string, uint32_t> compares = {{"eq", EQ}, {"ne", NE}, {"lt", LT}, {"le", LE}, {"gt", GT}, {"ge", GE},
                                                             {"lo", LT}, {"ls", LE}, {"hi", GT}, {"hs", GE}};
    std::string name = d.op.at(1);
    bool unordered = t == Type::f32 && name.size() == 3 && name[2] == 'u';
    if (unordered) name.pop_back();
    auto found = compares.find(name);
    if (found != compares.end()) i.n = found->second | unordered << 3;
    else if (t == Type::f32 && (name == "num" || name == "nan")) i.n = name == "num" ? 16 : 17;
    else return false;
    i.m = d.has("and") ? AND : d.has("or") ? OR : d.has("xor") ? XOR : PLAIN;
    if (i.m) {
        i.a[4] = d.slot(3, Type::pred);
        if (d.args.at(3).negated) i.m |= 4;
    }
    i.a[0] = d.slot(0, Type::pred);
    if (!d.args[0].items.empty()) { i.a[1] = d.slot(d.args[0].items[0], Type::pred); i.m |= 8; }
    i.a[2] = d.slot(1, t);
    i.a[3] = d.slot(2, t);
    i.fn = t == Type::f32 ? setp_float : pick_setp(t);
    return true;
}

bool decode_mov(Decoder& d, Type t) {
    Instr& i = d.out;
    if (d.args.at(0).kind == Operand::list || d.args.at(1).kind == Operand::list) {
        bool packs = d.args[1].kind == Operand::list;
        auto& parts = d.args[packs ? 1 : 0].items;
        i.n = parts.size();
        i.m = bits_of(t) / i.n;
        Type part = i.m == 32 ? Type::b32 : Type::b16;
        for (auto& o : parts) i.list.push_back(o.kind == Operand::none ? ALL : d.slot(o, part));
        i.a[0] = d.slot(packs ? 0 : 1, t);
        i.fn = packs ? pack : unpack;
        return true;
    }
    i.a[0] = d.slot(0, t);
    if (t == Type::u32 && d.args[1].kind == Operand::reg && bits_of(d.args[1].type) == 64) return false;
    i.a[1] = d.slot(1, t);
    i.fn = t == Type::pred ? mov_pred : bits_of(t) == 64 ? mov<2> : mov<1>;
    return true;
}

bool decode_pred(Decoder& d, const std::string& op) {
    Instr& i = d.out;
    i.a[0] = d.slot(0, Type::pred);
    i.a[1] = d.slot(1, Type::pred);
    if (op == "not") { i.fn = pred_not; return true; }
    i.a[2] = d.slot(2, Type::pred);
    i.fn = op == "and" ? pred_op<And<uint32_t>> : op == "or" ? pred_op<Or<uint32_t>> : op == "xor" ? pred_op<Xor<uint32_t>> : nullptr;
    return i.fn;
}

}  // namespace

bool decode_arith(Decoder& d) {
    Instr& i = d.out;
    const std::string& op = d.op[0];
    Type t = d.type();
    if (op == "setp") return (t == Type::f32 || bits_of(t) >= 16) && decode_setp(d, t);
    if (op == "mov") return decode_mov(d, t);
    if (op == "selp") {
        for (int k = 0; k < 3; k++) i.a[k] = d.slot(k, t);
        i.a[3] = d.slot(3, Type::pred);
        i.fn = bits_of(t) == 64 ? selp<uint64_t> : selp<uint32_t>;
        return true;
    }
    if (t == Type::pred && (op == "and" || op == "or" || op == "xor" || op == "not")) return decode_pred(d, op);
    if (t == Type::f32 || t == Type::f64 || t == Type::f16 || t == Type::bf16 || t == Type::f16x2 || t == Type::bf16x2) return false;
    auto slots = [&](std::initializer_list<Type> types) { int k = 0; for (Type x : types) { i.a[k] = d.slot(k, x); k++; } };
    Type wide = bits_of(t) == 16 ? Type::b32 : Type::b64;
    if (op == "mul" || op == "mad") {
        bool add = op == "mad";
        if (d.has("wide")) { i.fn = pick_wide(t, add); slots({wide, t, t}); if (add) i.a[3] = d.slot(3, wide); return i.fn; }
        if (d.has("lo")) i.fn = add ? pick_mad<Mul>(t) : pick_binary<Mul>(t);
        else if (d.has("hi")) i.fn = add ? pick_mad<High>(t) : pick_binary<High>(t);
        slots({t, t, t});
        if (add) i.a[3] = d.slot(3, t);
        return i.fn;
    }
    static const std::map<std::string, Handler (*)(Type)> binaries = {
        {"add", pick_binary<Add>}, {"sub", pick_binary<Sub>}, {"min", pick_binary<Min>}, {"max", pick_binary<Max>}, {"and", pick_binary<And>},
        {"or", pick_binary<Or>},   {"xor", pick_binary<Xor>}, {"div", pick_divide<Div>}, {"rem", pick_divide<Rem>}};
    static const std::map<std::string, Handler (*)(Type)> unaries = {{"neg", pick_unary<Neg>}, {"abs", pick_unary<Abs>}, {"not", pick_unary<Not>}};
    auto b = binaries.find(op);
    if (b != binaries.end()) {
        if (d.op.size() > 2) return false;  // .cc, .sat
        i.fn = b->second(t);
        slots({t, t, t});
        return i.fn;
    }
    auto u = unaries.find(op);
    if (u != unaries.end()) { i.fn = u->second(t); slots({t, t}); return i.fn; }
    if (op == "shl" || op == "shr") { i.n = op == "shl"; i.fn = pick_shift(t); slots({t, t, Type::b32}); return i.fn; }
    if (op == "popc") { i.fn = pick_count<Popc>(t); slots({Type::b32, t}); return i.fn; }
    if (op == "clz") { i.fn = pick_count<Clz>(t); slots({Type::b32, t}); return i.fn; }
    if (op == "bfind" && d.op.size() == 2) { i.fn = pick_count<Ffs>(t); slots({Type::b32, t}); return i.fn; }
    if (op == "brev" && t == Type::b32) { i.fn = unary<uint32_t, Brev>; slots({t, t}); return true; }
    if (op == "bfe") { i.fn = pick_bfe(t); slots({t, t, Type::b32, Type::b32}); return i.fn; }
    if (op == "bfi" && t == Type::b32) { i.fn = bfi; slots({t, t, t, t, t}); return true; }
    if (op == "prmt" && d.op.size() == 2) { i.fn = prmt; slots({t, t, t, t}); return true; }
    if (op == "lop3") { i.fn = lop3; slots({t, t, t, t, Type::b32}); return true; }
    if (op == "shf") { i.n = d.has("l"); i.m = d.has("wrap"); i.fn = shf; slots({t, t, t, t}); return true; }
    return false;
}
