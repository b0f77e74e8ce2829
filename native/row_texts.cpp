// Rows of text, each put together from the same parts: constants, numbers, repeated texts, texts of the row, arguments.
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "argument_texts.hpp"
#include "arrays.hpp"
#include "bindings.hpp"

namespace {

// Texts one after the other, with the offset of each and the end; codes say which of them a row has, without codes row i
// has text i.
using Texts = std::tuple<std::optional<In<int32_t>>, In<int64_t>, In<uint8_t>>;
using Arguments = std::tuple<const ArgumentSide*, int32_t>;
using Part = std::variant<std::string, In<int64_t>, Texts, Arguments>;
using Cursors = std::map<const ArgumentSide*, ArgumentSide::Cursor>;

constexpr size_t MOST_DIGITS = 20;  // and a sign

void check_texts(const Texts& part, size_t rows) {
    const auto& [codes, offsets, bytes] = part;
    const int64_t *const first = offsets.data(), *const last = first + offsets.shape(0);
    if (first == last || *first < 0 || !std::is_sorted(first, last) || last[-1] > static_cast<int64_t>(bytes.shape(0))) {
        throw nb::value_error("the offsets are not those of the texts");
    }
    const auto texts = static_cast<int64_t>(offsets.shape(0)) - 1;
    if (codes ? codes->shape(0) != rows : texts != static_cast<int64_t>(rows)) throw nb::value_error("a text per row");
    const auto is_text = [&](int32_t code) { return code >= 0 && code < texts; };
    if (codes && !std::all_of(codes->data(), codes->data() + rows, is_text)) throw nb::value_error("there is no such text");
}

// What a row needs of a part: the bytes of a text, or the most that a number can have.
class Writer {
  public:
    Writer(const Part& part, size_t rows, Cursors& cursors) {
        if (const auto* text = std::get_if<std::string>(&part)) {
            constant_ = *text;
        } else if (const auto* numbers = std::get_if<In<int64_t>>(&part)) {
            if (numbers->shape(0) != rows) throw nb::value_error("a number per row");
            numbers_ = numbers->data();
        } else if (const auto* arguments = std::get_if<Arguments>(&part)) {
            const auto& [side, which] = *arguments;
            if (side == nullptr || which < ArgumentSide::kValues || which > ArgumentSide::kStrides) throw nb::value_error("no such arguments");
            if (side->rows() != rows) throw nb::value_error("arguments per row");
            side_ = side;
            which_ = static_cast<ArgumentSide::Which>(which);
            cursor_ = &cursors[side];
        } else {
            const auto& texts = std::get<Texts>(part);
            check_texts(texts, rows);
            const auto& [codes, offsets, bytes] = texts;
            codes_ = codes ? codes->data() : nullptr;
            offsets_ = offsets.data();
            bytes_ = bytes.data();
        }
    }
    size_t most_bytes(size_t row) const {
        if (side_ != nullptr) return side_->most_bytes(which_, row);
        return offsets_ != nullptr ? text(row).size() : numbers_ != nullptr ? MOST_DIGITS : constant_.size();
    }
    // Where the part of the row ends, which is written from `at`.
    char* write(size_t row, char* at) const {
        if (side_ != nullptr) return side_->write(which_, row, at, *cursor_);
        if (numbers_ != nullptr) return std::to_chars(at, at + MOST_DIGITS, numbers_[row]).ptr;
        const std::string_view from = offsets_ != nullptr ? text(row) : constant_;
        if (!from.empty()) std::memcpy(at, from.data(), from.size());
        return at + from.size();
    }

  private:
    std::string_view text(size_t row) const {
        const size_t which = codes_ != nullptr ? static_cast<size_t>(codes_[row]) : row;
        return {reinterpret_cast<const char*>(bytes_) + offsets_[which], static_cast<size_t>(offsets_[which + 1] - offsets_[which])};
    }

    std::string_view constant_;
    const int64_t *numbers_ = nullptr, *offsets_ = nullptr;
    const int32_t* codes_ = nullptr;
    const uint8_t* bytes_ = nullptr;
    const ArgumentSide* side_ = nullptr;
    ArgumentSide::Which which_ = ArgumentSide::kValues;
    ArgumentSide::Cursor* cursor_ = nullptr;
};

// The rows as offsets and bytes.
nb::tuple row_texts(const std::vector<Part>& parts, size_t rows) {
    Cursors cursors;
    std::vector<Writer> writers;
    writers.reserve(parts.size());
    for (const Part& part : parts) writers.emplace_back(part, rows, cursors);
    Paged<int64_t> offsets{0};
    Paged<uint8_t> bytes;
    {
        nb::gil_scoped_release release;
        offsets.reserve(rows + 1);
        size_t most = 0;
        for (const Writer& writer : writers) {
            for (size_t row = 0; row < rows; ++row) most += writer.most_bytes(row);
        }
        bytes.resize(most);
        char* const begin = reinterpret_cast<char*>(bytes.data());
        char* at = begin;
        for (size_t row = 0; row < rows; ++row) {
            for (const Writer& writer : writers) at = writer.write(row, at);
            offsets.push_back(at - begin);
        }
        bytes.resize(static_cast<size_t>(at - begin));
    }
    return nb::make_tuple(to_numpy(std::move(offsets)), to_numpy(std::move(bytes)));
}

}  // namespace

void bind_row_texts(nb::module_& module) {
    module.def("row_texts", &row_texts, nb::arg("parts"), nb::arg("rows"),
               "Rows of text, as offsets and bytes, from their parts: constants, numbers, texts as codes (or None: a text per "
               "row), offsets and bytes, and arguments (0: values, 1: shapes, 2: strides).");
}
