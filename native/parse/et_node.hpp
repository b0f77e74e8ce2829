// One node of an execution trace, from its JSON.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "et_fields.hpp"
#include "tokens.hpp"
#include "troubles.hpp"

namespace etloom::et {

// A list: its text, and where its tokens are.
struct Part {
    std::string_view text;
    Cursor at;
    bool there() const { return !text.empty(); }
    List list() const { return there() ? List(at) : List(); }
};

// The arguments or the results.
struct Side {
    Part values, shapes, types, strides;
};

// The texts are those of the file.
struct Node {
    std::string_view id, name, parent;
    Side sides[2];
    std::array<std::string_view, kFieldCount> tokens;
    uint32_t present = 0;  // bit i: kFields[i] was there
    std::string rest;      // attributes that no column holds, as `"key":value,`

    void keep(std::string_view key, std::string_view token);
    // Keeps what is not of the type expected.
    void odd(std::string_view key, std::string_view token, Troubles& troubles);
    void clear();
};

class NodeReader {
  public:
    explicit NodeReader(Troubles& troubles) : troubles_(troubles) {}
    // The node that `at` is at, which it steps over; nullptr: it is damaged.
    Node* read(Cursor& at);

  private:
    // An attribute is mostly written as that in its place in the node before: `front` is the text before its value.
    struct Learned {
        std::string front, name;
        ptrdiff_t tokens;
        size_t field;
    };

    bool member(std::string_view key, Cursor& at);
    bool side(std::string_view key, Cursor& at, Side& side);
    bool part(std::string_view key, Cursor& at, Part& into);
    bool attributes(Cursor& at);
    bool known_attribute(Cursor& at, const Learned& learned);
    bool attribute(Cursor& at, size_t place);
    size_t field_of(std::string_view key);
    void put(size_t field, std::string_view key, std::string_view token);

    Troubles& troubles_;
    Node node_;
    std::vector<Learned> learned_;  // by place in the list of attributes
    size_t next_field_ = 0;
};

}  // namespace etloom::et
