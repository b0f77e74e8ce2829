// How far a graph explains a recording: starts of device work that an edge explains, and what no floor explains.
#include <algorithm>
#include <cstdint>
#include <vector>

#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "bindings.hpp"
#include "sweeps.hpp"

namespace {

// Of the starts of work (the sources of edges of kind `work`) that are the rank's own: how many there are, how many of
// them edges explain, how many of them launches and others do both, and how many of all would be explained if they were
// moved by each shift. A launch explains what starts between `call` and `back`, which are of each edge of that kind, in
// order; another edge what starts at most `soon` after its source; an overlap what starts after its source. Last the sum
// over all own points of what they took beyond the floors of all edges into them.
nb::tuple explained_starts(In<int32_t> first, In<int32_t> source, In<int64_t> times, In<int64_t> floor,
                           In<uint8_t> kinds, In<bool> owns, In<int64_t> call, In<int64_t> back, uint8_t work,
                           uint8_t launch, uint8_t overlap, int64_t soon, const std::vector<int64_t>& shifts) {
    const size_t n = check_sweep(first, source, times.shape(0), kinds.shape(0)), m = kinds.shape(0);
    if (floor.shape(0) != m || owns.shape(0) != n || call.shape(0) != back.shape(0)) throw nb::value_error("the edges do not fit the points");
    const int32_t *const bound = first.data(), *const from = source.data();
    const int64_t* const time = times.data();
    const uint8_t* const kind = kinds.data();
    const bool* const own = owns.data();
    if (static_cast<size_t>(std::count(kind, kind + m, launch)) != call.shape(0)) throw nb::value_error("the edges do not fit the points");
    int64_t starts = 0, explained = 0, ambiguous = 0;
    uint64_t residual = 0;
    std::vector<int64_t> by_chance(shifts.size());
    {
        nb::gil_scoped_release release;
        const Recorded recorded{first, source, floor, times};
        Paged<uint8_t> begins(n, 0);
        for (size_t e = 0; e < m; ++e)
            if (kind[e] == work) begins[from[e]] = 1;
        struct Times {
            int64_t low, high;
            bool launched;
        };
        std::vector<Times> reasons;
        size_t next = 0;
        for (size_t v = 0; v < n; ++v) {
            if (own[v]) residual += static_cast<uint64_t>(recorded.beyond(v));
            const int32_t to = bound[v + 1];
            if (!begins[v] || !own[v]) {
                for (int32_t e = bound[v]; e < to; ++e) next += kind[e] == launch;
                continue;
            }
            reasons.clear();
            for (int32_t e = bound[v]; e < to; ++e) {
                const int64_t before = time[from[e]];
                if (kind[e] == launch) {
                    reasons.push_back({call(next), bounded_plus(back(next), soon), true});
                    ++next;
                } else {
                    reasons.push_back({before, kind[e] == overlap ? time[v] : bounded_plus(before, soon), false});
                }
            }
            const auto seen = [&](int64_t at, bool launched) {
                for (const Times& one : reasons)
                    if (one.launched == launched && one.low <= at && at <= one.high) return true;
                return false;
            };
            const bool launched = seen(time[v], true), ordered = seen(time[v], false);
            ++starts;
            explained += launched || ordered;
            ambiguous += launched && ordered;
            for (size_t s = 0; s < shifts.size(); ++s) {
                const int64_t moved = bounded_plus(time[v], shifts[s]);
                by_chance[s] += seen(moved, true) || seen(moved, false);
            }
        }
    }
    return nb::make_tuple(starts, explained, ambiguous, by_chance, static_cast<int64_t>(residual));
}

// The sum over the points of what they took beyond the floors of all edges into them.
int64_t residual_sum(In<int32_t> first, In<int32_t> source, In<int64_t> time, In<int64_t> floor) {
    const size_t n = check_sweep(first, source, time.shape(0), floor.shape(0));
    nb::gil_scoped_release release;
    const Recorded recorded{first, source, floor, time};
    uint64_t sum = 0;
    for (size_t v = 0; v < n; ++v) sum += static_cast<uint64_t>(recorded.beyond(v));
    return static_cast<int64_t>(sum);
}

}  // namespace

void bind_quality(nb::module_& module) {
    module.def("explained_starts", &explained_starts, nb::arg("first"), nb::arg("source"), nb::arg("time"),
               nb::arg("floor"), nb::arg("kind"), nb::arg("own"), nb::arg("call"), nb::arg("back"), nb::arg("work"),
               nb::arg("launch"), nb::arg("overlap"), nb::arg("soon"), nb::arg("shifts"),
               "How many own starts of work there are, how many edges explain, how many in two ways, and how many after "
               "each shift; the sum of what own points took beyond all floors.");
    module.def("residual_sum", &residual_sum, nb::arg("first"), nb::arg("source"), nb::arg("time"), nb::arg("floor"),
               "The sum of what points took beyond the floors of all edges into them.");
}
