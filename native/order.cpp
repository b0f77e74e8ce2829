// The points and edges of a graph in the order in which every edge goes forward, out of columns in parts.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "bindings.hpp"

namespace {

// A column in parts. A part may repeat one value (stride 0).
template <typename T>
using Parts = std::vector<nb::ndarray<const T, nb::ndim<1>, nb::device::cpu>>;

template <typename T>
struct Part {
    explicit Part(const nb::ndarray<const T, nb::ndim<1>, nb::device::cpu>& values)
        : begin(values.data()), stride(values.stride(0)), size(values.shape(0)) {}
    const T& operator[](size_t i) const { return begin[static_cast<int64_t>(i) * stride]; }

    const T* begin;
    int64_t stride;
    size_t size;
};

template <typename T>
std::vector<Part<T>> parts_of(const Parts<T>& columns) {
    return {columns.begin(), columns.end()};
}

template <typename T>
size_t size_of(const std::vector<Part<T>>& parts) {
    size_t size = 0;
    for (const Part<T>& part : parts) size += part.size;
    return size;
}

// What ascends in time: `size` places from `first` on or, where they had to be sorted, those of `sorted`.
struct Run {
    int32_t place(size_t i) const { return sorted.empty() ? first + static_cast<int32_t>(i) : sorted[i]; }

    int32_t first;
    size_t size;
    Paged<int32_t> sorted;
};

// Places 0..n-1 by time, equal times by place: a radix sort that is stable and skips the digits that all times share.
Paged<int32_t> by_time(const Part<int64_t>& time) {
    struct Keyed {
        uint64_t key;
        int32_t place;
    };
    constexpr int DIGIT = 11;
    constexpr uint64_t MASK = (uint64_t{1} << DIGIT) - 1;
    const size_t n = time.size;
    int64_t low = time[0], high = time[0];
    for (size_t i = 1; i < n; ++i) {
        low = std::min(low, time[i]);
        high = std::max(high, time[i]);
    }
    const uint64_t base = static_cast<uint64_t>(low), range = static_cast<uint64_t>(high) - base;
    Paged<Keyed> from(n), to(n);
    for (size_t i = 0; i < n; ++i) from[i] = {static_cast<uint64_t>(time[i]) - base, static_cast<int32_t>(i)};
    for (int shift = 0; shift < 64 && (range >> shift) != 0; shift += DIGIT) {
        std::vector<size_t> at(MASK + 2);
        for (const Keyed& one : from) ++at[((one.key >> shift) & MASK) + 1];
        for (size_t d = 1; d < at.size(); ++d) at[d] += at[d - 1];
        for (const Keyed& one : from) to[at[(one.key >> shift) & MASK]++] = one;
        from.swap(to);
    }
    Paged<int32_t> places(n);
    for (size_t i = 0; i < n; ++i) places[i] = from[i].place;
    return places;
}

// The ascending runs of the times, by place. Threads and streams are few long ones; a part of many short ones is sorted.
std::vector<Run> runs_of(const std::vector<Part<int64_t>>& times) {
    constexpr size_t LONG = 256;
    std::vector<Run> runs;
    size_t base = 0;
    for (const Part<int64_t>& time : times) {
        const size_t known = runs.size(), most = 16 + time.size / LONG;
        size_t begin = 0;
        for (size_t i = 1; i <= time.size && runs.size() - known <= most; ++i) {
            if (i < time.size && time[i] >= time[i - 1]) continue;
            runs.push_back({static_cast<int32_t>(base + begin), i - begin, {}});
            begin = i;
        }
        if (runs.size() - known > most) {
            runs.resize(known);
            Paged<int32_t> places = by_time(time);
            for (int32_t& place : places) place += static_cast<int32_t>(base);
            runs.push_back({static_cast<int32_t>(base), time.size, std::move(places)});
        }
        base += time.size;
    }
    return runs;
}

// A value of a column in parts by its place; asked for places near each other it is found at once.
template <typename T>
class Lookup {
public:
    explicit Lookup(const std::vector<Part<T>>& parts) : parts_(parts) {
        for (const Part<T>& part : parts) ends_.push_back((ends_.empty() ? 0 : ends_.back()) + part.size);
    }
    const T& operator[](int32_t place) {
        const size_t at = static_cast<size_t>(place);
        if (at < low_ || at >= high_) {
            which_ = std::upper_bound(ends_.begin(), ends_.end(), at) - ends_.begin();
            low_ = which_ ? ends_[which_ - 1] : 0;
            high_ = ends_[which_];
        }
        return parts_[which_][at - low_];
    }

private:
    const std::vector<Part<T>>& parts_;
    std::vector<size_t> ends_;
    size_t which_ = 0, low_ = 0, high_ = 0;
};

// All places by time, equal times by place: where one run goes on before the others do, it is taken as far as it does.
Paged<int32_t> merged(const std::vector<Run>& runs, const std::vector<Part<int64_t>>& times, size_t n) {
    struct Head {
        int64_t time;
        int32_t place;
        size_t run;
        bool operator>(const Head& other) const { return std::pair(time, place) > std::pair(other.time, other.place); }
    };
    std::vector<Lookup<int64_t>> time(runs.size(), Lookup<int64_t>(times));
    std::vector<size_t> done(runs.size(), 0);
    std::priority_queue<Head, std::vector<Head>, std::greater<>> heads;
    const auto push = [&](size_t r) {
        const int32_t place = runs[r].place(done[r]);
        heads.push({time[r][place], place, r});
    };
    for (size_t r = 0; r < runs.size(); ++r) push(r);
    Paged<int32_t> order;
    order.reserve(n);
    while (!heads.empty()) {
        const size_t r = heads.top().run, size = runs[r].size;
        heads.pop();
        size_t& at = done[r];
        if (heads.empty()) {
            for (; at < size; ++at) order.push_back(runs[r].place(at));
            break;
        }
        const std::pair next(heads.top().time, heads.top().place);
        for (int32_t place; at < size && std::pair(time[r][place = runs[r].place(at)], place) < next; ++at)
            order.push_back(place);
        if (at < size) push(r);
    }
    return order;
}

// Within each run of equal times, puts the source of an edge before its target. Where edges run in a circle, the point
// of lowest place goes first: edges from lower to higher places are never the ones that break.
void settle_ties(Paged<int32_t>& order, const std::vector<Part<int64_t>>& times,
                 const std::vector<std::pair<int32_t, int32_t>>& edges) {
    const size_t n = order.size();
    Paged<int32_t> first(n + 1, 0), waiting(n, 0);
    std::vector<int32_t> next(edges.size());
    for (const auto& [source, target] : edges) {
        ++first[source + 1];
        ++waiting[target];
    }
    for (size_t i = 0; i < n; ++i) first[i + 1] += first[i];
    for (const auto& [source, target] : edges) next[first[source]++] = target;
    for (size_t i = n; i > 0; --i) first[i] = first[i - 1];
    first[0] = 0;
    Lookup<int64_t> time(times);
    std::vector<int32_t> run, ready;
    Paged<uint8_t> taken(n, 0);
    for (size_t a = 0, b; a < n; a = b) {
        const int64_t now = time[order[a]];
        for (b = a + 1; b < n && time[order[b]] == now;) ++b;
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

template <typename Each>
void each_pair(const std::vector<Part<int32_t>>& sources, const std::vector<Part<int32_t>>& targets, Each each) {
    for (size_t p = 0; p < sources.size(); ++p)
        for (size_t i = 0; i < sources[p].size; ++i) each(sources[p][i], targets[p][i]);
}

void check_ends(const std::vector<Part<int32_t>>& sources, const std::vector<Part<int32_t>>& targets, size_t points) {
    if (sources.size() != targets.size()) throw nb::value_error("the columns of the edges differ in length");
    for (size_t p = 0; p < sources.size(); ++p)
        if (sources[p].size != targets[p].size) throw nb::value_error("the columns of the edges differ in length");
    constexpr size_t MOST = std::numeric_limits<int32_t>::max();
    if (points >= MOST || size_of(sources) >= MOST) throw nb::value_error("more points or edges than 32 bits number");
    bool there = true;
    each_pair(sources, targets, [&](int32_t source, int32_t target) {
        there &= static_cast<uint32_t>(source) < points && static_cast<uint32_t>(target) < points;
    });
    if (!there) throw nb::value_error("an edge names a point that is not there");
}

nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> order_points(const Parts<int64_t>& time, const Parts<int32_t>& source,
                                                          const Parts<int32_t>& target) {
    const auto times = parts_of(time);
    const auto sources = parts_of(source), targets = parts_of(target);
    const size_t n = size_of(times);
    check_ends(sources, targets, n);
    Paged<int32_t> order;
    {
        nb::gil_scoped_release release;
        order = merged(runs_of(times), times, n);
        std::vector<std::pair<int32_t, int32_t>> tied;
        Lookup<int64_t> from(times), into(times);
        each_pair(sources, targets, [&](int32_t a, int32_t b) {
            if (a != b && from[a] == into[b]) tied.emplace_back(a, b);
        });
        if (!tied.empty()) settle_ties(order, times, tied);
    }
    return to_numpy(std::move(order));
}

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> gather(const Parts<T>& column, In<int32_t> order) {
    const auto parts = parts_of(column);
    const size_t n = order.shape(0), all = size_of(parts);
    Paged<T> values(n);
    {
        nb::gil_scoped_release release;
        Lookup<T> of(parts);
        for (size_t i = 0; i < n; ++i) {
            if (static_cast<uint32_t>(order(i)) >= all) throw nb::value_error("there is no such place");
            values[i] = of[order(i)];
        }
    }
    return to_numpy(std::move(values));
}

nb::tuple order_edges(In<int32_t> order, In<int64_t> time, const Parts<int32_t>& source, const Parts<int32_t>& target,
                      const Parts<int64_t>& floor, const Parts<uint8_t>& kind, const Parts<int32_t>& owner) {
    const auto sources = parts_of(source), targets = parts_of(target), owners = parts_of(owner);
    const auto floors = parts_of(floor);
    const auto kinds = parts_of(kind);
    const size_t n = order.shape(0), m = size_of(sources);
    check_ends(sources, targets, n);
    if (time.shape(0) != n) throw nb::value_error("the columns of the points differ in length");
    if (floors.size() != sources.size() || kinds.size() != sources.size() || owners.size() != sources.size())
        throw nb::value_error("the columns of the edges differ in length");
    for (size_t p = 0; p < sources.size(); ++p)
        for (size_t size : {floors[p].size, kinds[p].size, owners[p].size})
            if (size != sources[p].size) throw nb::value_error("the columns of the edges differ in length");
    for (size_t i = 0; i < n; ++i)
        if (static_cast<uint32_t>(order(i)) >= n) throw nb::value_error("there is no such place");
    Paged<int32_t> first(n + 2, 0), from, owned;
    Paged<int64_t> least;
    Paged<uint8_t> why, dropped;
    {
        nb::gil_scoped_release release;
        Paged<int32_t> number(n, 0);
        for (size_t i = 0; i < n; ++i) number[order(i)] = static_cast<int32_t>(i);
        size_t kept = 0;
        for (size_t p = 0; p < sources.size(); ++p)
            for (size_t i = 0; i < sources[p].size; ++i) {
                const int32_t into = number[targets[p][i]];
                if (number[sources[p][i]] < into) {
                    ++first[into + 2];
                    ++kept;
                } else {
                    dropped.push_back(kinds[p][i]);
                }
            }
        // first[v + 1] is where the next edge into v goes and, when all are placed, where those into v + 1 begin.
        for (size_t i = 1; i <= n; ++i) first[i + 1] += first[i];
        from.resize(kept);
        owned.resize(kept);
        least.resize(kept);
        why.resize(kept);
        for (size_t p = 0; p < sources.size(); ++p)
            for (size_t i = 0; i < sources[p].size; ++i) {
                const int32_t a = number[sources[p][i]], b = number[targets[p][i]];
                if (a >= b) continue;
                const int32_t place = first[b + 1]++;
                from[place] = a;
                // In unsigned numbers what is too long for 64 bits wraps and is not undefined.
                const auto took = static_cast<int64_t>(static_cast<uint64_t>(time(b)) - static_cast<uint64_t>(time(a)));
                least[place] = std::clamp<int64_t>(floors[p][i], 0, std::max<int64_t>(took, 0));
                why[place] = kinds[p][i];
                owned[place] = owners[p][i];
            }
        first.pop_back();
    }
    return nb::make_tuple(to_numpy(std::move(first)), to_numpy(std::move(from)), to_numpy(std::move(least)),
                          to_numpy(std::move(why)), to_numpy(std::move(owned)), to_numpy(std::move(dropped)));
}

}  // namespace

void bind_order(nb::module_& module) {
    module.def("order_points", &order_points, nb::arg("time"), nb::arg("source"), nb::arg("target"),
               "The places of points in an order of ascending time in which edges go forward; columns in parts.");
    const char* gathers = "The values of a column in parts at these places.";
    module.def("gather", &gather<int64_t>, nb::arg("column"), nb::arg("order"), gathers);
    module.def("gather", &gather<int32_t>, nb::arg("column"), nb::arg("order"), gathers);
    module.def("gather", &gather<uint8_t>, nb::arg("column"), nb::arg("order"), gathers);
    module.def("order_edges", &order_edges, nb::arg("order"), nb::arg("time"), nb::arg("source"), nb::arg("target"),
               nb::arg("floor"), nb::arg("kind"), nb::arg("owner"),
               "Of edges between places of points in this order, at these times, those that go forward, sorted by target: "
               "the offsets of those into each point; source, floor (at most what the edge took), kind, owner; and the "
               "kinds of those that do not.");
}
