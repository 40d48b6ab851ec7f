// PTX text to decoded kernels. PTX ISA, chapters 4 (syntax), 5 (state spaces, types), 6 (operands), 11 (directives).
#include <algorithm>

#include "emu.h"

const std::vector<Decode> SECTIONS = {decode_warp,   decode_select,  decode_arith, decode_float, decode_convert,
                                      decode_memory, decode_barrier, decode_tma,   decode_wgmma};

namespace {

struct Register {
    uint32_t slot;
    Type type;
};
struct Range {
    uint32_t first, count;
    Type type;
};  // %r<4706>: numbered from 0
struct Scope {
    std::map<std::string, Register> registers;
    std::map<std::string, Range> ranges;
    int id;
};
struct Symbol {
    bool param;
    uint64_t at;
};

bool name_char(char c) { return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%'; }

struct Parser {
    const std::string& s;
    size_t at = 0;
    uint32_t line = 1;
    Module& module;
    std::map<std::string, Symbol> globals;  // shared memory declared outside kernels

    Kernel* k = nullptr;
    std::vector<Scope> scopes;
    int next_scope = 0;
    std::map<std::string, Symbol> symbols;
    std::map<std::string, uint32_t> labels;                  // "name#scope"
    std::vector<std::pair<uint32_t, std::string>> branches;  // instruction, candidates of labels joined by newlines
    std::map<std::pair<uint64_t, bool>, uint32_t> constants;
    std::map<std::string, uint32_t> specials;

    Parser(const std::string& text, Module& module) : s(text), module(module) {}

    [[noreturn]] void wrong(const std::string& what) { fault("PTX", "line %u: %s", line, what.c_str()); }

    void space() {
        while (at < s.size()) {
            if (s[at] == '\n') {
                line++;
                at++;
            } else if (isspace((unsigned char)s[at])) at++;
            else if (s.compare(at, 2, "//") == 0) {
                while (at < s.size() && s[at] != '\n') at++;
            } else if (s.compare(at, 2, "/*") == 0) {
                while (s.compare(at, 2, "*/") != 0) {
                    if (s[at] == '\n') line++;
                    at++;
                }
                at += 2;
            } else break;
        }
    }
    bool peek(char c) {
        space();
        return at < s.size() && s[at] == c;
    }
    bool take(char c) {
        if (!peek(c)) return false;
        at++;
        return true;
    }
    void expect(char c) {
        if (!take(c)) wrong(std::string("expected ") + c + " at " + s.substr(at, 40));
    }
    std::string word() {
        space();
        size_t first = at;
        while (at < s.size() && (name_char(s[at]) || s[at] == '.' || s[at] == ':')) {
            if (s[at] == ':' && s.compare(at, 2, "::") != 0) break;
            at += s[at] == ':' ? 2 : 1;
        }
        return s.substr(first, at - first);
    }
    std::string name() {
        space();
        size_t first = at;
        while (at < s.size() && name_char(s[at])) at++;
        if (first == at) wrong("expected a name at " + s.substr(at, 40));
        return s.substr(first, at - first);
    }
    uint64_t number() {
        uint64_t v = 0;
        bool f = false;
        if (!literal(v, f)) wrong("expected a number");
        return v;
    }
    bool literal(uint64_t& v, bool& is_float) {  // PTX ISA 4.5
        space();
        size_t p = at;
        bool minus = s[p] == '-';
        if (minus) p++;
        if (!isdigit((unsigned char)s[p])) return false;
        is_float = s[p] == '0' && (s[p + 1] == 'f' || s[p + 1] == 'F' || s[p + 1] == 'd' || s[p + 1] == 'D');
        char* end;
        if (is_float) {
            v = strtoull(s.substr(p + 2, 16).c_str(), &end, 16);
            p += 2;
            while (isxdigit((unsigned char)s[p])) p++;
            if (minus) wrong("a negative floating-point literal in hexadecimal is not expected");
        } else {
            v = strtoull(s.c_str() + p, &end, 0);
            p = end - s.c_str();
            if (s[p] == 'U') p++;
            if (minus) v = -v;
        }
        at = p;
        return true;
    }

    // ---- declarations --------------------------------------------------------------------------------------------

    uint32_t new_slot(Type type) {
        uint32_t slot = k->slots;
        k->slots += bits_of(type) == 64 ? 2 : 1;
        return slot;
    }

    void declare_registers() {
        Type type = type_of(word().substr(1));
        do {
            std::string id = name();
            if (take('<')) {
                uint32_t count = number();
                expect('>');
                uint32_t first = k->slots;
                k->slots += count * (bits_of(type) == 64 ? 2 : 1);
                scopes.back().ranges[id] = {first, count, type};
            } else scopes.back().registers[id] = {new_slot(type), type};
        } while (take(','));
        expect(';');
    }

    void declare_shared(bool global) {
        uint32_t align = 1, bytes = 1;
        std::string w = word();
        if (w == ".align") {
            align = number();
            w = word();
        }
        bytes = bits_of(type_of(w.substr(1))) / 8;
        std::string id = name();
        bool open = false;
        if (take('[')) {
            if (peek(']')) open = true;
            else bytes *= number();
            expect(']');
        }
        expect(';');
        if (global && !open) wrong("shared memory of a size must be declared in its kernel");
        Kernel* kernel = k;
        if (open) {
            globals[id] = {false, ~0ull};
            return;
        }  // behind the static: the kernel's end decides
        kernel->static_smem = (kernel->static_smem + align - 1) / align * align;
        symbols[id] = {false, kernel->static_smem};
        kernel->static_smem += bytes;
    }

    bool find_register(const std::string& id, Register& out) {
        for (size_t i = scopes.size(); i--;) {
            auto found = scopes[i].registers.find(id);
            if (found != scopes[i].registers.end()) {
                out = found->second;
                return true;
            }
            size_t digits = id.size();
            while (digits && isdigit((unsigned char)id[digits - 1])) digits--;
            if (digits == id.size()) continue;
            auto range = scopes[i].ranges.find(id.substr(0, digits));
            if (range == scopes[i].ranges.end()) continue;
            uint32_t n = atoi(id.c_str() + digits);
            if (n >= range->second.count) wrong("register " + id + " is not declared");
            out = {range->second.first + n * (bits_of(range->second.type) == 64 ? 2 : 1), range->second.type};
            return true;
        }
        return false;
    }

    uint32_t special(const std::string& id) {
        auto found = specials.find(id);
        if (found != specials.end()) return found->second;
        uint32_t slot = new_slot(id == "%globaltimer" || id == "%clock64" ? Type::b64 : Type::b32);
        k->specials.push_back({slot, id});
        return specials[id] = slot;
    }

    // ---- statements ----------------------------------------------------------------------------------------------

    Operand operand() {
        Operand o;
        space();
        size_t first = at;
        if (take('!')) {
            o = operand();
            o.negated = true;
            return o;
        }
        if (take('{')) {
            o.kind = Operand::list;
            do o.items.push_back(operand());
            while (take(','));
            expect('}');
        } else if (take('[')) {
            Operand base = operand();
            o.kind = Operand::mem;
            o.items.push_back(base);
            if (take('+')) o.offset += number();
            else if (peek('-')) o.offset += number();
            if (take(',')) o.items.push_back(operand());
            expect(']');
        } else if (literal(o.bits, o.is_float)) {
            o.kind = Operand::imm;
        } else {
            std::string id = name();
            while (at < s.size() && s[at] == '.') {
                at++;
                id += "." + name();
            }
            Register r;
            if (id == "_") o.kind = Operand::none;
            else if (find_register(id, r)) {
                o.kind = Operand::reg;
                o.slot = r.slot;
                o.type = r.type;
            } else if (id[0] == '%') {
                o.kind = Operand::reg;
                o.slot = special(id);
                o.type = Type::b32;
            } else o.kind = Operand::symbol;
            o.name = id;
            if (take('|')) {
                Operand pair = operand();
                o.items.push_back(pair);
            }
        }
        if (o.name.empty()) o.name = s.substr(first, at - first);
        return o;
    }

    void statement() {
        Instr in;
        in.line = line;
        size_t first = at;
        if (take('@')) {
            in.guard_not = take('!');
            Register r;
            std::string id = name();
            if (!find_register(id, r)) wrong("predicate " + id + " is not declared");
            in.guard = r.slot;
        }
        std::string opcode = word();
        Decoder d{*k, {}, {}, in};
        for (size_t p = 0; p <= opcode.size();) {
            size_t dot = opcode.find('.', p);
            if (dot == std::string::npos) dot = opcode.size();
            d.op.push_back(opcode.substr(p, dot - p));
            p = dot + 1;
        }
        if (d.op[0] == "bra") {
            std::string label = name(), all;
            for (size_t i = scopes.size(); i--;) all += label + "#" + std::to_string(scopes[i].id) + "\n";
            branches.push_back({uint32_t(k->code.size()), all});
        } else if (!peek(';')) {
            do d.args.push_back(operand());
            while (take(','));
        }
        expect(';');
        in.text = s.substr(first, std::min<size_t>(at - first, 200));
        for (char& c : in.text)
            if (isspace((unsigned char)c)) c = ' ';
        resolve(d.args);
        bool known = false;
        for (Decode decode : SECTIONS)
            if ((known = decode(d))) break;
        if (!known || !in.fn)
            fault("unknown opcode", "line %u: the emulator does not know `%s`; see CONTRIBUTING, how to add an opcode",
                  in.line, in.text.c_str());
        k->code.push_back(std::move(in));
    }

    void resolve(std::vector<Operand>& args) {  // symbols become constants: addresses in shared memory, of parameters
        for (Operand& o : args) {
            resolve(o.items);
            if (o.kind != Operand::symbol) continue;
            auto found = symbols.find(o.name);
            bool global = found == symbols.end();
            if (global && (found = globals.find(o.name)) == globals.end()) wrong("`" + o.name + "` is not declared");
            if (found->second.param) {
                uint32_t slot = new_slot(Type::b64);
                k->param_addresses.push_back({slot, uint32_t(found->second.at)});
                o.kind = Operand::reg;
                o.slot = slot;
                o.type = Type::b64;
            } else {
                o.kind = Operand::imm;
                o.bits = global ? dynamic_base() : SMEM_BASE + found->second.at;
            }
        }
    }
    uint64_t dynamic_base() const { return SMEM_BASE + (k->static_smem + 1023) / 1024 * 1024; }

    void body() {
        expect('{');
        scopes.push_back({{}, {}, next_scope++});
        while (!scopes.empty()) {
            space();
            if (at >= s.size()) wrong("a kernel does not end");
            if (take('{')) {
                scopes.push_back({{}, {}, next_scope++});
                continue;
            }
            if (take('}')) {
                scopes.pop_back();
                continue;
            }
            if (take(';')) continue;
            if (s[at] == '.') {
                std::string w = word();
                if (w == ".reg") declare_registers();
                else if (w == ".shared") declare_shared(false);
                else if (w == ".pragma") {
                    while (s[at] != ';') at++;
                    at++;
                } else if (w == ".loc" || w == ".file") {
                    while (s[at] != '\n') at++;
                } else wrong("directive " + w + " is not known");
                continue;
            }
            size_t back = at;
            if (s[at] != '@') {  // a label?
                std::string id = word();
                if (take(':')) {
                    labels[id + "#" + std::to_string(scopes.back().id)] = k->code.size();
                    continue;
                }
                at = back;
            }
            statement();
        }
        for (auto& [pc, all] : branches) {
            auto found = labels.end();
            for (size_t p = 0; p < all.size() && found == labels.end();) {
                size_t end = all.find('\n', p);
                found = labels.find(all.substr(p, end - p));
                p = end + 1;
            }
            if (found == labels.end()) wrong("no label " + all.substr(0, all.find('#')));
            k->code[pc].imm = found->second;
        }
        Instr end;
        end.text = "ret;";
        end.line = line;
        std::vector<Operand> nothing;
        Decoder d{*k, {"ret"}, {}, end};
        decode_warp(d);
        k->code.push_back(end);
    }

    void entry() {
        auto owned = std::make_unique<Kernel>();
        k = owned.get();
        symbols.clear();
        labels.clear();
        branches.clear();
        constants.clear();
        specials.clear();
        scopes.clear();
        k->name = name();
        if (take('(')) {
            while (!take(')')) {
                if (word() != ".param") wrong("expected .param");
                Param p{"", 0, 0, 0};
                std::string w = word();
                if (w == ".align") {
                    p.align = number();
                    w = word();
                }
                p.size = bits_of(type_of(w.substr(1))) / 8;
                if (!p.align) p.align = p.size;
                p.name = name();
                if (take('[')) {
                    p.size *= number();
                    expect(']');
                }
                p.offset = k->param_bytes = (k->param_bytes + p.align - 1) / p.align * p.align;
                k->param_bytes += p.size;
                symbols[p.name] = {true, p.offset};
                k->params.push_back(p);
                take(',');
            }
        }
        while (!peek('{')) {
            std::string w = word();
            if (w == ".reqntid") {
                for (int i = 0; i < 3; i++) {
                    k->threads[i] = number();
                    if (i < 2 && !take(',')) {
                        for (i++; i < 3; i++) k->threads[i] = 1;
                    }
                }
            } else if (w == ".minnctapersm" || w == ".maxnctapersm" || w == ".maxnreg") number();
            else if (w == ".maxntid") {
                do number();
                while (take(','));
            } else if (w == ".reqnctapercluster" || w == ".maxclusterrank") {
                do number();
                while (take(','));
            } else if (w == ".explicitcluster") {
            } else wrong("directive " + w + " is not known");
        }
        body();
        std::string id = k->name;
        module.kernels[id] = std::move(owned);
        k = nullptr;
    }

    void file() {
        for (space(); at < s.size(); space()) {
            std::string w = word();
            if (w == ".version" || w == ".target" || w == ".address_size" || w == ".file") {
                while (at < s.size() && s[at] != '\n') at++;
            } else if (w == ".visible" || w == ".weak" || w == ".extern") {
            } else if (w == ".entry") entry();
            else if (w == ".shared") declare_shared(true);
            else if (w == ".section") {
                while (s[at] != '}') {
                    if (s[at] == '\n') line++;
                    at++;
                }
                at++;
            } else wrong("`" + w + s.substr(at, 20) + "` is not known outside a kernel");
        }
    }
};

}  // namespace

std::unique_ptr<Module> parse(const std::string& text) {
    auto module = std::make_unique<Module>();
    Parser(text, *module).file();
    return module;
}
