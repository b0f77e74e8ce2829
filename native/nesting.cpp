// Which event of a thread encloses which: one pass over events sorted by start, a stack for each lane.
#include <nanobind/ndarray.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "bindings.hpp"

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
            while (!stack->empty() && stack->back().end + tolerance < e) {
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

}  // namespace

void bind_nesting(nb::module_& module) {
    module.def("nest", &nest, nb::arg("lane"), nb::arg("start"), nb::arg("end"), nb::arg("tolerance") = 0,
               "Parent row (-1 for none), depth, and the rows that outlast the event around them, of events sorted by "
               "(start, -end). All int64; rows of one lane nest, lanes are independent.");
}
