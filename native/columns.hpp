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

#include "scalars.hpp"

struct ArrowSchema;
struct ArrowArray;

namespace etloom {

// Distinct texts, numbered in the order they came. The bytes are kept as the file had them; `finish` may rewrite them.
class Dictionary {
  public:
    Dictionary() : slots_(1024, kEmpty) {}

    uint32_t code(std::string_view text) {
        if (text.data() == nullptr) text = "";  // memcpy takes no null pointer, not even for nothing
        const uint64_t hash = hash_of(text);
        size_t slot = hash & (slots_.size() - 1);
        while (slots_[slot] != kEmpty) {
            const uint32_t found = slots_[slot];
            if (hashes_[found] == hash && texts_[found] == text) return found;
            slot = (slot + 1) & (slots_.size() - 1);
        }
        const auto added = static_cast<uint32_t>(texts_.size());
        texts_.emplace_back(keep(text));
        hashes_.push_back(hash);
        slots_[slot] = added;
        if (texts_.size() * 2 > slots_.size()) grow();
        return added;
    }

    const std::vector<std::string_view>& texts() const { return texts_; }

  private:
    static constexpr uint32_t kEmpty = UINT32_MAX;
    static constexpr size_t kBlock = 1 << 18;

    static uint64_t mix(uint64_t a, uint64_t b) {
        const auto product = static_cast<unsigned __int128>(a) * b;
        return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }

    static uint64_t hash_of(std::string_view text) {
        constexpr uint64_t k0 = 0x9E3779B97F4A7C15ULL, k1 = 0xD6E8FEB86659FD93ULL;
        const char* p = text.data();
        size_t left = text.size();
        uint64_t h = mix(left ^ k0, k1), a = 0, b = 0;
        for (; left >= 16; p += 16, left -= 16) {
            std::memcpy(&a, p, 8);
            std::memcpy(&b, p + 8, 8);
            h = mix(h ^ a ^ k0, b ^ k1);
        }
        a = b = 0;
        if (left >= 8) {
            std::memcpy(&a, p, 8);
            std::memcpy(&b, p + 8, left - 8);
        } else {
            std::memcpy(&a, p, left);
        }
        return mix(h ^ a ^ k1, b ^ k0);
    }

    std::string_view keep(std::string_view text) {
        if (text.size() > kBlock / 4) {
            blocks_.emplace_back(new char[text.size()]);
            std::memcpy(blocks_.back().get(), text.data(), text.size());
            return {blocks_.back().get(), text.size()};
        }
        if (used_ + text.size() > kBlock || current_ == nullptr) {
            blocks_.emplace_back(new char[kBlock]);  // not zeroed: small files need little of it
            current_ = blocks_.back().get();
            used_ = 0;
        }
        char* at = current_ + used_;
        std::memcpy(at, text.data(), text.size());
        used_ += text.size();
        return {at, text.size()};
    }

    void grow() {
        slots_.assign(slots_.size() * 2, kEmpty);
        for (uint32_t i = 0; i < texts_.size(); ++i) {
            size_t slot = hashes_[i] & (slots_.size() - 1);
            while (slots_[slot] != kEmpty) slot = (slot + 1) & (slots_.size() - 1);
            slots_[slot] = i;
        }
    }

    std::vector<uint32_t> slots_;
    std::vector<uint64_t> hashes_;
    std::vector<std::string_view> texts_;
    std::vector<std::unique_ptr<char[]>> blocks_;
    char* current_ = nullptr;
    size_t used_ = 0;
};

// Room that the columns of a table share while they are put in order: the old place of one is the new one of the next.
struct Scratch {
    std::tuple<std::vector<int8_t>, std::vector<int16_t>, std::vector<int32_t>, std::vector<int64_t>, std::vector<uint32_t>,
               std::vector<uint64_t>, std::vector<double>>
        rooms;
    template <typename T>
    std::vector<T>& of() {
        return std::get<std::vector<T>>(rooms);
    }
};

// One column of a table.
class Column {
  public:
    virtual ~Column() = default;
    virtual size_t size() const = 0;
    virtual void null() = 0;
    virtual void truncate(size_t rows) = 0;
    virtual void reserve(size_t rows) = 0;
    virtual void take(const std::vector<uint32_t>& order, Scratch& scratch) = 0;
    // Moves the column into Arrow structures; the column is empty afterwards.
    virtual void leave(ArrowSchema* schema, ArrowArray* array) = 0;

  protected:
    // Bit i of the bitmap is set where row i has a value. There is no bitmap before the first null.
    void mark_valid(size_t row) {
        if (valid_.empty()) return;
        if ((row & 7) == 0) valid_.push_back(0);
        valid_.back() |= static_cast<uint8_t>(1U << (row & 7));
    }
    void mark_null(size_t row) {
        if (valid_.empty()) {
            valid_.assign((row + 7) / 8, 0xFF);
            if (row & 7) valid_.back() = static_cast<uint8_t>((1U << (row & 7)) - 1);
        }
        if ((row & 7) == 0) valid_.push_back(0);
        ++nulls_;
    }
    bool is_valid(size_t row) const { return valid_.empty() || ((valid_[row >> 3] >> (row & 7)) & 1); }
    void truncate_bitmap(size_t from, size_t to) {
        if (valid_.empty()) return;
        for (size_t row = to; row < from; ++row) nulls_ -= is_valid(row) ? 0 : 1;
        valid_.resize((to + 7) / 8);
        if (to & 7) valid_.back() &= static_cast<uint8_t>((1U << (to & 7)) - 1);
    }
    void take_bitmap(const std::vector<uint32_t>& order) {
        if (nulls_ == 0) return;
        std::vector<uint8_t> taken((order.size() + 7) / 8, 0);
        for (size_t i = 0; i < order.size(); ++i) {
            if (is_valid(order[i])) taken[i >> 3] |= static_cast<uint8_t>(1U << (i & 7));
        }
        valid_ = std::move(taken);
    }
    void leave_with(ArrowSchema* schema, ArrowArray* array, const char* format, size_t rows,
                    std::shared_ptr<void> values, const void* data, Dictionary* texts);

    std::vector<uint8_t> valid_;
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
    void push(T value) {
        mark_valid(values_.size());
        values_.push_back(value);
    }
    void null() override {
        mark_null(values_.size());
        values_.push_back(T{});
    }
    size_t size() const override { return values_.size(); }
    void truncate(size_t rows) override {
        truncate_bitmap(values_.size(), rows);
        values_.resize(rows);
    }
    void reserve(size_t rows) override {
        if (rows > values_.capacity()) values_.reserve(rows);
    }
    void take(const std::vector<uint32_t>& order, Scratch& scratch) override {
        auto& taken = scratch.of<T>();
        taken.resize(order.size());
        for (size_t i = 0; i < order.size(); ++i) taken[i] = values_[order[i]];
        values_.swap(taken);
        take_bitmap(order);
    }
    void leave(ArrowSchema* schema, ArrowArray* array) override { leave_as(schema, array, Format<T>::value, nullptr); }

    std::vector<T>& values() { return values_; }

  protected:
    void leave_as(ArrowSchema* schema, ArrowArray* array, const char* format, Dictionary* texts) {
        auto values = std::make_shared<std::vector<T>>(std::move(values_));
        values_ = {};
        leave_with(schema, array, format, values->size(), values, values->data(), texts);
    }

    std::vector<T> values_;
};

// Whether the text is one JSON value (inf and nan pass), nested no deeper than any parser can follow.
bool is_json(std::string_view text);

// How the bytes of a text in the file become the text of the column, when the column leaves: once a distinct text.
enum class Finish { kUnescape, kCanonical };

// Repeated text: the inside of JSON strings (kUnescape) or JSON values (kCanonical).
class Texts : public Numbers<uint32_t> {
  public:
    explicit Texts(Finish finish) : finish_(finish) {}

    uint32_t push_text(std::string_view text) {
        // Texts come in runs of the same more often than not.
        if (!same(text, last_) || last_.data() == nullptr) {
            code_ = dictionary_.code(text);
            last_ = dictionary_.texts()[code_];
        }
        push(code_);
        return code_;
    }
    // False, and null in its place, for what is no valid JSON. Checked once a distinct text.
    bool push_json(std::string_view json) {
        const uint32_t code = push_text(json);
        while (sound_.size() <= code) sound_.push_back(is_json(dictionary_.texts()[sound_.size()]));
        if (sound_[code]) return true;
        truncate(size() - 1);
        null();
        return false;
    }
    void leave(ArrowSchema* schema, ArrowArray* array) override;

  private:
    Finish finish_;
    Dictionary dictionary_;
    std::vector<bool> sound_;  // by code, as far as it was asked for
    std::string_view last_;
    uint32_t code_ = 0;
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
    size_t rows() const { return columns_.empty() ? 0 : columns_.front().column->size(); }
    void truncate(size_t rows) {
        for (auto& named : columns_) named.column->truncate(rows);
    }
    void reserve(size_t rows) {
        for (auto& named : columns_) named.column->reserve(rows);
    }
    void take(const std::vector<uint32_t>& order) {
        Scratch scratch;
        for (auto& named : columns_) named.column->take(order, scratch);
    }

    struct Named {
        const char* name;
        std::unique_ptr<Column> column;
    };
    std::vector<Named>& columns() { return columns_; }

  private:
    std::vector<Named> columns_;
};

// Replaces the escapes of a JSON string's inside. Bad escapes are kept as they are.
std::string unescape(std::string_view quoted);

// The JSON value with ", " and ": " between its parts and no other white space, so that equal values are equal texts;
// inf and nan become strings.
std::string canonical(std::string_view json);

}  // namespace etloom
