// What the parsers of all formats share: their tables, taking back a damaged row, counting trouble.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "columns.hpp"
#include "rows.hpp"
#include "tokens.hpp"
#include "troubles.hpp"
#include "worker.hpp"

namespace etloom {

using Tables = std::map<std::string, Table>;

class Parser : public RowStream {
  public:
    using RowStream::RowStream;

    // Pieces of at least `bytes` are parsed by two threads. 0: large ones are, where a processor has nothing to do.
    void split_from(size_t bytes) { split_from_ = bytes; }
    // Reads all rows by their tokens, as a reference for `known_row`.
    void only_by_tokens() { only_by_tokens_ = true; }
    // How many rows were read without tokens.
    uint64_t known_rows() const { return known_rows_; }
    Tables& tables() {
        worker_.wait();
        return tables_;
    }
    const Troubles& troubles() const { return troubles_; }
    // Orders the tables and counts what is wrong with their texts. Once, before the columns leave.
    void sort();

  protected:
    // Puts the rows of the tables in order, with the help of `worker`, if there is one.
    virtual void order(Worker* worker) = 0;
    // The row that `at` is at, which it steps over. False: it is damaged.
    virtual bool row(Cursor& at, uint64_t position) = 0;
    // Reads the row at `at`, which is moved behind it, without tokens, if it is printed as rows before it. False: `row` has
    // to read it. `to`: the end of the array.
    virtual bool known_row(const char*& /*at*/, const char* /*to*/, uint64_t /*position*/) { return false; }
    // Adds a row that `row` has read, with its first token, to those that `known_row` knows.
    virtual void learn(std::string_view /*row*/, const Cursor& /*at*/) {}
    // Texts outside of columns: keeps their number, and removes those that were added since.
    virtual void mark_texts() {}
    virtual void truncate_texts() {}
    // The table that the rows of other tables refer to.
    virtual const Table& main_table() = 0;
    // A parser of the same format, whose rows this one takes over.
    virtual std::unique_ptr<Parser> make_second() const = 0;
    // Waits for the second thread, for a destructor: it may still use members of a derived class.
    void stop() noexcept;

    Tables tables_;
    Troubles troubles_;

  private:
    bool rows(std::string_view json, uint64_t& position) override;
    bool rows_of_both(std::string_view first, std::string_view second, uint64_t& position) override;
    bool is_for_two(size_t bytes) const override;
    bool is_for_two(size_t size, size_t large) const;
    void checkpoint() override;
    void rewind() override;

    Tokens tokens_;
    Troubles saved_troubles_;
    std::vector<size_t> marks_;
    size_t split_from_ = 0;
    bool only_by_tokens_ = false;
    uint64_t known_rows_ = 0, saved_known_rows_ = 0;
    std::unique_ptr<Parser> second_;
    Worker worker_;
};

}  // namespace etloom
