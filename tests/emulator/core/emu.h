// Shared declarations of the emulator: a decoded kernel, a warp's state, the memories and what is known about them.
//
// A warp is one vector of 32 lanes. A register is a slot of 32 words (two slots where it is 64 bits wide); constants,
// special registers and address symbols are slots too, so that a handler reads every operand alike.
#pragma once
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

constexpr int LANES = 32;
constexpr uint32_t ALL = ~0u;
constexpr uint32_t SMEM_BASE = 1024;            // where a CTA's shared memory begins; what lies below is the system's
constexpr uint64_t SHARED_WINDOW = 1ull << 56;  // generic addresses of shared memory
constexpr uint32_t RANK_SHIFT = 24;             // shared::cluster addresses: (rank + 1) << 24 | offset
constexpr uint64_t BEFORE_ALL = 255ull << 56;   // shadow of global memory: written before the first launch
constexpr uint32_t PENDING = 1u << 31;          // tag of a register that a wgmma in flight will write

struct Warp;
struct Instr;
struct Kernel;
struct Cta;
struct Cluster;
struct Launch;
struct Machine;

struct Fault {  // what a checker found; api.cpp makes a report of it
    std::string kind, what;
};
[[noreturn]] void fault(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

enum class Type {
    none,
    pred,
    b8,
    u8,
    s8,
    b16,
    u16,
    s16,
    f16,
    bf16,
    b32,
    u32,
    s32,
    f32,
    f16x2,
    bf16x2,
    b64,
    u64,
    s64,
    f64,
    e4m3x2,
    e5m2x2,
    b128
};
int bits_of(Type type);
Type type_of(const std::string& name);  // Type::none where it is no type

using Handler = void (*)(Warp&, const Instr&);

struct Instr {
    Handler fn = nullptr;
    int32_t guard = -1;  // slot of the predicate
    bool guard_not = false;
    uint32_t a[6] = {};     // slots, in the order that the handler wants
    int64_t imm = 0;        // offset of an address, target of a branch, ...
    uint32_t n = 0, m = 0;  // sizes and flags of the handler's own
    std::vector<uint32_t> list;
    uint32_t line = 0;
    std::string text;
};

// ---- parsing -------------------------------------------------------------------------------------------------------

struct Operand {
    enum Kind { reg, imm, mem, list, symbol, none } kind = none;
    std::string name;  // as written
    uint32_t slot = 0;
    Type type = Type::none;  // of a register
    bool negated = false;
    uint64_t bits = 0;  // of an immediate
    bool is_float = false;
    int64_t offset = 0;          // of an address
    std::vector<Operand> items;  // of a list, of [a, {b}] and of a|b
};

struct Param {
    std::string name;
    uint32_t size, align, offset;
};

struct Kernel {
    std::string name;
    std::vector<Param> params;
    uint32_t param_bytes = 0;
    uint32_t static_smem = 0;
    uint32_t threads[3] = {0, 0, 0};  // .reqntid
    std::vector<Instr> code;
    uint32_t slots = 0;
    std::vector<std::pair<uint32_t, uint64_t>> constants;        // slot, bits
    std::vector<bool> wide;                                      // of constants: 64 bits
    std::vector<std::pair<uint32_t, std::string>> specials;      // slot, %name
    std::vector<std::pair<uint32_t, uint32_t>> param_addresses;  // slot, offset in the parameters
};

struct Module {
    std::map<std::string, std::unique_ptr<Kernel>> kernels;
};

// What a section's decode function sees of one statement.
struct Decoder {
    Kernel& kernel;
    std::vector<std::string> op;  // the opcode split at its dots
    std::vector<Operand> args;
    Instr& out;
    bool has(const char* part) const;
    Type type(int from_end = 0) const;                 // the type among the parts, counted from the last
    uint32_t slot(const Operand& operand, Type type);  // of a register or of a constant made for an immediate
    uint32_t slot(size_t index, Type type);
    uint32_t address(const Operand& memory, bool wide);  // slot of the base; its offset goes to out.imm
    uint32_t constant(uint64_t bits, bool wide);
};
using Decode = bool (*)(Decoder&);          // false: not of this section
extern const std::vector<Decode> SECTIONS;  // parse.cpp: a new architecture's opcodes are one more entry
bool decode_select(Decoder&);
bool decode_arith(Decoder&);
bool decode_float(Decoder&);
bool decode_convert(Decoder&);
bool decode_warp(Decoder&);
bool decode_memory(Decoder&);
bool decode_barrier(Decoder&);
bool decode_tma(Decoder&);
bool decode_wgmma(Decoder&);

std::unique_ptr<Module> parse(const std::string& text);

// ---- what is known to have happened ---------------------------------------------------------------------------------

// Vector clocks over the agents of a cluster: per warp five (its instructions, its wgmma groups, its bulk groups, its
// cp.async, its ldmatrix), then one a mbarrier, whose clock is the number of its completed phases. `fenced` holds what
// a proxy fence has passed on to asynchronous readers. A barrier that some lanes of a warp arrive at passes on what all
// lanes did before their last bar.warp.sync, and of these lanes (`lanes`, by warp of the cluster) what they did since.
struct Known {
    std::vector<uint32_t> seen, fenced, lanes, lane_seen, lane_fenced;
    void join(const Known& other);
};
Known nothing_known(const Cluster& cluster);
enum Kind : uint32_t { GENERIC = 0, WGMMA = 1, BULK = 2, CPASYNC = 3, MATRIX = 4, KINDS = 5 };
constexpr uint32_t CLOCK_BITS = 22;
constexpr uint32_t EVERY_LANE = 32;  // where one lane is asked for: it was done by all together

struct Cell {  // what is known of 4 bytes of shared memory
    static constexpr int READERS = 8;
    uint32_t writer = 0;  // agent << CLOCK_BITS | clock; 0: never written
    uint32_t write_pc : 20, lane : 6, async : 1, zeros : 1;
    uint32_t reader[READERS] = {};
    Cell() : write_pc(0), lane(0), async(0), zeros(0) {}
};

struct MBarrier {
    uint32_t count = 0, pending = 0, phase = 0;  // phase: completed ones
    int64_t tx = 0;
    Known arriving, done;
    uint32_t agent = 0, init = 0;  // init: agent << CLOCK_BITS | clock of mbarrier.init
    bool fenced = false;
};

struct NamedBarrier {
    uint32_t expected = 0, arrived = 0, generation = 0;
    uint32_t voted = 0, result = 0;  // bar.red: threads whose predicate holds, so far and in the last generation
    Known arriving, done;
};

struct Region {  // global memory that a launch may touch
    uint8_t *begin, *end;
    bool writable;
    std::vector<uint64_t> shadow;  // per 4 bytes: who wrote it (see memory.cpp); empty where it is read-only
    std::string name;
};

// ---- execution -----------------------------------------------------------------------------------------------------

struct Group {  // lanes of a warp at one place
    uint32_t pc = 0, mask = 0;
    uint64_t token = 0;         // what a blocked instruction has done already
    const char* why = nullptr;  // it is blocked: a format, with numbers
    unsigned long long numbers[4] = {};
};

struct WgmmaOp {  // a warp's quarter of one wgmma
    const Instr* instr = nullptr;
    uint32_t group = 0;
    bool done = false;
    std::vector<float> a;                      // [16][K]: from registers; else read from a_chunks when it is done
    std::vector<uint32_t> a_chunks, b_chunks;  // places in shared memory of 16 bytes each
    std::vector<uint32_t> from;  // of each accumulator register: the op that gives it, + 1; 0: it is in `values`
    std::vector<float> values;   // accumulator, [register][lane]
};

struct Warp {
    Cta* cta = nullptr;
    const Kernel* kernel = nullptr;
    uint32_t id = 0, global_id = 0;  // in the CTA; in the launch
    uint32_t agent = 0;              // first of its own
    uint32_t live = ALL;
    Group now;  // the group that runs
    std::vector<Group> others;
    uint32_t exec = ALL;  // lanes of the instruction, its guard applied
    bool stop = false, blocked = false;
    uint64_t polled = 0;  // events seen when it last was blocked
    std::vector<uint32_t> file, def, tag;
    uint32_t wait_epoch = 1;  // epoch at the last wait for a wgmma
    uint32_t epoch = 1;       // wgmma.fence executed so far
    Known known;
    uint32_t synced[KINDS] = {};  // clocks up to which the lanes know of each other
    uint32_t fences = 0;          // of scope gpu or wider, for global memory
    bool acquired = false;
    // wgmma
    std::deque<WgmmaOp> wgmmas;
    uint32_t cluster_wait = 0;  // generation of the cluster barrier that it has arrived for, + 1
    uint32_t first_op = 0, next_group = 1, waited_group = 0;
    uint64_t wgmma_hash = 0;
    uint32_t wgmma_count = 0;
    std::vector<uint32_t> pending_slots;
    // bulk and cp.async groups
    uint32_t bulk_next = 1;
    struct Bulk {
        uint32_t group;
        std::function<void()> read;
    };
    std::deque<Bulk> bulks;
    uint32_t cp_next = 1;
    std::deque<Bulk> copies;
    uint64_t steps = 0;

    uint32_t* reg(uint32_t slot) { return file.data() + size_t(slot) * LANES; }
    const uint32_t* in(uint32_t slot) {
        if ((def[slot] & exec) != exec) undefined(slot);
        return reg(slot);
    }
    uint32_t pred(uint32_t slot) { return in(slot)[0]; }
    void undefined(uint32_t slot);
    void set_pred(uint32_t slot, uint32_t value) {
        uint32_t* p = reg(slot);
        p[0] = (p[0] & ~exec) | (value & exec);
        def[slot] |= exec;
    }
    uint32_t uniform(uint32_t slot, const char* what);  // the value that all lanes agree on
    uint64_t uniform64(uint32_t slot, const char* what);
    int first_lane() const { return __builtin_ctz(exec); }
    void tick() { known.seen[agent + MATRIX] = ++known.seen[agent]; }
    void sync() {
        synced[GENERIC] = known.seen[agent];
        synced[CPASYNC] = known.seen[agent + CPASYNC];
        tick();
    }
    uint32_t stamp(uint32_t kind, uint32_t clock) const { return (agent + kind) << CLOCK_BITS | clock; }
    uint32_t stamp() const { return stamp(GENERIC, known.seen[agent]); }
    void block(const char* why, unsigned long long a = 0, unsigned long long b = 0, unsigned long long c = 0,
               unsigned long long d = 0) {
        blocked = stop = true;
        now.why = why;
        now.numbers[0] = a, now.numbers[1] = b, now.numbers[2] = c, now.numbers[3] = d;
        now.pc--;  // it is tried again
    }
    const Instr& instr() const;
};

template <class T> inline T lane(const uint32_t* p, int l) {
    T t;
    memcpy(&t, p + (sizeof(T) == 8 ? 2 * l : l), sizeof(T));
    return t;
}
template <class T> inline void put(uint32_t* p, int l, T v) {
    if constexpr (sizeof(T) >= 4) memcpy(p + (sizeof(T) == 8 ? 2 * l : l), &v, sizeof(T));
    else if constexpr (sizeof(T) == 2) {
        uint16_t h;
        memcpy(&h, &v, 2);
        p[l] = h;
    } else {
        uint8_t h;
        memcpy(&h, &v, 1);
        p[l] = h;
    }
}
template <class T> inline void write(Warp& w, uint32_t slot, const T* v) {
    uint32_t* p = w.reg(slot);
    if (w.exec == ALL)
        for (int l = 0; l < LANES; l++) put(p, l, v[l]);
    else
        for (int l = 0; l < LANES; l++)
            if (w.exec >> l & 1) put(p, l, v[l]);
    w.def[slot] |= w.exec;
    w.tag[slot] = w.epoch;
}

struct Cta {
    Cluster* cluster = nullptr;
    Launch* launch = nullptr;
    uint32_t index[3] = {}, rank = 0, number = 0;
    std::vector<uint8_t> smem;
    std::vector<Cell> cells;
    std::unordered_map<uint32_t, std::vector<uint32_t>> more_readers;
    std::map<uint32_t, MBarrier> mbarriers;
    NamedBarrier named[16];
    std::vector<std::unique_ptr<Warp>> warps;
    uint32_t running = 0;    // warps
    bool triggered = false;  // griddepcontrol.launch_dependents
    std::string place() const;
};

struct Cluster {
    Launch* launch = nullptr;
    std::vector<std::unique_ptr<Cta>> ctas;
    uint32_t agents = 0, next_mbarrier = 0, dependency = 0;  // dependency: the agent of griddepcontrol.wait
    uint32_t running = 0;                                    // CTAs
    uint32_t pending = 0;                                    // asynchronous operations under way
    NamedBarrier barrier;
};

struct Launch {
    Machine* machine = nullptr;
    const Kernel* kernel = nullptr;
    uint32_t grid[3], block[3], cluster_size = 1, smem = 0, index = 0;
    bool dependent = false;  // programmatic: starts once the launch before has triggered
    std::vector<uint8_t> param_storage;
    uint8_t* params = nullptr;  // aligned as tensor maps must be
    uint32_t next_cta = 0, total = 0, finished = 0, triggered = 0;
    std::vector<std::unique_ptr<Cluster>> resident;
    std::vector<uint32_t> fences;  // per warp of the launch: how often it has fenced
    bool done() const { return finished == total && resident.empty(); }
};

struct Policy {      // what a seed decides
    double finish;   // chance that a pending operation completes, each turn
    double now;      // chance that a wgmma or a copy of registers happens at once
    uint32_t slice;  // longest run of a warp
    int order;       // 0 random, 1 lowest warps first, 2 highest first
};

struct Async {  // an operation under way
    Cluster* cluster;
    std::function<void()> run;
};

struct Machine {
    std::vector<std::unique_ptr<Launch>> launches;
    std::vector<Region> regions;
    std::vector<Async> pending;
    std::mt19937 random;
    Policy policy;
    uint64_t events = 1, steps = 0, max_steps = 0;
    Warp* current = nullptr;  // whose instruction is in progress, for reports
    std::string place;        // of an asynchronous operation in progress, else empty
    bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(random) < p; }
    void async(Cluster* cluster, std::function<void()> run);
    void run();
};

inline Machine& machine(Warp& w) { return *w.cta->launch->machine; }

// schedule.cpp
void run_warp(Warp& w, uint32_t slice);
std::string describe(const Warp& w, uint32_t pc);
void start_cluster(Launch& launch);
// warp.cpp
void converge(Warp& w, uint32_t members, const char* what, bool& wait);
void aligned(Warp& w, bool& wait);
// shadow.cpp
enum class Proxy { generic, async };
struct Access {          // of shared memory
    Cta* cta;            // that it lies in
    uint32_t at, bytes;  // offset from SMEM_BASE
    uint32_t lane = EVERY_LANE;
};
Access shared_at(Warp& w, uint32_t address, uint32_t bytes, uint32_t align, bool cluster_window,
                 uint32_t lane = EVERY_LANE);
void check_bounds(Cta& cta, uint32_t at, uint32_t bytes, uint32_t align);
void note_read(Warp& w, const Access& a, Proxy proxy, uint32_t stamp, bool product = false);
void note_write(Warp& w, const Access& a, Proxy proxy, uint32_t stamp, const uint8_t* value);
std::string agent_name(const Cluster& cluster, uint32_t agent);
// barrier.cpp
MBarrier& mbarrier_at(Warp& w, const Access& a);
void complete_tx(Cta& cta, uint32_t at, uint32_t bytes, uint32_t phase);
bool before(const std::vector<uint32_t>& clocks, uint32_t stamp);
void publish(const Warp& w, Known& to);
// global.cpp
void aligned_global(uint64_t address, uint32_t bytes, uint32_t align);
uint64_t shadow_of(const Warp& w);
uint8_t* global_read(Warp& w, uint64_t address, uint32_t bytes, uint32_t align, bool acquire,
                     bool* undefined = nullptr);
uint8_t* global_write(Warp& w, uint64_t address, uint32_t bytes, uint32_t align, const uint8_t* value);
Region& region_at(Machine& m, uint64_t address, uint64_t bytes);
// memory.cpp, tma.cpp
void finish_bulk_reads(Warp& w, uint32_t group);
void finish_copies(Warp& w, uint32_t group);
// wgmma.cpp
void finish_wgmmas(Warp& w, uint32_t group);
// number formats, convert.cpp
float from_bf16(uint16_t v);
float from_f16(uint16_t v);
float from_e4m3(uint8_t v);
float from_e5m2(uint8_t v);
uint16_t to_bf16(double v);
uint16_t to_f16(double v);
uint8_t to_e4m3(double v);
uint8_t to_e5m2(double v);

// A handler for each integer type: F(T) names it.
#define PICK(type, F)                       \
    switch (type) {                         \
        case Type::u16:                     \
        case Type::b16: return F(uint16_t); \
        case Type::s16: return F(int16_t);  \
        case Type::u32:                     \
        case Type::b32: return F(uint32_t); \
        case Type::s32: return F(int32_t);  \
        case Type::u64:                     \
        case Type::b64: return F(uint64_t); \
        case Type::s64: return F(int64_t);  \
        default: return nullptr;            \
    }
