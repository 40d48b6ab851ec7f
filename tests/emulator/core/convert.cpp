// Number formats and cvt: PTX ISA 5.2.3 (alternate formats), 9.7.9.21 (cvt).
#include <cmath>

#include "emu.h"

float from_bf16(uint16_t v) {
    uint32_t b = uint32_t(v) << 16;
    float f;
    memcpy(&f, &b, 4);
    return f;
}

// A format of `exponent` and `mantissa` bits; the highest exponent holds infinities and NaN unless it is e4m3's.
static float widen(uint32_t v, int exponent, int mantissa, bool finite) {
    int bias = (1 << (exponent - 1)) - 1;
    uint32_t e = v >> mantissa & ((1u << exponent) - 1), m = v & ((1u << mantissa) - 1);
    float r;
    if (finite && e == (1u << exponent) - 1 && m == (1u << mantissa) - 1) r = NAN;
    else if (!finite && e == (1u << exponent) - 1) r = m ? NAN : INFINITY;
    else
        r = e ? std::ldexp(float(m + (1u << mantissa)), int(e) - bias - mantissa)
              : std::ldexp(float(m), 1 - bias - mantissa);
    return v >> (exponent + mantissa) & 1 ? -r : r;
}

// Round to nearest even. `finite`: beyond the range the largest number, as e4m3 and .satfinite have it.
static uint32_t narrow(double v, int exponent, int mantissa, bool finite, bool e4m3) {
    uint32_t sign = std::signbit(v) ? 1u << (exponent + mantissa) : 0;
    uint32_t top = (1u << (exponent + mantissa)) - 1;  // all ones
    if (v != v) return e4m3 ? top : finite || mantissa < 7 ? top : top >> 0;
    int bias = (1 << (exponent - 1)) - 1;
    double a = std::fabs(v);
    uint32_t infinity = ((1u << exponent) - 1) << mantissa, largest = e4m3 ? top - 1 : infinity - 1;
    if (std::isinf(a)) return sign | (finite ? largest : infinity);
    int e = a == 0 ? -100000 : std::ilogb(a);
    if (e < 1 - bias) e = 1 - bias;
    double scaled = std::nearbyint(std::ldexp(a, mantissa - e));  // in [0, 2**(mantissa + 1)]
    if (a == 0) scaled = 0;
    uint64_t m = uint64_t(scaled);
    int64_t r = (int64_t(e + bias - 1) << mantissa) + int64_t(m);  // a carry raises the exponent by itself
    if (r > largest) return sign | (finite ? largest : infinity);
    return sign | uint32_t(r);
}

static float half_table[65536];
static const bool half_table_made = [] {
    for (int v = 0; v < 65536; v++) half_table[v] = widen(v, 5, 10, false);
    return true;
}();
float from_f16(uint16_t v) { return half_table[v]; }
float from_e4m3(uint8_t v) { return widen(v, 4, 3, true); }
float from_e5m2(uint8_t v) { return widen(v, 5, 2, false); }
uint16_t to_f16(double v) { return v != v ? 0x7fff : narrow(v, 5, 10, false, false); }
uint16_t to_bf16(double v) { return v != v ? 0x7fff : narrow(v, 8, 7, false, false); }
uint8_t to_e4m3(double v) { return narrow(v, 4, 3, true, true); }
uint8_t to_e5m2(double v) { return v != v ? 0x7f : narrow(v, 5, 2, true, false); }

namespace {

uint16_t bf16_of(float f) {
    uint32_t b;
    memcpy(&b, &f, 4);
    if ((b & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (b + 0x7fff + (b >> 16 & 1)) >> 16;
}

template <bool bf16> void pair_of_floats(Warp& w, const Instr& i) {  // d = {b low, a high}
    const uint32_t *a = w.in(i.a[1]), *b = w.in(i.a[2]);
    uint32_t out[LANES];
    for (int l = 0; l < LANES; l++) {
        float hi = lane<float>(a, l), lo = lane<float>(b, l);
        if (i.n) {
            hi = hi > 0 || hi != hi ? hi : 0;
            lo = lo > 0 || lo != lo ? lo : 0;
        }
        out[l] = bf16 ? uint32_t(bf16_of(hi)) << 16 | bf16_of(lo) : uint32_t(to_f16(hi)) << 16 | to_f16(lo);
    }
    write(w, i.a[0], out);
}

void to_fp8x2(Warp& w, const Instr& i) {  // n: 1 e5m2; m: 1 from a packed f16x2
    const uint32_t *a = w.in(i.a[1]), *b = i.m ? a : w.in(i.a[2]);
    uint32_t out[LANES];
    for (int l = 0; l < LANES; l++) {
        float hi = i.m ? from_f16(a[l] >> 16) : lane<float>(a, l),
              lo = i.m ? from_f16(a[l] & 0xffff) : lane<float>(b, l);
        out[l] = i.n ? uint32_t(to_e5m2(hi)) << 8 | to_e5m2(lo) : uint32_t(to_e4m3(hi)) << 8 | to_e4m3(lo);
    }
    write(w, i.a[0], out);
}

void from_fp8x2(Warp& w, const Instr& i) {
    const uint32_t* a = w.in(i.a[1]);
    uint32_t out[LANES];
    for (int l = 0; l < LANES; l++) {
        float lo = i.n ? from_e5m2(a[l]) : from_e4m3(a[l]), hi = i.n ? from_e5m2(a[l] >> 8) : from_e4m3(a[l] >> 8);
        out[l] = uint32_t(to_f16(hi)) << 16 | to_f16(lo);
    }
    write(w, i.a[0], out);
}

bool is_float(Type t) { return t == Type::f32 || t == Type::f16 || t == Type::bf16 || t == Type::f64; }
bool is_signed(Type t) { return t == Type::s8 || t == Type::s16 || t == Type::s32 || t == Type::s64; }

double float_of(Type t, uint64_t v) {
    if (t == Type::f16) return from_f16(v);
    if (t == Type::bf16) return from_bf16(v);
    if (t == Type::f64) {
        double d;
        memcpy(&d, &v, 8);
        return d;
    }
    uint32_t b = v;
    float f;
    memcpy(&f, &b, 4);
    return f;
}
uint64_t float_bits(Type t, double v) {
    if (t == Type::f16) return to_f16(v);
    if (t == Type::bf16) return to_bf16(v);
    if (t == Type::f64) {
        uint64_t b;
        memcpy(&b, &v, 8);
        return b;
    }
    float f = float(v);
    uint32_t b;
    memcpy(&b, &f, 4);
    return b;
}
int64_t extend(uint64_t v, int bits, bool sign) {
    if (bits == 64) return v;
    v &= (1ull << bits) - 1;
    return sign && v >> (bits - 1) & 1 ? int64_t(v | ~((1ull << bits) - 1)) : int64_t(v);
}

// n: to | from << 8 | how floats become integers << 16 (0 nearest, 1 zero, 2 down, 3 up) | saturate << 20
void convert(Warp& w, const Instr& i) {
    Type to = Type(i.n & 255), from = Type(i.n >> 8 & 255);
    uint32_t how = i.n >> 16 & 15, sat = i.n >> 20 & 1;
    const uint32_t* a = w.in(i.a[1]);
    bool wide_in = bits_of(from) == 64, wide_out = bits_of(to) == 64;
    uint64_t out[LANES];
    for (int l = 0; l < LANES; l++) {
        uint64_t raw = wide_in ? lane<uint64_t>(a, l) : a[l];
        int bits = bits_of(to);
        if (is_float(from)) {
            double v = float_of(from, raw);
            if (is_float(to)) {
                out[l] = float_bits(to, sat ? (v != v || v < 0 ? 0 : v > 1 ? 1 : v) : v);
                continue;
            }
            v = v != v     ? 0
                : how == 1 ? std::trunc(v)
                : how == 2 ? std::floor(v)
                : how == 3 ? std::ceil(v)
                           : std::nearbyint(v);
            double low = is_signed(to) ? -std::ldexp(1, bits - 1) : 0,
                   high = std::ldexp(1, is_signed(to) ? bits - 1 : bits);
            out[l] = v <= low        ? uint64_t(int64_t(low))
                     : v >= high     ? (is_signed(to) ? (1ull << (bits - 1)) - 1
                                        : bits == 64  ? ~0ull
                                                      : (1ull << bits) - 1)
                     : is_signed(to) ? uint64_t(int64_t(v))
                                     : uint64_t(v);
        } else {
            int64_t v = extend(raw, bits_of(from), is_signed(from));
            if (is_float(to)) {
                out[l] = float_bits(to, is_signed(from) || !wide_in ? double(v) : double(uint64_t(v)));
                continue;
            }
            out[l] = extend(v, bits, is_signed(to));  // a narrow value is extended to its register
        }
    }
    if (wide_out) {
        write(w, i.a[0], out);
        return;
    }
    uint32_t low[LANES];
    for (int l = 0; l < LANES; l++) low[l] = bits_of(to) <= 16 ? out[l] & 0xffff : out[l];
    write(w, i.a[0], low);
}

Type container(Type t) { return bits_of(t) <= 16 ? Type::b16 : bits_of(t) == 64 ? Type::b64 : Type::b32; }

}  // namespace

bool decode_convert(Decoder& d) {
    if (d.op[0] != "cvt") return false;
    Instr& i = d.out;
    Type from = d.type(0), to = d.type(1);
    auto slots = [&](std::initializer_list<Type> types) {
        int k = 0;
        for (Type x : types) {
            i.a[k] = d.slot(k, x);
            k++;
        }
    };
    bool fp8_out = to == Type::e4m3x2 || to == Type::e5m2x2, fp8_in = from == Type::e4m3x2 || from == Type::e5m2x2;
    if ((to == Type::f16x2 || to == Type::bf16x2) && from == Type::f32 && d.has("rn")) {
        if (d.has("satfinite")) return false;
        i.n = d.has("relu");
        i.fn = to == Type::bf16x2 ? pair_of_floats<true> : pair_of_floats<false>;
        slots({Type::b32, Type::b32, Type::b32});
        return true;
    }
    if (fp8_out && d.has("satfinite") && !d.has("relu")) {
        i.n = to == Type::e5m2x2;
        i.m = from == Type::f16x2;
        i.fn = to_fp8x2;
        if (i.m) slots({Type::b16, Type::b32});
        else slots({Type::b16, Type::b32, Type::b32});
        return true;
    }
    if (fp8_in && to == Type::f16x2 && !d.has("relu")) {
        i.n = from == Type::e5m2x2;
        i.fn = from_fp8x2;
        slots({Type::b32, Type::b16});
        return true;
    }
    if (from == Type::none || to == Type::none || fp8_out || fp8_in || d.has("relu")) return false;
    bool floats = is_float(from) && is_float(to);
    if (floats &&
        (d.has("rz") || d.has("rm") || d.has("rp") || d.has("rni") || d.has("rzi") || d.has("rmi") || d.has("rpi")))
        return false;
    uint32_t how = d.has("rzi") ? 1 : d.has("rmi") ? 2 : d.has("rpi") ? 3 : 0;
    i.n = uint32_t(to) | uint32_t(from) << 8 | how << 16 | uint32_t(d.has("sat")) << 20;
    if (d.has("sat") && !floats) return false;
    slots({container(to), container(from)});
    i.fn = convert;
    return true;
}
