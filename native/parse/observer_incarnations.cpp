// See observer.hpp.
#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "observer.hpp"

namespace etloom::observer {

namespace {

// The rows by address, and those of one address in the order they came; and where each address begins and the last ends.
struct Grouped {
    std::vector<uint32_t> rows;
    std::vector<size_t> bounds;
};

Grouped group_by_address(const Uses& uses) {
    std::unordered_map<uint64_t, uint32_t> known;
    std::vector<uint32_t> group(uses.rows);
    for (size_t row = 0; row < uses.rows; ++row) {
        group[row] = known.try_emplace(uses.address[row], static_cast<uint32_t>(known.size())).first->second;
    }
    std::vector<std::pair<uint64_t, uint32_t>> sorted(known.begin(), known.end());
    std::sort(sorted.begin(), sorted.end());
    std::vector<uint32_t> place(sorted.size());
    for (uint32_t i = 0; i < sorted.size(); ++i) place[sorted[i].second] = i;
    Grouped all{std::vector<uint32_t>(uses.rows), std::vector<size_t>(sorted.size() + 1)};
    for (const uint32_t number : group) ++all.bounds[place[number] + 1];
    std::partial_sum(all.bounds.begin(), all.bounds.end(), all.bounds.begin());
    std::vector<size_t> next(all.bounds.begin(), all.bounds.end() - 1);
    for (size_t row = 0; row < uses.rows; ++row) all.rows[next[place[group[row]]]++] = static_cast<uint32_t>(row);
    return all;
}

}  // namespace

Incarnations number_incarnations(const Uses& uses) {
    Incarnations out;
    out.is_new.resize_unset(uses.rows);
    out.number.resize_unset(uses.rows);
    auto [rows, bounds] = group_by_address(uses);
    const auto is_earlier = [&](uint32_t a, uint32_t b) { return uses.time[a] < uses.time[b]; };
    int64_t number = 0;
    for (size_t group = 0; group + 1 < bounds.size(); ++group) {
        const auto first = rows.begin() + static_cast<ptrdiff_t>(bounds[group]), end = rows.begin() + static_cast<ptrdiff_t>(bounds[group + 1]);
        std::stable_sort(first, end, is_earlier);
        for (auto at = first; at != end; ++at) {
            bool is_new = at == first;
            if (!is_new) {
                const uint32_t row = *at, before = at[-1];
                is_new = uses.is_created[row] != 0 && uses.time[before] < uses.begin[row];
                if (uses.version != nullptr) {
                    is_new |= uses.version[row] < uses.version[before] && uses.version[before] != INT64_MAX;
                }
            }
            number += is_new;
            out.is_new[*at] = is_new;
            out.number[*at] = number;
        }
    }
    return out;
}

}  // namespace etloom::observer
