// Barriers and fences: PTX ISA 9.7.14.1 (bar), .3 (barrier.cluster), .4 (membar, fence), .15 (mbarrier), .16
// (griddepcontrol).
#include <algorithm>

#include "emu.h"

MBarrier& mbarrier_at(Warp& w, const Access& a) {
    auto found = a.cta->mbarriers.find(a.at);
    if (found == a.cta->mbarriers.end())
        fault("uninitialised shared memory", "there is no initialised mbarrier at smem+%u", a.at);
    if (!before(w.known.seen, found->second.init))
        fault("race", "the mbarrier at smem+%u is used, but its initialisation is not known to be over", a.at);
    return found->second;
}

static void try_complete(Cta& cta, uint32_t at, MBarrier& bar) {
    if (bar.pending) return;
    if (bar.tx < 0)
        fault("transaction count", "%lld bytes more than expected came to the mbarrier at smem+%u in its phase %u",
              -(long long)bar.tx, at, bar.phase);
    if (bar.tx) return;
    bar.phase++;
    bar.pending = bar.count;
    bar.done.join(bar.arriving);
    for (auto* clocks : {&bar.arriving.seen, &bar.arriving.fenced, &bar.arriving.lane_seen})
        std::fill(clocks->begin(), clocks->end(), 0);
    bar.done.seen[bar.agent] = bar.phase;
    cta.launch->machine->events++;
}

static void change_tx(MBarrier& bar, uint32_t at, int64_t change) {
    bar.tx += change;
    if (bar.tx > (1 << 20) - 1 || bar.tx < -(1 << 20) + 1)
        fault("transaction count", "the mbarrier at smem+%u has a tx-count of %lld", at, (long long)bar.tx);
}

void complete_tx(Cta& cta, uint32_t at, uint32_t bytes, uint32_t phase) {
    MBarrier& bar = cta.mbarriers.at(at);
    if (bar.phase != phase)
        fault("transaction count",
              "%u bytes arrive at the mbarrier at smem+%u in phase %u, but were asked for in phase %u: it expected too "
              "few",
              bytes, at, bar.phase, phase);
    change_tx(bar, at, -int64_t(bytes));
    try_complete(cta, at, bar);
}

namespace {

enum Flag : uint32_t {
    CLUSTER_WINDOW = 1,
    RELAXED = 2,
    EXPECT = 4,
    COUNTED = 8,
    PARITY = 16,
    STATE = 32,
    TRY = 64,
    DROP = 128
};

void mbarrier_init(Warp& w, const Instr& i) {
    const uint32_t *at = w.in(i.a[0]), *count = w.in(i.a[1]);
    Cluster& cluster = *w.cta->cluster;
    for (int l = 0; l < LANES; l++) {
        if (!(w.exec >> l & 1)) continue;
        Access a = shared_at(w, at[l] + uint32_t(i.imm), 8, 8, false);
        if (count[l] < 1 || count[l] > (1 << 20) - 1)
            fault("barrier count", "mbarrier.init with a count of %u", count[l]);
        if (cluster.next_mbarrier == cluster.agents)
            fault("limits", "the emulator follows no more mbarriers in a cluster");
        note_write(w, a, Proxy::generic, w.stamp(), nullptr);
        MBarrier& bar = w.cta->mbarriers[a.at];
        bar = MBarrier();
        bar.count = bar.pending = count[l];
        bar.arriving = bar.done = nothing_known(cluster);
        bar.agent = cluster.next_mbarrier++;
        bar.init = w.stamp();
    }
    w.tick();
}

void mbarrier_inval(Warp& w, const Instr& i) {
    const uint32_t* at = w.in(i.a[0]);
    for (int l = 0; l < LANES; l++)
        if (w.exec >> l & 1) w.cta->mbarriers.erase(shared_at(w, at[l] + uint32_t(i.imm), 8, 8, false).at);
}

void mbarrier_arrive(Warp& w, const Instr& i) {  // a: address, state, count or bytes
    const uint32_t *at = w.in(i.a[0]), *n = i.n & COUNTED ? w.in(i.a[2]) : nullptr;
    uint64_t state[LANES] = {};
    for (int l = 0; l < LANES; l++) {
        if (!(w.exec >> l & 1)) continue;
        Access a = shared_at(w, at[l] + uint32_t(i.imm), 8, 8, i.n & CLUSTER_WINDOW);
        MBarrier& bar = mbarrier_at(w, a);
        uint32_t count = n && !(i.n & EXPECT) ? n[l] : 1;
        if (i.n & EXPECT) change_tx(bar, a.at, n[l]);
        state[l] = bar.phase;
        if (count < 1 || bar.pending < count)
            fault("barrier count", "%u arrivals at the mbarrier at smem+%u, whose phase %u expects %u more of %u",
                  count, a.at, bar.phase, bar.pending, bar.count);
        if (!(i.n & RELAXED)) publish(w, bar.arriving);
        bar.pending -= count;
        if (i.n & DROP) bar.count -= count;
        try_complete(*a.cta, a.at, bar);
    }
    w.tick();
    if (i.n & STATE) write(w, i.a[1], state);
}

void mbarrier_expect(Warp& w, const Instr& i) {  // m: 1 complete_tx
    const uint32_t *at = w.in(i.a[0]), *n = w.in(i.a[2]);
    for (int l = 0; l < LANES; l++) {
        if (!(w.exec >> l & 1)) continue;
        Access a = shared_at(w, at[l] + uint32_t(i.imm), 8, 8, i.n & CLUSTER_WINDOW);
        MBarrier& bar = mbarrier_at(w, a);
        change_tx(bar, a.at, i.m ? -int64_t(n[l]) : n[l]);
        if (i.m) try_complete(*a.cta, a.at, bar);
    }
}

void mbarrier_wait(Warp& w, const Instr& i) {  // a: predicate, address, parity or state
    const uint32_t *at = w.in(i.a[1]), *value = w.in(i.a[2]);
    uint32_t p = 0;
    for (int l = 0; l < LANES; l++) {
        if (!(w.exec >> l & 1)) continue;
        Access a = shared_at(w, at[l] + uint32_t(i.imm), 8, 8, false);
        MBarrier& bar = mbarrier_at(w, a);
        bool over = i.n & PARITY ? (bar.phase & 1) != (value[l] & 1) : bar.phase > lane<uint64_t>(value, l);
        if (!over) continue;
        p |= 1u << l;
        if (!(i.n & RELAXED)) w.known.join(bar.done);
    }
    if (!p && i.n & TRY) {
        int l = w.first_lane();
        Access a = shared_at(w, at[l] + uint32_t(i.imm), 8, 8, false);
        w.block("mbarrier at smem+%llu, whose phase %llu lacks %llu arrivals and %lld bytes", a.at,
                w.cta->mbarriers[a.at].phase, w.cta->mbarriers[a.at].pending, w.cta->mbarriers[a.at].tx);
        return;
    }
    if (!p) w.stop = true;  // others go on before it asks again
    w.set_pred(i.a[0], p);
}

void arrive_at(Warp& w, NamedBarrier& bar, uint32_t threads, uint32_t expected, bool release) {
    if (bar.arriving.seen.empty()) bar.arriving = bar.done = nothing_known(*w.cta->cluster);
    bar.expected = expected;
    bar.arrived += threads;
    if (release) bar.arriving.join(w.known);
    w.sync();
    if (bar.arrived < bar.expected) return;
    bar.generation++;
    bar.arrived = 0;
    bar.result = bar.voted;
    bar.voted = 0;
    bar.done.join(bar.arriving);
    bar.arriving = nothing_known(*w.cta->cluster);
    machine(w).events++;
}

enum Reduction : uint32_t { NOT_RED, RED_OR, RED_AND, RED_COUNT };
void bar(Warp& w,
         const Instr& i) {  // n: 1 waits; m: reduction | negated << 2; a: id, threads or ALL, predicate, result
    bool wait;
    aligned(w, wait);
    if (wait) return;
    uint32_t id = w.uniform(i.a[0], "the number of a barrier");
    if (id > 15) fault("barrier count", "barrier %u; there are 16", id);
    NamedBarrier& bar = w.cta->named[id];
    if (!w.now.token) {
        uint32_t all = uint32_t(w.cta->warps.size()) * LANES,
                 expected = i.a[1] == ALL ? all : w.uniform(i.a[1], "the threads of a barrier");
        if (expected % LANES || !expected || expected > all)
            fault("barrier count", "barrier %u of %u threads in a CTA of %u", id, expected, all);
        if (bar.arrived && bar.expected != expected)
            fault("barrier count", "barrier %u is met for %u threads, and was for %u by those that wait there", id,
                  expected, bar.expected);
        w.now.token = bar.generation + 1;
        if (i.m) bar.voted += __builtin_popcount(w.exec & (i.m & 4 ? ~w.pred(i.a[2]) : w.pred(i.a[2])));
        arrive_at(w, bar, LANES, expected, true);
    }
    if (i.n && bar.generation < w.now.token) {
        w.block("barrier %llu, where %llu of %llu threads are", id, bar.arrived, bar.expected);
        return;
    }
    if (i.n) w.known.join(bar.done);
    w.now.token = 0;
    uint32_t red = i.m & 3;
    if (red == RED_COUNT) {
        uint32_t out[LANES];
        std::fill(out, out + LANES, bar.result);
        write(w, i.a[3], out);
    } else if (red) w.set_pred(i.a[3], (red == RED_OR ? bar.result > 0 : bar.result == bar.expected) ? ALL : 0);
}

void bar_warp(Warp& w, const Instr& i) {
    bool wait;
    converge(w, w.uniform(i.a[0], "the mask of bar.warp.sync"), "bar.warp.sync", wait);
    if (!wait && w.exec == w.live) w.sync();
}

void cluster_arrive(Warp& w, const Instr& i) {
    bool wait;
    aligned(w, wait);
    if (wait) return;
    NamedBarrier& bar = w.cta->cluster->barrier;
    if (w.cluster_wait) fault("barrier count", "barrier.cluster.arrive comes twice without a wait");
    uint32_t warps = 0;
    for (auto& cta : w.cta->cluster->ctas) warps += cta->warps.size();
    w.cluster_wait = bar.generation + 1;
    arrive_at(w, bar, 1, warps, !(i.n & RELAXED));
}

void cluster_wait(Warp& w, const Instr& i) {
    bool wait;
    aligned(w, wait);
    if (wait) return;
    NamedBarrier& bar = w.cta->cluster->barrier;
    if (!w.cluster_wait) fault("barrier count", "barrier.cluster.wait without an arrive");
    if (bar.generation < w.cluster_wait) {
        w.block("the barrier of the cluster, where %llu of %llu warps are", bar.arrived, bar.expected);
        return;
    }
    if (!(i.n & RELAXED)) w.known.join(bar.done);
    w.cluster_wait = 0;
}

void fence_inits(Warp& w) {
    for (auto& [at, bar] : w.cta->mbarriers)
        if (before(w.known.seen, bar.init)) bar.fenced = true;
}
void fence_proxy(Warp& w, const Instr&) {
    w.known.fenced = w.known.seen;
    fence_inits(w);
    w.tick();
}
void fence_init(Warp& w, const Instr&) { fence_inits(w); }
void fence(Warp& w, const Instr& i) {  // n: gpu scope or wider
    if (!i.n) return;
    w.cta->launch->fences[w.global_id] = ++w.fences;
    w.acquired = true;
}
void nothing(Warp&, const Instr&) {}

void launch_dependents(Warp& w, const Instr&) {
    if (w.cta->triggered) return;
    w.cta->triggered = true;
    w.cta->launch->triggered++;
    machine(w).events++;
}
void dependency_wait(Warp& w, const Instr&) {
    Launch& launch = *w.cta->launch;
    if (launch.index && launch.dependent) {
        for (uint32_t k = 0; k < launch.index; k++)
            if (!launch.machine->launches[k]->done()) {
                w.block("griddepcontrol.wait: launch %llu is not over", k);
                return;
            }
    }
    w.known.seen[w.cta->cluster->dependency] = 1;
    w.acquired = true;
}

bool decode_mbarrier(Decoder& d) {
    Instr& i = d.out;
    if (!d.has("b64") || (d.has("shared::cluster") && !(d.has("arrive") || d.has("expect_tx")))) return false;
    if (d.has("shared::cluster")) i.n |= CLUSTER_WINDOW;
    if (d.has("relaxed")) i.n |= RELAXED;
    if (d.has("parity")) i.n |= PARITY;
    const std::string& what = d.op[1];
    if (what == "init") {
        i.a[0] = d.address(d.args.at(0), false);
        i.a[1] = d.slot(1, Type::b32);
        i.fn = mbarrier_init;
        return true;
    }
    if (what == "inval") {
        i.a[0] = d.address(d.args.at(0), false);
        i.fn = mbarrier_inval;
        return true;
    }
    if (what == "arrive" || what == "arrive_drop") {
        if (d.has("noComplete")) return false;
        bool state = d.args.at(0).kind != Operand::mem;
        if (state && d.args[0].kind == Operand::reg) {
            i.a[1] = d.slot(0, Type::b64);
            i.n |= STATE;
        }
        i.a[0] = d.address(d.args.at(state), false);
        if (d.args.size() > size_t(state) + 1) {
            i.a[2] = d.slot(size_t(state) + 1, Type::b32);
            i.n |= COUNTED;
        }
        if (d.has("expect_tx")) {
            if (!(i.n & COUNTED)) return false;
            i.n |= EXPECT;
        }
        if (what == "arrive_drop") i.n |= DROP;
        i.fn = mbarrier_arrive;
        return true;
    }
    if (what == "expect_tx" || what == "complete_tx") {
        i.m = what == "complete_tx";
        i.a[0] = d.address(d.args.at(0), false);
        i.a[2] = d.slot(1, Type::b32);
        i.fn = mbarrier_expect;
        return true;
    }
    if (what == "test_wait" || what == "try_wait") {
        if (what == "try_wait") i.n |= TRY;
        i.a[0] = d.slot(0, Type::pred);
        i.a[1] = d.address(d.args.at(1), false);
        i.a[2] = d.slot(2, d.has("parity") ? Type::b32 : Type::b64);
        i.fn = mbarrier_wait;
        return true;
    }
    return false;
}

bool decode_fence(Decoder& d) {
    Instr& i = d.out;
    if (d.has("proxy")) {
        if (d.has("tensormap::generic") || d.has("alias")) {
            i.fn = nothing;
            return true;
        }
        i.fn = d.has("async") && d.has("global") ? nothing
                                                 : fence_proxy;  // the emulator does not follow it for global memory
        return d.has("async") || d.has("async::generic") || d.has("async.shared::cta") || d.has("async.global");
    }
    if (d.has("mbarrier_init")) {
        i.fn = fence_init;
        return true;
    }
    if (!d.has("acq_rel") && !d.has("sc") && d.op[0] == "fence") return false;
    i.n = d.has("gpu") || d.has("gl") || d.has("sys");
    i.fn = fence;
    return true;
}

}  // namespace

bool decode_barrier(Decoder& d) {
    Instr& i = d.out;
    const std::string& op = d.op[0];
    if (op == "mbarrier") return decode_mbarrier(d);
    if (op == "fence" || op == "membar") return decode_fence(d);
    if (op == "griddepcontrol") {
        i.fn = d.has("wait") ? dependency_wait : d.has("launch_dependents") ? launch_dependents : nullptr;
        return i.fn;
    }
    if (op == "barrier" && d.has("cluster")) {
        if (d.has("relaxed")) i.n = RELAXED;
        i.fn = d.has("arrive") ? cluster_arrive : d.has("wait") ? cluster_wait : nullptr;
        return i.fn;
    }
    if (op == "bar" && d.has("warp")) {
        i.a[0] = d.slot(0, Type::b32);
        i.fn = bar_warp;
        return true;
    }
    if ((op == "bar" || op == "barrier") && d.has("red")) {
        bool count = d.args.size() == 4;
        Operand& vote = d.args.at(count ? 3 : 2);
        i.n = 1;
        i.m = (d.has("popc") ? RED_COUNT : d.has("or") ? RED_OR : RED_AND) | (vote.negated ? 4 : 0);
        i.a[0] = d.slot(1, Type::b32);
        i.a[1] = count ? d.slot(2, Type::b32) : ALL;
        i.a[2] = d.slot(vote, Type::pred);
        i.a[3] = d.slot(0, d.has("popc") ? Type::b32 : Type::pred);
        i.fn = bar;
        return true;
    }
    if ((op == "bar" || op == "barrier") && (d.has("sync") || d.has("arrive"))) {
        i.n = d.has("sync");
        i.a[0] = d.slot(0, Type::b32);
        i.a[1] = d.args.size() > 1 ? d.slot(1, Type::b32) : ALL;
        i.fn = bar;
        return i.n || i.a[1] != ALL;
    }
    return false;
}
