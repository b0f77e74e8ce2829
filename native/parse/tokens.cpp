// See tokens.hpp.
#include "tokens.hpp"

#include <simdjson.h>

#include <algorithm>
#include <deque>
#include <string>

#include "json_text.hpp"

namespace etloom {

static_assert(kPadding >= simdjson::SIMDJSON_PADDING);

namespace {

thread_local std::deque<std::string> unescaped_keys;

}  // namespace

std::string_view unescaped_key(std::string_view key) {
    std::string plain = unescape(key);
    const auto is_special = [](char c) { return c == '"' || c == '\\' || static_cast<uint8_t>(c) < 0x20; };
    if (std::any_of(plain.begin(), plain.end(), is_special)) return key;
    const size_t size = plain.size();
    plain.append(kPadding, '\0');
    return {unescaped_keys.emplace_back(std::move(plain)).data(), size};
}

struct Tokens::Stage {
    std::unique_ptr<simdjson::internal::dom_parser_implementation> simdjson;
    size_t capacity = 0;
};

Tokens::Tokens() : stage_(std::make_unique<Stage>()) {}
Tokens::~Tokens() = default;

bool Tokens::find(std::string_view json, Cursor& start) {
    unescaped_keys.clear();
    if (json.empty() || json.size() >= simdjson::SIMDJSON_MAXSIZE_BYTES) return false;
    auto& [stage, capacity] = *stage_;
    if (json.size() > capacity) {
        stage.reset();
        capacity = 0;
        const size_t wanted = std::min<size_t>(json.size() + json.size() / 4 + (1 << 16), simdjson::SIMDJSON_MAXSIZE_BYTES);
        constexpr size_t kDepth = 1;  // the second stage, which would need it, is not used
        if (simdjson::get_active_implementation()->create_dom_parser_implementation(wanted, kDepth, stage)) return false;
        capacity = wanted;
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(json.data());
    if (stage->stage1(bytes, json.size(), simdjson::stage1_mode::regular)) return false;
    const uint32_t *first = stage->structural_indexes.get(), *last = first + stage->n_structural_indexes;
    start = Cursor(json.data(), first, last);
    return first != last && json[last[-1]] == ']';
}

}  // namespace etloom
