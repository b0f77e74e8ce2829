// The end of a JSON value, from eight bytes at a time, without tokens.
#pragma once
#include <array>
#include <bit>
#include <cstdint>

#include "lanes.hpp"
#include "scalars.hpp"

namespace etloom {

enum class ValueType : uint8_t { kNone, kText, kNumber, kWord, kNested };

inline constexpr auto kValueTypes = [] {
    std::array<ValueType, 256> types{};
    for (int c = 'a'; c <= 'z'; ++c) types[static_cast<size_t>(c)] = ValueType::kWord;
    for (int c = 'A'; c <= 'Z'; ++c) types[static_cast<size_t>(c)] = ValueType::kWord;
    for (const char c : {'0', '1', '2', '3', '4', '5', '6', '7', '8', '9', '-', '+', '.'}) types[static_cast<size_t>(c)] = ValueType::kNumber;
    types['"'] = ValueType::kText;
    types['['] = types['{'] = ValueType::kNested;
    return types;
}();
inline ValueType type_of(char c) { return kValueTypes[static_cast<uint8_t>(c)]; }

// Returns the end of the string whose opening quote is at `p`. nullptr: it is not closed before `to`, or contains bytes that
// JSON forbids or that may be damaged UTF-8.
inline const char* scan_text(const char* p, const char* to) {
    for (++p; p < to;) {
        const Lanes lanes(p);
        const Lanes::Mask marks = lanes.equal('"') | lanes.equal('\\') | lanes.below_or_high(' ');
        if (marks == 0) {
            p += Lanes::kCount;
            continue;
        }
        p += Lanes::first(marks);
        if (p >= to) return nullptr;
        if (*p == '"') return p + 1;
        if (*p != '\\' || to - p < 2 || static_cast<int8_t>(p[1]) < ' ') return nullptr;
        p += 2;
    }
    return nullptr;
}

// Returns the end of the array or object at `p`; brackets are counted, not matched, as by `Cursor::value`.
inline const char* scan_nested(const char* p, const char* to) {
    ptrdiff_t depth = 0;
    while (p < to) {
        const Lanes lanes(p);
        // For the tokens, a quote behind a backslash does not open a string, even outside of strings: left to them.
        const Lanes::Mask quotes = lanes.equal('"') | lanes.equal('\\') | lanes.high();
        const Lanes::Mask opening = lanes.equal('[') | lanes.equal('{'), closing = lanes.equal(']') | lanes.equal('}');
        const Lanes::Mask before = quotes == 0 ? ~Lanes::Mask{0} : Lanes::up_to(Lanes::first(quotes));
        if (std::popcount(closing & before) < depth) {
            depth += std::popcount(opening & before) - std::popcount(closing & before);
        } else {
            for (Lanes::Mask left = (opening | closing) & before; left != 0; left &= left - 1) {
                depth += (opening & left & -left) != 0 ? 1 : -1;
                if (depth == 0) {
                    p += Lanes::first(left) + 1;
                    return p <= to ? p : nullptr;
                }
            }
        }
        if (quotes == 0) {
            p += Lanes::kCount;
            continue;
        }
        p += Lanes::first(quotes);
        if (p >= to || *p != '"') return nullptr;
        p = scan_text(p, to);
        if (p == nullptr) return nullptr;
    }
    return nullptr;
}

// Returns the end of the digits at `p`. The text contains another byte.
inline const char* scan_digits(const char* p) {
    for (;;) {
        const ptrdiff_t count = count_digits(eight_bytes(p) ^ kZeros);
        p += count;
        if (count < 8) return p;
    }
}

// Returns the end of the value at `p`. nullptr: it does not end before `to`, or its tokens have to be read.
inline const char* scan_value(const char* p, const char* to) {
    switch (type_of(*p)) {
        case ValueType::kText: return scan_text(p, to);
        case ValueType::kNested: return scan_nested(p, to);
        case ValueType::kNumber:
            p = scan_digits(*p == '-' ? p + 1 : p);
            if (*p == '.') p = scan_digits(p + 1);
            [[fallthrough]];
        case ValueType::kWord:
            while (p < to && (type_of(*p) == ValueType::kWord || type_of(*p) == ValueType::kNumber)) ++p;
            return p < to ? p : nullptr;
        case ValueType::kNone: break;
    }
    return nullptr;
}

}  // namespace etloom
