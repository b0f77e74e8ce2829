// Arithmetic of times, which a file may put anywhere in 64 bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

// Sums and differences of times, which wrap around where they are too long for 64 bits.
inline int64_t plus(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); }
inline int64_t minus(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b)); }

// A sum of times, the greatest or the least there is where it is too long for 64 bits.
inline int64_t bounded_plus(int64_t a, int64_t b) {
    using Limits = std::numeric_limits<int64_t>;
    if (b > 0) return a > Limits::max() - b ? Limits::max() : a + b;
    return a < Limits::min() - b ? Limits::min() : a + b;
}

// A number from 0 to 2^51, to the nearest whole number (of two the even one), without a call of a library.
inline int64_t round_small(double number) {
    constexpr double WHOLE = 0x1.8p52;
    return static_cast<int64_t>((number + WHOLE) - WHOLE);
}

// A lag times a factor, to the nearest whole number (of two the even one), as numpy rounds.
inline int64_t scale(int64_t lag, double factor) {
    constexpr double MOST = 0x1p62;
    const double scaled = std::min(static_cast<double>(lag) * factor, MOST);
    if (scaled >= 0 && scaled < 0x1p51) return round_small(scaled);
    return static_cast<int64_t>(std::nearbyint(scaled));
}
