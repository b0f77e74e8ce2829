// Sets of times as sorted, disjoint intervals [start, end): union of any intervals, intersection, difference, coverage.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bindings.hpp"
#include "times.hpp"

namespace {

using Ints = In<int64_t>;

// Intervals of a set as numpy handed them over.
struct Set {
    Set(const Ints& starts, const Ints& ends) : start(starts.data()), end(ends.data()), size(starts.shape(0)) {
        if (ends.shape(0) != size) throw nb::value_error("the columns differ in length");
    }
    const int64_t* start;
    const int64_t* end;
    size_t size;
};

struct Result {
    Paged<int64_t> starts, ends;
    void add(int64_t start, int64_t end) {
        starts.push_back(start);
        ends.push_back(end);
    }
    nb::tuple to_python() { return nb::make_tuple(to_numpy(std::move(starts)), to_numpy(std::move(ends))); }
};

// The union of intervals in any order, of which those that end where they start, or before, are left out.
nb::tuple merge_intervals(Ints starts, Ints ends) {
    const Set all(starts, ends);
    Result result;
    {
        nb::gil_scoped_release release;
        const auto merge = [&](int64_t start, int64_t end) {
            if (end <= start) return;
            if (result.ends.empty() || start > result.ends.back())
                result.add(start, end);
            else
                result.ends.back() = std::max(result.ends.back(), end);
        };
        if (std::is_sorted(all.start, all.start + all.size)) {
            for (size_t i = 0; i < all.size; ++i) merge(all.start[i], all.end[i]);
        } else {
            std::vector<std::pair<int64_t, int64_t>> ordered(all.size);
            for (size_t i = 0; i < all.size; ++i) ordered[i] = {all.start[i], all.end[i]};
            std::sort(ordered.begin(), ordered.end());
            for (const auto& [start, end] : ordered) merge(start, end);
        }
    }
    return result.to_python();
}

nb::tuple intersect_intervals(Ints starts, Ints ends, Ints other_starts, Ints other_ends) {
    const Set a(starts, ends), b(other_starts, other_ends);
    Result result;
    {
        nb::gil_scoped_release release;
        for (size_t i = 0, j = 0; i < a.size && j < b.size;) {
            const int64_t start = std::max(a.start[i], b.start[j]), end = std::min(a.end[i], b.end[j]);
            if (start < end) result.add(start, end);
            if (a.end[i] < b.end[j])
                ++i;
            else
                ++j;
        }
    }
    return result.to_python();
}

nb::tuple subtract_intervals(Ints starts, Ints ends, Ints other_starts, Ints other_ends) {
    const Set a(starts, ends), b(other_starts, other_ends);
    Result result;
    {
        nb::gil_scoped_release release;
        for (size_t i = 0, j = 0; i < a.size; ++i) {
            int64_t start = a.start[i];
            while (j < b.size && b.end[j] <= start) ++j;
            for (size_t k = j; k < b.size && b.start[k] < a.end[i]; ++k) {
                if (start < b.start[k]) result.add(start, b.start[k]);
                start = b.end[k];
            }
            if (start < a.end[i]) result.add(start, a.end[i]);
        }
    }
    return result.to_python();
}

// The length of the first 0, 1, 2, ... intervals of a set.
std::vector<int64_t> sum_lengths(const Set& set) {
    std::vector<int64_t> total(set.size + 1);
    for (size_t i = 0; i < set.size; ++i) total[i + 1] = plus(total[i], minus(set.end[i], set.start[i]));
    return total;
}

// How much of a set lies before each time. Most times ascend, so each search begins where the last one ended.
class Coverage {
  public:
    Coverage(const Set& set, const std::vector<int64_t>& total) : set_(set), total_(total) {}
    int64_t before(int64_t time) {
        const int64_t *const first = set_.start, *const last = first + set_.size, *const here = first + begun_;
        if (here != last && *here <= time) {
            const int64_t* next = here + 1;  // mostly one of the next few
            for (int step = 0; step < 8 && next != last && *next <= time; ++step) ++next;
            if (next != last && *next <= time) next = std::upper_bound(next, last, time);
            begun_ = static_cast<size_t>(next - first);
        } else if (begun_ > 0 && first[begun_ - 1] > time) {
            begun_ = static_cast<size_t>(std::upper_bound(first, here, time) - first);
        }
        if (begun_ == 0) return 0;
        const int64_t end = set_.end[begun_ - 1];
        return end > time ? minus(total_[begun_], minus(end, time)) : total_[begun_];
    }

  private:
    Set set_;
    size_t begun_ = 0;  // intervals that start by then
    const std::vector<int64_t>& total_;
};

nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> covered_before(Ints starts, Ints ends, Ints times) {
    const Set set(starts, ends);
    const size_t n = times.shape(0);
    Paged<int64_t> result(n);
    {
        nb::gil_scoped_release release;
        const auto total = sum_lengths(set);
        Coverage coverage(set, total);
        for (size_t i = 0; i < n; ++i) result[i] = coverage.before(times(i));
    }
    return to_numpy(std::move(result));
}

// How much of each interval a set covers; 0 for intervals that end before they start.
nb::ndarray<nb::numpy, int64_t, nb::ndim<1>> covered(Ints starts, Ints ends, Ints low, Ints high) {
    const Set set(starts, ends), intervals(low, high);
    Paged<int64_t> result(intervals.size);
    {
        nb::gil_scoped_release release;
        const auto total = sum_lengths(set);
        Coverage from(set, total), to(set, total);
        for (size_t i = 0; i < intervals.size; ++i) {
            const int64_t length = minus(to.before(intervals.end[i]), from.before(intervals.start[i]));
            result[i] = std::max<int64_t>(length, 0);
        }
    }
    return to_numpy(std::move(result));
}

}  // namespace

void bind_intervals(nb::module_& module) {
    module.def("merge_intervals", &merge_intervals, nb::arg("starts"), nb::arg("ends"), "The union of intervals in any order.");
    module.def("intersect_intervals", &intersect_intervals, nb::arg("starts"), nb::arg("ends"), nb::arg("other_starts"),
               nb::arg("other_ends"), "The times in both of two sets.");
    module.def("subtract_intervals", &subtract_intervals, nb::arg("starts"), nb::arg("ends"), nb::arg("other_starts"),
               nb::arg("other_ends"), "The times in the first of two sets only.");
    module.def("covered_before", &covered_before, nb::arg("starts"), nb::arg("ends"), nb::arg("times"),
               "How much of a set lies before each time.");
    module.def("covered", &covered, nb::arg("starts"), nb::arg("ends"), nb::arg("low"), nb::arg("high"),
               "How much of each interval a set covers.");
}
