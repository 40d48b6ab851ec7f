// What is known of each 4 bytes of shared memory, and whether an access may happen now.
//
// An access is right when all that it depends on happened before it, by the vector clocks that barriers pass on; and
// when a generic write that an asynchronous reader or writer meets has gone through a proxy fence (PTX
// ISA 8.6, 9.7.14.4).
#include <algorithm>

#include "emu.h"

void Known::join(const Known& other) {
    for (size_t k = 0; k < other.seen.size(); k++) {
        if (other.seen[k] > seen[k]) seen[k] = other.seen[k];
        if (other.fenced[k] > fenced[k]) fenced[k] = other.fenced[k];
    }
    for (size_t k = 0; k < other.lanes.size(); k++) {
        if (other.lane_seen[k] < lane_seen[k]) continue;
        lanes[k] = other.lane_seen[k] == lane_seen[k] ? lanes[k] | other.lanes[k] : other.lanes[k];
        lane_seen[k] = other.lane_seen[k];
        lane_fenced[k] = other.lane_fenced[k];
    }
}

Known nothing_known(const Cluster& cluster) {
    std::vector<uint32_t> agents(cluster.agents), warps(cluster.dependency / KINDS);
    return {agents, agents, warps, warps, warps};
}

// What the lanes that run pass on to a barrier. Of ldmatrix all: it is done for all lanes or for none.
void publish(const Warp& w, Known& to) {
    if (w.exec == w.live) {
        to.join(w.known);
        return;
    }
    uint32_t seen[KINDS], fenced[KINDS];
    for (uint32_t k : {GENERIC, CPASYNC}) seen[k] = to.seen[w.agent + k], fenced[k] = to.fenced[w.agent + k];
    to.join(w.known);
    for (uint32_t k : {GENERIC, CPASYNC}) {
        to.seen[w.agent + k] = std::max(seen[k], w.synced[k]);
        to.fenced[w.agent + k] = std::max(fenced[k], std::min(w.synced[k], w.known.fenced[w.agent + k]));
    }
    uint32_t warp = w.agent / KINDS;
    to.lanes[warp] = w.exec;
    to.lane_seen[warp] = w.known.seen[w.agent];
    to.lane_fenced[warp] = w.known.fenced[w.agent];
}

std::string agent_name(const Cluster& cluster, uint32_t agent) {
    static const char* const kinds[] = {"", " (wgmma)", " (bulk copy)", " (cp.async)", " (ldmatrix)"};
    for (auto& cta : cluster.ctas) {
        for (auto& warp : cta->warps)
            if (agent >= warp->agent && agent < warp->agent + KINDS)
                return text("%s warp %u%s", cta->place().c_str(), warp->id, kinds[agent - warp->agent]);
        for (auto& [at, bar] : cta->mbarriers)
            if (bar.agent == agent) return text("%s TMA for the mbarrier at smem+%u", cta->place().c_str(), at);
    }
    return text("agent %u", agent);
}

void check_bounds(Cta& cta, uint32_t at, uint32_t bytes, uint32_t align) {
    if (at > cta.smem.size() || bytes > cta.smem.size() - at)
        fault("out of bounds", "%u bytes at smem+%d; the CTA has %zu bytes of shared memory", bytes, int(at),
              cta.smem.size());
    if (at % align) fault("misaligned", "%u bytes at smem+%u need an alignment of %u", bytes, at, align);
}

Access shared_at(Warp& w, uint32_t address, uint32_t bytes, uint32_t align, bool cluster_window, uint32_t lane) {
    Cta* cta = w.cta;
    uint32_t at = address;
    if (cluster_window && address >> RANK_SHIFT) {
        uint32_t rank = (address >> RANK_SHIFT) - 1;
        if (rank >= cta->cluster->ctas.size())
            fault("out of bounds", "CTA rank %u of a cluster of %zu", rank, cta->cluster->ctas.size());
        cta = cta->cluster->ctas[rank].get();
        if (cta != w.cta && !cta->running)
            fault("out of bounds", "shared memory of CTA rank %u, which has ended", rank);
        at = address & ((1u << RANK_SHIFT) - 1);
    }
    at -= SMEM_BASE;
    check_bounds(*cta, at, bytes, align);
    return {cta, at, bytes, lane};
}

bool before(const std::vector<uint32_t>& clocks, uint32_t stamp) {
    return clocks[stamp >> CLOCK_BITS] >= (stamp & ((1u << CLOCK_BITS) - 1));
}

// Whether a lane's doing is among what arriving lanes passed on for themselves.
static bool by_lane(const Known& known, uint32_t stamp, uint32_t lane, bool fenced) {
    uint32_t agent = stamp >> CLOCK_BITS, warp = agent / KINDS;
    if (warp >= known.lanes.size() || agent % KINDS != GENERIC || lane == EVERY_LANE ||
        !(known.lanes[warp] >> lane & 1))
        return false;
    return (fenced ? known.lane_fenced[warp] : known.lane_seen[warp]) >= (stamp & ((1u << CLOCK_BITS) - 1));
}

// The order of an access behind the cell's last write.
static void behind_write(Warp& w, const Access& a, const Cell& cell, uint32_t at, Proxy proxy, const char* verb) {
    const Cluster& cluster = *w.cta->cluster;
    const uint32_t agent = cell.writer >> CLOCK_BITS, clock = cell.writer & ((1u << CLOCK_BITS) - 1);
    if (!before(w.known.seen, cell.writer) && !by_lane(w.known, cell.writer, cell.lane, false)) {
        bool waited = cell.async || (agent < cluster.dependency && agent % KINDS == CPASYNC);
        fault(waited ? "missing wait" : "race", "smem+%u is %s, but its write by %s in line %u is not known to be over",
              at, verb, agent_name(cluster, agent).c_str(), w.kernel->code[cell.write_pc].line);
    }
    if (agent == w.agent && clock > w.synced[GENERIC] && (cell.lane != a.lane || a.lane == EVERY_LANE) &&
        !by_lane(w.known, cell.writer, cell.lane, false))
        fault("race",
              "smem+%u is %s in a lane, but was written by another lane in line %u, and no bar.warp.sync came since",
              at, verb, w.kernel->code[cell.write_pc].line);
    if (proxy == Proxy::async && !cell.async && !before(w.known.fenced, cell.writer) &&
        !by_lane(w.known, cell.writer, cell.lane, true))
        fault("missing proxy fence",
              "smem+%u is %s asynchronously; its write by %s in line %u has passed no fence.proxy.async", at, verb,
              agent_name(cluster, agent).c_str(), w.kernel->code[cell.write_pc].line);
}

// Whether an agent is one of a warp of w's warpgroup, of that kind.
static bool in_warpgroup(const Warp& w, uint32_t agent, uint32_t kind) {
    const Warp& first = *w.cta->warps[w.id / 4 * 4];
    return agent >= first.agent && agent < first.agent + 4 * KINDS && (agent - first.agent) % KINDS == kind;
}

// Zeros that a warp writes over rows which a product of its warpgroup may still read, or reads already: a kernel clears
// the tokens behind a request's end so, whose scores it masks. Where they were not dead the result is wrong, and that
// shows.
//
// product: wgmma reads a line of a K-major operand, which is a row or column of the result of its own and may be
// masked. It may be one that nobody wrote, which is NaN (start_cluster), or one that is cleared meanwhile.
void note_read(Warp& w, const Access& a, Proxy proxy, uint32_t stamp, bool product) {
    const uint32_t agent = stamp >> CLOCK_BITS;
    for (uint32_t k = a.at / 4; k <= (a.at + a.bytes - 1) / 4; k++) {
        Cell& cell = a.cta->cells[k];
        if (!cell.writer && !product)
            fault("uninitialised shared memory", "smem+%u is read and was never written", 4 * k);
        bool cleared = product && cell.zeros && !before(w.known.seen, cell.writer) &&
                       in_warpgroup(w, cell.writer >> CLOCK_BITS, GENERIC);
        if (cell.writer && !cleared) behind_write(w, a, cell, 4 * k, proxy, "read");
        uint32_t* free = nullptr;
        bool noted = false;
        for (uint32_t& r : cell.reader) {
            if (r >> CLOCK_BITS == agent && r) {
                r = stamp;
                noted = true;
                break;
            }
            if (!free && (!r || before(w.known.seen, r))) free = &r;
        }
        if (noted) continue;
        if (free) *free = stamp;
        else a.cta->more_readers[k].push_back(stamp);
    }
}

static void behind_read(Warp& w, uint32_t reader, uint32_t at, bool zeros) {
    if (before(w.known.seen, reader) ||
        (zeros && (in_warpgroup(w, reader >> CLOCK_BITS, WGMMA) || in_warpgroup(w, reader >> CLOCK_BITS, MATRIX))))
        return;
    fault("race", "smem+%u is written, but a read by %s is not known to be over", at,
          agent_name(*w.cta->cluster, reader >> CLOCK_BITS).c_str());
}

void note_write(Warp& w, const Access& a, Proxy proxy, uint32_t stamp, const uint8_t* value) {
    for (uint32_t k = a.at / 4; k <= (a.at + a.bytes - 1) / 4; k++) {
        Cell& cell = a.cta->cells[k];
        uint32_t first = std::max(4 * k, a.at), end = std::min(4 * k + 4, a.at + a.bytes);
        // the same bits written by several warps are no race
        uint32_t bits = 1;
        if (value && end - first == 4) memcpy(&bits, value + first - a.at, 4);
        bool zeros = bits == 0, same = value && cell.writer && !cell.async &&
                                       !memcmp(&a.cta->smem[first], value + first - a.at, end - first);
        if (cell.writer && !same) behind_write(w, a, cell, 4 * k, proxy, "written");
        for (uint32_t& r : cell.reader) {
            if (r && !same) behind_read(w, r, 4 * k, zeros);
            r = 0;
        }
        if (!a.cta->more_readers.empty()) {
            auto more = a.cta->more_readers.find(k);
            if (more != a.cta->more_readers.end()) {
                if (!same)
                    for (uint32_t r : more->second) behind_read(w, r, 4 * k, zeros);
                a.cta->more_readers.erase(more);
            }
        }
        cell.writer = stamp;
        cell.write_pc = w.now.pc - 1;
        cell.lane = a.lane;
        cell.async = proxy == Proxy::async;
        cell.zeros = zeros;
    }
}
