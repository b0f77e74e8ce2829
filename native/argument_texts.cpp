// The arguments of operators as JSON: the text around tensors, which repeats, and the text of each tensor.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "bindings.hpp"

namespace {

constexpr size_t kNumbers = 5;          // of a tensor: its id, the storage's, offset, elements, bytes of one
constexpr int32_t kShared = INT16_MAX;  // the largest index, which all arguments behind it share

// Where a tensor is: side, argument, and item of a list.
struct Place {
    int32_t io, index, item;
    auto operator<=>(const Place&) const = default;
};

struct Slot {
    int32_t index, item;
    std::string after_value, after_shape;
};

struct Template {
    std::string value, shape;  // up to the first tensor
    std::vector<Slot> slots;
};

struct Tensors {
    std::vector<uint32_t> node;  // sorted
    std::vector<Place> place;
    std::array<std::vector<int64_t>, kNumbers> numbers;
    std::array<std::vector<bool>, kNumbers> known;
    std::array<std::vector<int32_t>, 3> codes;  // of device, shape, stride; below 0: none
    std::array<std::vector<std::string>, 3> texts;
};

// Texts one after the other, and where each ends.
struct Texts {
    Paged<uint8_t> bytes;
    Paged<int64_t> offsets{0};
    void add(std::string_view text) { bytes.insert(bytes.end(), text.begin(), text.end()); }
    void end() { offsets.push_back(static_cast<int64_t>(bytes.size())); }
};

class ArgumentTexts {
  public:
    void add_template(std::string value, std::string shape, const std::vector<std::pair<int32_t, int32_t>>& places,
                      const std::vector<std::string>& after_values, const std::vector<std::string>& after_shapes) {
        if (places.size() != after_values.size() || places.size() != after_shapes.size()) throw nb::value_error("a text per place");
        Template added{std::move(value), std::move(shape), {}};
        for (size_t i = 0; i < places.size(); ++i) added.slots.push_back({places[i].first, places[i].second, after_values[i], after_shapes[i]});
        templates_.push_back(std::move(added));
    }

    // The tensors, sorted by node; io, index and item are their places.
    void set_places(In<uint32_t> node, In<int32_t> io, In<int32_t> index, In<int32_t> item) {
        const size_t n = node.shape(0);
        if (io.shape(0) != n || index.shape(0) != n || item.shape(0) != n || !std::is_sorted(node.data(), node.data() + n)) {
            throw nb::value_error("the places are not those of sorted nodes");
        }
        tensors_.node.assign(node.data(), node.data() + n);
        tensors_.place.clear();
        for (size_t i = 0; i < n; ++i) tensors_.place.push_back({io(i), index(i), item(i)});
    }
    void set_numbers(size_t which, In<int64_t> numbers, In<bool> known) {
        if (which >= kNumbers || numbers.shape(0) != tensors_.node.size() || known.shape(0) != tensors_.node.size()) throw nb::value_error("a number per tensor");
        tensors_.numbers[which].assign(numbers.data(), numbers.data() + numbers.shape(0));
        tensors_.known[which].assign(known.data(), known.data() + known.shape(0));
    }
    // Device, shape and stride, by their numbers in `texts`.
    void set_texts(size_t which, In<int32_t> codes, std::vector<std::string> texts) {
        const auto is_good = [&](int32_t code) { return code < static_cast<int32_t>(texts.size()); };
        if (which >= 3 || codes.shape(0) != tensors_.node.size() || !std::all_of(codes.data(), codes.data() + codes.shape(0), is_good)) {
            throw nb::value_error("a text per tensor");
        }
        tensors_.codes[which].assign(codes.data(), codes.data() + codes.shape(0));
        tensors_.texts[which] = std::move(texts);
    }

    // Values, shapes and strides of one side of the nodes, each as offsets and bytes.
    nb::tuple format(In<uint32_t> nodes, In<uint32_t> templates, int32_t io) const {
        const size_t n = nodes.shape(0);
        if (templates.shape(0) != n || !std::all_of(templates.data(), templates.data() + n, [&](uint32_t t) { return t < templates_.size(); })) {
            throw nb::value_error("a template per node");
        }
        for (size_t k = 0; k < kNumbers; ++k) {
            if (tensors_.numbers[k].size() != tensors_.node.size() || tensors_.codes[std::min<size_t>(k, 2)].size() != tensors_.node.size()) throw nb::value_error("the tensors are incomplete");
        }
        std::array<Texts, 3> out;
        {
            nb::gil_scoped_release release;
            size_t hint = 0;
            for (size_t i = 0; i < n; ++i) hint = add_row(nodes(i), templates_[templates(i)], io, out, hint);
        }
        nb::list columns;
        for (auto& texts : out) columns.append(nb::make_tuple(to_numpy(std::move(texts.offsets)), to_numpy(std::move(texts.bytes))));
        return nb::tuple(columns);
    }

  private:
    static constexpr size_t kNone = SIZE_MAX;

    // Searches the tensors of the node from the place `hint` on, and returns where they end.
    size_t add_row(uint32_t node, const Template& text, int32_t io, std::array<Texts, 3>& out, size_t hint) const {
        auto& [values, shapes, strides] = out;
        values.add(text.value);
        shapes.add(text.shape);
        strides.add(text.shape);
        if (!text.slots.empty()) {
            const size_t begin = find_first(node, hint);
            size_t end = begin;
            while (end < tensors_.node.size() && tensors_.node[end] == node) ++end;
            hint = end;
            std::map<Place, size_t> index;
            // The tensors mostly stand in the order of their places.
            size_t next = begin;
            while (next < end && tensors_.place[next].io < io) ++next;
            bool in_order = true;
            for (const Slot& slot : text.slots) {
                const Place place{io, slot.index, slot.item};
                in_order = in_order && slot.index < kShared && next < end && tensors_.place[next] == place;
                const size_t tensor = in_order ? next++ : find(place, begin, end, index);
                add_tensor(tensor, values);
                values.add(slot.after_value);
                shapes.add(text_of(1, tensor, "[]"));
                shapes.add(slot.after_shape);
                strides.add(text_of(2, tensor, "[]"));
                strides.add(slot.after_shape);
            }
        }
        for (auto& texts : out) texts.end();
        return hint;
    }

    // The first tensor of the node or of a later one. The tensors of consecutive nodes are mostly adjacent, so the search
    // starts where those of the previous node end.
    size_t find_first(uint32_t node, size_t hint) const {
        const auto& nodes = tensors_.node;
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

    // The first tensor at the place, or kNone.
    size_t find(const Place& place, size_t begin, size_t end, std::map<Place, size_t>& index) const {
        if (index.empty()) {
            for (size_t i = begin; i < end; ++i) index.emplace(tensors_.place[i], i);
        }
        const auto at = index.find(place);
        return at == index.end() ? kNone : at->second;
    }

    std::string_view text_of(size_t which, size_t tensor, std::string_view none) const {
        const int32_t code = tensor == kNone ? -1 : tensors_.codes[which][tensor];
        return code < 0 ? none : std::string_view(tensors_.texts[which][static_cast<size_t>(code)]);
    }

    // A null without a tensor is a null of the file.
    void add_tensor(size_t tensor, Texts& out) const {
        if (tensor == kNone) return out.add("null");
        out.add("[");
        for (size_t k = 0; k < kNumbers; ++k) {
            char digits[24];
            const auto end = std::to_chars(digits, digits + sizeof digits, tensors_.numbers[k][tensor]).ptr;
            out.add(tensors_.known[k][tensor] ? std::string_view(digits, static_cast<size_t>(end - digits)) : "null");
            out.add(", ");
        }
        out.add(text_of(0, tensor, "\"\""));
        out.add("]");
    }

    std::vector<Template> templates_;
    Tensors tensors_;
};

}  // namespace

void bind_argument_texts(nb::module_& module) {
    nb::class_<ArgumentTexts>(module, "ArgumentTexts", "Formats the arguments of operators as JSON.")
        .def(nb::init<>())
        .def("add_template", &ArgumentTexts::add_template)
        .def("set_places", &ArgumentTexts::set_places)
        .def("set_numbers", &ArgumentTexts::set_numbers)
        .def("set_texts", &ArgumentTexts::set_texts)
        .def("format", &ArgumentTexts::format);
}
