// What args of Kineto events have a column, and which. The names of columns are those of src/etloom/core/schema.py.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>

#include "scalars.hpp"

namespace etloom::kineto {

// What to do with the value of an argument.
enum class Kind : uint8_t {
    kWhole,     // int64
    kPositive,  // int64; 0 and -1 say "none"
    kNatural,   // int64; -1 and 2^32-1 say "none"
    kUnsigned,  // uint64
    kReal,
    kText,
    kJson,  // the text of the value, whatever it is
    kTriple,
    kFlag,
    kIgnored,
};

// The tables that the fields are columns of; all but events and memory hang on a row of events.
enum class Group : uint8_t { kEvent, kArguments, kKernel, kSync, kFrame, kComm, kMemory, kNone };
inline constexpr const char* kGroupTables[] = {"events", "arguments", "kernels", "syncs", "frames", "comms", "memory"};
inline constexpr size_t kGroupCount = std::size(kGroupTables);
constexpr bool is_side(Group group) { return group > Group::kEvent && group < Group::kMemory; }

struct Field {
    std::string_view key;
    const char* column;
    Group group;
    Kind kind;
    bool narrow = false;  // a whole number of 32 bits
};

// "Ev Idx" numbers the file's own events: `position` says it.
inline constexpr Field kFields[] = {
    {"device", "device", Group::kEvent, Kind::kNatural, true},
    {"stream", "stream", Group::kEvent, Kind::kNatural},
    {"correlation", "correlation", Group::kEvent, Kind::kPositive},
    {"External id", "external_id", Group::kEvent, Kind::kPositive},
    {"Record function id", "rf_id", Group::kEvent, Kind::kPositive},
    {"Sequence number", "seq_id", Group::kEvent, Kind::kNatural},
    {"Fwd thread id", "fwd_tid", Group::kEvent, Kind::kPositive},
    {"Input Dims", "dims", Group::kArguments, Kind::kJson},
    {"Input type", "types", Group::kArguments, Kind::kJson},
    {"Input Strides", "strides", Group::kArguments, Kind::kJson},
    {"Concrete Inputs", "concrete_inputs", Group::kArguments, Kind::kJson},
    {"grid", "grid", Group::kKernel, Kind::kTriple},
    {"block", "block", Group::kKernel, Kind::kTriple},
    {"registers per thread", "registers", Group::kKernel, Kind::kWhole, true},
    {"shared memory", "shared_mem", Group::kKernel, Kind::kWhole},
    {"blocks per SM", "blocks_per_sm", Group::kKernel, Kind::kReal},
    {"warps per SM", "warps_per_sm", Group::kKernel, Kind::kReal},
    {"est. achieved occupancy %", "occupancy", Group::kKernel, Kind::kReal},
    {"bytes", "bytes", Group::kKernel, Kind::kWhole},
    {"memory bandwidth (GB/s)", "bandwidth", Group::kKernel, Kind::kReal},
    {"context", "context", Group::kKernel, Kind::kNatural},
    {"queued", "queued", Group::kKernel, Kind::kWhole},
    {"graph id", "graph_id", Group::kKernel, Kind::kPositive},
    {"graph node id", "graph_node_id", Group::kKernel, Kind::kPositive},
    {"cuda_sync_kind", "kind", Group::kSync, Kind::kText},
    {"wait_on_stream", "wait_stream", Group::kSync, Kind::kNatural},
    {"wait_on_cuda_event_id", "wait_event", Group::kSync, Kind::kNatural},
    {"wait_on_cuda_event_record_corr_id", "record_correlation", Group::kSync, Kind::kPositive},
    {"Python id", "python_id", Group::kFrame, Kind::kWhole},
    {"Python parent id", "python_parent_id", Group::kFrame, Kind::kWhole},
    {"Python module id", "module_id", Group::kFrame, Kind::kWhole},
    {"Collective name", "collective", Group::kComm, Kind::kText},
    {"Process Group Name", "pg_name", Group::kComm, Kind::kText},
    {"Process Group Description", "pg_desc", Group::kComm, Kind::kText},
    {"Process Group Ranks", "ranks", Group::kComm, Kind::kText},
    {"Group size", "group_size", Group::kComm, Kind::kWhole},
    {"Seq", "seq", Group::kComm, Kind::kNatural},
    {"dtype", "dtype", Group::kComm, Kind::kText},
    {"In msg nelems", "in_nelems", Group::kComm, Kind::kWhole},
    {"Out msg nelems", "out_nelems", Group::kComm, Kind::kWhole},
    {"In split size", "in_split", Group::kComm, Kind::kText},
    {"Out split size", "out_split", Group::kComm, Kind::kText},
    {"Src Rank", "root", Group::kComm, Kind::kNatural},
    {"Dst Rank", "peer", Group::kComm, Kind::kNatural},
    {"Is asynchronized op", "is_async", Group::kComm, Kind::kFlag},
    {"Comms Id", "comms_id", Group::kComm, Kind::kUnsigned},
    {"Addr", "addr", Group::kMemory, Kind::kUnsigned},
    {"Bytes", "bytes", Group::kMemory, Kind::kWhole},
    {"Total Allocated", "total_allocated", Group::kMemory, Kind::kWhole},
    {"Total Reserved", "total_reserved", Group::kMemory, Kind::kWhole},
    {"Device Type", "device_type", Group::kMemory, Kind::kWhole, true},
    {"Device Id", "device", Group::kMemory, Kind::kNatural, true},
    {"Ev Idx", nullptr, Group::kNone, Kind::kIgnored},
};
inline constexpr size_t kFieldCount = std::size(kFields);
static_assert(kFieldCount <= 64, "a bit a field");

inline bool is_whole(Kind kind) { return kind == Kind::kWhole || kind == Kind::kPositive || kind == Kind::kNatural; }

// Whether the column takes a whole number. none: it says that there is none.
inline bool fits(const Field& field, int64_t number, bool& none) {
    if (field.kind != Kind::kWhole) none = number == -1 || number == (field.kind == Kind::kPositive ? 0 : UINT32_MAX);
    return none || !field.narrow || (number >= INT32_MIN && number <= INT32_MAX);
}

constexpr uint64_t group_mask(Group group) {
    uint64_t mask = 0;
    for (size_t i = 0; i < kFieldCount; ++i) mask |= kFields[i].group == group ? uint64_t{1} << i : 0;
    return mask;
}

constexpr size_t field_at(std::string_view key) {
    for (size_t i = 0; i < kFieldCount; ++i) {
        if (kFields[i].key == key) return i;
    }
    return kFieldCount;
}
inline constexpr std::string_view kOldExternalId = "external id";  // Kineto of 2021
// The field of a key; kFieldCount: no column holds it.
constexpr size_t field_of(std::string_view key) { return field_at(key == kOldExternalId ? "External id" : key); }
inline constexpr size_t kGrid = field_at("grid"), kBlock = field_at("block"), kCollective = field_at("Collective name"),
                 kSyncKind = field_at("cuda_sync_kind"), kPythonId = field_at("Python id"),
                 kGroupRanks = field_at("Process Group Ranks"), kExternalId = field_at("External id");
static_assert(kGrid < kFieldCount && kBlock < kFieldCount && kCollective < kFieldCount && kSyncKind < kFieldCount);

// Key to field. Keys follow each other in few orders: the one that came next the last time is tried first, then all
// of the same hash, which is made of the length and some of the bytes.
class FieldIndex {
  public:
    FieldIndex() {
        slots_.fill(kNone);
        for (size_t i = 0; i < kFieldCount; ++i) {
            size_t slot = hash(kFields[i].key);
            while (slots_[slot] != kNone) slot = (slot + 1) % slots_.size();
            slots_[slot] = static_cast<uint8_t>(i);
        }
    }
    // kFieldCount: no column holds it.
    size_t find(std::string_view key) {
        const uint8_t guess = next_[last_];
        if (same(kFields[guess].key, key)) return last_ = guess;
        for (size_t slot = hash(key); slots_[slot] != kNone; slot = (slot + 1) % slots_.size()) {
            if (same(kFields[slots_[slot]].key, key)) return last_ = next_[last_] = slots_[slot];
        }
        if (key == kOldExternalId) return kExternalId;
        return kFieldCount;
    }

  private:
    static constexpr uint8_t kNone = kFieldCount;
    size_t hash(std::string_view key) const {
        if (key.empty()) return 0;
        const size_t n = key.size();
        return (n * 31 + static_cast<uint8_t>(key[0]) * 7 + static_cast<uint8_t>(key[n / 2]) * 13 +
                static_cast<uint8_t>(key[n - 1]) * 17) %
               slots_.size();
    }
    std::array<uint8_t, 256> slots_;
    std::array<uint8_t, kFieldCount> next_{};
    size_t last_ = 0;
};

}  // namespace etloom::kineto
