// What sweeps over a graph share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "arrays.hpp"

// The edges into point v are first[v] .. first[v + 1], and each comes from a lower number.
inline size_t check_sweep(const In<int32_t>& first, const In<int32_t>& source, size_t points, size_t lags) {
    const size_t m = source.shape(0);
    if (first.shape(0) != points + 1 || first(0) != 0 || static_cast<size_t>(first(points)) != m || lags != m)
        throw nb::value_error("the edges do not fit the points");
    int32_t e = 0;
    for (size_t v = 0; v < points; ++v) {
        if (first(v + 1) < first(v) || static_cast<size_t>(first(v + 1)) > m) throw nb::value_error("the edges do not fit the points");
        for (; e < first(v + 1); ++e)
            if (source(e) < 0 || static_cast<size_t>(source(e)) >= v) throw nb::value_error("an edge goes backward");
    }
    return points;
}

// Differences of times, which wrap around where they are too long for 64 bits.
inline int64_t minus(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b)); }

// What a recording took beyond the floors of edges.
struct Recorded {
    const In<int32_t>& first;
    const In<int32_t>& source;
    const In<int64_t>& floor;
    const In<int64_t>& time;

    int64_t beyond(size_t v, int32_t e) const { return minus(minus(time(v), time(source(e))), floor(e)); }
    int64_t beyond(size_t v) const {
        if (first(v) == first(v + 1)) return 0;
        int64_t least = beyond(v, first(v));
        for (int32_t e = first(v) + 1; e < first(v + 1); ++e) least = std::min(least, beyond(v, e));
        return least;
    }
};
