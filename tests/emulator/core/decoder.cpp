// What decode functions share: types by name, operands as slots and constants; and faults as text.
#include <algorithm>
#include <cstdarg>

#include "emu.h"

std::string text(const char* format, ...) {
    char buffer[1500];
    va_list args;
    va_start(args, format);
    vsnprintf(buffer, sizeof buffer, format, args);
    va_end(args);
    return buffer;
}

void fault(const char* kind, const char* format, ...) {
    char buffer[1500];
    va_list args;
    va_start(args, format);
    vsnprintf(buffer, sizeof buffer, format, args);
    va_end(args);
    throw Fault{kind, buffer};
}

static const std::pair<const char*, Type> TYPES[] = {
    {"pred", Type::pred},     {"b8", Type::b8},    {"u8", Type::u8},   {"s8", Type::s8},       {"b16", Type::b16},
    {"u16", Type::u16},       {"s16", Type::s16},  {"f16", Type::f16}, {"bf16", Type::bf16},   {"b32", Type::b32},
    {"u32", Type::u32},       {"s32", Type::s32},  {"f32", Type::f32}, {"f16x2", Type::f16x2}, {"bf16x2", Type::bf16x2},
    {"b64", Type::b64},       {"u64", Type::u64},  {"s64", Type::s64}, {"f64", Type::f64},     {"e4m3x2", Type::e4m3x2},
    {"e5m2x2", Type::e5m2x2}, {"b128", Type::b128}};

Type type_of(const std::string& name) {
    for (auto& [known, type] : TYPES)
        if (name == known) return type;
    return Type::none;
}

int bits_of(Type type) {
    switch (type) {
        case Type::pred: return 1;
        case Type::b8:
        case Type::u8:
        case Type::s8: return 8;
        case Type::b16:
        case Type::u16:
        case Type::s16:
        case Type::f16:
        case Type::bf16:
        case Type::e4m3x2:
        case Type::e5m2x2: return 16;
        case Type::b64:
        case Type::u64:
        case Type::s64:
        case Type::f64: return 64;
        case Type::b128: return 128;
        default: return 32;
    }
}

bool Decoder::has(const char* part) const { return std::find(op.begin(), op.end(), part) != op.end(); }

Type Decoder::type(int from_end) const {
    for (size_t i = op.size(); i-- > 1;) {
        Type t = type_of(op[i]);
        if (t != Type::none && from_end-- == 0) return t;
    }
    return Type::none;
}

uint32_t Decoder::constant(uint64_t bits, bool wide) {
    for (size_t i = 0; i < kernel.constants.size(); i++)
        if (kernel.constants[i].second == bits && kernel.wide[i] == wide) return kernel.constants[i].first;
    uint32_t slot = kernel.slots;
    kernel.slots += wide ? 2 : 1;
    kernel.constants.push_back({slot, bits});
    kernel.wide.push_back(wide);
    return slot;
}

uint32_t Decoder::slot(const Operand& o, Type t) {
    if (o.kind == Operand::reg) {
        bool wide = bits_of(t) == 64;
        if ((t == Type::pred) != (o.type == Type::pred) || (wide != (bits_of(o.type) == 64)))
            fault("PTX", "line %u: operand %s does not fit the type of `%s`", out.line, o.name.c_str(),
                  out.text.c_str());
        return o.slot;
    }
    if (o.kind != Operand::imm)
        fault("PTX", "line %u: operand %s of `%s` is neither a register nor a number", out.line, o.name.c_str(),
              out.text.c_str());
    uint64_t bits = o.bits;
    if (t == Type::f32 && !o.is_float) {
        float f = float(int64_t(bits));
        uint32_t b;
        memcpy(&b, &f, 4);
        bits = b;
    }
    if (t == Type::pred) bits = bits ? ALL : 0;
    bool wide = bits_of(t) == 64;
    return constant(wide ? bits : uint32_t(bits), wide);
}

uint32_t Decoder::slot(size_t index, Type t) {
    if (index >= args.size()) fault("PTX", "line %u: `%s` lacks an operand", out.line, out.text.c_str());
    return slot(args[index], t);
}

uint32_t Decoder::address(const Operand& o, bool wide) {
    if (o.kind != Operand::mem)
        fault("PTX", "line %u: `%s`: %s is no address", out.line, out.text.c_str(), o.name.c_str());
    const Operand& base = o.items[0];
    out.imm = o.offset + (base.kind == Operand::imm ? int64_t(base.bits) : 0);
    if (base.kind == Operand::imm) return constant(0, wide);
    if (bits_of(base.type) == 64 && !wide) return base.slot;  // the handler is told by its caller
    return slot(base, wide ? Type::b64 : Type::b32);
}
