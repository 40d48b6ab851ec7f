// Comparisons, predicates, selections, moves: PTX ISA 9.7.6, 9.7.7, 9.7.8 (on predicates), 9.7.9 (mov).
#include "emu.h"

namespace {

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
    else
        for (int l = 0; l < LANES; l++)
            if (w.exec >> l & 1) memcpy(d + words * l, a + words * l, words * 4);
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
    if (i.n * i.m == 64) {
        write(w, i.a[0], out);
        return;
    }
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

void pred_op(Warp& w, const Instr& i) {
    uint32_t a = w.pred(i.a[1]), b = w.pred(i.a[2]);
    w.set_pred(i.a[0], i.n == AND ? a & b : i.n == OR ? a | b : a ^ b);
}
void pred_not(Warp& w, const Instr& i) { w.set_pred(i.a[0], ~w.pred(i.a[1])); }

Handler pick_setp(Type t) {
#define F(T) setp<T>
    PICK(t, F)
#undef F
}
bool decode_setp(Decoder& d, Type t) {
    Instr& i = d.out;
    static const std::map<std::string, uint32_t> compares = {{"eq", EQ}, {"ne", NE}, {"lt", LT}, {"le", LE},
                                                             {"gt", GT}, {"ge", GE}, {"lo", LT}, {"ls", LE},
                                                             {"hi", GT}, {"hs", GE}};
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
    if (!d.args[0].items.empty()) {
        i.a[1] = d.slot(d.args[0].items[0], Type::pred);
        i.m |= 8;
    }
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
    if (op == "not") {
        i.fn = pred_not;
        return true;
    }
    i.a[2] = d.slot(2, Type::pred);
    i.n = op == "and" ? AND : op == "or" ? OR : XOR;
    i.fn = pred_op;
    return true;
}

}  // namespace

bool decode_select(Decoder& d) {
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
    return t == Type::pred && (op == "and" || op == "or" || op == "xor" || op == "not") && decode_pred(d, op);
}
