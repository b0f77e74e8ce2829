// Columns that grow row by row and leave through the Arrow C data interface, without a copy and without a Python object
// a row. https://arrow.apache.org/docs/format/CDataInterface.html
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "buffer.hpp"
#include "dictionary.hpp"
#include "json_text.hpp"
#include "scalars.hpp"
#include "troubles.hpp"
#include "worker.hpp"

struct ArrowSchema;
struct ArrowArray;

namespace etloom {

// Room that the columns of a table share while they are put in order: the old place of one is the new one of the next.
struct Scratch {
    std::tuple<Buffer<int8_t>, Buffer<int16_t>, Buffer<int32_t>, Buffer<int64_t>, Buffer<uint32_t>, Buffer<uint64_t>,
               Buffer<double>>
        rooms;
    template <typename T>
    Buffer<T>& of() {
        return std::get<Buffer<T>>(rooms);
    }
};

// What is added to the numbers of rows that another parser counted from 0.
struct Shifts {
    uint32_t row;       // of the table that the column refers to
    uint32_t position;  // in the file
};

// One column of a table. It may be behind the others: rows that it has not got yet are null.
class Column {
  public:
    virtual ~Column() = default;
    virtual size_t size() const = 0;
    virtual void null() = 0;
    // Makes up for rows that it is behind.
    virtual void pad(size_t rows) = 0;
    virtual void truncate(size_t rows) = 0;
    virtual void take(const Buffer<uint32_t>& order, Scratch& scratch) = 0;
    // Adds the rows of a column of the same type, which stays as it is. Always of the same column until `forget_other`:
    // what its codes mean is remembered.
    virtual void append(const Column& other, const Shifts& shifts) = 0;
    virtual void forget_other() {}
    // Counts what is wrong with the values; called before they leave.
    virtual void settle(Troubles&) {}
    // Moves the column into Arrow structures; the column is empty afterwards.
    virtual void leave(ArrowSchema* schema, ArrowArray* array) = 0;

  protected:
    // Bit i of the bitmap is set where row i has a value. Rows from `marked_` on have values and no bits yet.
    void mark_nulls(size_t from, size_t to) {
        mark_values(from);
        valid_.resize((to + 7) / 8);
        marked_ = to;
        nulls_ += static_cast<int64_t>(to - from);
    }
    // The bits of the rows up to `rows`, which have values from where the bitmap ends.
    void mark_values(size_t rows) {
        if (rows <= marked_) return;
        valid_.resize((rows + 7) / 8);
        size_t row = marked_;
        for (; row < rows && (row & 7) != 0; ++row) valid_[row >> 3] |= static_cast<uint8_t>(1U << (row & 7));
        if (rows - row >= 8) std::memset(valid_.data() + row / 8, 0xFF, (rows - row) / 8);
        for (row = std::max(row, rows & ~size_t{7}); row < rows; ++row) valid_[row >> 3] |= static_cast<uint8_t>(1U << (row & 7));
        marked_ = rows;
    }
    bool is_valid(size_t row) const { return row >= marked_ || ((valid_[row >> 3] >> (row & 7)) & 1); }
    // Row `row`, which had a value, has none any more.
    void unmark(size_t row) {
        mark_values(row + 1);
        valid_[row >> 3] &= static_cast<uint8_t>(~(1U << (row & 7)));
        ++nulls_;
    }
    // The bits of another column's rows behind those of `before`.
    void append_bitmap(size_t before, const Column& other) {
        if (other.marked_ == 0) return;
        mark_values(before);
        marked_ = before + other.marked_;
        valid_.resize((marked_ + 7) / 8);
        const unsigned shift = before & 7;
        for (size_t i = 0; i < (other.marked_ + 7) / 8; ++i) {
            const unsigned bits = other.valid_[i];
            uint8_t* at = &valid_[before / 8 + i];
            at[0] |= static_cast<uint8_t>(bits << shift);
            if (bits >> (8 - shift) != 0) at[1] |= static_cast<uint8_t>(bits >> (8 - shift));
        }
        nulls_ += other.nulls_;
    }
    void truncate_bitmap(size_t to) {
        if (to >= marked_) return;
        for (size_t row = to; row < marked_; ++row) nulls_ -= is_valid(row) ? 0 : 1;
        marked_ = to;
        valid_.resize((to + 7) / 8);
        if (to & 7) valid_.back() &= static_cast<uint8_t>((1U << (to & 7)) - 1);
    }
    void take_bitmap(const Buffer<uint32_t>& order, size_t rows) {
        if (nulls_ == 0) return;
        mark_values(rows);
        std::vector<uint8_t> taken((order.size() + 7) / 8);
        const uint8_t* valid = valid_.data();
        for (size_t i = 0; i < taken.size(); ++i) {
            unsigned byte = 0;
            for (size_t bit = 0; bit < std::min<size_t>(8, order.size() - 8 * i); ++bit) {
                const uint32_t row = order[8 * i + bit];
                byte |= ((valid[row >> 3] >> (row & 7)) & 1U) << bit;
            }
            taken[i] = static_cast<uint8_t>(byte);
        }
        valid_ = std::move(taken);
        marked_ = order.size();
    }
    void leave_with(ArrowSchema* schema, ArrowArray* array, const char* format, size_t rows,
                    std::shared_ptr<void> values, const void* data, Dictionary* texts);

    std::vector<uint8_t> valid_;
    size_t marked_ = 0;  // rows that have a bit
    int64_t nulls_ = 0;
};

template <typename T>
struct Format;
template <> struct Format<int8_t> { static constexpr const char* value = "c"; };
template <> struct Format<int16_t> { static constexpr const char* value = "s"; };
template <> struct Format<int32_t> { static constexpr const char* value = "i"; };
template <> struct Format<int64_t> { static constexpr const char* value = "l"; };
template <> struct Format<uint32_t> { static constexpr const char* value = "I"; };
template <> struct Format<uint64_t> { static constexpr const char* value = "L"; };
template <> struct Format<double> { static constexpr const char* value = "g"; };

template <typename T>
class Numbers : public Column {
  public:
    void push(T value) { values_.push_back(value); }
    // The value of row `row`.
    void push_at(size_t row, T value) {
        pad(row);
        push(value);
    }
    void null() override {
        mark_nulls(values_.size(), values_.size() + 1);
        values_.push_back(T{});
    }
    void pad(size_t rows) override {
        if (values_.size() >= rows) return;
        mark_nulls(values_.size(), rows);
        values_.resize(rows);
    }
    size_t size() const override { return values_.size(); }
    void truncate(size_t rows) override {
        if (values_.size() <= rows) return;
        truncate_bitmap(rows);
        values_.resize(rows);
    }
    void take(const Buffer<uint32_t>& order, Scratch& scratch) override {
        take_bitmap(order, values_.size());
        auto& taken = scratch.of<T>();
        taken.resize_unset(order.size());
        for (size_t i = 0; i < order.size(); ++i) taken[i] = values_[order[i]];
        values_.swap(taken);
    }
    void append(const Column& other, const Shifts&) override { append_shifted(static_cast<const Numbers&>(other), T{}); }
    void leave(ArrowSchema* schema, ArrowArray* array) override { leave_as(schema, array, Format<T>::value, nullptr); }

    Buffer<T>& values() { return values_; }
    const Buffer<T>& values() const { return values_; }

  protected:
    void leave_as(ArrowSchema* schema, ArrowArray* array, const char* format, Dictionary* texts) {
        values_.fit();
        auto values = std::make_shared<Buffer<T>>(std::move(values_));
        leave_with(schema, array, format, values->size(), values, values->data(), texts);
    }

    void append_shifted(const Numbers& other, T shift) {
        const size_t before = values_.size(), rows = other.values_.size();
        values_.resize_unset(before + rows);
        for (size_t i = 0; i < rows; ++i) values_[before + i] = other.values_[i] + shift;
        append_bitmap(before, other);
    }

    Buffer<T> values_;
};

// Numbers of rows: of the table that the other tables refer to, or in the file.
class RowNumbers : public Numbers<uint32_t> {
  public:
    explicit RowNumbers(uint32_t Shifts::* shift) : shift_(shift) {}
    void append(const Column& other, const Shifts& shifts) override {
        append_shifted(static_cast<const RowNumbers&>(other), shifts.*shift_);
    }

  private:
    uint32_t Shifts::* shift_;
};

// How the bytes of a text in the file become the text of the column, when the column leaves: once a distinct text.
enum class Finish { kUnescape, kCanonical, kPlain };

// Repeated text: the inside of JSON strings (kUnescape), JSON values (kCanonical), or plain UTF-8 text (kPlain).
class Texts : public Numbers<uint32_t> {
  public:
    explicit Texts(Finish finish) : finish_(finish) {}

    uint32_t push_text(std::string_view text) {
        // Texts come in the same order again and again: the one that followed the last time is tried first.
        const auto& texts = dictionary_.texts();
        uint32_t code = code_ < next_.size() ? next_[code_] : 0;
        if (code >= texts.size() || !same(text, texts[code])) {
            code = dictionary_.code(text);
            next_.resize(std::max(next_.size(), texts.size()));
            next_[code_] = code;
        }
        push(code_ = code);
        return code;
    }
    void push_text_at(size_t row, std::string_view text) {
        pad(row);
        push_text(text);
    }
    // Null for no text.
    void push_text_or_null(std::string_view text) { text.empty() ? null() : static_cast<void>(push_text(text)); }
    // A code for `push`, and the text of a code.
    uint32_t code(std::string_view text) { return dictionary_.code(text); }
    std::string_view text(uint32_t code) const { return dictionary_.texts()[code]; }
    const std::vector<std::string_view>& texts() const { return dictionary_.texts(); }

    void append(const Column& other, const Shifts& shifts) override;
    void forget_other() override { codes_of_other_.clear(); }
    // What is no JSON becomes null. Texts are looked at once a distinct one, faults counted once a row.
    void settle(Troubles& troubles) override;
    void leave(ArrowSchema* schema, ArrowArray* array) override;

  private:
    Finish finish_;
    Dictionary dictionary_;
    std::vector<Fault> faults_;  // by code, as far as they were looked at
    bool faultless_ = true;
    uint32_t code_ = 0;           // of the last text
    std::vector<uint32_t> next_;  // by code: that of the text which followed
    std::vector<uint32_t> codes_of_other_;  // by its code
};

// Named columns of equal length.
class Table {
  public:
    template <typename C, typename... Args>
    C* add(const char* name, Args&&... args) {
        auto column = std::make_unique<C>(std::forward<Args>(args)...);
        C* raw = column.get();
        columns_.push_back({name, std::move(column)});
        return raw;
    }
    // Each row has a value in the first column.
    size_t rows() const { return columns_.empty() ? 0 : columns_.front().column->size(); }
    // Nothing is added afterwards.
    void settle(Troubles& troubles) {
        for (auto& named : columns_) {
            named.column->pad(rows());
            named.column->settle(troubles);
        }
    }
    void truncate(size_t rows) {
        for (auto& named : columns_) named.column->truncate(rows);
    }
    // Adds the rows of a table with the same columns.
    void append(const Table& other, const Shifts& shifts) {
        const size_t before = rows();
        for (size_t i = 0; i < columns_.size(); ++i) {
            columns_[i].column->pad(before);
            columns_[i].column->append(*other.columns_[i].column, shifts);
        }
    }
    void forget_other() {
        for (auto& named : columns_) named.column->forget_other();
    }
    // Puts the rows in order; every second column is left to `worker`, if there is one.
    void take(const Buffer<uint32_t>& order, Worker* worker = nullptr) {
        const auto take_from = [&](size_t first) {
            Scratch scratch;
            for (size_t i = first; i < columns_.size(); i += 2) columns_[i].column->take(order, scratch);
        };
        run_both(worker, [&] { take_from(1); }, [&] { take_from(0); });
    }

    struct Named {
        const char* name;
        std::unique_ptr<Column> column;
    };
    std::vector<Named>& columns() { return columns_; }

  private:
    std::vector<Named> columns_;
};

}  // namespace etloom
