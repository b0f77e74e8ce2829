// What sweeps over a graph share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "arrays.hpp"
#include "times.hpp"

// The edges into point v are first[v] .. first[v + 1], and each comes from a lower number.
inline size_t check_sweep(const In<int32_t>& first, const In<int32_t>& source, size_t points, size_t lags) {
    const size_t m = source.shape(0);
    if (first.shape(0) != points + 1 || first(0) != 0 || static_cast<size_t>(first(points)) != m || lags != m)
        throw nb::value_error("the edges do not fit the points");
    const int32_t *const bound = first.data(), *const from = source.data();
    int32_t e = 0;
    for (size_t v = 0; v < points; ++v) {
        const int32_t to = bound[v + 1];
        if (to < bound[v] || static_cast<size_t>(to) > m) throw nb::value_error("the edges do not fit the points");
        for (; e < to; ++e)
            if (from[e] < 0 || static_cast<size_t>(from[e]) >= v) throw nb::value_error("an edge goes backward");
    }
    return points;
}

// What a recording took beyond the floors of edges.
struct Recorded {
    Recorded(const In<int32_t>& bounds, const In<int32_t>& sources, const In<int64_t>& floors, const In<int64_t>& times)
        : first(bounds.data()), source(sources.data()), floor(floors.data()), time(times.data()) {}

    int64_t beyond(size_t v, int32_t e) const { return minus(minus(time[v], time[source[e]]), floor[e]); }
    int64_t beyond(size_t v) const {
        const int32_t from = first[v], to = first[v + 1];
        if (from == to) return 0;
        int64_t least = beyond(v, from);
        for (int32_t e = from + 1; e < to; ++e) least = std::min(least, beyond(v, e));
        return least;
    }

    const int32_t* first;
    const int32_t* source;
    const int64_t* floor;
    const int64_t* time;
};
