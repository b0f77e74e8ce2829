// What attributes of execution-trace nodes have a column, and which. The names of columns are those of src/etloom/core/schema.py.
#pragma once
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>

namespace etloom::et {

enum class Kind : uint8_t {
    kWhole,     // int64
    kScope,     // int8
    kNatural,   // int64; -1 says "none"
    kPositive,  // int64; 0 and -1 say "none"
    kText,      // the empty text says "none"
    kFlag,
};
enum class Group : uint8_t { kNode, kComm };

struct Field {
    std::string_view key;
    const char* column;
    Group group;
    Kind kind;
};

// In the order in which PyTorch writes them, which is where a key is looked for first.
inline constexpr Field kFields[] = {
    {"rf_id", "rf_id", Group::kNode, Kind::kPositive},
    {"fw_parent", "fw_parent", Group::kNode, Kind::kPositive},
    {"seq_id", "seq_id", Group::kNode, Kind::kNatural},
    {"scope", "scope", Group::kNode, Kind::kScope},
    {"tid", "tid", Group::kNode, Kind::kWhole},
    {"fw_tid", "fw_tid", Group::kNode, Kind::kPositive},
    {"op_schema", "op_schema", Group::kNode, Kind::kText},
    {"kernel_backend", "kernel_backend", Group::kNode, Kind::kText},
    {"kernel_file", "kernel_file", Group::kNode, Kind::kText},
    {"collective_name", "collective", Group::kComm, Kind::kText},
    {"dtype", "dtype", Group::kComm, Kind::kText},
    {"in_msg_nelems", "in_nelems", Group::kComm, Kind::kWhole},
    {"out_msg_nelems", "out_nelems", Group::kComm, Kind::kWhole},
    {"in_split_size", "in_split", Group::kComm, Kind::kText},
    {"out_split_size", "out_split", Group::kComm, Kind::kText},
    {"pg_name", "pg_name", Group::kComm, Kind::kText},
    {"pg_desc", "pg_desc", Group::kComm, Kind::kText},
    {"pg_size", "group_size", Group::kComm, Kind::kWhole},
    {"global_rank_start", "rank_start", Group::kComm, Kind::kWhole},
    {"global_rank_stride", "rank_stride", Group::kComm, Kind::kWhole},
    {"is_asynchronized_op", "is_async", Group::kComm, Kind::kFlag},
};
inline constexpr size_t kFieldCount = std::size(kFields);
static_assert(kFieldCount <= 32, "a bit a field");

inline constexpr uint32_t kCommMask = [] {
    uint32_t mask = 0;
    for (size_t i = 0; i < kFieldCount; ++i) mask |= kFields[i].group == Group::kComm ? 1U << i : 0;
    return mask;
}();

}  // namespace etloom::et
