// Arithmetic of times, which a file may put anywhere in 64 bits.
#pragma once

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
