// Which event of a thread encloses which: one pass over events sorted by start, a stack for each lane.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

#include "arrays.hpp"
#include "bindings.hpp"
#include "times.hpp"

namespace {

using Ints = In<int64_t>;

struct Open {
    int64_t end;
    int64_t row;
};

// A child that outlasts its parent by at most `tolerance` is still its child (clock granularity); one that outlasts
// it by more closes the parent, and the row is counted in `crossed`.
nb::tuple nest(Ints lane, Ints start, Ints end, int64_t tolerance) {
    const size_t n = lane.shape(0);
    if (start.shape(0) != n || end.shape(0) != n) throw nb::value_error("lane, start and end differ in length");
    std::vector<int64_t> parent(n, -1);
    std::vector<int16_t> depth(n, 0);
    std::vector<int64_t> crossed;
    {
        nb::gil_scoped_release release;
        std::unordered_map<int64_t, std::vector<Open>> stacks;
        std::vector<Open>* stack = nullptr;
        int64_t current = 0;
        for (size_t i = 0; i < n; ++i) {
            if (stack == nullptr || lane(i) != current) {
                current = lane(i);
                stack = &stacks[current];
            }
            const int64_t s = start(i), e = end(i);
            // An event that starts where another ended is its sibling, unless both are of no length.
            while (!stack->empty() && (stack->back().end < s || (stack->back().end == s && e > s))) stack->pop_back();
            while (!stack->empty() && bounded_plus(stack->back().end, tolerance) < e) {
                crossed.push_back(static_cast<int64_t>(i));
                stack->pop_back();
            }
            if (!stack->empty()) parent[i] = stack->back().row;
            depth[i] = static_cast<int16_t>(std::min<size_t>(stack->size(), INT16_MAX));
            stack->push_back({e, static_cast<int64_t>(i)});
        }
    }
    return nb::make_tuple(to_numpy(std::move(parent)), to_numpy(std::move(depth)), to_numpy(std::move(crossed)));
}

struct Frame {
    int64_t end;  // where it ends, or where an event around it does
    int64_t row;
};

// One thread: what is open, and up to when its time is charged.
struct Lane {
    std::vector<Frame> open;
    int64_t charged = std::numeric_limits<int64_t>::min();
};

using Flags = In<uint8_t>;

// As nest, for the timed events of host threads: every instant of a lane is charged to the innermost event open there,
// so exclusive times tile what the events cover. A child that outlasts its parent by at most `tolerance` is clamped.
// One that outlasts it by more crosses it. A crossing event of kind DETACHES leaves the lane (depth -1), since it ended
// on another thread, unless all that it crosses YIELDS; every other one closes the events it crosses.
nb::tuple stack_tracks(Ints lane, Ints start, Ints end, Flags kind, int64_t tolerance) {
    constexpr uint8_t DETACHES = 1, YIELDS = 2;
    const size_t n = lane.shape(0);
    if (start.shape(0) != n || end.shape(0) != n || kind.shape(0) != n)
        throw nb::value_error("lane, start, end and kind differ in length");
    std::vector<int64_t> parent(n, -1), exclusive(n, 0), detached, crossed, clamped;
    std::vector<int16_t> depth(n, 0);
    {
        nb::gil_scoped_release release;
        std::unordered_map<int64_t, Lane> lanes;
        Lane* on = nullptr;
        int64_t current = 0;
        const auto charge = [&exclusive](Lane& at, int64_t until) {
            if (until <= at.charged) return;
            if (!at.open.empty()) {
                int64_t& own = exclusive[at.open.back().row];
                own = plus(own, minus(until, at.charged));
            }
            at.charged = until;
        };
        const auto close = [&charge](Lane& at) {
            charge(at, at.open.back().end);
            at.open.pop_back();
        };
        for (size_t i = 0; i < n; ++i) {
            if (on == nullptr || lane(i) != current) {
                current = lane(i);
                on = &lanes[current];
            }
            std::vector<Frame>& open = on->open;
            const int64_t s = start(i);
            int64_t e = std::max(s, end(i));
            while (!open.empty() && (open.back().end < s || (open.back().end == s && e > s))) close(*on);
            if (!open.empty() && bounded_plus(open.back().end, tolerance) < e) {
                bool detach = false;
                for (size_t k = open.size(); kind(i) & DETACHES && k-- > 0 && bounded_plus(open[k].end, tolerance) < e;)
                    detach |= !(kind(open[k].row) & YIELDS);
                if (detach) {
                    detached.push_back(static_cast<int64_t>(i));
                    depth[i] = -1;
                    exclusive[i] = minus(e, s);
                    continue;
                }
                crossed.push_back(static_cast<int64_t>(i));
                charge(*on, s);
                while (!open.empty() && bounded_plus(open.back().end, tolerance) < e) open.pop_back();
            }
            if (open.empty()) {
                on->charged = std::max(on->charged, s);
            } else {
                charge(*on, s);
                parent[i] = open.back().row;
                if (open.back().end < e) {
                    clamped.push_back(static_cast<int64_t>(i));
                    e = open.back().end;
                }
            }
            depth[i] = static_cast<int16_t>(std::min<size_t>(open.size(), INT16_MAX));
            open.push_back({e, static_cast<int64_t>(i)});
        }
        for (auto& [_, at] : lanes)
            while (!at.open.empty()) close(at);
    }
    return nb::make_tuple(to_numpy(std::move(parent)), to_numpy(std::move(depth)), to_numpy(std::move(exclusive)),
                          to_numpy(std::move(detached)), to_numpy(std::move(crossed)), to_numpy(std::move(clamped)));
}

// Of each row the nearest wanted one among it and those around it; and one value more, of the row -1.
template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> nearest(In<T> parent, In<bool> wanted) {
    constexpr T NONE = -1, OPEN = -2, ASKED = -3;
    const size_t n = parent.shape(0);
    if (wanted.shape(0) != n || n > static_cast<size_t>(std::numeric_limits<T>::max()))
        throw nb::value_error("the columns differ in length");
    const T* const around = parent.data();
    const bool* const marked = wanted.data();
    Paged<T> found(n + 1, OPEN);
    found[n] = NONE;
    bool there = true;
    {
        nb::gil_scoped_release release;
        std::vector<T> path;
        for (size_t row = 0; row < n; ++row) {
            T at = static_cast<T>(row);
            // What leads around in a circle has nothing around it.
            while (at >= 0 && found[at] == OPEN && !marked[at]) {
                found[at] = ASKED;
                path.push_back(at);
                at = around[at];
                there &= at < static_cast<T>(n);
                if (!there) at = NONE;
            }
            const T what = at < 0 ? NONE : marked[at] ? at : found[at] == ASKED ? NONE : found[at];
            if (marked[row]) found[row] = what;
            for (const T one : path) found[one] = what;
            path.clear();
        }
    }
    if (!there) throw nb::value_error("there is no such row");
    return to_numpy(std::move(found));
}

}  // namespace

void bind_nesting(nb::module_& module) {
    const char* nearest_of = "Of each row the nearest wanted one among it and those around it (rows, negative for none), and of the row -1; -1 for none.";
    module.def("nearest", &nearest<int32_t>, nb::arg("parent"), nb::arg("wanted"), nearest_of);
    module.def("nearest", &nearest<int64_t>, nb::arg("parent"), nb::arg("wanted"), nearest_of);
    module.def("nest", &nest, nb::arg("lane"), nb::arg("start"), nb::arg("end"), nb::arg("tolerance") = 0,
               "Parent row (-1 for none), depth, and the rows that outlast the event around them, of events sorted by "
               "(start, -end). All int64; rows of one lane nest, lanes are independent.");
    module.def("stack_tracks", &stack_tracks, nb::arg("lane"), nb::arg("start"), nb::arg("end"), nb::arg("kind"),
               nb::arg("tolerance"),
               "Parent row (-1 for none), depth (-1 off the lane), exclusive time, and the rows that were detached, that "
               "crossed the event around them, and that were clamped to it, of events sorted by (start, -end).");
}
