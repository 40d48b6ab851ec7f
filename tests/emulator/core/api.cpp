// The flat interface that Python binds (machine.py).
#include <algorithm>
#include <cstdio>

#include "emu.h"

extern "C" {

struct LaunchRequest {
    const char* kernel;
    uint32_t grid[3], block[3], cluster, smem, dependent;
    const uint8_t* params;
};

struct RegionRequest {
    uint8_t* begin;
    uint64_t bytes;
    uint32_t writable, written;
    const char* name;
};

static int report(char* out, size_t size, const std::string& kind, const std::string& what) {
    snprintf(out, size, "%s\n%s", kind.c_str(), what.c_str());
    return 1;
}

void* emulator_module(const char* ptx, char* out, size_t size) {
    try {
        return parse(ptx).release();
    } catch (const Fault& f) { report(out, size, f.kind, f.what); } catch (const std::exception& e) {
        report(out, size, "PTX", std::string("a statement that the emulator cannot read: ") + e.what());
    }
    return nullptr;
}

void emulator_free(void* module) { delete (Module*)module; }

// The sizes of a kernel's parameters; their number, or -1 where there is no such kernel.
int emulator_params(void* module, const char* kernel, uint32_t* sizes, int room) {
    auto& kernels = ((Module*)module)->kernels;
    auto found = kernels.find(kernel);
    if (found == kernels.end()) return -1;
    auto& params = found->second->params;
    for (size_t k = 0; k < params.size() && int(k) < room; k++) sizes[k] = params[k].size;
    return int(params.size());
}

// params of a request: the parameters one behind the other, without padding. 0, or 1 and a report.
int emulator_run(void* module, const LaunchRequest* requests, int count, const RegionRequest* regions, int region_count,
                 uint64_t seed, uint64_t max_steps, uint64_t* steps, char* out, size_t size) {
    Machine m;
    try {
        m.random.seed(uint32_t(seed * 2654435761u + 1));
        m.max_steps = max_steps;
        // seed 0: a middle way; 1: everything late; 2: everything at once; others: by their own dice
        static const Policy fixed[] = {{0.3, 0.5, 400, 0}, {0.0, 0.0, 100000, 0}, {1.0, 1.0, 400, 0}};
        auto dice = [&](double from, double to) { return std::uniform_real_distribution<>(from, to)(m.random); };
        m.policy = seed < 3 ? fixed[seed]
                            : Policy{dice(0, 0.5), dice(0, 1), uint32_t(1) << (m.random() % 12), int(m.random() % 3)};
        for (int k = 0; k < region_count; k++) {
            const RegionRequest& q = regions[k];
            Region r{q.begin, q.begin + q.bytes, q.writable != 0, {}, q.name};
            if (q.writable) r.shadow.assign((q.bytes + 3) / 4, q.written ? BEFORE_ALL : 0);
            m.regions.push_back(std::move(r));
        }
        std::sort(m.regions.begin(), m.regions.end(),
                  [](const Region& a, const Region& b) { return a.begin < b.begin; });
        auto& kernels = ((Module*)module)->kernels;
        for (int k = 0; k < count; k++) {
            const LaunchRequest& q = requests[k];
            auto l = std::make_unique<Launch>();
            l->machine = &m;
            l->kernel = kernels.at(q.kernel).get();
            memcpy(l->grid, q.grid, sizeof l->grid);
            memcpy(l->block, q.block, sizeof l->block);
            l->cluster_size = q.cluster, l->smem = q.smem, l->index = uint32_t(k), l->dependent = q.dependent != 0;
            l->total = q.grid[0] * q.grid[1] * q.grid[2];
            uint32_t threads = q.block[0] * q.block[1] * q.block[2];
            if (threads % LANES) fault("limits", "a block of %u threads, no multiple of %d", threads, LANES);
            const uint32_t* need = l->kernel->threads;
            if (need[0] && memcmp(need, q.block, sizeof l->block))
                fault("launch", "a block of %u threads for a kernel of %u", q.block[0], need[0]);
            if (l->total % q.cluster)
                fault("launch", "%u CTAs are not a multiple of clusters of %u", l->total, q.cluster);
            if (l->smem + l->kernel->static_smem > 232448)
                fault("launch", "%u bytes of shared memory; there are 232448", l->smem);
            l->param_storage.resize(l->kernel->param_bytes + 128);
            l->params = (uint8_t*)((uintptr_t(l->param_storage.data()) + 127) / 128 * 128);
            l->fences.assign(l->total * threads / LANES, 0);
            const uint8_t* p = q.params;
            for (auto& param : l->kernel->params) {
                memcpy(&l->params[param.offset], p, param.size);
                p += param.size;
            }
            m.launches.push_back(std::move(l));
        }
        m.run();
        *steps = m.steps;
        return 0;
    } catch (const Fault& f) {
        std::string where =
            !m.place.empty() ? "\nissued by " + m.place
            : m.current
                ? "\nin " + describe(*m.current, std::min<uint32_t>(m.current->now.pc ? m.current->now.pc - 1 : 0,
                                                                    m.current->kernel->code.size() - 1))
                : "";
        return report(out, size, f.kind, f.what + where);
    } catch (const std::exception& e) { return report(out, size, "internal", e.what()); }
}
}
