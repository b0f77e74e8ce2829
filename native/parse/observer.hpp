// The records of an observer's file (docs/observer-format.md), and the arguments of its operators.
//
// A file is 64-bit words, cut into chunks of the same length; nothing in it is trusted.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "buffer.hpp"

namespace etloom::observer {

struct Words {
    const uint64_t* data;
    size_t count;
    uint64_t operator[](size_t i) const { return data[i]; }
};

struct Definition {
    uint8_t kind;
    uint32_t stream, id;
    std::string bytes;
};

struct Note {
    uint32_t stream, id;
    uint64_t handle;
};

struct Window {
    bool opens;
    int64_t wall_ns;
};

// Where the arguments of each operator are. Those without any have the key 0.
struct Lists {
    Buffer<uint64_t> key;  // stream and form
    Buffer<uint64_t> first;
    Buffer<int64_t> words;
};

// Sorted by handle. Of several with one handle, and of several ends, the first in the file is here.
struct Operators {
    Buffer<uint64_t> handle, name;  // name: stream and number
    Buffer<int64_t> start, end, seq, rf_tid, os_tid, parent;  // parent: the row of the enclosing operator, or -1
    Buffer<uint16_t> fw_tid;
    Buffer<uint8_t> scope, has_end, raised;
    std::array<Lists, 2> lists;  // of inputs, of outputs
};

struct Records {
    uint64_t damaged_chunks = 0, first_damaged_chunk = 0, damaged_records = 0, damaged_definitions = 0;
    uint64_t duplicates = 0, ends_without_begin = 0, missing_parents = 0;
    std::vector<Definition> definitions;  // the first of each number, in the order of the file
    std::vector<Note> notes;
    std::vector<Window> windows;
    std::vector<uint64_t> forms;  // the distinct keys of the lists, sorted
    Operators operators;
};

// `declared`: the number of chunks in use, from the header. Words after the last whole chunk are ignored.
Records read_records(const Words& words, size_t chunk_words, uint64_t declared);

// Where the values are that a form describes.
struct Form {
    struct Piece {
        std::string text;
        char tag;  // i, d or c: a number at `word`; 0: the text
        uint32_t word;
    };
    struct Tensor {
        int32_t word;  // below 0: undefined
        bool has_offset;
    };
    uint64_t key;
    uint32_t words;
    std::vector<Piece> pieces;
    std::vector<Tensor> tensors;
};

struct Arguments {
    struct Side {
        Buffer<int32_t> form;  // of each operator, below 0 where it has none or it does not fit
        Buffer<int32_t> text;  // number of its text
    };
    uint64_t damaged = 0;
    std::array<Side, 2> sides;
    std::vector<std::string> texts;  // the first is that of no arguments
    // The tensors, by operator, side and place.
    Buffer<int64_t> operators, version, offset;
    Buffer<uint64_t> address, storage;
    Buffer<int32_t> tensor;  // the number of the tensor among those of all forms, of outputs behind those of inputs
};

// Whether each place that a form names is among its words.
bool is_sound(const Form& form);

// All forms are sound, each list lies inside of the words.
Arguments decode_arguments(const Words& words, const std::array<const uint64_t*, 2>& keys,
                           const std::array<const uint64_t*, 2>& firsts, const std::array<const int64_t*, 2>& sizes,
                           size_t operators, const std::vector<Form>& forms);

// Which of the rows refer to a new object at their address, and the number of the object, from 1, by address and time.
//
// An object is new when its address occurs first; when an operator created it and the address was last used before the
// operator began; and, with versions, when the last one was newer, unless that is an output (of the greatest version).
struct Incarnations {
    Buffer<uint8_t> is_new;
    Buffer<int64_t> number;
};
struct Uses {
    const uint64_t* address;
    const int64_t *time, *begin;
    const uint8_t* is_created;
    const int64_t* version;  // or null
    size_t rows;
};
Incarnations number_incarnations(const Uses& uses);

}  // namespace etloom::observer
