// Who runs: lanes of a warp, warps, CTAs, launches, and what completes by itself. A seed decides.
#include <algorithm>
#include <cstdio>

#include "emu.h"

const Instr& Warp::instr() const { return kernel->code[now.pc]; }

std::string describe(const Warp& w, uint32_t pc) {
    const Instr& i = w.kernel->code[pc];
    return text("launch %u %s warp %u, line %u: %s", w.cta->launch->index, w.cta->place().c_str(), w.id, i.line,
                i.text.c_str());
}

std::string Cta::place() const {
    std::string s = text("CTA %u", index[0]);
    if (index[1] || index[2]) s += text(",%u,%u", index[1], index[2]);
    return s;
}

// ---- a warp
// ----------------------------------------------------------------------------------------------------------

// Lanes at the same place go on together; of several groups that can go on the one that is furthest behind does.
static bool choose(Warp& w) {
    auto& groups = w.others;
    if (w.now.mask) groups.push_back(w.now);
    for (size_t a = 0; a < groups.size(); a++)
        for (size_t b = groups.size(); --b > a;)
            if (groups[a].pc == groups[b].pc) {
                groups[a].mask |= groups[b].mask;
                groups[a].why = nullptr;
                groups.erase(groups.begin() + b);
            }
    size_t best = groups.size();
    for (size_t k = 0; k < groups.size(); k++)
        if (!groups[k].why && (best == groups.size() || groups[k].pc < groups[best].pc)) best = k;
    bool found = best < groups.size();
    if (!found) best = 0;
    if (groups.empty()) return false;
    w.now = groups[best];
    groups.erase(groups.begin() + best);
    return found;
}

static void finish_warp(Warp& w) {
    Cta& cta = *w.cta;
    if (!w.wgmmas.empty()) fault("missing wait", "the warp ends with a wgmma that no wgmma.wait_group waits for");
    if (!w.bulks.empty())
        fault("missing wait",
              "the warp ends with a bulk copy from shared memory that no cp.async.bulk.wait_group waits for");
    if (!w.copies.empty()) fault("missing wait", "the warp ends with a cp.async that nothing waits for");
    machine(w).events++;
    if (--cta.running) return;
    for (auto& [at, bar] : cta.mbarriers)
        if (bar.tx)
            fault("transaction count", "the CTA ends, and the mbarrier at smem+%u still awaits %lld bytes", at,
                  (long long)bar.tx);
    for (size_t k = 0; k < cta.warps.size(); k++) {  // the warps of a warpgroup do the same products
        const Warp &a = *cta.warps[k], &b = *cta.warps[k / 4 * 4];
        if (a.wgmma_hash != b.wgmma_hash)
            fault("divergence", "warps %u and %u of a warpgroup executed different wgmma: %u and %u", b.id, a.id,
                  b.wgmma_count, a.wgmma_count);
    }
    if (!cta.triggered) {
        cta.triggered = true;
        cta.launch->triggered++;
    }
    cta.launch->finished++;
    cta.cluster->running--;
}

void run_warp(Warp& w, uint32_t slice) {
    Machine& m = machine(w);
    m.current = &w;
    w.blocked = false;
    w.now.why = nullptr;
    for (auto& g : w.others) g.why = nullptr;
    const Instr* code = w.kernel->code.data();
    for (uint32_t k = 0; k < slice; k++) {
        if (!w.others.empty() || !w.now.mask) {
            w.blocked = !choose(w);
            if (w.blocked) break;
        }
        w.stop = false;
        const Instr& i = code[w.now.pc++];
        w.exec = w.now.mask;
        w.steps++;
        if (i.guard >= 0) {
            uint32_t p = w.pred(i.guard);
            w.exec &= i.guard_not ? ~p : p;
            if (!w.exec) continue;
        }
        i.fn(w, i);
        if (!w.stop) continue;
        if (!w.live) {
            finish_warp(w);
            break;
        }
        if (w.now.why && !w.others.empty()) continue;  // another group may go on
        break;
    }
    if (w.blocked && w.live) w.polled = m.events;
    w.blocked = w.blocked && w.live;
}

// ---- CTAs and launches
// -------------------------------------------------------------------------------------------------

static void fill(Warp& w, uint32_t slot, uint64_t v, bool wide) {
    uint32_t* p = w.reg(slot);
    for (int l = 0; l < LANES; l++)
        if (wide) put(p, l, v);
        else p[l] = uint32_t(v);
    w.def[slot] = ALL;
}

static void fill_specials(Warp& w) {
    Launch& launch = *w.cta->launch;
    for (auto& [slot, name] : w.kernel->specials) {
        auto xyz = [&](const uint32_t v[3]) { fill(w, slot, v[name.back() - 'x'], false); };
        uint32_t clusters[3] = {launch.grid[0] / launch.cluster_size, launch.grid[1], launch.grid[2]};
        uint32_t size[3] = {launch.cluster_size, 1, 1}, rank[3] = {w.cta->rank, 0, 0},
                 id[3] = {w.cta->index[0] / launch.cluster_size, w.cta->index[1], w.cta->index[2]};
        if (name.rfind("%tid.", 0) == 0) {
            uint32_t* p = w.reg(slot);
            const uint32_t* b = launch.block;
            for (int l = 0; l < LANES; l++) {
                uint32_t t = w.id * LANES + l, v[3] = {t % b[0], t / b[0] % b[1], t / b[0] / b[1]};
                p[l] = v[name.back() - 'x'];
            }
            w.def[slot] = ALL;
        } else if (name == "%laneid") {
            for (int l = 0; l < LANES; l++) w.reg(slot)[l] = l;
            w.def[slot] = ALL;
        } else if (name.rfind("%lanemask_", 0) == 0) {
            for (int l = 0; l < LANES; l++) {
                uint32_t lt = (1u << l) - 1, eq = 1u << l;
                std::string what = name.substr(10);
                w.reg(slot)[l] = what == "lt"   ? lt
                                 : what == "eq" ? eq
                                 : what == "le" ? lt | eq
                                 : what == "gt" ? ~(lt | eq)
                                                : ~lt;
            }
            w.def[slot] = ALL;
        } else if (name.rfind("%ntid.", 0) == 0) xyz(launch.block);
        else if (name.rfind("%ctaid.", 0) == 0) xyz(w.cta->index);
        else if (name.rfind("%nctaid.", 0) == 0) xyz(launch.grid);
        else if (name.rfind("%cluster_ctaid.", 0) == 0) xyz(rank);
        else if (name.rfind("%cluster_nctaid.", 0) == 0) xyz(size);
        else if (name.rfind("%clusterid.", 0) == 0) xyz(id);
        else if (name.rfind("%nclusterid.", 0) == 0) xyz(clusters);
        else if (name == "%cluster_ctarank") fill(w, slot, w.cta->rank, false);
        else if (name == "%cluster_nctarank") fill(w, slot, launch.cluster_size, false);
        else if (name == "%warpid") fill(w, slot, w.id, false);
        else if (name == "%smid") fill(w, slot, w.cta->number, false);
        else if (name == "%nsmid") fill(w, slot, 132, false);
        else if (name == "%globaltimer" || name == "%clock64") fill(w, slot, 0, true);
        else if (name == "%clock" || name == "%clock_hi" || name == "%globaltimer_lo") fill(w, slot, 0, false);
        else if (name == "%dynamic_smem_size") fill(w, slot, launch.smem, false);
        else fault("unknown opcode", "the special register %s", name.c_str());
    }
}

static std::unique_ptr<Warp> make_warp(Cta& cta, uint32_t id) {
    auto w = std::make_unique<Warp>();
    w->cta = &cta;
    w->kernel = cta.launch->kernel;
    w->id = id;
    w->file.resize(size_t(w->kernel->slots) * LANES);
    w->def.assign(w->kernel->slots, 0);
    w->tag.assign(w->kernel->slots, 0);
    for (size_t k = 0; k < w->kernel->constants.size(); k++)
        fill(*w, w->kernel->constants[k].first, w->kernel->constants[k].second, w->kernel->wide[k]);
    for (auto& [slot, offset] : w->kernel->param_addresses) fill(*w, slot, (uint64_t)cta.launch->params + offset, true);
    w->now.mask = ALL;
    return w;
}

constexpr uint32_t MBARRIERS = 96;  // of a CTA, that are followed

void start_cluster(Launch& launch) {
    auto cluster = std::make_unique<Cluster>();
    cluster->launch = &launch;
    uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2], warps = threads / LANES,
             size = launch.cluster_size;
    cluster->next_mbarrier = size * warps * KINDS + KINDS;
    cluster->dependency = size * warps * KINDS;
    cluster->agents = cluster->next_mbarrier + size * MBARRIERS;
    cluster->running = size;
    if (cluster->agents >= 1u << (32 - CLOCK_BITS))
        fault("limits", "a cluster of %u CTAs of %u warps is more than the emulator follows", size, warps);
    for (uint32_t rank = 0; rank < size; rank++) {
        auto cta = std::make_unique<Cta>();
        cta->cluster = cluster.get();
        cta->launch = &launch;
        cta->rank = rank;
        uint32_t number = cta->number = launch.next_cta++;
        const uint32_t* g = launch.grid;
        cta->index[0] = number % g[0], cta->index[1] = number / g[0] % g[1], cta->index[2] = number / g[0] / g[1];
        uint32_t fixed = (launch.kernel->static_smem + 1023) / 1024 * 1024;
        cta->smem.assign(fixed + launch.smem, 0xff);  // NaN in every format
        cta->cells.resize((cta->smem.size() + 3) / 4);
        for (uint32_t id = 0; id < warps; id++) {
            auto w = make_warp(*cta, id);
            w->agent = (rank * warps + id) * KINDS;
            w->global_id = number * warps + id;
            w->known = nothing_known(*cluster);
            w->known.seen[w->agent] = w->known.seen[w->agent + MATRIX] = 1;
            fill_specials(*w);
            cta->warps.push_back(std::move(w));
        }
        cta->running = warps;
        cluster->ctas.push_back(std::move(cta));
    }
    launch.resident.push_back(std::move(cluster));
}

void Machine::async(Cluster* cluster, std::function<void()> run) {
    cluster->pending++;
    pending.push_back({cluster, std::move(run)});
}

static void complete_one(Machine& m) {
    size_t k = m.random() % m.pending.size();
    Async op = std::move(m.pending[k]);
    m.pending.erase(m.pending.begin() + k);
    op.run();
    m.place.clear();
    op.cluster->pending--;
    m.events++;
}

static void admit(Machine& m) {
    for (size_t k = 0; k < m.launches.size(); k++) {
        Launch& l = *m.launches[k];
        bool may = true;
        for (size_t e = 0; e < k; e++) {
            Launch& before = *m.launches[e];
            may &= before.done() ||
                   (e + 1 == k && l.dependent && before.triggered == before.total && before.next_cta == before.total);
        }
        if (!may) return;
        // the first launch is resident as a whole, as a persistent grid is; of others as many as memory allows
        uint32_t threads = l.block[0] * l.block[1] * l.block[2];
        size_t room = std::max<size_t>(1, 16384 / threads / l.cluster_size);
        while (l.next_cta < l.total && l.resident.size() < room) {
            start_cluster(l);
            m.events++;
        }
    }
}

static std::string waiters(Machine& m) {
    std::string out;
    int shown = 0;
    for (auto& launch : m.launches)
        for (auto& cluster : launch->resident)
            for (auto& cta : cluster->ctas)
                for (auto& w : cta->warps) {
                    if (!w->live || ++shown > 64) continue;
                    auto say = [&](const Group& g) {
                        if (!g.mask) return;
                        char why[300] = "";
                        if (g.why)
                            snprintf(why, sizeof why, g.why, g.numbers[0], g.numbers[1], g.numbers[2], g.numbers[3]);
                        out += "\n  " + describe(*w, g.pc) + "\n      lanes " + text("%08x", g.mask) + " wait for " +
                               (g.why ? why : "their turn");
                    };
                    say(w->now);
                    for (auto& g : w->others) say(g);
                }
    return out;
}

void Machine::run() {
    for (;;) {
        admit(*this);
        std::vector<Warp*> ready;
        bool all_done = true;
        for (auto& launch : launches) {
            auto& resident = launch->resident;
            for (size_t k = 0; k < resident.size();) {
                if (!resident[k]->running && !resident[k]->pending) {
                    resident.erase(resident.begin() + k);
                    events++;
                    continue;
                }
                for (auto& cta : resident[k]->ctas)
                    for (auto& w : cta->warps)
                        if (w->live && !(w->blocked && w->polled == events)) ready.push_back(w.get());
                k++;
            }
            all_done &= launch->done();
        }
        if (all_done) return;
        if (ready.empty()) {
            if (!pending.empty()) {
                complete_one(*this);
                continue;
            }
            uint64_t seen = events;
            admit(*this);
            bool waiting = false;
            for (auto& launch : launches)
                for (auto& c : launch->resident) waiting |= c->running || c->pending;
            if (seen != events || !waiting) continue;
            current = nullptr;
            fault("deadlock", "no warp can go on, and nothing is under way:%s", waiters(*this).substr(0, 1200).c_str());
        }
        for (size_t turns = std::max<size_t>(1, ready.size()); turns--;) {
            Warp* w = ready[policy.order == 0   ? random() % ready.size()
                            : policy.order == 1 ? ready.size() - 1 - turns
                                                : turns];
            if (!w->live || (w->blocked && w->polled == events)) continue;
            uint64_t before = w->steps;
            run_warp(*w, 1 + random() % policy.slice);
            steps += w->steps - before;
            if (!pending.empty() && chance(policy.finish)) complete_one(*this);
        }
        if (steps > max_steps) {
            current = nullptr;
            fault("livelock", "%llu instructions, and no end:%s", (unsigned long long)steps,
                  waiters(*this).substr(0, 1200).c_str());
        }
    }
}
