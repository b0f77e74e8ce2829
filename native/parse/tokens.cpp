// See tokens.hpp.
#include "tokens.hpp"

#include <algorithm>

namespace etloom {

bool Tokens::find(std::string_view json, Cursor& start) {
    if (json.empty() || json.size() >= simdjson::SIMDJSON_MAXSIZE_BYTES) return false;
    if (json.size() > capacity_) {
        const size_t wanted = std::max<size_t>(json.size() + json.size() / 4, 1 << 16);
        stage_.reset();
        capacity_ = 0;
        const size_t room = std::min<size_t>(wanted, simdjson::SIMDJSON_MAXSIZE_BYTES);
        constexpr size_t kDepth = 1;  // the second stage, which would need it, is not used
        if (simdjson::get_active_implementation()->create_dom_parser_implementation(room, kDepth, stage_)) return false;
        capacity_ = room;
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(json.data());
    if (stage_->stage1(bytes, json.size(), simdjson::stage1_mode::regular)) return false;
    const uint32_t *first = stage_->structural_indexes.get(), *last = first + stage_->n_structural_indexes;
    start = Cursor(json.data(), first, last);
    return first != last && json[last[-1]] == ']';
}

}  // namespace etloom
