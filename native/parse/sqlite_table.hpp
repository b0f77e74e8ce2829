// Columns of a table of a SQLite file, from its pages. https://www.sqlite.org/fileformat2.html
//
// A file that is damaged, or of a form that recorders do not write, is left to SQLite itself.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "parser.hpp"

namespace etloom::sqlite {

enum class Type : uint8_t { kWhole, kReal, kText, kNone };

struct Wanted {
    std::string name;
    size_t place;        // in the record of a row
    Type type;           // kNone: the values are not read, but counted
    bool is_row_number;  // its value is the number of the row
    bool has_default;    // of rows that are older than the column
};

// Reads exactly `size` bytes of the file at an offset; false where there are fewer.
using ReadAt = std::function<bool(uint64_t at, char* into, size_t size)>;

class TableReader {
  public:
    // The columns are in the order of their places.
    TableReader(ReadAt read, uint64_t file_bytes, std::vector<Wanted> wanted);
    // Reads all rows, up to one more than `max_rows`, of the table whose first page is `root`. False: nothing is to be used.
    bool read(uint32_t root, uint64_t max_rows);

    Tables tables;  // "rows"; a value of another type is null
    uint64_t rows = 0;
    std::vector<uint64_t> wrong_type_counts;  // values of another type, by column

  private:
    struct Target {
        Wanted wanted;
        Numbers<int64_t>* whole = nullptr;
        Numbers<double>* real = nullptr;
        Texts* text = nullptr;
    };

    bool read_head();
    bool load_page(uint32_t number, char* into);
    bool read_page(uint32_t number, size_t depth);
    bool read_leaf(std::string_view page, size_t head);
    bool read_payload(std::string_view page, size_t at, uint64_t size, size_t& used, std::string_view& payload);
    bool read_record(std::string_view record, int64_t row);
    void push(size_t column, uint64_t type, const char* value, size_t size, int64_t row);
    void push_null(size_t column);
    bool has_valid_texts() const;

    ReadAt read_at_;
    uint64_t file_bytes_;
    uint64_t max_rows_ = 0;
    size_t page_bytes_ = 0, usable_ = 0;
    std::vector<Target> columns_;
    std::vector<std::vector<char>> pages_;  // by depth
    std::vector<bool> visited_;
    std::string spilled_;  // a payload that is larger than its page
    int64_t last_row_ = 0;
};

}  // namespace etloom::sqlite
