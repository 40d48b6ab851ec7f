// wgmma: PTX ISA 9.7.15. A warp does its quarter of the product, 16 rows: its own rows of A with all of B.
//
// Operands in shared memory are read when the product happens: at once, or as late as wgmma.wait_group. Until the wait
// the accumulators are in flight: a register that holds one carries a tag, which mov passes on, and nothing else may
// read it.
#include "emu.h"

namespace {

// n: columns; m: flags
enum Flag : uint32_t {
    REGISTERS = 1,
    A_MN = 2,
    B_MN = 4,
    BF16 = 8,
    F16 = 16,
    E4M3_A = 32,
    E5M2_A = 64,
    E4M3_B = 128,
    E5M2_B = 256,
    NEG_A = 512,
    NEG_B = 1024
};

// The matrix descriptor, 9.7.15.5.1.2.2: start, leading and stride byte offsets in units of 16 bytes, base offset,
// swizzle.
struct Descriptor {
    uint32_t start, leading, stride, mode;  // mode: 0 none, 1 32 bytes, 2 64, 3 128
    explicit Descriptor(uint64_t d)
        : start(uint32_t(d & 0x3fff) << 4),
          leading(uint32_t(d >> 16 & 0x3fff) << 4),
          stride(uint32_t(d >> 32 & 0x3fff) << 4) {
        static const uint32_t modes[] = {0, 3, 2, 1};
        mode = modes[d >> 62];
        if (d >> 49 & 7) fault("wgmma descriptor", "a base offset of %u is not modelled", uint32_t(d >> 49 & 7));
        if (d >> 52 & 1) fault("wgmma descriptor", "bit 52 is set");
    }
    uint32_t swizzled(uint32_t address) const {
        static const uint32_t masks[] = {0, 1, 3, 7};
        return address ^ ((address >> 7 & masks[mode]) << 4);
    }
    // Places of 16 bytes each, 9.7.15.5.1.2.1: [line][2] of `count` lines from `first` of a K-major operand (a line is
    // 32 bytes of K); of an MN-major one [16 k][count / 8].
    void chunks(uint32_t first, uint32_t count, bool mn_major, std::vector<uint32_t>& out) const {
        const uint32_t pitch = 16u << mode;  // bytes of a line of the swizzled atom, whose 8 lines repeat
        if (!mn_major) {
            for (uint32_t r = first; r < first + count; r++)
                for (uint32_t c = 0; c < 2; c++)
                    out.push_back(swizzled(start + r % 8 * pitch + r / 8 * stride + c * (mode ? 16 : leading)));
            return;
        }
        const uint32_t wide = 1u << mode;  // chunks of 8 elements that lie side by side
        for (uint32_t k = 0; k < 16; k++)
            for (uint32_t c = first / 8; c < (first + count) / 8; c++)
                out.push_back(
                    mode ? swizzled(start + c % wide * 16 + c / wide * leading + k % 8 * pitch + k / 8 * stride)
                         : start + c * stride + k % 8 * 16 + k / 8 * leading);
    }
};

float element(const uint8_t* p, uint32_t k, uint32_t flags, bool b) {
    if (flags & (BF16 | F16)) {
        uint16_t v;
        memcpy(&v, p + 2 * k, 2);
        return flags & BF16 ? from_bf16(v) : from_f16(v);
    }
    return flags & (b ? E4M3_B : E4M3_A) ? from_e4m3(p[k]) : from_e5m2(p[k]);
}

uint32_t depth(uint32_t flags) { return flags & (BF16 | F16) ? 16 : 32; }

// [line][K] of floats from chunks
void gather(const Cta& cta, const std::vector<uint32_t>& chunks, uint32_t lines, bool mn_major, uint32_t flags, bool b,
            std::vector<float>& out) {
    uint32_t deep = depth(flags);
    out.resize(lines * deep);
    for (size_t c = 0; c < chunks.size(); c++) {
        const uint8_t* p = &cta.smem[chunks[c]];
        if (mn_major) {
            uint32_t k = c / (lines / 8), line = c % (lines / 8) * 8;
            for (uint32_t e = 0; e < 8; e++) out[(line + e) * deep + k] = element(p, e, flags, b);
        } else {
            for (uint32_t e = 0; e < deep / 2; e++)
                out[c / 2 * deep + c % 2 * (deep / 2) + e] = element(p, e, flags, b);
        }
    }
}

void take(WgmmaOp& op, size_t k, const WgmmaOp& before) {
    memcpy(&op.values[k * LANES], &before.values[k * LANES], LANES * 4);
}

void execute(Warp& w, size_t index) {
    WgmmaOp& op = w.wgmmas[index];
    const uint32_t n = op.instr->n, flags = op.instr->m, deep = depth(flags);
    std::vector<float> b;
    if (!(flags & REGISTERS)) gather(*w.cta, op.a_chunks, 16, flags & A_MN, flags, false, op.a);
    gather(*w.cta, op.b_chunks, n, flags & B_MN, flags, true, b);
    for (size_t k = 0; k < op.from.size(); k++)
        if (op.from[k]) take(op, k, w.wgmmas[op.from[k] - 1 - w.first_op]);
    std::vector<double> columns(deep * n);  // [K][N]
    for (uint32_t c = 0; c < n; c++)
        for (uint32_t k = 0; k < deep; k++) columns[k * n + c] = flags & NEG_B ? -b[c * deep + k] : b[c * deep + k];
    std::vector<double> sum(n);
    for (uint32_t r = 0; r < 16; r++) {
        std::fill(sum.begin(), sum.end(), 0.0);
        for (uint32_t k = 0; k < deep; k++) {
            const double x = flags & NEG_A ? -op.a[r * deep + k] : op.a[r * deep + k], *y = &columns[k * n];
            for (uint32_t c = 0; c < n; c++) sum[c] += x * y[c];
        }
        // register i of lane l holds row l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (l % 4) + i % 2 (9.7.15.5.1.1, D)
        for (uint32_t c = 0; c < n; c++) {
            uint32_t i = c / 8 * 4 + (r >= 8 ? 2 : 0) + c % 2, l = r % 8 * 4 + c % 8 / 2;
            float& v = op.values[i * LANES + l];
            v = float(double(v) + sum[c]);
        }
    }
    op.done = true;
}

void execute_until(Warp& w, size_t index) {
    for (size_t k = 0; k <= index; k++)
        if (!w.wgmmas[k].done) execute(w, k);
}

void must_be_fenced(Warp& w, uint32_t slot) {
    if (!(w.tag[slot] & PENDING) && w.tag[slot] == w.epoch)
        fault("missing wgmma.fence", "a register of this wgmma was written after the last wgmma.fence");
}

// a: descriptor of A, of B, predicate that keeps the accumulator; list: accumulator, then A's registers
void wgmma(Warp& w, const Instr& i) {
    bool wait;
    aligned(w, wait);
    if (wait) return;
    if (w.exec != ALL) fault("divergence", "wgmma needs all 32 lanes");
    w.wgmma_hash = w.wgmma_hash * 0x100000001b3ull + w.now.pc;
    w.wgmma_count++;
    const uint32_t registers = i.n / 2, stamp = w.stamp(WGMMA, w.next_group), quarter = w.id % 4;
    uint32_t keep = w.pred(i.a[2]);
    if (keep != 0 && keep != ALL) fault("divergence", "the predicate of wgmma differs between lanes");
    WgmmaOp op;
    op.instr = &i;
    op.group = w.next_group;
    auto read = [&](uint64_t bits, uint32_t first, uint32_t count, bool mn_major, std::vector<uint32_t>& chunks) {
        Descriptor(bits).chunks(first, count, mn_major, chunks);
        for (uint32_t& address : chunks) {
            Access a = shared_at(w, address, 16, 16, false);
            note_read(w, a, Proxy::async, stamp, !mn_major);
            address = a.at;
        }
    };
    // Registers of A: rows l / 4 and that + 8, then the second half of K (9.7.15.5.1.1, A). That they are written
    // before wgmma.fence is not checked: the compiler sinks their conversions below it, and ptxas sees the dependence.
    if (i.m & REGISTERS) {
        const uint32_t deep = depth(i.m), each = 32 / (deep == 16 ? 16 : 8);
        op.a.resize(16 * deep);
        for (uint32_t k = 0; k < 4; k++) {
            uint32_t slot = i.list[registers + k];
            const uint32_t* p = w.in(slot);
            for (int l = 0; l < LANES; l++)
                for (uint32_t e = 0; e < each; e++)
                    op.a[(l / 4 + k % 2 * 8) * deep + k / 2 * (deep / 2) + l % 4 * each + e] =
                        element((const uint8_t*)&p[l], e, i.m, false);
        }
    } else read(w.uniform64(i.a[0], "a descriptor of wgmma"), 16 * quarter, 16, i.m & A_MN, op.a_chunks);
    read(w.uniform64(i.a[1], "a descriptor of wgmma"), 0, i.n, i.m & B_MN, op.b_chunks);

    op.values.assign(registers * LANES, 0.f);
    op.from.assign(registers, 0);
    const uint32_t number = w.first_op + uint32_t(w.wgmmas.size());
    if (!(w.tag[i.list[0]] & PENDING) && w.epoch == w.wait_epoch)
        fault("missing wgmma.fence",
              "no wgmma.fence stands between this wgmma and what may have used its registers since the last wait");
    for (uint32_t k = 0; k < registers; k++) {
        uint32_t slot = i.list[k], tag = w.tag[slot];
        if (tag & PENDING) {
            if (keep) {
                if ((tag & 255) != k)
                    fault("accumulator in flight",
                          "wgmma takes a register in flight in another place than it was given");
                op.from[k] = (tag >> 8 & 0x7fffff) + 1;
            }
        } else if (keep) {
            must_be_fenced(w, slot);
            memcpy(&op.values[k * LANES], w.in(slot), LANES * 4);
        }
        w.tag[slot] = PENDING | (number & 0x7fffff) << 8 | k;
        w.def[slot] = 0;
        w.pending_slots.push_back(slot);
    }
    w.wgmmas.push_back(std::move(op));
    if (machine(w).chance(machine(w).policy.now)) execute_until(w, w.wgmmas.size() - 1);
}

void wgmma_fence(Warp& w, const Instr&) {
    bool wait;
    aligned(w, wait);
    if (!wait) w.epoch++;
}
void wgmma_commit(Warp& w, const Instr&) { w.next_group++; }
void wgmma_wait(Warp& w, const Instr& i) { finish_wgmmas(w, w.next_group - 1 - std::min(w.next_group - 1, i.n)); }

bool decode_mma(Decoder& d) {
    Instr& i = d.out;
    uint32_t m = 0, n = 0, k = 0;
    if (sscanf(d.op.at(4).c_str(), "m%un%uk%u", &m, &n, &k) != 3 || m != 64 || n % 8 || n < 8 || n > 256 ||
        d.op.size() != 8)
        return false;
    if (d.op[5] != "f32") return false;
    const std::string &a = d.op[6], &b = d.op[7];
    if (a == "bf16" && b == a) i.m = BF16;
    else if (a == "f16" && b == a) i.m = F16;
    else if ((a == "e4m3" || a == "e5m2") && (b == "e4m3" || b == "e5m2"))
        i.m = (a == "e4m3" ? E4M3_A : E5M2_A) | (b == "e4m3" ? E4M3_B : E5M2_B);
    else return false;
    if (k != depth(i.m)) return false;
    i.n = n;
    for (auto& o : d.args.at(0).items) i.list.push_back(d.slot(o, Type::b32));
    if (i.list.size() != n / 2) return false;
    if (d.args.at(1).kind == Operand::list) {
        i.m |= REGISTERS;
        for (auto& o : d.args[1].items) i.list.push_back(d.slot(o, Type::b32));
        if (d.args[1].items.size() != 4) return false;
    } else i.a[0] = d.slot(1, Type::b64);
    i.a[1] = d.slot(2, Type::b64);
    i.a[2] = d.slot(3, Type::pred);
    if (d.args[3].negated) return false;
    if (int64_t(d.args.at(4).bits) == -1) i.m |= NEG_A;
    if (int64_t(d.args.at(5).bits) == -1) i.m |= NEG_B;
    size_t at = 6;
    if (i.m & (BF16 | F16)) {
        if (!(i.m & REGISTERS) && d.args.at(at++).bits) i.m |= A_MN;
        if (d.args.at(at++).bits) i.m |= B_MN;
    }
    i.fn = wgmma;
    return at == d.args.size();
}

}  // namespace

void finish_wgmmas(Warp& w, uint32_t group) {
    size_t count = 0;
    while (count < w.wgmmas.size() && w.wgmmas[count].group <= group) count++;
    uint32_t& seen = w.known.seen[w.agent + WGMMA];
    seen = std::max(seen, group);
    if (!count) return;
    execute_until(w, count - 1);
    for (size_t k = count; k < w.wgmmas.size(); k++)  // what is still under way keeps what it takes from those that go
        for (size_t r = 0; r < w.wgmmas[k].from.size(); r++) {
            uint32_t& from = w.wgmmas[k].from[r];
            if (!from || from - 1 - w.first_op >= count) continue;
            if (!w.wgmmas[k].done) take(w.wgmmas[k], r, w.wgmmas[from - 1 - w.first_op]);
            from = 0;
        }
    std::vector<uint32_t> rest;
    for (uint32_t slot : w.pending_slots) {
        uint32_t tag = w.tag[slot];
        if (!(tag & PENDING)) continue;
        uint32_t index = (tag >> 8 & 0x7fffff) - w.first_op;
        if (index >= count) {
            rest.push_back(slot);
            continue;
        }
        memcpy(w.reg(slot), &w.wgmmas[index].values[(tag & 255) * LANES], LANES * 4);
        w.def[slot] = ALL;
        w.tag[slot] = 0;
    }
    w.pending_slots = std::move(rest);
    w.wgmmas.erase(w.wgmmas.begin(), w.wgmmas.begin() + count);
    w.first_op += count;
    w.wait_epoch = w.epoch;
}

bool decode_wgmma(Decoder& d) {
    if (d.op[0] != "wgmma") return false;
    Instr& i = d.out;
    const std::string& what = d.op.at(1);
    if (what == "fence") i.fn = wgmma_fence;
    else if (what == "commit_group") i.fn = wgmma_commit;
    else if (what == "wait_group") {
        i.n = d.args.at(0).bits;
        i.fn = wgmma_wait;
    } else if (what == "mma_async") return decode_mma(d);
    return i.fn;
}
