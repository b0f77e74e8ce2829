// Numbers from the text of a JSON token, exactly. A token stands in a buffer with `kPadding` behind it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

namespace etloom {

// Bytes behind a text that are read though they are not looked at, here and by simdjson.
constexpr size_t kPadding = 64;

inline bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

inline std::string_view trim(std::string_view token) {
    while (!token.empty() && is_space(token.back())) token.remove_suffix(1);
    while (!token.empty() && is_space(token.front())) token.remove_prefix(1);
    return token;
}

inline bool is_text(std::string_view token) { return token.size() >= 2 && token.front() == '"' && token.back() == '"'; }
inline std::string_view inside(std::string_view text) { return text.substr(1, text.size() - 2); }

inline uint64_t eight_bytes(const char* from) {
    uint64_t word;
    std::memcpy(&word, from, 8);
    return word;
}

// memcmp costs a call, and these texts are short.
inline bool same(std::string_view a, std::string_view b) {
    const size_t n = a.size();
    if (n != b.size()) return false;
    const char *p = a.data(), *q = b.data();
    if (n < 8) {
        for (size_t i = 0; i < n; ++i) {
            if (p[i] != q[i]) return false;
        }
        return true;
    }
    for (size_t i = 0; i + 8 < n; i += 8) {
        if (eight_bytes(p + i) != eight_bytes(q + i)) return false;
    }
    return eight_bytes(p + n - 8) == eight_bytes(q + n - 8);
}

// Whether the text is a JSON number, true, false or null.
bool is_scalar(std::string_view token);

// inf and nan as C and Python print them, which PyTorch writes as they are though JSON has no word for them.
bool is_nonfinite(std::string_view token);

constexpr uint64_t kPowersOfTen[] = {1, 10, 100, 1000, 10'000, 100'000, 1'000'000, 10'000'000, 100'000'000};

// Each byte of a text that is a digit becomes 0 to 9, and no other does.
constexpr uint64_t kZeros = 0x3030303030303030;

// The number whose eight digits are the lanes of a word, the first one in the lowest.
[[gnu::always_inline]] inline uint64_t eight_digits(uint64_t lanes) {
    lanes = lanes * 10 + (lanes >> 8);
    return ((lanes & 0x000000FF000000FF) * 0x000F424000000064 + ((lanes >> 16) & 0x000000FF000000FF) * 0x0000271000000001) >> 32;
}

// The number of digits at the beginning of eight bytes, which were combined with `kZeros` by exclusive or.
[[gnu::always_inline]] inline ptrdiff_t count_digits(uint64_t word) {
    constexpr uint64_t kHigh = 0xF0F0F0F0F0F0F0F0, kSixes = 0x0606060606060606;
    const uint64_t others = (word | (word + kSixes)) & kHigh;
    return others == 0 ? 8 : __builtin_ctzll(others) / 8;
}

// A run of decimal digits. More than 19 do not fit the value.
struct Digits {
    uint64_t value = 0;
    ptrdiff_t count = 0;
};

// The digits at `p`, which is moved behind them: eight at a time, as the lanes of one word.
[[gnu::always_inline]] inline Digits digits(const char*& p, const char* end) {
    Digits found;
    for (;;) {
        const uint64_t word = eight_bytes(p) ^ kZeros;
        const ptrdiff_t count = std::min<ptrdiff_t>(count_digits(word), end - p);
        if (count == 0) return found;
        found.value = found.value * kPowersOfTen[count] + eight_digits(word << (8 * (8 - count)));
        found.count += count;
        p += count;
        if (count < 8 || found.count > 19) return found;
    }
}

// Parses at most 15 digits, and perhaps a point and at most three places, as a number times 1000, which fits. `p` is moved
// behind them.
[[gnu::always_inline]] inline bool parse_short_decimal(const char*& p, const char* end, int64_t& value) {
    const Digits before = digits(p, end);
    if (before.count == 0 || before.count > 15) return false;
    Digits behind;
    if (p < end && *p == '.') behind = digits(++p, end);
    if (behind.count > 3) return false;
    value = static_cast<int64_t>(before.value * 1000 + behind.value * kPowersOfTen[3 - behind.count]);
    return true;
}

// Parses at most 18 digits, perhaps behind a minus. `p` is moved behind them.
[[gnu::always_inline]] inline bool parse_short_integer(const char*& p, const char* end, int64_t& value) {
    const bool negative = p < end && *p == '-';
    if (negative) ++p;
    const Digits found = digits(p, end);
    if (found.count == 0 || found.count > 18) return false;
    value = negative ? -static_cast<int64_t>(found.value) : static_cast<int64_t>(found.value);
    return true;
}

std::optional<int64_t> any_decimal(std::string_view token, int scale);
std::optional<int64_t> any_whole(std::string_view token);

// What is written as Kineto writes times, with three places, times 1000: up to 13 digits, the point taken out, as two
// words that do not wait for each other. False for any other text.
[[gnu::always_inline]] inline bool three_places(std::string_view token, int64_t& value) {
    constexpr uint64_t kHigh = 0x8080808080808080, kOverNine = 0x7676767676767676;
    const size_t size = token.size();
    if (size < 5 || size > 17 || token[size - 4] != '.') return false;
    const char* p = token.data();
    const size_t before = size - 4, near = std::min<size_t>(before, 5);
    const uint64_t whole = (eight_bytes(p + before - near) ^ kZeros) & ((uint64_t{1} << (8 * near)) - 1);
    const uint64_t places = (eight_bytes(p + before + 1) ^ kZeros) << (8 * near);
    const uint64_t low = (whole | places) << (8 * (5 - near));
    const uint64_t high = before > near ? (eight_bytes(p) ^ kZeros) << (8 * (13 - before)) : 0;
    if (((low + kOverNine) | low | (high + kOverNine) | high) & kHigh) return false;
    value = static_cast<int64_t>(eight_digits(high) * kPowersOfTen[8] + eight_digits(low));
    return true;
}

// Parses digits, a point and three places, as Kineto prints times, as a number times 1000; `p` is moved behind it. False for
// any other text, and for more than 13 digits before the point.
[[gnu::always_inline]] inline bool parse_kineto_time(const char*& p, const char* end, int64_t& value) {
    ptrdiff_t before = count_digits(eight_bytes(p) ^ kZeros);
    if (before == 8) before += count_digits(eight_bytes(p + 8) ^ kZeros);
    if (end - p < before + 5 || static_cast<uint8_t>(p[before + 4] - '0') < 10) return false;
    if (!three_places({p, static_cast<size_t>(before + 4)}, value)) return false;
    p += before + 4;
    return true;
}

// The value times 1000 as a whole number, halves away from zero; nothing for what is no number or does not fit. Exact
// where a double is not: 1700000000000000.123 us has 19 digits in ns.
inline std::optional<int64_t> thousandths(std::string_view token) {
    if (token.empty()) return {};
    if (int64_t value; three_places(token, value)) return value;
    const char *p = token.data(), *const end = p + token.size();
    if (int64_t value; parse_short_decimal(p, end, value) && p == end) return value;
    return any_decimal(token, 3);
}

// The same as `whole`, for a text that is not one to eight digits.
std::optional<int64_t> long_whole(std::string_view token);

// A whole number, also one written as a string or with a fraction of zeros. Inlined: a result that is
// written to memory in two parts and read in one makes the processor wait for longer than the number takes.
[[gnu::always_inline]] inline std::optional<int64_t> whole(std::string_view token) {
    constexpr uint64_t kHigh = 0x8080808080808080, kOverNine = 0x7676767676767676;
    if (const size_t count = token.size(); count - 1 < 8) {
        const uint64_t lanes = (eight_bytes(token.data()) ^ kZeros) << (64 - 8 * count);
        if ((((lanes + kOverNine) | lanes) & kHigh) == 0) return static_cast<int64_t>(eight_digits(lanes));
    }
    return long_whole(token);
}

std::optional<uint64_t> unsigned_whole(std::string_view token);
std::optional<double> real(std::string_view token);

// Append a number as JSON: a real one with a point or an exponent; inf and nan as C prints them.
void append_whole(std::string& json, int64_t number);
void append_real(std::string& json, double real);

}  // namespace etloom
