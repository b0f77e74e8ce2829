// See parser.hpp.
#include "parser.hpp"

#include <algorithm>

namespace etloom {

void Parser::sort() {
    for (auto& [name, table] : tables_) table.settle(troubles_);
    order();
}

bool Parser::rows(std::string_view json, uint64_t& position) {
    Cursor at;
    if (!tokens_.find(json, at) || at.peek() != '[') return false;
    do {
        at.step();
        if (!row(at, position)) return false;
        ++position;
    } while (at.peek() == ',');
    return at.peek() == ']' && at.left() == 1;
}

void Parser::checkpoint() {
    marks_.clear();
    for (auto& [name, table] : tables_) marks_.push_back(table.rows());
    saved_troubles_ = troubles_;
}

void Parser::rewind() {
    auto mark = marks_.begin();
    for (auto& [name, table] : tables_) table.truncate(*mark++);
    troubles_ = saved_troubles_;
}

void Parser::make_room() {
    if (expected_bytes_ == 0 || bytes() < kSample) return;
    const double share = std::min(static_cast<double>(expected_bytes_) / static_cast<double>(bytes()) * 1.1, 1e4);
    for (auto& [name, table] : tables_) table.reserve(static_cast<size_t>(static_cast<double>(table.rows()) * share));
    expected_bytes_ = 0;
}

}  // namespace etloom
