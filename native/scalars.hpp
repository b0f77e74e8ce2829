// Numbers from the text of a JSON token, exactly.
#pragma once
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

namespace etloom {

inline std::string_view trim(std::string_view token) {
    const auto is_space = [](char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; };
    while (!token.empty() && is_space(token.back())) token.remove_suffix(1);
    while (!token.empty() && is_space(token.front())) token.remove_prefix(1);
    return token;
}

inline bool is_text(std::string_view token) { return token.size() >= 2 && token.front() == '"' && token.back() == '"'; }
inline std::string_view inside(std::string_view text) { return text.substr(1, text.size() - 2); }

// memcmp costs a call, and these texts are short.
inline bool same(std::string_view a, std::string_view b) {
    const size_t n = a.size();
    if (n != b.size()) return false;
    const char *p = a.data(), *q = b.data();
    const auto load = [](const char* from) {
        uint64_t word;
        std::memcpy(&word, from, 8);
        return word;
    };
    if (n < 8) {
        for (size_t i = 0; i < n; ++i) {
            if (p[i] != q[i]) return false;
        }
        return true;
    }
    for (size_t i = 0; i + 8 < n; i += 8) {
        if (load(p + i) != load(q + i)) return false;
    }
    return load(p + n - 8) == load(q + n - 8);
}

// The value times 10^scale as a whole number, halves away from zero; nothing for what is no number or does not fit.
// Exact where a double is not: 1700000000000000.123 us has 19 digits in ns.
inline std::optional<int64_t> decimal(std::string_view token, int scale) {
    if (token.size() <= 19 && scale <= 3) {
        // The common case: digits, perhaps a point and no more places than asked for.
        int64_t value = 0;
        const char *p = token.data(), *const end = p + token.size();
        while (p < end && static_cast<unsigned char>(*p - '0') < 10) value = value * 10 + (*p++ - '0');
        const auto before = p - token.data();
        const bool digits = before > 0 && before <= 15;  // with three places more they fit
        int left = scale;
        if (digits && p < end && *p == '.') {
            ++p;
            while (p < end && left > 0 && static_cast<unsigned char>(*p - '0') < 10) {
                value = value * 10 + (*p++ - '0');
                --left;
            }
        }
        if (digits && p == end) {
            constexpr int64_t kPowers[] = {1, 10, 100, 1000};
            return value * kPowers[left];
        }
    }
    size_t i = 0;
    const bool negative = i < token.size() && token[i] == '-';
    if (negative) ++i;
    uint64_t value = 0;
    int digits = 0, places = 0;
    bool point = false, up = false, dropped = false;
    for (; i < token.size(); ++i) {
        const char c = token[i];
        if (c == '.') {
            if (point) return {};
            point = true;
            continue;
        }
        if (c < '0' || c > '9') break;
        ++digits;
        if (point && places == scale) {
            if (!dropped) up = c >= '5';
            dropped = true;
            continue;
        }
        if (value > (UINT64_MAX - 9) / 10) return {};
        value = value * 10 + static_cast<uint64_t>(c - '0');
        if (point) ++places;
    }
    if (digits == 0) return {};
    int exponent = 0;
    if (i < token.size()) {
        if (token[i] != 'e' && token[i] != 'E') return {};
        ++i;
        bool down = false;
        if (i < token.size() && (token[i] == '+' || token[i] == '-')) down = token[i++] == '-';
        if (i == token.size()) return {};
        for (; i < token.size(); ++i) {
            if (token[i] < '0' || token[i] > '9' || exponent > 100) return {};
            exponent = exponent * 10 + (token[i] - '0');
        }
        // A dropped digit would be wanted again: rare enough to be refused.
        if (dropped && exponent != 0) return {};
        if (down) exponent = -exponent;
    }
    for (int shift = scale - places + exponent; shift > 0; --shift) {
        if (value > UINT64_MAX / 10) return {};
        value *= 10;
    }
    for (int shift = scale - places + exponent; shift < 0; ++shift) {
        up = value % 10 >= 5;
        value /= 10;
    }
    if (up) ++value;
    if (value > static_cast<uint64_t>(INT64_MAX)) return {};
    return negative ? -static_cast<int64_t>(value) : static_cast<int64_t>(value);
}

// A whole number, also one written as a string or with a fraction of zeros.
inline std::optional<int64_t> whole(std::string_view token) {
    if (is_text(token)) token = inside(token);
    if (const size_t point = token.find('.'); point != std::string_view::npos) {
        if (token.find_first_not_of('0', point + 1) != std::string_view::npos) return {};
        token = token.substr(0, point);
    }
    return decimal(token, 0);
}

inline std::optional<uint64_t> unsigned_whole(std::string_view token) {
    if (is_text(token)) token = inside(token);
    if (token.empty() || token.size() > 20) return {};
    unsigned __int128 value = 0;
    for (const char c : token) {
        if (c < '0' || c > '9') return {};
        value = value * 10 + static_cast<unsigned>(c - '0');
    }
    if (value > UINT64_MAX) return {};
    return static_cast<uint64_t>(value);
}

std::optional<double> real(std::string_view token);

}  // namespace etloom
