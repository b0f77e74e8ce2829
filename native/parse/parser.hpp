// What the parsers of all formats share: their tables, taking back a damaged row, counting trouble.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "columns.hpp"
#include "rows.hpp"
#include "tokens.hpp"
#include "troubles.hpp"

namespace etloom {

using Tables = std::map<std::string, Table>;

class Parser : public RowStream {
  public:
    using RowStream::RowStream;

    Tables& tables() { return tables_; }
    const Troubles& troubles() const { return troubles_; }
    // Orders the tables and counts what is wrong with their texts. Once, before the columns leave.
    void sort();

  protected:
    // Puts the rows of the tables in order.
    virtual void order() = 0;
    // The row that `at` is at, which it steps over. False: it is damaged.
    virtual bool row(Cursor& at, uint64_t position) = 0;

    Tables tables_;
    Troubles troubles_;

  private:
    bool rows(std::string_view json, uint64_t& position) override;
    void checkpoint() override;
    void rewind() override;

    Tokens tokens_;
    Troubles saved_troubles_;
    std::vector<size_t> marks_;
};

}  // namespace etloom
