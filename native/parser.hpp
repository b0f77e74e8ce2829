// What the parsers of all formats share: their tables, taking back a damaged row, counting trouble.
#pragma once
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <unordered_map>

#include "columns.hpp"
#include "rows.hpp"
#include "scalars.hpp"

namespace etloom {

class Parser : public RowStream {
  public:
    using RowStream::RowStream;

    std::map<std::string, Table>& tables() { return tables_; }
    const std::map<std::string, Trouble>& troubles() const { return troubles_; }
    // How long the file is, where it is known.
    void expect(uint64_t bytes) { expected_bytes_ = bytes; }
    // Orders the tables; no bytes may be fed afterwards.
    virtual void sort() = 0;

  protected:
    Table& table(const char* name) { return tables_[name]; }
    Trouble& trouble(const char* name) { return troubles_[name]; }

    void push_json(Texts* column, std::string_view json) {
        if (!column->push_json(json)) trouble("odd_json").add(json);
    }

    void checkpoint() override {
        marks_.clear();
        for (auto& [name, table] : tables_) marks_.push_back(table.rows());
        saved_troubles_ = troubles_;
    }
    void rewind() override {
        auto mark = marks_.begin();
        for (auto& [name, table] : tables_) table.truncate(*mark++);
        troubles_ = saved_troubles_;
    }

    // A member of an object: its key as it stands in the file, and the first token of its value. The value is not moved
    // out of the iterator's result: such a copy of two halves stalls the processor, and is what parsing would then wait for.
    struct Member {
        od::value* value;
        std::string_view key, token;
    };
    static bool member_of(simdjson::simdjson_result<od::field>& result, Member& member) {
        if (result.error()) return false;
        od::field&& field = std::move(result).value_unsafe();
        member.value = &field.value();
        member.token = member.value->raw_json_token();
        if (member.token.empty()) return false;
        // Between a key and its value stand its quote, a colon and white space: backwards is the short way.
        const char* start = field.key().raw();
        const char* end = member.token.data() - 1;
        while (end > start && *end != '"') --end;
        member.key = {start, static_cast<size_t>(end - start)};
        return true;
    }

    // The whole text of a member's value; it is consumed.
    static bool whole_token(Member& member) {
        if (member.token.front() == '[') {
            od::array array;
            if (member.value->get_array().get(array) || array.raw_json().get(member.token)) return false;
        } else if (member.token.front() == '{') {
            od::object object;
            if (member.value->get_object().get(object) || object.raw_json().get(member.token)) return false;
        }
        member.token = trim(member.token);
        return true;
    }

  private:
    // Makes room for as many rows as the rest of the file will hold if it goes on like this, so that no column is moved
    // while it grows. Room that is not used is no memory used.
    void make_room() override {
        if (expected_bytes_ == 0 || bytes() < kSample) return;
        const double share = std::min(static_cast<double>(expected_bytes_) / static_cast<double>(bytes()) * 1.1, 1e4);
        for (auto& [name, table] : tables_) table.reserve(static_cast<size_t>(static_cast<double>(table.rows()) * share));
        expected_bytes_ = 0;
    }

    static constexpr uint64_t kSample = 1 << 22;
    uint64_t expected_bytes_ = 0;
    std::map<std::string, Table> tables_;
    std::map<std::string, Trouble> troubles_, saved_troubles_;
    std::vector<size_t> marks_;
};

// The order that sorts the rows, stable; empty when they are sorted already.
template <typename Less>
std::vector<uint32_t> sorting_order(size_t rows, Less less) {
    bool sorted = true;
    for (size_t i = 1; i < rows && sorted; ++i) sorted = !less(static_cast<uint32_t>(i), static_cast<uint32_t>(i - 1));
    if (sorted) return {};
    std::vector<uint32_t> order(rows);
    std::iota(order.begin(), order.end(), 0U);
    std::stable_sort(order.begin(), order.end(), less);
    return order;
}

std::unique_ptr<Parser> kineto_parser();
std::unique_ptr<Parser> execution_trace_parser();

}  // namespace etloom
