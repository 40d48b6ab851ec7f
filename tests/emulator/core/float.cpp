// Floating point: PTX ISA 9.7.3 (single), 9.7.4 (half). The .approx forms are computed to the last place or nearly;
// the hardware's have errors of a few units: the ISA bounds them, and results agree within these bounds.
#include <cmath>

#include "emu.h"

namespace {

enum Flag : uint32_t { FTZ = 1, SAT = 2, NAN_WINS = 4 };

inline float flush(float v) { return std::fabs(v) < 1.17549435e-38f ? std::copysign(0.f, v) : v; }
inline float quiet(float v) {
    if (v != v) {
        uint32_t b = 0x7fffffff;
        memcpy(&v, &b, 4);
    }
    return v;
}

struct Add {
    static float of(float a, float b) { return a + b; }
};
struct Sub {
    static float of(float a, float b) { return a - b; }
};
struct Mul {
    static float of(float a, float b) { return a * b; }
};
struct Div {
    static float of(float a, float b) { return a / b; }
};
struct Max {
    static float of(float a, float b) {
        return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
    }
};
struct Min {
    static float of(float a, float b) {
        return a != a ? b : b != b ? a : a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
    }
};
struct Ex2 {
    static float of(float a) { return std::exp2(a); }
};
struct Lg2 {
    static float of(float a) { return std::log2(a); }
};
struct Rcp {
    static float of(float a) { return 1.f / a; }
};
struct Sqrt {
    static float of(float a) { return std::sqrt(a); }
};
struct Rsqrt {
    static float of(float a) { return float(1.0 / std::sqrt(double(a))); }
};
struct Tanh {
    static float of(float a) { return std::tanh(a); }
};
struct Sin {
    static float of(float a) { return std::sin(a); }
};
struct Cos {
    static float of(float a) { return std::cos(a); }
};
struct Neg {
    static float of(float a) { return -a; }
};
struct Abs {
    static float of(float a) { return std::fabs(a); }
};

float finish(float v, uint32_t flags) {
    if (flags & FTZ) v = flush(v);
    if (flags & SAT) v = v != v ? 0.f : v < 0.f ? 0.f : v > 1.f ? 1.f : v;
    return v;
}

template <class F> void unary(Warp& w, const Instr& i) {
    const uint32_t* a = w.in(i.a[1]);
    float out[LANES];
    for (int l = 0; l < LANES; l++) {
        float x = lane<float>(a, l);
        out[l] = finish(F::of(i.n & FTZ ? flush(x) : x), i.n);
    }
    write(w, i.a[0], out);
}

template <class F> void binary(Warp& w, const Instr& i) {
    const uint32_t *a = w.in(i.a[1]), *b = w.in(i.a[2]);
    float out[LANES];
    if (!i.n)
        for (int l = 0; l < LANES; l++) out[l] = F::of(lane<float>(a, l), lane<float>(b, l));
    else
        for (int l = 0; l < LANES; l++) {
            float x = lane<float>(a, l), y = lane<float>(b, l);
            if (i.n & FTZ) {
                x = flush(x);
                y = flush(y);
            }
            out[l] = i.n & NAN_WINS && (x != x || y != y) ? quiet(NAN) : finish(F::of(x, y), i.n);
        }
    write(w, i.a[0], out);
}

void fma3(Warp& w, const Instr& i) {
    const uint32_t *a = w.in(i.a[1]), *b = w.in(i.a[2]), *c = w.in(i.a[3]);
    float out[LANES];
    if (!i.n)
        for (int l = 0; l < LANES; l++) out[l] = std::fma(lane<float>(a, l), lane<float>(b, l), lane<float>(c, l));
    else
        for (int l = 0; l < LANES; l++) {
            float x = lane<float>(a, l), y = lane<float>(b, l), z = lane<float>(c, l);
            if (i.n & FTZ) {
                x = flush(x);
                y = flush(y);
                z = flush(z);
            }
            out[l] = finish(std::fma(x, y, z), i.n);
        }
    write(w, i.a[0], out);
}

// Half and bfloat16, one or two to a register: computed in double and rounded once. n: operation | packed << 8 | bf16
// << 9
enum Half : uint32_t { H_ADD, H_SUB, H_MUL, H_FMA, H_MAX, H_MIN, H_NEG, H_ABS };
void half(Warp& w, const Instr& i) {
    uint32_t op = i.n & 255;
    const uint32_t* in[3] = {};
    for (uint32_t k = 0; k < i.m; k++) in[k] = w.in(i.a[1 + k]);
    uint32_t out[LANES];
    for (int l = 0; l < LANES; l++) {
        out[l] = 0;
        for (int k = 0; k < (i.n >> 8 & 1 ? 2 : 1); k++) {
            uint16_t raw[3];
            double v[3];
            for (uint32_t j = 0; j < i.m; j++) {
                raw[j] = in[j][l] >> (16 * k);
                v[j] = i.n >> 9 & 1 ? from_bf16(raw[j]) : from_f16(raw[j]);
            }
            double r = op == H_ADD   ? v[0] + v[1]
                       : op == H_SUB ? v[0] - v[1]
                       : op == H_MUL ? v[0] * v[1]
                       : op == H_FMA ? v[0] * v[1] + v[2]
                       : op == H_MAX ? double(Max::of(v[0], v[1]))
                       : op == H_MIN ? double(Min::of(v[0], v[1]))
                                     : 0;
            uint16_t h = op == H_NEG    ? raw[0] ^ 0x8000
                         : op == H_ABS  ? raw[0] & 0x7fff
                         : i.n >> 9 & 1 ? to_bf16(r)
                                        : to_f16(r);
            out[l] |= uint32_t(h) << (16 * k);
        }
    }
    write(w, i.a[0], out);
}

bool decode_half(Decoder& d, Type t) {
    static const std::map<std::string, std::pair<uint32_t, int>> ops = {
        {"add", {H_ADD, 2}}, {"sub", {H_SUB, 2}}, {"mul", {H_MUL, 2}}, {"fma", {H_FMA, 3}},
        {"max", {H_MAX, 2}}, {"min", {H_MIN, 2}}, {"neg", {H_NEG, 1}}, {"abs", {H_ABS, 1}}};
    auto found = ops.find(d.op[0]);
    if (found == ops.end() || d.has("sat") || d.has("relu") || d.has("ftz") || d.has("NaN")) return false;
    bool packed = t == Type::f16x2 || t == Type::bf16x2;
    d.out.n = found->second.first | packed << 8 | (t == Type::bf16 || t == Type::bf16x2) << 9;
    d.out.m = found->second.second;
    for (uint32_t k = 0; k <= d.out.m; k++) d.out.a[k] = d.slot(k, packed ? Type::b32 : Type::b16);
    d.out.fn = half;
    return true;
}

}  // namespace

bool decode_float(Decoder& d) {
    Instr& i = d.out;
    const std::string& op = d.op[0];
    Type t = d.type();
    if (t == Type::f16 || t == Type::bf16 || t == Type::f16x2 || t == Type::bf16x2) return decode_half(d, t);
    if (t != Type::f32 || d.has("rz") || d.has("rm") || d.has("rp") || d.has("xorsign")) return false;
    if (d.has("ftz")) i.n |= FTZ;
    if (d.has("sat")) i.n |= SAT;
    if (d.has("NaN")) i.n |= NAN_WINS;
    static const std::map<std::string, Handler> unaries = {
        {"ex2", unary<Ex2>},   {"lg2", unary<Lg2>}, {"rcp", unary<Rcp>}, {"sqrt", unary<Sqrt>}, {"rsqrt", unary<Rsqrt>},
        {"tanh", unary<Tanh>}, {"neg", unary<Neg>}, {"abs", unary<Abs>}, {"sin", unary<Sin>},   {"cos", unary<Cos>}};
    static const std::map<std::string, Handler> binaries = {{"add", binary<Add>}, {"sub", binary<Sub>},
                                                            {"mul", binary<Mul>}, {"div", binary<Div>},
                                                            {"max", binary<Max>}, {"min", binary<Min>}};
    auto u = unaries.find(op), b = binaries.find(op);
    int count = u != unaries.end() ? 1 : b != binaries.end() ? 2 : op == "fma" ? 3 : 0;
    if (!count || d.args.size() != size_t(count) + 1) return false;
    i.fn = count == 1 ? u->second : count == 2 ? b->second : fma3;
    for (int k = 0; k <= count; k++) i.a[k] = d.slot(k, Type::f32);
    return true;
}
