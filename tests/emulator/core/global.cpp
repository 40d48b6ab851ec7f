// Global memory: what may be touched, who wrote it, and whether an access may happen now.
//
// A word that a launch may write remembers its last writer: launch + 1, warp of the launch, and how often that warp had
// fenced (gpu scope) before. From that: reads of what nobody wrote, and accesses across launches or CTAs that neither
// griddepcontrol.wait nor a fence with an acquire orders (PTX ISA 8, 9.7.14.16).
#include <algorithm>

#include "emu.h"

Region& region_at(Machine& m, uint64_t address, uint64_t bytes) {
    uint8_t* p = (uint8_t*)address;
    auto after = std::upper_bound(m.regions.begin(), m.regions.end(), p,
                                  [](uint8_t* q, const Region& r) { return q < r.begin; });
    if (after != m.regions.begin()) {
        Region& r = *(after - 1);
        if (p + bytes <= r.end) return r;
        if (p < r.end)
            fault("out of bounds", "%llu bytes of global memory begin %td bytes before the end of %s",
                  (unsigned long long)bytes, r.end - p, r.name.c_str());
        fault("out of bounds", "global memory at %#llx, %td bytes behind %s", (unsigned long long)address, p - r.end,
              r.name.c_str());
    }
    fault("out of bounds", "global memory at %#llx, before all that was given", (unsigned long long)address);
}

uint64_t shadow_of(const Warp& w) {
    return uint64_t(w.cta->launch->index + 1) << 56 | uint64_t(w.global_id) << 32 | w.fences;
}

static bool ordered(Warp& w, uint64_t s, bool acquire, std::string& why) {
    if (s == BEFORE_ALL) return true;
    Launch& launch = *w.cta->launch;
    uint32_t index = uint32_t(s >> 56) - 1, writer = s >> 32 & 0xffffff, fences = uint32_t(s);
    if (index != launch.index) {
        if (!launch.dependent || w.known.seen[w.cta->cluster->dependency]) return true;
        why = "the launch before";
    } else {
        if (writer / uint32_t(w.cta->warps.size()) == w.cta->number) return true;
        why = "another CTA";
    }
    Launch& from = *launch.machine->launches[index];
    return from.fences[writer] > fences && (acquire || w.acquired);
}

void aligned_global(uint64_t address, uint32_t bytes, uint32_t align) {
    if (address % align)
        fault("misaligned", "%u bytes of global memory at %#llx need an alignment of %u", bytes,
              (unsigned long long)address, align);
}

// undefined: told, instead of a fault, that a part was never written.
uint8_t* global_read(Warp& w, uint64_t address, uint32_t bytes, uint32_t align, bool acquire, bool* undefined) {
    aligned_global(address, bytes, align);
    Region& r = region_at(machine(w), address, bytes);
    uint8_t* p = (uint8_t*)address;
    if (r.writable) {
        for (size_t k = (p - r.begin) / 4; k <= size_t(p + bytes - 1 - r.begin) / 4; k++) {
            if (!r.shadow[k]) {
                if (!undefined)
                    fault("uninitialised global memory", "%s, byte %zu, is read and was never written", r.name.c_str(),
                          4 * k);
                *undefined = true;
                continue;
            }
            std::string why;
            if (!ordered(w, r.shadow[k], acquire, why))
                fault("grid dependency",
                      "%s, byte %zu, was written by %s: neither griddepcontrol.wait nor a fence and an acquire orders "
                      "this read behind it",
                      r.name.c_str(), 4 * k, why.c_str());
        }
    }
    return p;
}

uint8_t* global_write(Warp& w, uint64_t address, uint32_t bytes, uint32_t align, const uint8_t* value) {
    aligned_global(address, bytes, align);
    Region& r = region_at(machine(w), address, bytes);
    if (!r.writable) fault("out of bounds", "a write to %s, which is an input", r.name.c_str());
    uint8_t* p = (uint8_t*)address;
    for (size_t k = (p - r.begin) / 4; k <= size_t(p + bytes - 1 - r.begin) / 4; k++) {
        std::string why;
        size_t first = std::max<size_t>(4 * k, p - r.begin), end = std::min<size_t>(4 * k + 4, p - r.begin + bytes);
        if (r.shadow[k] && memcmp(r.begin + first, value + first - (p - r.begin), end - first) &&
            !ordered(w, r.shadow[k], false, why))
            fault("grid dependency", "%s, byte %zu, was written by %s, and nothing orders this write behind that",
                  r.name.c_str(), 4 * k, why.c_str());
        r.shadow[k] = shadow_of(w);
    }
    memcpy(p, value, bytes);
    return p;
}
