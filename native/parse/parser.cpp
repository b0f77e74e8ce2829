// See parser.hpp.
#include "parser.hpp"

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

}  // namespace etloom
