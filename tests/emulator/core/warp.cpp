// Control flow and exchange within a warp: PTX ISA 9.7.9.6 (shfl), 9.7.12 (control flow), 9.7.13 (vote, redux, elect),
// 9.7.15.5 (ldmatrix, stmatrix).
#include <algorithm>

#include "emu.h"

void converge(Warp& w, uint32_t members, const char* what, bool& wait) {
    uint32_t needed = members & w.live;
    if (w.exec & ~members)
        fault("divergence", "%s runs in lanes %08x that its mask %08x does not name", what, w.exec & ~members, members);
    wait = (w.exec & needed) != needed;
    if (wait) {
        if (w.exec != w.now.mask)
            fault("divergence", "%s is skipped by a guard in lanes that its mask %08x names", what, members);
        w.block("lanes %08llx of the mask %08llx have not come", needed & ~w.exec, members);
    }
}

void aligned(Warp& w, bool& wait) {
    wait = w.exec != w.live;
    if (!wait) return;
    if (w.exec != w.now.mask) fault("divergence", "an .aligned instruction runs in lanes %08x alone", w.exec);
    w.block("an .aligned instruction: lanes %08llx have not come", w.live & ~w.exec);
}

uint32_t Warp::uniform(uint32_t slot, const char* what) {
    const uint32_t* p = in(slot);
    uint32_t v = p[first_lane()];
    for (int l = 0; l < LANES; l++)
        if (exec >> l & 1 && p[l] != v) fault("divergence", "%s differs between lanes", what);
    return v;
}

uint64_t Warp::uniform64(uint32_t slot, const char* what) {
    const uint32_t* p = in(slot);
    uint64_t v = lane<uint64_t>(p, first_lane());
    for (int l = 0; l < LANES; l++)
        if (exec >> l & 1 && lane<uint64_t>(p, l) != v) fault("divergence", "%s differs between lanes", what);
    return v;
}

void Warp::undefined(uint32_t slot) {
    if (tag[slot] & PENDING)
        fault("accumulator in flight",
              "a register is read that a wgmma writes whose group no wgmma.wait_group has waited for");
    fault("uninitialised register",
          "a register is read in lanes %08x, where it was never written, or comes from memory that was never written",
          exec & ~def[slot]);
}

namespace {

void bra(Warp& w, const Instr& i) {
    if (w.exec != w.now.mask) {
        Group rest = w.now;
        rest.mask &= ~w.exec;
        w.others.push_back(rest);
        w.now.mask = w.exec;
    }
    w.now.pc = uint32_t(i.imm);
}

void ret(Warp& w, const Instr&) {
    w.live &= ~w.exec;
    w.now.mask &= ~w.exec;
    for (Group& g : w.others) g.why = nullptr;  // they may have waited for these lanes
    if (!w.live) w.stop = true;
}

void trap(Warp&, const Instr&) { fault("trap", "the kernel gives up"); }
void nothing(Warp&, const Instr&) {}
void yield(Warp& w, const Instr&) { w.stop = true; }

enum Shuffle : uint32_t { UP, DOWN, BFLY, IDX };
void shfl(Warp& w, const Instr& i) {
    bool wait;
    converge(w, w.uniform(i.a[5], "the mask of shfl"), "shfl", wait);
    if (wait) return;
    const uint32_t *a = w.in(i.a[2]), *b = w.in(i.a[3]), *c = w.in(i.a[4]);
    uint32_t out[LANES], p = 0;
    for (int l = 0; l < LANES; l++) {
        if (!(w.exec >> l & 1)) continue;
        int n = b[l] & 31, clamp = c[l] & 31, segment = c[l] >> 8 & 31;
        int most = (l & segment) | (clamp & ~segment), least = l & segment, j;
        bool inside;
        if (i.n == UP) {
            j = l - n;
            inside = j >= most;
        } else {
            j = i.n == DOWN ? l + n : i.n == BFLY ? l ^ n : least | (n & ~segment);
            inside = j <= most;
        }
        if (!inside) j = l;
        if (!(w.exec >> (j & 31) & 1)) fault("divergence", "shfl reads lane %d, which does not take part", j);
        out[l] = a[j];
        p |= uint32_t(inside) << l;
    }
    write(w, i.a[0], out);
    if (i.m) w.set_pred(i.a[1], p);
}

void elect(Warp& w, const Instr& i) {
    bool wait;
    uint32_t members = w.uniform(i.a[2], "the mask of elect");
    converge(w, members, "elect", wait);
    if (wait) return;
    uint32_t out[LANES], leader = __builtin_ctz(w.exec);
    for (int l = 0; l < LANES; l++) out[l] = leader;
    if (i.a[0] != ALL) write(w, i.a[0], out);
    w.set_pred(i.a[1], 1u << leader);
}

enum Vote : uint32_t { ANY, EVERY, UNI, BALLOT };
void vote(Warp& w, const Instr& i) {
    bool wait;
    converge(w, w.uniform(i.a[2], "the mask of vote"), "vote", wait);
    if (wait) return;
    uint32_t p = (i.m ? ~w.pred(i.a[1]) : w.pred(i.a[1])) & w.exec;
    if (i.n == BALLOT) {
        uint32_t out[LANES];
        for (int l = 0; l < LANES; l++) out[l] = p;
        write(w, i.a[0], out);
    } else {
        bool r = i.n == ANY ? p != 0 : i.n == EVERY ? p == w.exec : p == 0 || p == w.exec;
        w.set_pred(i.a[0], r ? ALL : 0);
    }
}

// n: add, min, max, and, or, xor; m: signed
void redux(Warp& w, const Instr& i) {
    bool wait;
    converge(w, w.uniform(i.a[2], "the mask of redux"), "redux", wait);
    if (wait) return;
    const uint32_t* a = w.in(i.a[1]);
    uint32_t r = a[w.first_lane()];
    for (int l = w.first_lane() + 1; l < LANES; l++) {
        if (!(w.exec >> l & 1)) continue;
        uint32_t v = a[l];
        bool less = i.m ? int32_t(v) < int32_t(r) : v < r;
        switch (i.n) {
            case 0: r += v; break;
            case 1: r = less ? v : r; break;
            case 2: r = less ? r : v; break;
            case 3: r &= v; break;
            case 4: r |= v; break;
            default: r ^= v;
        }
    }
    uint32_t out[LANES];
    for (int l = 0; l < LANES; l++) out[l] = r;
    write(w, i.a[0], out);
}

void activemask(Warp& w, const Instr& i) {
    uint32_t out[LANES];
    for (int l = 0; l < LANES; l++) out[l] = w.exec;
    write(w, i.a[0], out);
}

// Matrices of 8 rows of 16 bytes; lanes 8k .. 8k + 7 give the addresses of matrix k. Lane l holds elements 2 (l % 4)
// and the next of row l / 4, transposed: of column l / 4. n: matrices; m: transposed
template <bool load> void matrix(Warp& w, const Instr& i) {
    bool wait;
    aligned(w, wait);
    if (wait) return;
    const uint32_t* address = w.in(i.a[0]);
    uint32_t exec = w.exec;
    if (exec != ALL) fault("divergence", "ldmatrix and stmatrix need all 32 lanes");
    for (uint32_t k = 0; k < i.n; k++) {
        uint16_t rows[8][8];
        uint8_t* at[8];
        for (int r = 0; r < 8; r++) {
            Access a = shared_at(w, address[8 * k + r] + uint32_t(i.imm), 16, 16, false);
            at[r] = &a.cta->smem[a.at];
            if (load) {
                note_read(w, a, Proxy::generic, w.stamp(MATRIX, w.known.seen[w.agent]), true);
                memcpy(rows[r], at[r], 16);
            }
        }
        uint32_t v[LANES];
        if (load) {
            for (int l = 0; l < LANES; l++) {
                int x = l / 4, y = 2 * (l % 4);
                v[l] = i.m ? rows[y][x] | uint32_t(rows[y + 1][x]) << 16 : rows[x][y] | uint32_t(rows[x][y + 1]) << 16;
            }
            write(w, i.list[k], v);
            continue;
        }
        const uint32_t* p = w.in(i.list[k]);
        for (int l = 0; l < LANES; l++) {
            int x = l / 4, y = 2 * (l % 4);
            (i.m ? rows[y][x] : rows[x][y]) = uint16_t(p[l]);
            (i.m ? rows[y + 1][x] : rows[x][y + 1]) = uint16_t(p[l] >> 16);
        }
        for (int r = 0; r < 8; r++) {
            Access a = shared_at(w, address[8 * k + r] + uint32_t(i.imm), 16, 16, false);
            note_write(w, a, Proxy::generic, w.stamp(), (const uint8_t*)rows[r]);
            memcpy(at[r], rows[r], 16);
        }
    }
}

}  // namespace

bool decode_warp(Decoder& d) {
    Instr& i = d.out;
    const std::string& op = d.op[0];
    auto second = [&](const std::vector<std::string>& names) -> int {
        for (size_t k = 0; k < names.size(); k++)
            if (d.has(names[k].c_str())) return int(k);
        return -1;
    };
    if (op == "bra") {
        i.fn = bra;
        return true;
    }
    if (op == "ret" || op == "exit") {
        i.fn = ret;
        return true;
    }
    if (op == "trap") {
        i.fn = trap;
        return true;
    }
    if (op == "nanosleep") {
        i.fn = yield;
        return true;
    }
    if (op == "setmaxnreg") {  // how many registers a warp has is the hardware's concern
        if (d.args.at(0).bits % 8 || d.args[0].bits < 24 || d.args[0].bits > 256) return false;
        i.fn = nothing;
        return true;
    }
    if (op == "shfl" && d.has("sync")) {
        int n = second({"up", "down", "bfly", "idx"});
        if (n < 0) return false;
        i.n = n;
        i.a[0] = d.slot(0, Type::b32);
        if (!d.args[0].items.empty()) {
            i.a[1] = d.slot(d.args[0].items[0], Type::pred);
            i.m = 1;
        }
        for (int k = 1; k <= 4; k++) i.a[1 + k] = d.slot(k, Type::b32);
        i.fn = shfl;
        return true;
    }
    if (op == "elect" && d.has("sync")) {
        i.a[0] = d.args.at(0).kind == Operand::none ? ALL : d.slot(0, Type::b32);
        i.a[1] = d.slot(d.args[0].items.at(0), Type::pred);
        i.a[2] = d.slot(1, Type::b32);
        i.fn = elect;
        return true;
    }
    if (op == "vote" && d.has("sync")) {
        int n = second({"any", "all", "uni", "ballot"});
        if (n < 0) return false;
        i.n = n;
        i.a[0] = d.slot(0, n == BALLOT ? Type::b32 : Type::pred);
        i.a[1] = d.slot(1, Type::pred);
        i.m = d.args[1].negated;
        i.a[2] = d.slot(2, Type::b32);
        i.fn = vote;
        return true;
    }
    if (op == "redux" && d.has("sync") && !d.has("f32")) {
        int n = second({"add", "min", "max", "and", "or", "xor"});
        if (n < 0) return false;
        i.n = n;
        i.m = d.type() == Type::s32;
        for (int k = 0; k < 3; k++) i.a[k] = d.slot(k, Type::b32);
        i.fn = redux;
        return true;
    }
    if (op == "activemask") {
        i.a[0] = d.slot(0, Type::b32);
        i.fn = activemask;
        return true;
    }
    if ((op == "ldmatrix" || op == "stmatrix") && d.has("m8n8") && d.has("b16")) {
        bool load = op == "ldmatrix";
        i.n = d.has("x4") ? 4 : d.has("x2") ? 2 : 1;
        i.m = d.has("trans");
        i.a[0] = d.address(d.args.at(load ? 1 : 0), false);
        Operand& list = d.args.at(load ? 0 : 1);
        if (list.kind == Operand::list)
            for (auto& o : list.items) i.list.push_back(d.slot(o, Type::b32));
        else i.list.push_back(d.slot(list, Type::b32));
        if (i.list.size() != i.n) return false;
        i.fn = load ? matrix<true> : matrix<false>;
        return true;
    }
    return false;
}
