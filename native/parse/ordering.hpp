// Orders of rows, and what follows them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>

#include "columns.hpp"

namespace etloom {

// The order that sorts the rows, stable; empty when they are sorted already.
template <typename Less>
Buffer<uint32_t> sorting_order(size_t rows, Less less) {
    bool sorted = true;
    for (size_t i = 1; i < rows && sorted; ++i) sorted = !less(static_cast<uint32_t>(i), static_cast<uint32_t>(i - 1));
    if (sorted) return {};
    Buffer<uint32_t> order;
    order.resize_unset(rows);
    std::iota(order.begin(), order.end(), 0U);
    std::stable_sort(order.begin(), order.end(), less);
    return order;
}

template <typename T>
void sort_by(Table& rows, const Buffer<T>& key) {
    const auto order = sorting_order(rows.rows(), [&](uint32_t a, uint32_t b) { return key[a] < key[b]; });
    if (!order.empty()) rows.take(order);
}

// Where each row goes.
inline Buffer<uint32_t> places(const Buffer<uint32_t>& order) {
    Buffer<uint32_t> place;
    place.resize_unset(order.size());
    for (size_t i = 0; i < order.size(); ++i) place[order[i]] = static_cast<uint32_t>(i);
    return place;
}

// Puts in order a table whose rows refer (by `refers`, a column of it) to those of another table, in whose old order
// they stand; that table was put in `order`. In linear time.
inline void follow(Table& rows, Buffer<uint32_t>& refers, const Buffer<uint32_t>& order, const Buffer<uint32_t>& place,
                   Worker* worker = nullptr) {
    if (refers.empty()) return;
    Buffer<uint32_t> first;
    first.resize_unset(order.size());
    std::fill(first.begin(), first.end(), UINT32_MAX);
    for (size_t i = refers.size(); i > 0; --i) first[refers[i - 1]] = static_cast<uint32_t>(i - 1);
    Buffer<uint32_t> taken;
    for (const uint32_t referred : order) {
        for (size_t i = first[referred]; i < refers.size() && refers[i] == referred; ++i) taken.push_back(static_cast<uint32_t>(i));
    }
    for (auto& row : refers) row = place[row];
    rows.take(taken, worker);
}

}  // namespace etloom
