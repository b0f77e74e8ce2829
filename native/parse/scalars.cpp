// Numbers that are not written the common way; see scalars.hpp.
#include "scalars.hpp"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <locale>
#include <sstream>
#include <string>

namespace etloom {

bool is_scalar(std::string_view token) {
    if (token == "true" || token == "false" || token == "null") return true;
    size_t i = !token.empty() && token[0] == '-' ? 1 : 0;
    const auto skip_digits = [&] {
        const size_t from = i;
        while (i < token.size() && token[i] >= '0' && token[i] <= '9') ++i;
        return i - from;
    };
    const bool zero = i < token.size() && token[i] == '0';
    const size_t before = skip_digits();
    if (before == 0 || (zero && before > 1)) return false;
    if (i < token.size() && token[i] == '.') {
        ++i;
        if (skip_digits() == 0) return false;
    }
    if (i < token.size() && (token[i] == 'e' || token[i] == 'E')) {
        ++i;
        if (i < token.size() && (token[i] == '+' || token[i] == '-')) ++i;
        if (skip_digits() == 0) return false;
    }
    return i == token.size();
}

bool is_nonfinite(std::string_view token) {
    if (!token.empty() && (token[0] == '-' || token[0] == '+')) token.remove_prefix(1);
    for (const std::string_view word : {"inf", "nan", "Infinity", "NaN", "Inf", "infinity"}) {
        if (token == word) return true;
    }
    return false;
}

// The value times 10^scale.
std::optional<int64_t> any_decimal(std::string_view token, int scale) {
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

std::optional<int64_t> any_whole(std::string_view token) {
    if (is_text(token)) token = inside(token);
    if (const size_t point = token.find('.'); point != std::string_view::npos) {
        if (token.find_first_not_of('0', point + 1) != std::string_view::npos) return {};
        token = token.substr(0, point);
    }
    // A negative power would be rounded.
    if (token.find("e-") != std::string_view::npos || token.find("E-") != std::string_view::npos) return {};
    return any_decimal(token, 0);
}

std::optional<int64_t> long_whole(std::string_view token) {
    if (token.empty()) return {};
    const char *p = token.data(), *const end = p + token.size();
    if (int64_t value; parse_short_integer(p, end, value) && p == end) return value;
    return any_whole(token);
}

std::optional<uint64_t> unsigned_whole(std::string_view token) {
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

std::optional<double> real(std::string_view token) {
    if (is_text(token)) token = inside(token);
    double value = 0;
#ifdef __cpp_lib_to_chars
    const auto [end, error] = std::from_chars(token.data(), token.data() + token.size(), value);
    if (error != std::errc{} || end != token.data() + token.size() || value - value != 0) return {};
#else  // the C++ library of macOS reads no doubles so
    std::istringstream stream{std::string(token)};
    stream.imbue(std::locale::classic());
    if (!is_scalar(token) || !(stream >> value)) return {};
#endif
    return value;
}

void append_whole(std::string& json, int64_t number) {
    char text[24];
    json.append(text, std::to_chars(text, text + sizeof text, number).ptr);
}

void append_real(std::string& json, double real) {
    char text[40];
#ifdef __cpp_lib_to_chars
    const std::string_view digits(text, static_cast<size_t>(std::to_chars(text, text + sizeof text, real).ptr - text));
#else
    const std::string_view digits(text, static_cast<size_t>(std::snprintf(text, sizeof text, "%.17g", real)));
#endif
    json += digits;
    if (std::isfinite(real) && digits.find_first_of(".e") == std::string_view::npos) json += ".0";
}

}  // namespace etloom
