// A graph of points in time: sweeps along the order in which every edge goes forward.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>

#include "arrays.hpp"
#include "bindings.hpp"
#include "sweeps.hpp"

namespace {

void schedule(In<int32_t> first, In<int32_t> source, In<int64_t> lag, Out<int64_t> time) {
    const size_t n = check_sweep(first, source, time.shape(0), lag.shape(0));
    nb::gil_scoped_release release;
    const int32_t *const bound = first.data(), *const from = source.data();
    const int64_t* const lags = lag.data();
    int64_t* const times = time.data();
    for (size_t v = 0; v < n; ++v) {
        int32_t e = bound[v];
        const int32_t to = bound[v + 1];
        if (e == to) continue;
        int64_t at = plus(times[from[e]], lags[e]);
        while (++e < to) at = std::max(at, plus(times[from[e]], lags[e]));
        times[v] = at;
    }
}

void schedule_scaled(In<int32_t> first, In<int32_t> source, In<int64_t> lag, In<uint8_t> basis, uint8_t scaled,
                     double factor, Out<int64_t> time) {
    const size_t n = check_sweep(first, source, time.shape(0), lag.shape(0));
    if (basis.shape(0) != lag.shape(0)) throw nb::value_error("the bases do not fit the edges");
    nb::gil_scoped_release release;
    const int32_t *const bound = first.data(), *const from = source.data();
    const int64_t* const lags = lag.data();
    const uint8_t* const bases = basis.data();
    int64_t* const times = time.data();
    const auto arrive = [=](int32_t e) {
        const bool changes = bases[e] == scaled && lags[e] > 0;
        return plus(times[from[e]], changes ? scale(lags[e], factor) : lags[e]);
    };
    for (size_t v = 0; v < n; ++v) {
        int32_t e = bound[v];
        const int32_t to = bound[v + 1];
        if (e == to) continue;
        int64_t at = arrive(e);
        while (++e < to) at = std::max(at, arrive(e));
        times[v] = at;
    }
}

// With the recorded times the lags are floors, and what binding edges took beyond them is added.
void latest(In<int32_t> first, In<int32_t> source, In<int64_t> lag, std::optional<In<int64_t>> recorded,
            Out<int64_t> time) {
    const size_t n = check_sweep(first, source, time.shape(0), lag.shape(0));
    if (recorded && recorded->shape(0) != n) throw nb::value_error("the edges do not fit the points");
    nb::gil_scoped_release release;
    const int32_t *const bound = first.data(), *const from = source.data();
    const int64_t* const lags = lag.data();
    int64_t* const times = time.data();
    const Recorded record{first, source, lag, recorded ? *recorded : lag};
    for (size_t v = n; v-- > 0;) {
        const int64_t own = times[v], least = recorded ? record.beyond(v) : 0;
        for (int32_t e = bound[v]; e < bound[v + 1]; ++e) {
            const int64_t beyond = recorded && record.beyond(v, e) == least ? least : 0;
            times[from[e]] = std::min(times[from[e]], minus(minus(own, lags[e]), beyond));
        }
    }
}

void reach(In<int32_t> first, In<int32_t> source, Out<uint8_t> reached, bool backward) {
    const size_t n = check_sweep(first, source, reached.shape(0), source.shape(0));
    nb::gil_scoped_release release;
    if (backward) {
        for (size_t v = n; v-- > 0;)
            for (int32_t e = first(v); reached(v) && e < first(v + 1); ++e) reached(source(e)) = 1;
    } else {
        for (size_t v = 0; v < n; ++v)
            for (int32_t e = first(v); !reached(v) && e < first(v + 1); ++e) reached(v) = reached(source(e));
    }
}

// Of each point what it took beyond the floors of all edges into it; 0 of one that has none.
nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> residual(In<int32_t> first, In<int32_t> source, In<int64_t> time,
                                                      In<int64_t> floor) {
    const Recorded recorded{first, source, floor, time};
    const size_t n = check_sweep(first, source, time.shape(0), floor.shape(0));
    Paged<int64_t> beyond(n);
    {
        nb::gil_scoped_release release;
        for (size_t v = 0; v < n; ++v) beyond[v] = recorded.beyond(v);
    }
    return to_numpy(std::move(beyond));
}

// Of each edge what its target took beyond all floors, where it is one of those that bind it; else 0.
nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> excess(In<int32_t> first, In<int32_t> source, In<int64_t> time,
                                                    In<int64_t> floor) {
    const Recorded recorded{first, source, floor, time};
    const size_t n = check_sweep(first, source, time.shape(0), floor.shape(0));
    Paged<int64_t> found(source.shape(0));
    {
        nb::gil_scoped_release release;
        for (size_t v = 0; v < n; ++v) {
            const int64_t least = recorded.beyond(v);
            for (int32_t e = first(v); e < first(v + 1); ++e) found[e] = recorded.beyond(v, e) == least ? least : 0;
        }
    }
    return to_numpy(std::move(found));
}

// The edges from a source to `end` of which each sets the time of its target, as those do that leave the least between
// their lag and what they took: of several into a point the one from the latest source, then of the highest kind.
// An edge may stand for a chain of edges: `near` is the lag of the last edge of each, `kind` its kind, and the source is
// that of the last edge.
nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> walk_back(In<int32_t> first, In<int32_t> source, In<int64_t> lag,
                                                       In<int64_t> near, In<int64_t> time, In<uint8_t> kind, int64_t end) {
    const size_t n = check_sweep(first, source, time.shape(0), lag.shape(0));
    if (kind.shape(0) != source.shape(0) || near.shape(0) != source.shape(0) || end < 0 || static_cast<size_t>(end) >= n)
        throw nb::value_error("the edges do not fit the points");
    Paged<int32_t> path;
    path.reserve(n);  // pages that are not reached cost nothing, growing would copy
    {
        nb::gil_scoped_release release;
        const Recorded recorded{first, source, lag, time};
        for (int64_t at = end; first(at) < first(at + 1);) {
            const int64_t least = recorded.beyond(at);
            int32_t best = -1;
            for (int32_t e = first(at); e < first(at + 1); ++e) {
                if (recorded.beyond(at, e) != least) continue;
                const auto from = [&](int32_t one) { return minus(minus(time(at), near(one)), least); };
                if (best < 0 || std::pair(from(e), kind(e)) >= std::pair(from(best), kind(best))) best = e;
            }
            path.push_back(best);
            at = source(best);
        }
        std::reverse(path.begin(), path.end());
    }
    return to_numpy(std::move(path));
}

}  // namespace

void bind_graph(nb::module_& module) {
    module.def("schedule", &schedule, nb::arg("first"), nb::arg("source"), nb::arg("lag"), nb::arg("time"),
               "Set the time of every point with edges into it to the greatest of source time + lag, in place.");
    module.def("schedule_scaled", &schedule_scaled, nb::arg("first"), nb::arg("source"), nb::arg("lag"),
               nb::arg("basis"), nb::arg("scaled"), nb::arg("factor"), nb::arg("time"),
               "As schedule, with the positive lags of the edges of one basis times a factor, rounded.");
    module.def("latest", &latest, nb::arg("first"), nb::arg("source"), nb::arg("lag"), nb::arg("recorded").none(),
               nb::arg("time"),
               "Lower the time of every point to the least of target time - lag, in place; with recorded times of "
               "target time - lag - excess.");
    module.def("residual", &residual, nb::arg("first"), nb::arg("source"), nb::arg("time"), nb::arg("floor"),
               "What points took beyond the floors of all edges into them.");
    module.def("excess", &excess, nb::arg("first"), nb::arg("source"), nb::arg("time"), nb::arg("floor"),
               "What the targets of edges took beyond all floors, of the edges that bind them.");
    module.def("walk_back", &walk_back, nb::arg("first"), nb::arg("source"), nb::arg("lag"), nb::arg("near"),
               nb::arg("time"), nb::arg("kind"), nb::arg("end"),
               "The edges that set the time of a point, back to a source, in order.");
    module.def("reach", &reach, nb::arg("first"), nb::arg("source"), nb::arg("reached"), nb::arg("backward"),
               "Mark every point that a marked one leads to, or that leads to one, in place.");
}
