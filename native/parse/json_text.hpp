// JSON as text: where a value ends, whether it is sound, and how it is written for a column.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "scalars.hpp"

namespace etloom {

inline const char* skip_space(const char* from, const char* to) {
    while (from < to && is_space(*from)) ++from;
    return from;
}

// Behind the closing quote of the string at `from`, or nullptr.
const char* string_end(const char* from, const char* to);

// The end of the JSON value at `from`, or nullptr when it goes on behind `to`. Brackets are counted, not matched.
const char* value_end(const char* from, const char* to);

// What is wrong with a text, the worst that is.
enum class Fault : uint8_t {
    kNone,
    kLong,        // more than a megabyte
    kNonFinite,   // inf and nan, which are no JSON, stand in it as numbers
    kBadEscape,   // a backslash that JSON does not know
    kNoJson,      // no JSON value, or nested deeper than any parser can follow
};

Fault fault_of_json(std::string_view json);
// quoted: the inside of a JSON string.
Fault fault_of_text(std::string_view quoted);

// Replaces the escapes of a JSON string's inside. Bad escapes are kept as they are.
std::string unescape(std::string_view quoted);

// The JSON value with ", " and ": " between its parts and no other white space, so that equal values are equal texts;
// inf and nan become strings, halves of surrogate pairs U+FFFD.
std::string canonical(std::string_view json);

}  // namespace etloom
