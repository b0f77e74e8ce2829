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
    // Orders the tables; no bytes may be fed afterwards.
    virtual void sort() = 0;

  protected:
    Table& table(const char* name) { return tables_[name]; }
    Trouble& trouble(const char* name) { return troubles_[name]; }

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

    // The key as it stands in the file, without its quotes.
    static std::string_view key_of(od::field& field) {
        const char* start = field.key().raw();
        const char* end = start;
        while (*end != '"') end += *end == '\\' ? 2 : 1;
        return {start, static_cast<size_t>(end - start)};
    }

    // The text of a value; it is consumed.
    static bool token_of(od::value value, std::string_view& token) {
        token = value.raw_json_token();
        if (token.empty()) return false;
        if (token.front() == '[') {
            od::array array;
            if (value.get_array().get(array) || array.raw_json().get(token)) return false;
        } else if (token.front() == '{') {
            od::object object;
            if (value.get_object().get(object) || object.raw_json().get(token)) return false;
        }
        token = trim(token);
        return true;
    }

  private:
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
