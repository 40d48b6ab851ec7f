// Integers and bits: PTX ISA 9.7.1, 9.7.2, 9.7.8 (logic, shifts), 9.7.9.7 (prmt).
#include <algorithm>
#include <type_traits>

#include "emu.h"

namespace {

// ---- operators -----------------------------------------------------------------------------------------------------

template <class T> using Unsigned = std::make_unsigned_t<T>;
template <class T> using Wide =
    std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                       std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;
#define BINARY(name, result)                     \
    template <class T> struct name {             \
        static T of(T a, T b) { return result; } \
    };
BINARY(Add, T(Unsigned<T>(a) + Unsigned<T>(b)))
BINARY(Sub, T(Unsigned<T>(a) - Unsigned<T>(b)))
BINARY(Mul, T(uint64_t(a) * uint64_t(b)))
template <class T> struct High {
    static T of(T a, T b) {
        if constexpr (sizeof(T) == 8)
            return T(std::is_signed_v<T> ? ((__int128)a * b) >> 64 : (__int128)(((unsigned __int128)a * b) >> 64));
        else return T((Wide<T>(a) * Wide<T>(b)) >> (8 * sizeof(T)));
    }
};
BINARY(Min, a < b ? a : b)
BINARY(Max, a > b ? a : b)
BINARY(And, a& b)
BINARY(Or, a | b)
BINARY(Xor, a ^ b)
template <template <class> class Op> struct Relu {
    static int32_t of(int32_t a, int32_t b) { return std::max(Op<int32_t>::of(a, b), 0); }
};
template <class T> struct Div {  // by 0: the ISA leaves it to the machine, which gives all ones
    static T of(T a, T b) {
        if (b == 0) return T(-1);
        return b == T(-1) && std::is_signed_v<T> ? T(0 - Unsigned<T>(a)) : T(a / b);
    }
};
template <class T> struct Rem {
    static T of(T a, T b) {
        if (b == 0) return a;
        return b == T(-1) && std::is_signed_v<T> ? T(0) : T(a % b);
    }
};
template <class T> struct Neg {
    static T of(T a) { return T(0 - Unsigned<T>(a)); }
};
template <class T> struct Abs {
    static T of(T a) { return a < 0 ? T(0 - Unsigned<T>(a)) : a; }
};
template <class T> struct Not {
    static T of(T a) { return T(~a); }
};

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

template <class T> void mul_wide(Warp& w, const Instr& i) {
    const uint32_t *a = w.in(i.a[1]), *b = w.in(i.a[2]);
    Wide<T> out[LANES];
    for (int l = 0; l < LANES; l++) out[l] = Wide<T>(lane<T>(a, l)) * Wide<T>(lane<T>(b, l));
    write(w, i.a[0], out);
}

template <class T> void mad_wide(Warp& w, const Instr& i) {
    const uint32_t *a = w.in(i.a[1]), *b = w.in(i.a[2]), *c = w.in(i.a[3]);
    Wide<T> out[LANES];
    for (int l = 0; l < LANES; l++)
        out[l] = Add<Wide<T>>::of(Wide<T>(lane<T>(a, l)) * Wide<T>(lane<T>(b, l)), lane<Wide<T>>(c, l));
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

template <class T> struct Popc {
    static uint32_t of(T a) { return __builtin_popcountll(Unsigned<T>(a)); }
};
template <class T> struct Clz {
    static uint32_t of(T a) { return a ? __builtin_clzll(Unsigned<T>(a)) - (64 - 8 * sizeof(T)) : 8 * sizeof(T); }
};
template <class T> struct Ffs {
    static uint32_t of(T a) {  // bfind: position of the highest bit that differs from the sign
        Unsigned<T> v = std::is_signed_v<T> && a < 0 ? Unsigned<T>(~a) : Unsigned<T>(a);
        return v ? 63 - __builtin_clzll(v) : ALL;
    }
};
template <class T, class F> void count(Warp& w, const Instr& i) {
    const uint32_t* a = w.in(i.a[1]);
    uint32_t out[LANES];
    for (int l = 0; l < LANES; l++) out[l] = F::of(lane<T>(a, l));
    write(w, i.a[0], out);
}
struct Brev {
    static uint32_t of(uint32_t v) {
        uint32_t r = 0;
        for (int k = 0; k < 32; k++) r |= (v >> k & 1) << (31 - k);
        return r;
    }
};

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
template <template <class> class Op> Handler pick_mad(Type t) {
#define F(T) mad<T, Op<T>>
    PICK(t, F)
#undef F
}
template <template <class> class Op> Handler pick_count(Type t){
#define F(T) count<T, Op<T>>
    PICK(t, F)
#undef F
} Handler pick_shift(Type t){
#define F(T) shift<T>
    PICK(t, F)
#undef F
} Handler pick_bfe(Type t){
#define F(T) bfe<T>
    PICK(t, F)
#undef F
} Handler pick_wide(Type t, bool add) {
    switch (t) {
        case Type::u16: return add ? mad_wide<uint16_t> : mul_wide<uint16_t>;
        case Type::s16: return add ? mad_wide<int16_t> : mul_wide<int16_t>;
        case Type::u32: return add ? mad_wide<uint32_t> : mul_wide<uint32_t>;
        case Type::s32: return add ? mad_wide<int32_t> : mul_wide<int32_t>;
        default: return nullptr;
    }
}

}  // namespace

bool decode_arith(Decoder& d) {
    Instr& i = d.out;
    const std::string& op = d.op[0];
    Type t = d.type();
    if (t == Type::f32 || t == Type::f64 || t == Type::f16 || t == Type::bf16 || t == Type::f16x2 || t == Type::bf16x2)
        return false;
    auto slots = [&](std::initializer_list<Type> types) {
        int k = 0;
        for (Type x : types) {
            i.a[k] = d.slot(k, x);
            k++;
        }
    };
    Type wide = bits_of(t) == 16 ? Type::b32 : Type::b64;
    if (op == "mul" || op == "mad") {
        bool add = op == "mad";
        if (d.has("wide")) {
            i.fn = pick_wide(t, add);
            slots({wide, t, t});
            if (add) i.a[3] = d.slot(3, wide);
            return i.fn;
        }
        if (d.has("lo")) i.fn = add ? pick_mad<Mul>(t) : pick_binary<Mul>(t);
        else if (d.has("hi")) i.fn = add ? pick_mad<High>(t) : pick_binary<High>(t);
        slots({t, t, t});
        if (add) i.a[3] = d.slot(3, t);
        return i.fn;
    }
    static const std::map<std::string, Handler (*)(Type)> binaries = {
        {"add", pick_binary<Add>}, {"sub", pick_binary<Sub>}, {"min", pick_binary<Min>},
        {"max", pick_binary<Max>}, {"and", pick_binary<And>}, {"or", pick_binary<Or>},
        {"xor", pick_binary<Xor>}, {"div", pick_binary<Div>}, {"rem", pick_binary<Rem>}};
    static const std::map<std::string, Handler (*)(Type)> unaries = {
        {"neg", pick_unary<Neg>}, {"abs", pick_unary<Abs>}, {"not", pick_unary<Not>}};
    auto b = binaries.find(op);
    if ((op == "min" || op == "max") && t == Type::s32 && d.op.size() == 3 && d.has("relu")) {
        i.fn = op == "min" ? binary<int32_t, Relu<Min>> : binary<int32_t, Relu<Max>>;
        slots({t, t, t});
        return true;
    }
    if (b != binaries.end()) {
        if (d.op.size() > 2) return false;  // .cc, .sat
        i.fn = b->second(t);
        slots({t, t, t});
        return i.fn;
    }
    auto u = unaries.find(op);
    if (u != unaries.end()) {
        i.fn = u->second(t);
        slots({t, t});
        return i.fn;
    }
    if (op == "shl" || op == "shr") {
        i.n = op == "shl";
        i.fn = pick_shift(t);
        slots({t, t, Type::b32});
        return i.fn;
    }
    if (op == "popc") {
        i.fn = pick_count<Popc>(t);
        slots({Type::b32, t});
        return i.fn;
    }
    if (op == "clz") {
        i.fn = pick_count<Clz>(t);
        slots({Type::b32, t});
        return i.fn;
    }
    if (op == "bfind" && d.op.size() == 2) {
        i.fn = pick_count<Ffs>(t);
        slots({Type::b32, t});
        return i.fn;
    }
    if (op == "brev" && t == Type::b32) {
        i.fn = unary<uint32_t, Brev>;
        slots({t, t});
        return true;
    }
    if (op == "bfe") {
        i.fn = pick_bfe(t);
        slots({t, t, Type::b32, Type::b32});
        return i.fn;
    }
    if (op == "bfi" && t == Type::b32) {
        i.fn = bfi;
        slots({t, t, t, t, t});
        return true;
    }
    if (op == "prmt" && d.op.size() == 2) {
        i.fn = prmt;
        slots({t, t, t, t});
        return true;
    }
    if (op == "lop3") {
        i.fn = lop3;
        slots({t, t, t, t, Type::b32});
        return true;
    }
    if (op == "shf") {
        i.n = d.has("l");
        i.m = d.has("wrap");
        i.fn = shf;
        slots({t, t, t, t});
        return true;
    }
    return false;
}
