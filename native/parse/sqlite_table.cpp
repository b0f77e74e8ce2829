// See sqlite_table.hpp.
#include "sqlite_table.hpp"

#include <simdjson.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace etloom::sqlite {

namespace {

constexpr size_t kFileHead = 100, kDeepest = 20;
constexpr uint8_t kInterior = 5, kLeaf = 13;
constexpr std::string_view kMagic("SQLite format 3\0", 16);

uint64_t big_endian(const char* at, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) value = value << 8 | static_cast<uint8_t>(at[i]);
    return value;
}

int64_t big_endian_signed(const char* at, size_t bytes) {
    const unsigned shift = 64 - 8 * static_cast<unsigned>(bytes);
    return bytes == 0 ? 0 : static_cast<int64_t>(big_endian(at, bytes) << shift) >> shift;
}

// Up to eight bytes of seven bits, the highest first, and a ninth of eight.
bool read_varint(const char*& at, const char* end, uint64_t& value) {
    value = 0;
    for (size_t i = 0; i < 9 && at < end; ++i) {
        const auto byte = static_cast<uint8_t>(*at++);
        if (i == 8) return value = value << 8 | byte, true;
        value = value << 7 | (byte & 0x7F);
        if (byte < 0x80) return true;
    }
    return false;
}

// The bytes of a value by its type; types 10 and 11 are not in files.
uint64_t size_of(uint64_t type) {
    constexpr uint8_t kSizes[] = {0, 1, 2, 3, 4, 6, 8, 8, 0, 0};
    return type < std::size(kSizes) ? kSizes[type] : type < 12 ? UINT64_MAX : (type - 12) / 2;
}

bool is_whole(uint64_t type) { return (type >= 1 && type <= 6) || type == 8 || type == 9; }

}  // namespace

TableReader::TableReader(ReadAt read, uint64_t file_bytes, std::vector<Wanted> wanted)
    : wrong_type_counts(wanted.size()), read_at_(std::move(read)), file_bytes_(file_bytes) {
    Table& table = tables["rows"];
    columns_.reserve(wanted.size());  // the table refers to the names
    for (Wanted& column : wanted) {
        Target& into = columns_.emplace_back(Target{std::move(column)});
        const char* name = into.wanted.name.c_str();
        switch (into.wanted.type) {
            case Type::kWhole: into.whole = table.add<Numbers<int64_t>>(name); break;
            case Type::kReal: into.real = table.add<Numbers<double>>(name); break;
            case Type::kText: into.text = table.add<Texts>(name, Finish::kPlain); break;
            case Type::kNone: break;
        }
    }
}

bool TableReader::read(uint32_t root, uint64_t max_rows) {
    max_rows_ = max_rows;
    const auto is_storable = [](const Target& column) { return !column.wanted.is_row_number || column.whole != nullptr; };
    return std::all_of(columns_.begin(), columns_.end(), is_storable) && read_head() && read_page(root, 0) && has_valid_texts();
}

bool TableReader::read_head() {
    char head[kFileHead];
    if (!read_at_(0, head, kFileHead) || std::string_view(head, kMagic.size()) != kMagic) return false;
    page_bytes_ = big_endian(head + 16, 2);
    if (page_bytes_ == 1) page_bytes_ = 1 << 16;
    const auto reserved = static_cast<uint8_t>(head[20]);
    const bool is_utf8 = big_endian(head + 56, 4) == 1;
    if (page_bytes_ < 512 || (page_bytes_ & (page_bytes_ - 1)) != 0 || page_bytes_ - reserved < 480 || !is_utf8) return false;
    usable_ = page_bytes_ - reserved;
    visited_.resize(file_bytes_ / page_bytes_ + 1);
    return true;
}

// No page belongs to two places, and the rows of a page are not longer than it, so that a file takes no more time and
// memory than its size lets expect.
bool TableReader::load_page(uint32_t number, char* into) {
    if (number == 0 || number >= visited_.size() || visited_[number]) return false;
    visited_[number] = true;
    return read_at_((uint64_t{number} - 1) * page_bytes_, into, page_bytes_);
}

bool TableReader::read_page(uint32_t number, size_t depth) {
    if (depth >= kDeepest) return false;
    if (pages_.size() <= depth) pages_.emplace_back(page_bytes_ + kPadding);
    char* const content = pages_[depth].data();
    if (!load_page(number, content)) return false;
    const std::string_view page(content, usable_);
    const size_t head = number == 1 ? kFileHead : 0;
    if (page[head] == kLeaf) return read_leaf(page, head);
    const size_t cells = big_endian(content + head + 3, 2), pointers = head + 12;
    if (page[head] != kInterior || pointers + 2 * cells > usable_) return false;
    for (size_t cell = 0; cell < cells; ++cell) {
        const size_t at = big_endian(content + pointers + 2 * cell, 2);
        if (at + 4 > usable_) return false;
        if (!read_page(static_cast<uint32_t>(big_endian(content + at, 4)), depth + 1)) return false;
        if (rows > max_rows_) return true;
    }
    return read_page(static_cast<uint32_t>(big_endian(content + head + 8, 4)), depth + 1);
}

bool TableReader::read_leaf(std::string_view page, size_t head) {
    const size_t cells = big_endian(page.data() + head + 3, 2), pointers = head + 8;
    if (pointers + 2 * cells > usable_) return false;
    const char* const end = page.data() + usable_;
    size_t used = 0;
    for (size_t cell = 0; cell < cells && rows <= max_rows_; ++cell) {
        const char* at = page.data() + big_endian(page.data() + pointers + 2 * cell, 2);
        uint64_t size, number;
        std::string_view payload;
        if (at >= end || !read_varint(at, end, size) || !read_varint(at, end, number)) return false;
        const auto row = static_cast<int64_t>(number);
        if (rows > 0 && row <= last_row_) return false;
        if (!read_payload(page, static_cast<size_t>(at - page.data()), size, used, payload) || !read_record(payload, row)) return false;
        last_row_ = row;
        ++rows;
    }
    return true;
}

// A payload that is too large for its page goes on in pages that are linked to each other.
bool TableReader::read_payload(std::string_view page, size_t at, uint64_t size, size_t& used, std::string_view& payload) {
    const size_t most = usable_ - 35, least = (usable_ - 12) * 32 / 255 - 23;
    if (size > file_bytes_) return false;
    size_t local = size;
    if (size > most) {
        local = least + (size - least) % (usable_ - 4);
        if (local > most) local = least;
    }
    if (at + local + (local < size ? 4 : 0) > page.size() || (used += local) > usable_) return false;
    payload = page.substr(at, local);
    if (local == size) return true;
    spilled_.assign(payload);
    std::vector<char> next(page_bytes_);
    for (uint64_t number = big_endian(page.data() + at + local, 4); spilled_.size() < size;) {
        if (!load_page(static_cast<uint32_t>(number), next.data())) return false;
        spilled_.append(next.data() + 4, std::min<uint64_t>(size - spilled_.size(), usable_ - 4));
        number = big_endian(next.data(), 4);
    }
    payload = spilled_;
    return true;
}

bool TableReader::read_record(std::string_view record, int64_t row) {
    const char *at = record.data(), *const end = at + record.size();
    uint64_t head;
    if (!read_varint(at, end, head) || head > record.size() || head < static_cast<size_t>(at - record.data())) return false;
    const char *value = record.data() + head, *const types_end = value;
    size_t column = 0;
    for (size_t place = 0; at < types_end && column < columns_.size(); ++place) {
        uint64_t type;
        if (!read_varint(at, types_end, type)) return false;
        const uint64_t size = size_of(type);
        if (size > static_cast<uint64_t>(end - value)) return false;
        for (; column < columns_.size() && columns_[column].wanted.place == place; ++column) {
            push(column, type, value, size, row);
        }
        value += size;
    }
    for (; column < columns_.size(); ++column) {
        if (columns_[column].wanted.has_default) return false;
        push(column, 0, end, 0, row);
    }
    return true;
}

void TableReader::push(size_t column, uint64_t type, const char* value, size_t size, int64_t row) {
    const Target& into = columns_[column];
    if (into.wanted.is_row_number) return into.whole->push(row);
    if (type == 0) return push_null(column);
    const auto whole = [&] { return type >= 8 ? static_cast<int64_t>(type - 8) : big_endian_signed(value, size); };
    if (into.whole != nullptr && is_whole(type)) {
        into.whole->push(whole());
    } else if (into.real != nullptr && is_whole(type)) {
        into.real->push(static_cast<double>(whole()));
    } else if (into.real != nullptr && type == 7) {
        const uint64_t bits = big_endian(value, size);
        double real;
        std::memcpy(&real, &bits, sizeof real);
        if (std::isnan(real)) return push_null(column);
        into.real->push(real);
    } else if (into.text != nullptr && type >= 13 && type % 2 == 1) {
        into.text->push_text({value, size});
    } else {
        ++wrong_type_counts[column];
        push_null(column);
    }
}

void TableReader::push_null(size_t column) {
    const Target& into = columns_[column];
    for (Column* values : {static_cast<Column*>(into.whole), static_cast<Column*>(into.real), static_cast<Column*>(into.text)}) {
        if (values != nullptr) values->null();
    }
}

bool TableReader::has_valid_texts() const {
    return std::all_of(columns_.begin(), columns_.end(), [](const Target& into) {
        if (into.text == nullptr) return true;
        const auto& texts = into.text->texts();
        return std::all_of(texts.begin(), texts.end(), [](std::string_view text) {
            return simdjson::validate_utf8(text.data(), text.size());
        });
    });
}

}  // namespace etloom::sqlite
