// See parser.hpp.
#include "parser.hpp"

#include "json_text.hpp"

namespace etloom {

void Parser::sort() {
    const Computing counted;
    worker_.wait();
    size_t rows = 0;
    for (auto& [name, table] : tables_) {
        table.settle(troubles_);
        rows += table.rows();
    }
    constexpr size_t kManyRows = 1 << 17;
    order(is_for_two(rows, kManyRows) ? &worker_ : nullptr);
}

// The first row that needs tokens has those of all remaining rows found.
bool Parser::rows(std::string_view json, uint64_t& position) {
    const char *at = json.data(), *const to = at + json.size();
    Cursor tokens;
    for (;; ++at, ++position) {
        if (!only_by_tokens_ && known_row(at, to, position)) {
            ++known_rows_;
        } else {
            if (tokens.at_end() && !tokens_.find({at, static_cast<size_t>(to - at)}, tokens)) return false;
            tokens.skip_to(at);
            const Cursor first = tokens;
            if (!row(tokens, position)) return false;
            const char* end = tokens.here();
            while (is_space(end[-1])) --end;
            if (!only_by_tokens_) learn({at, static_cast<size_t>(end - at)}, first);
            at = end;
        }
        at = skip_space(at, to);
        if (at == to) return false;
        if (*at != ',') break;
    }
    ++position;
    return *at == ']' && at + 1 == to;
}

bool Parser::is_for_two(size_t bytes) const {
    // Of less, the start of the thread and a second parser, which has to learn the layouts, take as long as they save.
    constexpr size_t kLarge = 1 << 20;
    return is_for_two(bytes, kLarge);
}

bool Parser::is_for_two(size_t size, size_t large) const {
    return split_from_ == 0 ? size >= large && Computing::has_room() : size >= split_from_;
}

bool Parser::rows_of_both(std::string_view first, std::string_view second, uint64_t& position) {
    if (second_ == nullptr) second_ = make_second();
    second_->only_by_tokens_ = only_by_tokens_;
    bool good_first = false, good_second = false;
    uint64_t rows_of_second = 0;
    worker_.run_both([&] { good_second = second_->rows(second, rows_of_second); },
                     [&] { good_first = rows(first, position); });
    if (!good_first || !good_second) {
        // Texts that it met may be of no row, if the cut was inside one: they must not get numbers.
        second_ = nullptr;
        for (auto& [name, table] : tables_) table.forget_other();
        return false;
    }
    for (auto& [name, trouble] : second_->troubles_) troubles_[name].add(trouble.example, trouble.count);
    second_->troubles_.clear();
    known_rows_ += std::exchange(second_->known_rows_, 0);
    // While the next piece is read, the second thread adds its rows to those that are here.
    const Shifts shifts{static_cast<uint32_t>(main_table().rows()), static_cast<uint32_t>(position)};
    worker_.run_in_background([this, shifts] {
        for (auto& [name, table] : tables_) {
            Table& rows = second_->tables_.at(name);
            table.append(rows, shifts);
            rows.truncate(0);
        }
    });
    position += rows_of_second;
    return true;
}

void Parser::stop() noexcept {
    try {
        worker_.wait();
    } catch (...) {  // the rows are dropped
    }
}

void Parser::checkpoint() {
    worker_.wait();
    marks_.clear();
    for (auto& [name, table] : tables_) marks_.push_back(table.rows());
    saved_troubles_ = troubles_;
    saved_known_rows_ = known_rows_;
    mark_texts();
}

void Parser::rewind() {
    auto mark = marks_.begin();
    for (auto& [name, table] : tables_) table.truncate(*mark++);
    troubles_ = saved_troubles_;
    known_rows_ = saved_known_rows_;
    truncate_texts();
}

}  // namespace etloom
