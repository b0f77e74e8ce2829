// Numbers from the text of a JSON token, exactly.
#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>
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

// Whether the text is a JSON number, true, false or null.
inline bool is_scalar(std::string_view token) {
    if (token == "true" || token == "false" || token == "null") return true;
    size_t i = !token.empty() && token[0] == '-' ? 1 : 0;
    const auto digits = [&] {
        const size_t from = i;
        while (i < token.size() && token[i] >= '0' && token[i] <= '9') ++i;
        return i - from;
    };
    const bool zero = i < token.size() && token[i] == '0';
    const size_t before = digits();
    if (before == 0 || (zero && before > 1)) return false;
    if (i < token.size() && token[i] == '.') {
        ++i;
        if (digits() == 0) return false;
    }
    if (i < token.size() && (token[i] == 'e' || token[i] == 'E')) {
        ++i;
        if (i < token.size() && (token[i] == '+' || token[i] == '-')) ++i;
        if (digits() == 0) return false;
    }
    return i == token.size();
}

// inf and nan as C and Python print them, which PyTorch writes as they are though JSON has no word for them.
inline bool is_nonfinite(std::string_view token) {
    if (!token.empty() && (token[0] == '-' || token[0] == '+')) token.remove_prefix(1);
    for (const std::string_view word : {"inf", "nan", "Infinity", "NaN", "Inf", "infinity"}) {
        if (token == word) return true;
    }
    return false;
}

// The value times 10^scale as a whole number, halves away from zero; nothing for what is no number or does not fit.
// Exact where a double is not: 1700000000000000.123 us has 19 digits in ns.
inline std::optional<int64_t> decimal(std::string_view token, int scale) {
    if (token.size() <= 19 && scale <= 3) {
        // The common case: digits, perhaps a point and no more places than asked for.
        uint64_t value = 0;
        const char *p = token.data(), *const end = p + token.size();
        while (p < end && static_cast<unsigned char>(*p - '0') < 10) value = value * 10 + static_cast<uint64_t>(*p++ - '0');
        const auto before = p - token.data();
        const bool digits = before > 0 && before <= 15;  // with three places more they fit
        int left = scale;
        if (digits && p < end && *p == '.') {
            ++p;
            while (p < end && left > 0 && static_cast<unsigned char>(*p - '0') < 10) {
                value = value * 10 + static_cast<uint64_t>(*p++ - '0');
                --left;
            }
        }
        if (digits && p == end) {
            constexpr uint64_t kPowers[] = {1, 10, 100, 1000};
            return static_cast<int64_t>(value * kPowers[left]);
        }
    }
    // The exponent first: it says how many places are wanted.
    const size_t e = token.find_first_of("eE");
    if (e != std::string_view::npos) {
        std::string_view power = token.substr(e + 1);
        token = token.substr(0, e);
        const bool down = !power.empty() && power[0] == '-';
        if (down || (!power.empty() && power[0] == '+')) power.remove_prefix(1);
        int exponent = 0;
        if (power.empty()) return {};
        for (const char c : power) {
            if (c < '0' || c > '9' || exponent > 100) return {};
            exponent = exponent * 10 + (c - '0');
        }
        scale += down ? -exponent : exponent;
    }
    size_t i = 0;
    const bool negative = !token.empty() && token[0] == '-';
    if (negative) ++i;
    uint64_t value = 0;
    int places = 0;
    bool digits = false, point = false, up = false, dropped = false;
    for (; i < token.size(); ++i) {
        const char c = token[i];
        if (c == '.' && !point) {
            point = true;
            continue;
        }
        if (c < '0' || c > '9') return {};
        digits = true;
        if (point && places >= scale) {
            if (!dropped && places == scale) up = c >= '5';
            dropped = true;
            continue;
        }
        if (value > (UINT64_MAX - 9) / 10) return {};
        value = value * 10 + static_cast<uint64_t>(c - '0');
        if (point) ++places;
    }
    if (!digits) return {};
    for (int shift = scale - places; shift > 0 && value != 0; --shift) {
        if (value > UINT64_MAX / 10) return {};
        value *= 10;
    }
    for (int shift = scale - places; shift < 0; ++shift) {
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
    // A negative power would be rounded.
    if (token.find("e-") != std::string_view::npos || token.find("E-") != std::string_view::npos) return {};
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
