// Columns of codes: what a table says of each, which of them occur, and numbers for pairs.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bindings.hpp"
#include "times.hpp"

namespace {

// What a table says of each code; with clip its last entry is that of all greater codes.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> looked_up(In<uint8_t> table, In<uint32_t> codes, bool clip) {
    const size_t n = codes.shape(0), size = table.shape(0);
    if (clip && n && !size) throw nb::value_error("there is no such code");
    constexpr size_t BLOCK = 4096;  // looked through twice while it is near
    Paged<uint8_t> found(n);
    bool there = true;
    {
        nb::gil_scoped_release release;
        for (size_t low = 0; low < n && there; low += BLOCK) {
            const size_t high = std::min(n, low + BLOCK);
            if (clip) {
                const auto last = static_cast<uint32_t>(std::min<size_t>(size - 1, ~uint32_t{0}));
                for (size_t row = low; row < high; ++row) found[row] = table(std::min(codes(row), last));
                continue;
            }
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

// A row of each code, in the order of codes, and for each row the number of its code among these; -1 for absent codes.
nb::tuple distinct_codes(In<uint32_t> codes) {
    constexpr uint32_t ABSENT = ~uint32_t{0};
    const size_t n = codes.shape(0);
    const uint32_t* const code = codes.data();
    if (n > INT32_MAX) throw nb::value_error("too many rows");
    Paged<int64_t> rows;
    Paged<int32_t> numbers(n);
    {
        nb::gil_scoped_release release;
        uint32_t size = 0;  // above the greatest code
        for (size_t row = 0; row < n; ++row) size = std::max(size, code[row] + 1);  // that of ABSENT is 0
        if (size <= 16 * n + 65'536) {
            std::vector<int32_t> of_code(size, -1);  // a row, then the number
            for (size_t row = 0; row < n; ++row)
                if (code[row] != ABSENT) of_code[code[row]] = static_cast<int32_t>(row);
            for (int32_t& of : of_code) {
                if (of < 0) continue;
                rows.push_back(of);
                of = static_cast<int32_t>(rows.size()) - 1;
            }
            for (size_t row = 0; row < n; ++row) numbers[row] = code[row] == ABSENT ? -1 : of_code[code[row]];
        } else {  // a table would be much larger than the column
            for (size_t row = 0; row < n; ++row)
                if (code[row] != ABSENT) rows.push_back(static_cast<int64_t>(row));
            std::sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return code[a] < code[b]; });
            rows.erase(std::unique(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return code[a] == code[b]; }), rows.end());
            const auto is_before = [&](int64_t row, uint32_t value) { return code[row] < value; };
            for (size_t row = 0; row < n; ++row) {
                const auto at = std::lower_bound(rows.begin(), rows.end(), code[row], is_before);
                numbers[row] = code[row] == ABSENT ? -1 : static_cast<int32_t>(at - rows.begin());
            }
        }
    }
    return nb::make_tuple(to_numpy(std::move(rows)), to_numpy(std::move(numbers)));
}

// Numbers the pairs by sorting the rows, which many distinct pairs need.
void number_sorted(const In<int64_t>& first, const In<int64_t>& second, Paged<int32_t>& number) {
    struct Row {
        int64_t first, second;
        uint32_t row;
    };
    std::vector<Row> rows(number.size());
    for (uint32_t row = 0; row < rows.size(); ++row) rows[row] = {first(row), second(row), row};
    std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
        return a.first != b.first ? a.first < b.first : a.second < b.second;
    });
    int32_t last = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
        if (i > 0 && (rows[i].first != rows[i - 1].first || rows[i].second != rows[i - 1].second)) ++last;
        number[rows[i].row] = last;
    }
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
        constexpr size_t MANY = 4096;
        for (size_t row = 0; row < n && known.size() <= MANY; ++row) {
            const Pair pair(first(row), second(row));
            const uint64_t mixed = static_cast<uint64_t>(pair.first) * 31 + static_cast<uint64_t>(pair.second);
            auto& slot = recent[(mixed ^ (mixed >> 6)) % SLOTS];
            if (slot.second < 0 || slot.first != pair)
                slot = {pair, known.try_emplace(pair, static_cast<int32_t>(known.size())).first->second};
            number[row] = slot.second;
        }
        if (known.size() > MANY) {
            number_sorted(first, second, number);
        } else {
            std::vector<int32_t> place(known.size());
            int32_t next = 0;
            for (const auto& [pair, appeared] : known) place[appeared] = next++;
            for (int32_t& code : number) code = place[code];
        }
    }
    return to_numpy(std::move(number));
}

// The figures of each pair of codes that a chosen row has: see `bind_codes`.
nb::tuple sums_of_pairs(In<bool> chosen, In<int32_t> row, In<int64_t> value, In<uint32_t> first, In<uint32_t> second,
                        In<int64_t> weight, In<bool> wanted) {
    struct Slot {
        uint64_t pair;
        uint32_t group;
    };
    constexpr size_t SLOTS = 4096;
    constexpr uint32_t NONE = ~uint32_t{0};
    const size_t n = chosen.shape(0), all = first.shape(0);
    if (row.shape(0) != n || value.shape(0) != n || second.shape(0) != all || weight.shape(0) != all)
        throw nb::value_error("the columns differ in length");
    const bool* const marked = chosen.data();
    const int32_t* const at = row.data();
    const int64_t *const values = value.data(), *const weights = weight.data();
    Paged<int32_t> example;
    Paged<int64_t> count, zeros, least, low, high, most, total, of_zeros;
    bool there = true;
    {
        nb::gil_scoped_release release;
        // The groups in the order of their first rows; the last few pairs are remembered.
        std::unordered_map<uint64_t, uint32_t> known;
        std::vector<Slot> recent(SLOTS, {0, NONE});
        Paged<uint32_t> group;
        group.reserve(n);  // pages that are not reached cost nothing
        for (size_t i = 0; i < n; ++i) {
            if (!marked[i]) continue;
            const auto of = static_cast<uint32_t>(at[i]);
            const bool known_row = of < all && first.data()[of] < wanted.shape(0);
            there &= known_row;
            if (!known_row || !wanted.data()[first.data()[of]]) {
                group.push_back(NONE);
                continue;
            }
            const uint64_t pair = uint64_t{first.data()[of]} << 32 | second.data()[of];
            Slot& slot = recent[(pair ^ pair >> 29) % SLOTS];
            if (slot.group == NONE || slot.pair != pair) {
                const auto [found, fresh] = known.try_emplace(pair, static_cast<uint32_t>(known.size()));
                slot = {pair, found->second};
                if (fresh) {
                    example.push_back(at[i]);
                    for (auto* sum : {&count, &zeros, &total, &of_zeros}) sum->push_back(0);
                }
            }
            const uint32_t g = slot.group;
            group.push_back(g);
            ++count[g];
            total[g] = plus(total[g], weights[of]);
            if (values[i] == 0) {
                ++zeros[g];
                of_zeros[g] = plus(of_zeros[g], weights[of]);
            }
        }
        // The values group by group, of which those in the middle are looked for.
        std::vector<size_t> next(count.size() + 1, 0);
        for (size_t g = 0; g < count.size(); ++g) next[g + 1] = next[g] + static_cast<size_t>(count[g]);
        Paged<int64_t> grouped(next.back());
        for (size_t i = 0, k = 0; i < n; ++i)
            if (marked[i])
                if (const uint32_t g = group[k++]; g != NONE) grouped[next[g]++] = values[i];
        auto begin = grouped.begin();
        for (const int64_t size : count) {
            const auto end = begin + size, upper = begin + size / 2;
            std::nth_element(begin, upper, end);
            high.push_back(*upper);
            low.push_back(size % 2 ? *upper : *std::max_element(begin, upper));
            least.push_back(*std::min_element(begin, upper + 1));
            most.push_back(*std::max_element(upper, end));
            begin = end;
        }
    }
    if (!there) throw nb::value_error("there is no such row or code");
    return nb::make_tuple(to_numpy(std::move(example)), to_numpy(std::move(count)), to_numpy(std::move(zeros)),
                          to_numpy(std::move(least)), to_numpy(std::move(low)), to_numpy(std::move(high)),
                          to_numpy(std::move(most)), to_numpy(std::move(total)), to_numpy(std::move(of_zeros)));
}

}  // namespace

void bind_codes(nb::module_& module) {
    module.def("looked_up", &looked_up, nb::arg("table"), nb::arg("codes"), nb::arg("clip") = false,
               "What a table says of each code; with clip its last entry is that of all greater codes.");
    module.def("codes_of", &codes_of, nb::arg("marked"), nb::arg("codes"), nb::arg("size"),
               "Of each code below a size whether a marked row holds it.");
    module.def("distinct_codes", &distinct_codes, nb::arg("codes"),
               "A row of each code, in the order of codes, and for each row the number of its code; -1 for absent codes.");
    module.def("number_pairs", &number_pairs, nb::arg("first"), nb::arg("second"),
               "A number from 0 for each pair of values, in the order of pairs.");
    module.def("sums_of_pairs", &sums_of_pairs, nb::arg("chosen"), nb::arg("row"), nb::arg("value"), nb::arg("first"),
               nb::arg("second"), nb::arg("weight"), nb::arg("wanted"),
               "Of each pair of codes (first, second) that chosen points have, where the first is wanted, at their rows: "
               "one of the rows; how many points there are, and how many of value 0; the least value, the two in the "
               "middle (the same one of an odd number), the greatest; the sum of the weights, and of those of value 0.");
}
