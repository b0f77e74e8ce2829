#include "argument_texts.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"

namespace {

constexpr size_t kNone = SIZE_MAX;
constexpr int32_t kShared = INT16_MAX;      // the largest index, which all arguments behind it share
constexpr size_t kDigits = 20;              // of a number, and a sign
constexpr std::string_view kEmpty = "[]";   // the shape and the stride of a value that is no known tensor
constexpr std::string_view kNoDevice = "\"\"";

char* append(std::string_view text, char* at) {
    if (!text.empty()) std::memcpy(at, text.data(), text.size());
    return at + text.size();
}

}  // namespace

void ArgumentTexts::add_template(std::string value, std::string shape, const std::vector<std::pair<int32_t, int32_t>>& places,
                                 const std::vector<std::string>& after_values, const std::vector<std::string>& after_shapes) {
    if (places.size() != after_values.size() || places.size() != after_shapes.size()) throw nb::value_error("a text per place");
    Template added{std::move(value), std::move(shape), {}, 0, 0};
    added.value_bytes = added.value.size();
    added.shape_bytes = added.shape.size();
    for (size_t i = 0; i < places.size(); ++i) {
        added.slots.push_back({places[i].first, places[i].second, after_values[i], after_shapes[i]});
        added.value_bytes += after_values[i].size();
        added.shape_bytes += after_shapes[i].size();
    }
    templates_.push_back(std::move(added));
}

void ArgumentTexts::set_places(In<uint32_t> node, In<int32_t> io, In<int32_t> index, In<int32_t> item) {
    const size_t n = node.shape(0);
    if (io.shape(0) != n || index.shape(0) != n || item.shape(0) != n || !std::is_sorted(node.data(), node.data() + n)) {
        throw nb::value_error("the places are not those of sorted nodes");
    }
    tensors_.node.assign(node.data(), node.data() + n);
    tensors_.place.clear();
    tensors_.place.reserve(n);
    for (size_t i = 0; i < n; ++i) tensors_.place.push_back({io(i), index(i), item(i)});
}

void ArgumentTexts::set_numbers(size_t which, In<int64_t> numbers, In<bool> known) {
    if (which >= kNumbers || numbers.shape(0) != tensors_.node.size() || known.shape(0) != tensors_.node.size()) {
        throw nb::value_error("a number per tensor");
    }
    tensors_.numbers[which] = std::move(numbers);
    tensors_.known[which] = std::move(known);
}

void ArgumentTexts::set_texts(size_t which, In<int32_t> codes, std::vector<std::string> texts) {
    const auto is_good = [&](int32_t code) { return code < static_cast<int32_t>(texts.size()); };
    if (which >= 3 || codes.shape(0) != tensors_.node.size() || !std::all_of(codes.data(), codes.data() + codes.shape(0), is_good)) {
        throw nb::value_error("a text per tensor");
    }
    tensors_.codes[which] = std::move(codes);
    tensors_.most_bytes[which] = kEmpty.size();
    for (const std::string& text : texts) tensors_.most_bytes[which] = std::max(tensors_.most_bytes[which], text.size());
    tensors_.texts[which] = std::move(texts);
}

ArgumentSide::ArgumentSide(const ArgumentTexts& arguments, In<uint32_t> nodes, In<uint32_t> templates, int32_t io)
    : arguments_(arguments), nodes_(std::move(nodes)), templates_(std::move(templates)), io_(io) {
    const auto is_good = [&](uint32_t t) { return t < arguments_.templates_.size(); };
    if (templates_.shape(0) != rows() || !std::all_of(templates_.data(), templates_.data() + rows(), is_good)) {
        throw nb::value_error("a template per node");
    }
    const auto& tensors = arguments_.tensors_;
    const auto fits = [&](const auto& column) { return column.is_valid() && column.shape(0) == tensors.node.size(); };
    if (!std::all_of(tensors.numbers.begin(), tensors.numbers.end(), fits) || !std::all_of(tensors.codes.begin(), tensors.codes.end(), fits)) {
        throw nb::value_error("the tensors are incomplete");
    }
}

size_t ArgumentSide::most_bytes(Which which, size_t row) const {
    const auto& text = template_of(row);
    const auto& most = arguments_.tensors_.most_bytes;
    constexpr size_t brackets = 2, separator = 2;
    if (which == kValues) {
        return text.value_bytes + text.slots.size() * (brackets + ArgumentTexts::kNumbers * (kDigits + separator) + most[0]);
    }
    return text.shape_bytes + text.slots.size() * most[which == kShapes ? 1 : 2];
}

char* ArgumentSide::write(Which which, size_t row, char* at, Cursor& cursor) const {
    const auto& text = template_of(row);
    at = append(which == kValues ? text.value : text.shape, at);
    if (text.slots.empty()) return at;
    if (cursor.row != row) find_tensors(row, cursor);
    for (size_t i = 0; i < text.slots.size(); ++i) {
        const auto& slot = text.slots[i];
        if (which == kValues) {
            at = append(slot.after_value, write_tensor(cursor.tensors[i], at));
        } else {
            at = append(slot.after_shape, append(text_of(which == kShapes ? 1 : 2, cursor.tensors[i], kEmpty), at));
        }
    }
    return at;
}

// The tensors of the row's slots, each kNone if it is not recorded.
void ArgumentSide::find_tensors(size_t row, Cursor& cursor) const {
    const auto& tensors = arguments_.tensors_;
    const uint32_t node = nodes_.data()[row];
    const size_t begin = find_first(node, cursor.hint);
    size_t end = begin;
    while (end < tensors.node.size() && tensors.node[end] == node) ++end;
    cursor.row = row;
    cursor.hint = end;
    cursor.tensors.clear();
    // The tensors mostly stand in the order of their places.
    size_t next = begin;
    while (next < end && tensors.place[next].io < io_) ++next;
    bool in_order = true;
    std::map<ArgumentTexts::Place, size_t> index;
    for (const auto& slot : template_of(row).slots) {
        const ArgumentTexts::Place place{io_, slot.index, slot.item};
        in_order = in_order && slot.index < kShared && next < end && tensors.place[next] == place;
        if (in_order) {
            cursor.tensors.push_back(next++);
            continue;
        }
        if (index.empty()) {
            for (size_t i = begin; i < end; ++i) index.emplace(tensors.place[i], i);  // the first of a place counts
        }
        const auto found = index.find(place);
        cursor.tensors.push_back(found == index.end() ? kNone : found->second);
    }
}

// The first tensor of the node or of a later one. The tensors of consecutive nodes are mostly adjacent, so the search
// starts where those of the previous node end.
size_t ArgumentSide::find_first(uint32_t node, size_t hint) const {
    const auto& nodes = arguments_.tensors_.node;
    const size_t n = nodes.size();
    size_t low = hint, high = hint;
    for (size_t step = 1; low > 0 && nodes[low - 1] >= node; step *= 2) {
        high = low;
        low -= std::min(low, step);
    }
    for (size_t step = 1; high < n && nodes[high] < node; step *= 2) {
        low = high + 1;
        high += std::min(n - high, step);
    }
    const auto begin = nodes.begin();
    return static_cast<size_t>(std::lower_bound(begin + low, begin + high, node) - begin);
}

std::string_view ArgumentSide::text_of(size_t which, size_t tensor, std::string_view none) const {
    const int32_t code = tensor == kNone ? -1 : arguments_.tensors_.codes[which].data()[tensor];
    return code < 0 ? none : std::string_view(arguments_.tensors_.texts[which][static_cast<size_t>(code)]);
}

// A null without a tensor is a null of the file.
char* ArgumentSide::write_tensor(size_t tensor, char* at) const {
    if (tensor == kNone) return append("null", at);
    const auto& tensors = arguments_.tensors_;
    *at++ = '[';
    for (size_t k = 0; k < ArgumentTexts::kNumbers; ++k) {
        if (tensors.known[k].data()[tensor]) {
            at = std::to_chars(at, at + kDigits, tensors.numbers[k].data()[tensor]).ptr;
        } else {
            at = append("null", at);
        }
        at = append(", ", at);
    }
    at = append(text_of(0, tensor, kNoDevice), at);
    *at++ = ']';
    return at;
}

void bind_argument_texts(nb::module_& module) {
    nb::class_<ArgumentTexts>(module, "ArgumentTexts", "Templates of the arguments of operators, and their tensors.")
        .def(nb::init<>())
        .def("add_template", &ArgumentTexts::add_template)
        .def("set_places", &ArgumentTexts::set_places)
        .def("set_numbers", &ArgumentTexts::set_numbers)
        .def("set_texts", &ArgumentTexts::set_texts);
    nb::class_<ArgumentSide>(module, "ArgumentSide", "The inputs or the outputs of some nodes as JSON, for row_texts.")
        .def(nb::init<const ArgumentTexts&, In<uint32_t>, In<uint32_t>, int32_t>(), nb::arg("arguments"), nb::arg("nodes"),
             nb::arg("templates"), nb::arg("io"), nb::keep_alive<1, 2>());
}
