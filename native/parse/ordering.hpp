// Orders of rows, and what follows them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "columns.hpp"

namespace etloom {

// The order that sorts the rows, stable; empty when they are sorted already.
template <typename Less>
std::vector<uint32_t> sorting_order(size_t rows, Less less) {
    bool sorted = true;
    for (size_t i = 1; i < rows && sorted; ++i) sorted = !less(static_cast<uint32_t>(i), static_cast<uint32_t>(i - 1));
    if (sorted) return {};
    std::vector<uint32_t> order(rows);
    std::iota(order.begin(), order.end(), 0U);
    std::stable_sort(order.begin(), order.end(), less);
    return order;
}

template <typename T>
void sort_by(Table& rows, const std::vector<T>& key) {
    const auto order = sorting_order(rows.rows(), [&](uint32_t a, uint32_t b) { return key[a] < key[b]; });
    if (!order.empty()) rows.take(order);
}

// Where each row goes.
inline std::vector<uint32_t> places(const std::vector<uint32_t>& order) {
    std::vector<uint32_t> place(order.size());
    for (size_t i = 0; i < order.size(); ++i) place[order[i]] = static_cast<uint32_t>(i);
    return place;
}

// Puts in order a table whose rows refer (by `refers`, a column of it) to those of another table, in whose old order
// they stand; that table was put in `order`. In linear time.
inline void follow(Table& rows, std::vector<uint32_t>& refers, const std::vector<uint32_t>& order, const std::vector<uint32_t>& place) {
    if (refers.empty()) return;
    std::vector<uint32_t> first(order.size(), UINT32_MAX);
    for (size_t i = refers.size(); i > 0; --i) first[refers[i - 1]] = static_cast<uint32_t>(i - 1);
    std::vector<uint32_t> taken;
    taken.reserve(refers.size());
    for (const uint32_t referred : order) {
        for (size_t i = first[referred]; i < refers.size() && refers[i] == referred; ++i) taken.push_back(static_cast<uint32_t>(i));
    }
    for (auto& row : refers) row = place[row];
    rows.take(taken);
}

}  // namespace etloom
