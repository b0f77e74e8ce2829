// Columns of codes: what a table says of each, which of them occur, and numbers for pairs.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bindings.hpp"

namespace {

// What a table says of each code.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> looked_up(In<uint8_t> table, In<uint32_t> codes) {
    const size_t n = codes.shape(0), size = table.shape(0);
    constexpr size_t BLOCK = 4096;  // looked through twice while it is near
    Paged<uint8_t> found(n);
    bool there = true;
    {
        nb::gil_scoped_release release;
        for (size_t low = 0; low < n && there; low += BLOCK) {
            const size_t high = std::min(n, low + BLOCK);
            uint32_t most = 0;
            for (size_t row = low; row < high; ++row) most = std::max(most, codes(row));
            there = most < size;
            for (size_t row = low; there && row < high; ++row) found[row] = table(codes(row));
        }
    }
    if (!there) throw nb::value_error("there is no such code");
    return to_numpy(std::move(found));
}

// Which of the codes below `size` marked rows hold.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> codes_of(In<bool> marked, In<uint32_t> codes, size_t size) {
    const size_t n = codes.shape(0);
    if (marked.shape(0) != n) throw nb::value_error("the columns differ in length");
    Paged<uint8_t> held(size, 0);
    bool there = true;
    {
        nb::gil_scoped_release release;
        for (size_t row = 0; row < n; ++row) {
            if (!marked(row)) continue;
            if (codes(row) < size)
                held[codes(row)] = 1;
            else
                there = false;
        }
    }
    if (!there) throw nb::value_error("there is no such code");
    return to_numpy(std::move(held));
}

// A number from 0 for each pair of values, in the order of pairs; the same number for the same pair.
nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> number_pairs(In<int64_t> first, In<int64_t> second) {
    using Pair = std::pair<int64_t, int64_t>;
    const size_t n = first.shape(0);
    if (second.shape(0) != n) throw nb::value_error("the columns differ in length");
    Paged<int32_t> number(n);
    {
        nb::gil_scoped_release release;
        // By first appearance, where the last few pairs are remembered; then by their order.
        std::map<Pair, int32_t> known;
        constexpr size_t SLOTS = 64;
        std::pair<Pair, int32_t> recent[SLOTS];
        std::fill(std::begin(recent), std::end(recent), std::pair(Pair(0, 0), -1));
        for (size_t row = 0; row < n; ++row) {
            const Pair pair(first(row), second(row));
            const uint64_t mixed = static_cast<uint64_t>(pair.first) * 31 + static_cast<uint64_t>(pair.second);
            auto& slot = recent[(mixed ^ (mixed >> 6)) % SLOTS];
            if (slot.second < 0 || slot.first != pair)
                slot = {pair, known.try_emplace(pair, static_cast<int32_t>(known.size())).first->second};
            number[row] = slot.second;
        }
        std::vector<int32_t> place(known.size());
        int32_t next = 0;
        for (const auto& [pair, appeared] : known) place[appeared] = next++;
        for (int32_t& one : number) one = place[one];
    }
    return to_numpy(std::move(number));
}

}  // namespace

void bind_codes(nb::module_& module) {
    module.def("looked_up", &looked_up, nb::arg("table"), nb::arg("codes"), "What a table says of each code.");
    module.def("codes_of", &codes_of, nb::arg("marked"), nb::arg("codes"), nb::arg("size"),
               "Of each code below a size whether a marked row holds it.");
    module.def("number_pairs", &number_pairs, nb::arg("first"), nb::arg("second"),
               "A number from 0 for each pair of values, in the order of pairs.");
}
