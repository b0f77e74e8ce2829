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
#include "parse/worker.hpp"
#include "times.hpp"

namespace {

// A column in parts. A part may repeat one value (stride 0).
template <typename T>
using Parts = std::vector<nb::ndarray<const T, nb::ndim<1>, nb::device::cpu>>;

template <typename T>
struct Part {
    explicit Part(const nb::ndarray<const T, nb::ndim<1>, nb::device::cpu>& values, T rise = 0)
        : begin(values.data()), stride(values.stride(0)), size(values.shape(0)), step(rise) {}
    T operator[](size_t i) const { return static_cast<T>(begin[static_cast<int64_t>(i) * stride] + static_cast<T>(i) * step); }

    const T* begin;
    int64_t stride;
    size_t size;
    T step;  // what each value is more than the array says, times its place
};

template <typename T>
std::vector<Part<T>> parts_of(const Parts<T>& columns) {
    return {columns.begin(), columns.end()};
}

// Edges in parts: between the points that their arrays name or, in a chain, between these and so many points further on.
// Those of kind NONE are not there.
struct Edges {
    static constexpr uint8_t NONE = 255;

    Edges(const Parts<int32_t>& from, const Parts<int32_t>& into, const Parts<uint8_t>& why,
          const std::vector<bool>& chain)
        : kinds(parts_of(why)) {
        if (from.size() != into.size() || from.size() != why.size() || from.size() != chain.size())
            throw nb::value_error("the columns of the edges differ in length");
        for (size_t p = 0; p < from.size(); ++p) {
            sources.emplace_back(from[p], chain[p]);
            targets.emplace_back(into[p], chain[p]);
            size += kinds[p].size;
        }
    }

    // each(part, row, source, target, kind) of every edge that is there
    template <typename Each>
    void each(Each each) const {
        for (size_t p = 0; p < kinds.size(); ++p) {
            // Copies, which what `each` writes cannot change: they stay in registers.
            const Part<uint8_t> why = kinds[p];
            const Part<int32_t> from = sources[p], into = targets[p];
            for (size_t i = 0; i < why.size; ++i)
                if (const uint8_t kind = why[i]; kind != NONE) each(p, i, from[i], into[i], kind);
        }
    }

    bool is_worth_two_threads() const { return size >= size_t{1} << 18 && etloom::Computing::has_room(); }

    void check(size_t points) const {
        constexpr size_t MOST = std::numeric_limits<int32_t>::max();
        if (points >= MOST || size >= MOST) throw nb::value_error("more points or edges than 32 bits number");
        for (size_t p = 0; p < kinds.size(); ++p)
            if (sources[p].size != kinds[p].size || targets[p].size != kinds[p].size)
                throw nb::value_error("the columns of the edges differ in length");
    }

    static void check_all(bool are_there) {
        if (!are_there) throw nb::value_error("an edge names a point that is not there");
    }

    std::vector<Part<int32_t>> sources, targets;
    std::vector<Part<uint8_t>> kinds;
    size_t size = 0;
};

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
    T operator[](int32_t place) {
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

nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> number_points(const Parts<int64_t>& time, const Parts<int32_t>& source,
                                                           const Parts<int32_t>& target, const Parts<uint8_t>& kind,
                                                           const std::vector<bool>& chain) {
    const auto times = parts_of(time);
    const Edges edges(source, target, kind, chain);
    const size_t n = size_of(times);
    edges.check(n);
    Paged<int32_t> number(n);
    bool are_there = true;
    {
        nb::gil_scoped_release release;
        Paged<int32_t> order;
        std::vector<std::pair<int32_t, int32_t>> tied;
        const auto order_by_time = [&] { order = merged(runs_of(times), times, n); };
        const auto list_ties = [&] {
            Lookup<int64_t> from(times), into(times);
            edges.each([&](size_t, size_t, int32_t a, int32_t b, uint8_t) {
                if (static_cast<uint32_t>(a) >= n || static_cast<uint32_t>(b) >= n)
                    are_there = false;
                else if (a != b && from[a] == into[b])
                    tied.emplace_back(a, b);
            });
        };
        if (edges.is_worth_two_threads()) {
            etloom::Worker().run_both(list_ties, order_by_time);
        } else {
            order_by_time();
            list_ties();
        }
        if (are_there && !tied.empty()) settle_ties(order, times, tied);
        for (size_t i = 0; i < n; ++i) number[order[i]] = static_cast<int32_t>(i);
    }
    Edges::check_all(are_there);
    return to_numpy(std::move(number));
}

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> numbered(const Parts<T>& column, In<int32_t> numbers) {
    const auto parts = parts_of(column);
    const size_t n = numbers.shape(0);
    if (size_of(parts) != n) throw nb::value_error("the columns of the points differ in length");
    Paged<T> values(n);
    {
        nb::gil_scoped_release release;
        const int32_t* number = numbers.data();
        for (const Part<T>& part : parts)
            for (size_t i = 0; i < part.size; ++i, ++number) {
                if (static_cast<uint32_t>(*number) >= n) throw nb::value_error("there is no such place");
                values[*number] = part[i];
            }
    }
    return to_numpy(std::move(values));
}

nb::tuple order_edges(In<int32_t> numbers, In<int64_t> times, const Parts<int32_t>& source,
                      const Parts<int32_t>& target, const Parts<int64_t>& floor, const Parts<uint8_t>& kind,
                      const Parts<int32_t>& owner, const std::vector<bool>& chain) {
    const Edges edges(source, target, kind, chain);
    const auto owners = parts_of(owner);
    const auto floors = parts_of(floor);
    const size_t n = numbers.shape(0);
    edges.check(n);
    if (times.shape(0) != n) throw nb::value_error("the columns of the points differ in length");
    if (floors.size() != edges.kinds.size() || owners.size() != edges.kinds.size())
        throw nb::value_error("the columns of the edges differ in length");
    for (size_t p = 0; p < edges.kinds.size(); ++p)
        for (size_t size : {floors[p].size, owners[p].size})
            if (size != edges.kinds[p].size) throw nb::value_error("the columns of the edges differ in length");
    const int32_t* const number = numbers.data();
    const int64_t* const time = times.data();
    for (size_t i = 0; i < n; ++i)
        if (static_cast<uint32_t>(number[i]) >= n) throw nb::value_error("there is no such place");
    Paged<int32_t> first(n + 2, 0), from, owned;
    Paged<int64_t> least;
    Paged<uint8_t> why;
    std::vector<uint8_t> dropped, dropped_above;
    {
        nb::gil_scoped_release release;
        // Of many edges a second thread takes those into the lower half of the points: both write to different places.
        etloom::Worker worker;
        const bool is_split = edges.is_worth_two_threads();
        const int32_t middle = is_split ? static_cast<int32_t>(n / 2) : 0;
        const auto in_halves = [&](const auto& work) {
            if (is_split)
                worker.run_both([&] { work(true); }, [&] { work(false); });
            else
                work(false);
        };
        size_t kept[2] = {0, 0};
        bool are_there[2] = {true, true};
        in_halves([&](bool lower) {
            size_t count = 0;
            edges.each([&](size_t, size_t, int32_t a, int32_t b, uint8_t kind) {
                if (static_cast<uint32_t>(a) >= n || static_cast<uint32_t>(b) >= n) {
                    are_there[lower] = false;
                    return;
                }
                const int32_t into = number[b];
                if ((into < middle) != lower) return;
                if (number[a] < into) {
                    ++first[into + 2];
                    ++count;
                } else {
                    (lower ? dropped : dropped_above).push_back(kind);
                }
            });
            kept[lower] = count;
        });
        Edges::check_all(are_there[0] && are_there[1]);
        // first[v + 1] is where the next edge into v goes and, when all are placed, where those into v + 1 begin.
        for (size_t i = 1; i <= n; ++i) first[i + 1] += first[i];
        from.resize(kept[0] + kept[1]);
        owned.resize(from.size());
        least.resize(from.size());
        why.resize(from.size());
        int32_t *const next = first.data(), *const sources = from.data(), *const events = owned.data();
        int64_t* const floors_of = least.data();
        uint8_t* const kinds = why.data();
        in_halves([=, &edges, &floors, &owners](bool lower) {
            edges.each([=, &floors, &owners](size_t p, size_t i, int32_t source, int32_t target, uint8_t kind) {
                const int32_t a = number[source], b = number[target];
                if (a >= b || (b < middle) != lower) return;
                const int32_t place = next[b + 1]++;
                sources[place] = a;
                floors_of[place] = std::clamp<int64_t>(floors[p][i], 0, std::max<int64_t>(minus(time[b], time[a]), 0));
                kinds[place] = kind;
                events[place] = owners[p][i];
            });
        });
        first.pop_back();
        dropped.insert(dropped.end(), dropped_above.begin(), dropped_above.end());
    }
    return nb::make_tuple(to_numpy(std::move(first)), to_numpy(std::move(from)), to_numpy(std::move(least)),
                          to_numpy(std::move(why)), to_numpy(std::move(owned)), to_numpy(std::move(dropped)));
}

}  // namespace

void bind_order(nb::module_& module) {
    module.attr("NO_EDGE") = static_cast<int>(Edges::NONE);
    module.def("number_points", &number_points, nb::arg("time"), nb::arg("source"), nb::arg("target"), nb::arg("kind"),
               nb::arg("chain"),
               "Numbers for points in an order of ascending time in which edges go forward; columns in parts.");
    const char* puts = "The values of a column in parts, each at its number.";
    module.def("numbered", &numbered<int64_t>, nb::arg("column"), nb::arg("number"), puts);
    module.def("numbered", &numbered<int32_t>, nb::arg("column"), nb::arg("number"), puts);
    module.def("numbered", &numbered<uint8_t>, nb::arg("column"), nb::arg("number"), puts);
    module.def("order_edges", &order_edges, nb::arg("number"), nb::arg("time"), nb::arg("source"), nb::arg("target"),
               nb::arg("floor"), nb::arg("kind"), nb::arg("owner"), nb::arg("chain"),
               "Of edges between points with these numbers, at these times, those that go forward, sorted by target: "
               "the offsets of those into each point; source, floor (at most what the edge took), kind, owner; and the "
               "kinds of those that do not.");
}
