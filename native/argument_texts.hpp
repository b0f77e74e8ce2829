// The arguments of operators as JSON: the text around tensors, which repeats, and the text of each tensor.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.hpp"

// Templates of argument lists, and the tensors of all nodes.
class ArgumentTexts {
  public:
    void add_template(std::string value, std::string shape, const std::vector<std::pair<int32_t, int32_t>>& places,
                      const std::vector<std::string>& after_values, const std::vector<std::string>& after_shapes);
    // The tensors, sorted by node; io, index and item are their places.
    void set_places(In<uint32_t> node, In<int32_t> io, In<int32_t> index, In<int32_t> item);
    void set_numbers(size_t which, In<int64_t> numbers, In<bool> known);
    // Device, shape and stride, by their numbers in `texts`.
    void set_texts(size_t which, In<int32_t> codes, std::vector<std::string> texts);

  private:
    friend class ArgumentSide;

    static constexpr size_t kNumbers = 5;  // of a tensor: its id, the storage's, offset, elements, bytes of one

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
        size_t value_bytes, shape_bytes;  // without tensors
    };
    struct Tensors {
        std::vector<uint32_t> node;  // sorted
        std::vector<Place> place;
        std::array<In<int64_t>, kNumbers> numbers;
        std::array<In<bool>, kNumbers> known;
        std::array<In<int32_t>, 3> codes;  // of device, shape, stride; below 0: none
        std::array<std::vector<std::string>, 3> texts;
        std::array<size_t, 3> most_bytes{};  // of a text
    };

    std::vector<Template> templates_;
    Tensors tensors_;
};

// One side (inputs or outputs) of some nodes, whose values, shapes and strides are written row by row.
class ArgumentSide {
  public:
    enum Which : int32_t { kValues, kShapes, kStrides };

    // The state of a reader: the tensors of its current row, by slot, and where it looks for those of the next.
    struct Cursor {
        size_t row = SIZE_MAX, hint = 0;
        std::vector<size_t> tensors;
    };

    ArgumentSide(const ArgumentTexts& arguments, In<uint32_t> nodes, In<uint32_t> templates, int32_t io);
    size_t rows() const { return nodes_.shape(0); }
    size_t most_bytes(Which which, size_t row) const;
    // Writes the text of the row from `at` on, and returns its end.
    char* write(Which which, size_t row, char* at, Cursor& cursor) const;

  private:
    const ArgumentTexts::Template& template_of(size_t row) const { return arguments_.templates_[templates_.data()[row]]; }
    void find_tensors(size_t row, Cursor& cursor) const;
    size_t find_first(uint32_t node, size_t hint) const;
    char* write_tensor(size_t tensor, char* at) const;
    std::string_view text_of(size_t which, size_t tensor, std::string_view none) const;

    const ArgumentTexts& arguments_;
    In<uint32_t> nodes_, templates_;
    int32_t io_;
};
