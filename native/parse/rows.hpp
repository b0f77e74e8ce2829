// A JSON document whose bulk is one array of objects ("traceEvents", "nodes"), read in pieces of any size.
//
// Bytes go in by `feed`, or without a copy by `room` and `extend`; whole objects ("rows") come out by `rows`, the rest of
// the document is kept as its header. Rows are parsed many at a time: a piece is cut where one object ends and the next
// begins, and closed as an array of its own. A large piece is cut once more, for two threads; if either part does not parse, the cut may be inside a row, and
// the piece is parsed as a whole. A piece that does not parse so is gone through row by row, and what does not parse
// then costs that row alone: the search goes on at the next place that looks like the start of a row.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "troubles.hpp"

namespace etloom {

class RowStream {
  public:
    // rows_key: the member that holds the rows. A top-level array is taken for the rows if bare_array.
    // row_keys: the keys a row can begin with, each with its closing quote and without the opening one. If uniform, all
    // rows begin as the first one does, and objects inside of rows may begin with the other keys.
    RowStream(std::string_view rows_key, bool bare_array, bool uniform, std::vector<std::string_view> row_keys);
    virtual ~RowStream() = default;

    void feed(const char* data, size_t size);
    // The same in two steps: where the next bytes, up to `size`, are to be written, and then how many of them were.
    char* room(size_t size);
    void extend(size_t size);
    void finish();

    uint64_t rows_seen() const { return rows_seen_; }
    bool found_rows() const { return found_rows_; }
    bool truncated() const { return truncated_; }
    // Bytes behind the end of the document, or behind the place where its structure could not be followed.
    uint64_t trailing() const { return trailing_; }
    uint64_t bytes() const { return bytes_; }
    const Trouble& damaged() const { return damaged_; }
    // Members of the document other than the rows, as (key, JSON text), in file order.
    const std::vector<std::pair<std::string, std::string>>& header() const { return header_; }

  protected:
    // All rows of the array `json`, which begins behind its opening bracket. The first one is number `position` of the
    // file; their count is added to `position`. False: something in it is damaged, and what was appended is to be taken
    // back by `rewind`. The array must be all there is: a bracket that closes it early is damage. There is padding
    // behind it.
    virtual bool rows(std::string_view json, uint64_t& position) = 0;
    // The same of two arrays that follow each other, by two threads.
    virtual bool rows_of_both(std::string_view first, std::string_view second, uint64_t& position) = 0;
    // Whether a piece of that many bytes is to be parsed by two threads.
    virtual bool is_for_two(size_t bytes) const = 0;
    // Saves the numbers of rows for `rewind`. Waits for the second thread, so it comes before any other use of the tables.
    virtual void checkpoint() = 0;
    virtual void rewind() = 0;

  private:
    enum class State { kStart, kTop, kRows, kDone };

    char* begin() { return buffer_.data(); }
    char* end() { return begin() + size_; }
    void reserve(size_t size);
    void consume(size_t bytes);
    bool step(bool last);
    bool step_top();
    bool skip_to_rows(std::string_view key);
    const char* find_rows(const char* from, const char* to) const;
    bool step_rows(bool last);
    bool parse(char* from, char* to);
    bool parse_halves(char* from, char* to);
    // Goes row by row through [from, to). Returns where it stopped: at `to`, at an incomplete row, or behind the bracket
    // that closes the rows.
    char* crawl(char* from, char* to, bool last);
    char* last_boundary(char* from, char* to);
    char* next_boundary(char* from, char* to);
    void count_trailing();
    bool is_boundary(const char* brace, const char* to) const;
    bool settle_row_key();

    std::string rows_key_;
    bool bare_array_, uniform_;
    std::vector<std::string_view> row_keys_;
    State state_ = State::kStart;
    std::vector<char> buffer_;
    size_t size_ = 0;
    size_t searched_ = 0;  // bytes of the buffer known to hold no boundary
    size_t retry_at_ = 0;  // how many bytes to wait for before an unfinished member or row is looked at again
    size_t halved_ = 0, not_halved_ = 0;  // pieces that two threads parsed, and that they tried to
    uint64_t in_vain_ = 0;  // bytes looked through for the end of a row that has none
    bool found_rows_ = false, truncated_ = false, in_object_ = false;
    bool head_damaged_ = false;  // the rows are sought by their key
    uint64_t rows_seen_ = 0, bytes_ = 0, trailing_ = 0;
    Trouble damaged_;
    std::vector<std::pair<std::string, std::string>> header_;
};

}  // namespace etloom
