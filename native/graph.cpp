// A graph of points in time: the order in which every edge goes forward, and sweeps along it.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>

#include "arrays.hpp"
#include "bindings.hpp"

namespace {

// Where each ascending run of the times begins, and n; cut off once there are more than `most` runs.
std::vector<size_t> runs_of(const int64_t* time, size_t n, size_t most) {
    std::vector<size_t> begins{0};
    for (size_t i = 1; i < n && begins.size() <= most; ++i)
        if (time[i] < time[i - 1]) begins.push_back(i);
    begins.push_back(n);
    return begins;
}

// Numbers 0..n-1 by time, equal times by number. Few long runs, as threads are, are merged; else a radix sort that is
// stable and skips digits all times share.
std::vector<int32_t> by_time(const int64_t* time, size_t n) {
    constexpr size_t FEW = 16;
    std::vector<int32_t> order(n);
    for (size_t i = 0; i < n; ++i) order[i] = static_cast<int32_t>(i);
    std::vector<size_t> runs = runs_of(time, n, FEW);
    if (runs.size() <= FEW + 1) {
        std::vector<int32_t> merged(runs.size() > 2 ? n : 0);
        while (runs.size() > 2) {
            std::vector<size_t> next{0};
            for (size_t r = 0; r + 1 < runs.size(); r += 2) {
                const size_t low = runs[r], middle = runs[r + 1], high = r + 2 < runs.size() ? runs[r + 2] : middle;
                std::merge(order.begin() + low, order.begin() + middle, order.begin() + middle, order.begin() + high,
                           merged.begin() + low, [&](int32_t a, int32_t b) { return time[a] < time[b]; });
                next.push_back(high);
            }
            order.swap(merged);
            runs.swap(next);
        }
        return order;
    }
    const auto [low, high] = std::minmax_element(time, time + n);
    const uint64_t base = static_cast<uint64_t>(*low), range = static_cast<uint64_t>(*high) - base;
    struct Keyed {
        uint64_t key;
        int32_t number;
    };
    constexpr int DIGIT = 11;
    std::vector<Keyed> from(n), to(n);
    for (size_t i = 0; i < n; ++i) from[i] = {static_cast<uint64_t>(time[i]) - base, static_cast<int32_t>(i)};
    for (int shift = 0; shift < 64 && (range >> shift) != 0; shift += DIGIT) {
        std::vector<size_t> at((size_t{1} << DIGIT) + 1);
        constexpr uint64_t MASK = (1u << DIGIT) - 1;
        for (const Keyed& one : from) ++at[((one.key >> shift) & MASK) + 1];
        for (size_t d = 1; d < at.size(); ++d) at[d] += at[d - 1];
        for (const Keyed& one : from) to[at[(one.key >> shift) & MASK]++] = one;
        from.swap(to);
    }
    for (size_t i = 0; i < n; ++i) order[i] = from[i].number;
    return order;
}

// Within each run of equal times, puts the source of an edge before its target. Where edges run in a circle, the point
// of lowest number goes first: edges from lower to higher numbers are never the ones that break.
void settle_ties(std::vector<int32_t>& order, const int64_t* time, const In<int32_t>& source, const In<int32_t>& target) {
    const size_t n = order.size(), m = source.shape(0);
    std::vector<int32_t> edges;  // between points of one time
    for (size_t e = 0; e < m; ++e)
        if (time[source(e)] == time[target(e)] && source(e) != target(e)) edges.push_back(static_cast<int32_t>(e));
    if (edges.empty()) return;
    std::vector<int32_t> first(n + 1), next(edges.size()), waiting(n);
    for (int32_t e : edges) {
        ++first[source(e) + 1];
        ++waiting[target(e)];
    }
    for (size_t i = 0; i < n; ++i) first[i + 1] += first[i];
    {
        std::vector<int32_t> at(first.begin(), first.end() - 1);
        for (int32_t e : edges) next[at[source(e)]++] = target(e);
    }
    std::vector<int32_t> run, ready;
    std::vector<uint8_t> taken(n);
    for (size_t a = 0, b; a < n; a = b) {
        b = a + 1;
        while (b < n && time[order[b]] == time[order[a]]) ++b;
        if (b == a + 1) continue;
        run.assign(order.begin() + static_cast<int64_t>(a), order.begin() + static_cast<int64_t>(b));
        ready.clear();
        const auto take = [&](int32_t v) {
            taken[v] = 1;
            ready.push_back(v);
        };
        for (int32_t v : run)
            if (waiting[v] == 0) take(v);
        size_t done = 0, low = 0;
        while (done < run.size()) {
            if (done == ready.size()) {
                while (taken[run[low]]) ++low;
                take(run[low]);
            }
            const int32_t v = ready[done];
            order[a + done++] = v;
            for (int32_t k = first[v]; k < first[v + 1]; ++k)
                if (--waiting[next[k]] == 0 && !taken[next[k]]) take(next[k]);
        }
    }
}

nb::tuple order_points(In<int64_t> time, In<int32_t> source, In<int32_t> target) {
    const size_t n = time.shape(0), m = source.shape(0);
    if (target.shape(0) != m) throw nb::value_error("the columns of the edges differ in length");
    if (n >= std::numeric_limits<int32_t>::max() || m >= std::numeric_limits<int32_t>::max())
        throw nb::value_error("more points or edges than 32 bits number");
    for (size_t e = 0; e < m; ++e)
        if (source(e) < 0 || target(e) < 0 || static_cast<size_t>(source(e)) >= n || static_cast<size_t>(target(e)) >= n)
            throw nb::value_error("an edge names a point that is not there");
    std::vector<int32_t> order, first(n + 2), sources, edges, dropped;
    {
        nb::gil_scoped_release release;
        order = by_time(time.data(), n);
        settle_ties(order, time.data(), source, target);
        std::vector<int32_t> number(n);
        for (size_t i = 0; i < n; ++i) number[order[i]] = static_cast<int32_t>(i);
        for (size_t e = 0; e < m; ++e) {
            const int32_t into = number[target(e)];
            if (number[source(e)] < into)
                ++first[into + 2];
            else
                dropped.push_back(static_cast<int32_t>(e));
        }
        // first[v + 1] is where the next edge into v goes and, when all are placed, where those into v + 1 begin.
        for (size_t i = 1; i <= n; ++i) first[i + 1] += first[i];
        sources.resize(m - dropped.size());
        edges.resize(m - dropped.size());
        for (size_t e = 0; e < m; ++e) {
            const int32_t from = number[source(e)], into = number[target(e)];
            if (from >= into) continue;
            const int32_t place = first[into + 1]++;
            sources[place] = from;
            edges[place] = static_cast<int32_t>(e);
        }
        first.pop_back();
    }
    return nb::make_tuple(to_numpy(std::move(order)), to_numpy(std::move(first)), to_numpy(std::move(sources)),
                          to_numpy(std::move(edges)), to_numpy(std::move(dropped)));
}

// The edges into point v are first[v] .. first[v + 1], and each comes from a lower number.
size_t check(const In<int32_t>& first, const In<int32_t>& source, size_t points, size_t lags) {
    const size_t m = source.shape(0);
    if (first.shape(0) != points + 1 || first(0) != 0 || static_cast<size_t>(first(points)) != m || lags != m)
        throw nb::value_error("the edges do not fit the points");
    int32_t e = 0;
    for (size_t v = 0; v < points; ++v) {
        if (first(v + 1) < first(v)) throw nb::value_error("the edges do not fit the points");
        for (; e < first(v + 1); ++e)
            if (source(e) < 0 || static_cast<size_t>(source(e)) >= v) throw nb::value_error("an edge goes backward");
    }
    return points;
}

// The lags of edges: of one array or, where there are two, the sums of both.
struct Lags {
    In<int64_t> lag;
    std::optional<In<int64_t>> more;
    int64_t operator()(int32_t e) const { return more ? lag(e) + (*more)(e) : lag(e); }
    size_t size() const {
        if (more && more->shape(0) != lag.shape(0)) throw nb::value_error("the edges do not fit the points");
        return lag.shape(0);
    }
};

void schedule(In<int32_t> first, In<int32_t> source, In<int64_t> lag, std::optional<In<int64_t>> more, Out<int64_t> time) {
    const Lags lags{lag, more};
    const size_t n = check(first, source, time.shape(0), lags.size());
    nb::gil_scoped_release release;
    for (size_t v = 0; v < n; ++v) {
        const int32_t from = first(v), to = first(v + 1);
        if (from == to) continue;
        int64_t at = time(source(from)) + lags(from);
        for (int32_t e = from + 1; e < to; ++e) at = std::max(at, time(source(e)) + lags(e));
        time(v) = at;
    }
}

void latest(In<int32_t> first, In<int32_t> source, In<int64_t> lag, std::optional<In<int64_t>> more, Out<int64_t> time) {
    const Lags lags{lag, more};
    const size_t n = check(first, source, time.shape(0), lags.size());
    nb::gil_scoped_release release;
    for (size_t v = n; v-- > 0;)
        for (int32_t e = first(v); e < first(v + 1); ++e)
            time(source(e)) = std::min(time(source(e)), time(v) - lags(e));
}

void reach(In<int32_t> first, In<int32_t> source, Out<uint8_t> reached, bool backward) {
    const size_t n = check(first, source, reached.shape(0), source.shape(0));
    nb::gil_scoped_release release;
    if (backward) {
        for (size_t v = n; v-- > 0;)
            for (int32_t e = first(v); reached(v) && e < first(v + 1); ++e) reached(source(e)) = 1;
    } else {
        for (size_t v = 0; v < n; ++v)
            for (int32_t e = first(v); !reached(v) && e < first(v + 1); ++e) reached(v) = reached(source(e));
    }
}

// Cuts each floor to what its edge took, and gives what the edges that bind their target took beyond it: all edges of
// the least such excess into a point.
nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> bind_floors(In<int32_t> first, In<int32_t> source, In<int64_t> time,
                                                         Out<int64_t> floor) {
    const size_t n = check(first, source, time.shape(0), floor.shape(0));
    std::vector<int64_t> excess(source.shape(0), 0);
    {
        nb::gil_scoped_release release;
        for (size_t v = 0; v < n; ++v) {
            int64_t least = std::numeric_limits<int64_t>::max();
            for (int32_t e = first(v); e < first(v + 1); ++e) {
                const int64_t took = time(v) - time(source(e));
                floor(e) = std::clamp<int64_t>(floor(e), 0, took);
                least = std::min(least, took - floor(e));
            }
            for (int32_t e = first(v); e < first(v + 1); ++e)
                if (time(v) - time(source(e)) - floor(e) == least) excess[e] = least;
        }
    }
    return to_numpy(std::move(excess));
}

// The edges from a source to `end` of which each sets the time of its target: of several into a point the one from the
// latest source, then of the highest kind.
nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> walk_back(In<int32_t> first, In<int32_t> source, In<int64_t> lag,
                                                       std::optional<In<int64_t>> more, In<int64_t> time,
                                                       In<uint8_t> kind, int64_t end) {
    const Lags lags{lag, more};
    const size_t n = check(first, source, time.shape(0), lags.size());
    if (kind.shape(0) != source.shape(0) || end < 0 || static_cast<size_t>(end) >= n)
        throw nb::value_error("the edges do not fit the points");
    std::vector<int32_t> path;
    path.reserve(n);  // pages that are not reached cost nothing, growing would copy
    for (int64_t at = end;;) {
        int32_t best = -1;
        for (int32_t e = first(at); e < first(at + 1); ++e) {
            if (time(source(e)) + lags(e) != time(at)) continue;
            if (best < 0 || std::pair(time(source(e)), kind(e)) >= std::pair(time(source(best)), kind(best))) best = e;
        }
        if (best < 0) break;
        path.push_back(best);
        at = source(best);
    }
    std::reverse(path.begin(), path.end());
    return to_numpy(std::move(path));
}

}  // namespace

void bind_graph(nb::module_& module) {
    module.def("order_points", &order_points, nb::arg("time"), nb::arg("source"), nb::arg("target"),
               "The points in an order of ascending time in which edges go forward; the offsets of the edges into each; "
               "the sources of these, sorted by target, and which they are; the edges that do not go forward.");
    module.def("schedule", &schedule, nb::arg("first"), nb::arg("source"), nb::arg("lag"), nb::arg("more").none(),
               nb::arg("time"),
               "Set the time of every point with edges into it to the greatest of source time + lag, in place.");
    module.def("latest", &latest, nb::arg("first"), nb::arg("source"), nb::arg("lag"), nb::arg("more").none(),
               nb::arg("time"),
               "Lower the time of every point to the least of target time - lag, in place.");
    module.def("bind_floors", &bind_floors, nb::arg("first"), nb::arg("source"), nb::arg("time"), nb::arg("floor"),
               "Cut floors to what edges took, in place, and return what binding edges took beyond them.");
    module.def("walk_back", &walk_back, nb::arg("first"), nb::arg("source"), nb::arg("lag"), nb::arg("more").none(),
               nb::arg("time"), nb::arg("kind"), nb::arg("end"),
               "The edges that set the time of a point, back to a source, in order.");
    module.def("reach", &reach, nb::arg("first"), nb::arg("source"), nb::arg("reached"), nb::arg("backward"),
               "Mark every point that a marked one leads to, or that leads to one, in place.");
}
