// Which event of a thread encloses which: one pass over events sorted by start, a stack for each lane.
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

#include "bindings.hpp"
#include "times.hpp"

namespace nb = nanobind;

namespace {

using Ints = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(std::vector<T>&& values) {
    auto* owner = new std::vector<T>(std::move(values));
    nb::capsule free_it(owner, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(owner->data(), {owner->size()}, free_it);
}

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

using Flags = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// As nest, for the timed events of host threads: every instant of a lane is charged to the innermost event open there,
// so exclusive times tile what the events cover. A child that outlasts its parent by at most `tolerance` is clamped.
// One that outlasts it by more crosses it. A crossing event of kind DETACHES leaves the lane (depth -1), since it ended
// on another thread, unless all that it crosses YIELDS; every other one closes the events it crosses.
nb::tuple stack_lanes(Ints lane, Ints start, Ints end, Flags kind, int64_t tolerance) {
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

}  // namespace

void bind_nesting(nb::module_& module) {
    module.def("nest", &nest, nb::arg("lane"), nb::arg("start"), nb::arg("end"), nb::arg("tolerance") = 0,
               "Parent row (-1 for none), depth, and the rows that outlast the event around them, of events sorted by "
               "(start, -end). All int64; rows of one lane nest, lanes are independent.");
    module.def("stack_lanes", &stack_lanes, nb::arg("lane"), nb::arg("start"), nb::arg("end"), nb::arg("kind"),
               nb::arg("tolerance"),
               "Parent row (-1 for none), depth (-1 off the lane), exclusive time, and the rows that were detached, that "
               "crossed the event around them, and that were clamped to it, of events sorted by (start, -end).");
}
