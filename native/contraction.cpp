// A graph without the points in its chains: what is left has few points, and edges that are sums of edges.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

#include <nanobind/stl/optional.h>

#include "arrays.hpp"
#include "bindings.hpp"
#include "sweeps.hpp"

namespace {

// A chain leads from a kept point over points that have one edge into and one out of them to the next kept point. Kept
// are anchors and all points with other numbers of edges. Returns the kept points, the chains as edges between them (first,
// source), the last edge of each chain and the chain of each edge.
nb::tuple contract(In<int32_t> first, In<int32_t> source, In<bool> anchors) {
    const size_t m = source.shape(0), n = check_sweep(first, source, anchors.shape(0), m);
    const int32_t *const bound = first.data(), *const from = source.data();
    Paged<int32_t> points, bounds(1, 0), heads, last, chain(m);
    {
        nb::gil_scoped_release release;
        enum : uint8_t { NO_EDGE_OUT, ONE_EDGE_OUT, KEPT };
        Paged<uint8_t> state(n, NO_EDGE_OUT);
        for (size_t e = 0; e < m; ++e) state[from[e]] = state[from[e]] == NO_EDGE_OUT ? ONE_EDGE_OUT : KEPT;
        size_t kept = 0, chains = 0;
        for (size_t v = 0; v < n; ++v) {
            const int32_t degree = bound[v + 1] - bound[v];
            if (anchors(v) || degree != 1 || state[v] != ONE_EDGE_OUT) {
                state[v] = KEPT;
                ++kept;
                chains += static_cast<size_t>(degree);
            }
        }
        points.reserve(kept);
        bounds.reserve(kept + 1);
        heads.reserve(chains);
        last.reserve(chains);
        Paged<int32_t> at(n);  // the number of the kept point before each; then, going back, the chain after each
        for (size_t v = 0; v < n; ++v) {
            if (state[v] != KEPT) {
                at[v] = at[from[bound[v]]];
                continue;
            }
            at[v] = static_cast<int32_t>(points.size());
            points.push_back(static_cast<int32_t>(v));
            for (int32_t e = bound[v]; e < bound[v + 1]; ++e) {
                chain[e] = static_cast<int32_t>(last.size());
                heads.push_back(at[from[e]]);
                last.push_back(e);
            }
            bounds.push_back(static_cast<int32_t>(last.size()));
        }
        for (size_t v = n; v-- > 0;) {
            if (state[v] != KEPT) chain[bound[v]] = at[v];
            for (int32_t e = bound[v]; e < bound[v + 1]; ++e)
                if (state[from[e]] != KEPT) at[from[e]] = chain[e];
        }
    }
    return nb::make_tuple(to_numpy(std::move(points)), to_numpy(std::move(bounds)), to_numpy(std::move(heads)),
                          to_numpy(std::move(last)), to_numpy(std::move(chain)));
}

// Adds the differences of these edges (default: all) to the lags of their chains; `near` gets the lag of a chain's last edge.
void change_chains(In<int32_t> chain, In<int32_t> last, std::optional<In<int32_t>> edges, In<int64_t> difference,
                   In<int64_t> lag, Out<int64_t> sums, std::optional<Out<int64_t>> near) {
    const size_t m = chain.shape(0), chains = last.shape(0), k = edges ? edges->shape(0) : m;
    if (difference.shape(0) != k || lag.shape(0) != k || sums.shape(0) != chains || (near && near->shape(0) != chains))
        throw nb::value_error("the lags do not fit the edges");
    bool fit = true;
    {
        nb::gil_scoped_release release;
        for (size_t i = 0; i < k; ++i) {
            const int32_t e = edges ? (*edges)(i) : static_cast<int32_t>(i);
            if (static_cast<size_t>(e) >= m || static_cast<size_t>(chain(e)) >= chains) {
                fit = false;
                continue;
            }
            const int32_t c = chain(e);
            sums(c) = plus(sums(c), difference(i));
            if (near && last(c) == e) (*near)(c) = lag(i);
        }
    }
    if (!fit) throw nb::value_error("there is no such edge");
}

// Changes edges from their recorded lags and adds the differences to the sums of their chains for two bounds: each floor
// becomes `times` as much, or `to`, or `plus` more but not negative. The upper bound keeps the delay beyond it; of the
// lower bound's the part up to what is usual for the kind changes by `times`, is 0 with `to`, and stays with `plus`.
// Returns the sum of the other parts, and that of floors and delays of the lower bound before and after.
nb::tuple scale_chains(In<int32_t> chain, In<int32_t> last, In<int32_t> edges, In<int64_t> floor, In<int64_t> delay,
                       In<uint8_t> kind, In<int64_t> usual, std::optional<double> times, std::optional<int64_t> to,
                       int64_t more, Out<int64_t> upper, Out<int64_t> near, Out<int64_t> lower) {
    const size_t m = chain.shape(0), chains = last.shape(0);
    for (size_t length : {floor.shape(0), delay.shape(0), kind.shape(0)})
        if (length != m) throw nb::value_error("the lags do not fit the edges");
    for (size_t length : {upper.shape(0), near.shape(0), lower.shape(0)})
        if (length != chains) throw nb::value_error("the lags do not fit the chains");
    bool fit = true;
    uint64_t residual = 0;
    double before = 0, after = 0;
    {
        nb::gil_scoped_release release;
        for (size_t i = 0; i < edges.shape(0); ++i) {
            const auto e = static_cast<size_t>(edges(i));
            if (e >= m || static_cast<size_t>(chain(e)) >= chains || kind(e) >= usual.shape(0)) {
                fit = false;
                continue;
            }
            const auto c = static_cast<size_t>(chain(e));
            const int64_t removable = std::min(delay(e), usual(kind(e))), stays = minus(delay(e), removable);
            const int64_t least = times ? scale(floor(e), *times) : to ? *to : std::max<int64_t>(plus(floor(e), more), 0);
            const int64_t rest = times ? scale(removable, *times) : to ? 0 : removable;
            const int64_t delayed = plus(rest, stays);
            upper(c) = plus(upper(c), minus(least, floor(e)));
            lower(c) = plus(lower(c), minus(plus(least, delayed), plus(floor(e), delay(e))));
            if (last(c) == edges(i)) near(c) = plus(least, delay(e));
            residual += static_cast<uint64_t>(stays);
            before += static_cast<double>(floor(e)) + static_cast<double>(delay(e));
            after += static_cast<double>(least) + static_cast<double>(delayed);
        }
    }
    if (!fit) throw nb::value_error("there is no such edge");
    return nb::make_tuple(static_cast<int64_t>(residual), before, after);
}

// Edges in the order of their chains, to change many of them by a factor. Grouped are those without delay whose floor is
// positive and fits 32 bits: runs of the same chain (its number, where the next run begins, whether the chain's last edge
// is the last of the run), and the floor and the row of each edge. A factor changes nothing about edges without floor and
// delay, which are left out. The other ones are returned as they are.
nb::tuple group_edges(In<int32_t> chain, In<int32_t> last, In<int32_t> edges, In<int64_t> floor, In<int64_t> delay,
                      In<int32_t> rows) {
    const size_t m = chain.shape(0), chains = last.shape(0), k = edges.shape(0);
    for (size_t length : {floor.shape(0), delay.shape(0), rows.shape(0)})
        if (length != m) throw nb::value_error("the lags do not fit the edges");
    Paged<int32_t> runs, bounds(1, 0), floors, owners, others;
    Paged<uint8_t> ends;
    bool fit = true;
    {
        nb::gil_scoped_release release;
        const auto is_plain = [&](size_t e) { return floor(e) > 0 && floor(e) <= INT32_MAX && delay(e) == 0; };
        Paged<int32_t> place(chains + 1, 0), sorted;
        for (size_t i = 0; fit && i < k; ++i) {
            const auto e = static_cast<size_t>(edges(i));
            fit = e < m && static_cast<size_t>(chain(e)) < chains;
            if (!fit) break;
            if (is_plain(e))
                ++place[static_cast<size_t>(chain(e)) + 1];
            else if (floor(e) != 0 || delay(e) != 0)
                others.push_back(edges(i));
        }
        for (size_t c = 0; c < chains; ++c) place[c + 1] += place[c];
        sorted.resize(static_cast<size_t>(place[chains]));
        runs.reserve(std::min(sorted.size(), chains));
        bounds.reserve(runs.capacity() + 1);
        ends.reserve(runs.capacity());
        for (size_t i = 0; fit && i < k; ++i) {
            const auto e = static_cast<size_t>(edges(i));
            if (is_plain(e)) sorted[static_cast<size_t>(place[static_cast<size_t>(chain(e))]++)] = edges(i);
        }
        floors.resize(sorted.size());
        owners.resize(sorted.size());
        for (size_t i = 0; i < sorted.size(); ++i) {
            const auto e = static_cast<size_t>(sorted[i]);
            floors[i] = static_cast<int32_t>(floor(e));
            owners[i] = rows(e);
            if (i + 1 < sorted.size() && chain(static_cast<size_t>(sorted[i + 1])) == chain(e)) continue;
            runs.push_back(chain(e));
            bounds.push_back(static_cast<int32_t>(i + 1));
            ends.push_back(last(static_cast<size_t>(chain(e))) == sorted[i]);
        }
    }
    if (!fit) throw nb::value_error("there is no such edge");
    return nb::make_tuple(to_numpy(std::move(runs)), to_numpy(std::move(bounds)), to_numpy(std::move(ends)),
                          to_numpy(std::move(floors)), to_numpy(std::move(owners)), to_numpy(std::move(others)));
}

// Makes the floors of grouped edges, of those whose row is marked, `times` as much, as `scale_chains` does. Returns how
// much longer all of them take.
int64_t scale_groups(In<int32_t> runs, In<int32_t> bounds, In<uint8_t> ends, In<int32_t> floors, In<int32_t> rows,
                     std::optional<In<bool>> marked, double times, Out<int64_t> upper, Out<int64_t> near,
                     Out<int64_t> lower) {
    const size_t n = runs.shape(0), k = floors.shape(0), chains = upper.shape(0);
    const size_t owners = marked ? marked->shape(0) : 0;
    if (bounds.shape(0) != n + 1 || ends.shape(0) != n || rows.shape(0) != k || bounds(0) != 0 ||
        static_cast<size_t>(bounds(n)) != k || near.shape(0) != chains || lower.shape(0) != chains)
        throw nb::value_error("the lags do not fit the chains");
    if (!(times >= 0 && times < 0x1p20)) throw nb::value_error("the factor is too large");
    bool fit = true;
    int64_t longer = 0;
    {
        nb::gil_scoped_release release;
        const int32_t *const floor = floors.data(), *const row = rows.data();
        const bool* const marks = marked ? marked->data() : nullptr;
        const auto scaled = [times](int32_t lag) { return round_small(static_cast<double>(lag) * times); };
        for (size_t run = 0; run < n; ++run) {
            const auto c = static_cast<size_t>(runs(run)), to = static_cast<size_t>(bounds(run + 1));
            auto i = static_cast<size_t>(bounds(run));
            if (c >= chains || i >= to || to > k) {
                fit = false;
                break;
            }
            int64_t more = 0;
            bool is_marked = true;
            for (; i < to; ++i) {
                if (marks != nullptr) {  // a row that does not exist is not marked
                    const auto owner = static_cast<size_t>(static_cast<uint32_t>(row[i]));
                    is_marked = owner < owners && marks[owner];
                }
                more += is_marked ? scaled(floor[i]) - floor[i] : 0;
            }
            upper(c) = plus(upper(c), more);
            lower(c) = plus(lower(c), more);
            if (ends(run) != 0 && is_marked) near(c) = scaled(floor[to - 1]);
            longer += more;
        }
    }
    if (!fit) throw nb::value_error("there is no such chain");
    return longer;
}

// Those of the edges whose row is marked; edges without a row have a negative one.
nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> select_edges(In<int32_t> edges, In<int32_t> rows, In<bool> marked) {
    const size_t k = edges.shape(0), m = rows.shape(0), n = marked.shape(0);
    Paged<int32_t> selected(k);
    bool fit = true;
    {
        nb::gil_scoped_release release;
        const bool* const marks = marked.data();
        size_t count = 0;
        for (size_t i = 0; i < k; ++i) {
            const int32_t e = edges(i);
            if (static_cast<size_t>(e) >= m) {
                fit = false;
                break;
            }
            const int32_t row = rows(e);
            if (row >= 0 && static_cast<size_t>(row) >= n) {
                fit = false;
                break;
            }
            selected[count] = e;  // without a branch: names alternate
            count += row >= 0 && marks[row];
        }
        selected.resize(count);
    }
    if (!fit) throw nb::value_error("there is no such row");
    return to_numpy(std::move(selected));
}

// The edges of consecutive chains, in order. `first` and `source` are those of the whole graph.
nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> expand_chains(In<int32_t> first, In<int32_t> source, In<int32_t> points,
                                                           In<int32_t> heads, In<int32_t> last, In<int32_t> path) {
    const size_t n = first.shape(0) - 1, m = source.shape(0), chains = last.shape(0);
    if (heads.shape(0) != chains) throw nb::value_error("the edges do not fit the points");
    Paged<int32_t> edges;
    bool fit = true;
    {
        nb::gil_scoped_release release;
        for (size_t i = path.shape(0); fit && i-- > 0;) {
            const auto c = static_cast<size_t>(path(i));
            if (c >= chains || static_cast<size_t>(heads(c)) >= points.shape(0)) {
                fit = false;
                break;
            }
            const int32_t head = points(heads(c));
            for (int32_t e = last(c);;) {
                if (static_cast<size_t>(e) >= m || static_cast<size_t>(source(e)) >= n) {
                    fit = false;
                    break;
                }
                edges.push_back(e);
                const int32_t v = source(e);
                if (v == head) break;
                const int32_t before = first(v);
                if (before >= e) {  // edges go forward: no chain leads here
                    fit = false;
                    break;
                }
                e = before;
            }
        }
        std::reverse(edges.begin(), edges.end());
    }
    if (!fit) throw nb::value_error("there is no such chain");
    return to_numpy(std::move(edges));
}

// Of each point with a group (not negative) whether no usable edge leads to it from its group (1) or from it into its
// group (2): where such edges take no negative time, these points are the first and the last ones of the group.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> mark_extremes(In<int32_t> first, In<int32_t> source, In<bool> usable,
                                                           In<int32_t> group) {
    const size_t n = check_sweep(first, source, group.shape(0), usable.shape(0));
    const int32_t *const bound = first.data(), *const from = source.data(), *const of = group.data();
    Paged<uint8_t> marks(n);
    {
        nb::gil_scoped_release release;
        for (size_t v = 0; v < n; ++v) {
            marks[v] = of[v] < 0 ? 0 : 3;
            if (of[v] < 0) continue;
            for (int32_t e = bound[v]; e < bound[v + 1]; ++e) {
                if (!usable(e) || of[from[e]] != of[v]) continue;
                marks[v] &= static_cast<uint8_t>(~1);
                marks[from[e]] &= static_cast<uint8_t>(~2);
            }
        }
    }
    return to_numpy(std::move(marks));
}

}  // namespace

void bind_contraction(nb::module_& module) {
    module.def("contract", &contract, nb::arg("first"), nb::arg("source"), nb::arg("anchors"),
               "The graph of anchors and of the points that have not one edge into and one out of them: these points; "
               "the offsets of the chains into each; of each chain its source and last edge; the chain of each edge.");
    module.def("change_chains", &change_chains, nb::arg("chain"), nb::arg("last"), nb::arg("edges").none(),
               nb::arg("difference"), nb::arg("lag"), nb::arg("sums"), nb::arg("near").none(),
               "Add differences of edges (default: all) to the sums of their chains, and set the lags of last edges, in "
               "place.");
    module.def("scale_chains", &scale_chains, nb::arg("chain"), nb::arg("last"), nb::arg("edges"), nb::arg("floor"),
               nb::arg("delay"), nb::arg("kind"), nb::arg("usual"), nb::arg("times").none(), nb::arg("to").none(),
               nb::arg("more"), nb::arg("upper"), nb::arg("near"), nb::arg("lower"),
               "Change edges from their recorded lags: add to the sums of their chains of both bounds, in place. Returns "
               "the delays that stay, and the sums of floors and delays of the lower bound before and after.");
    module.def("group_edges", &group_edges, nb::arg("chain"), nb::arg("last"), nb::arg("edges"), nb::arg("floor"),
               nb::arg("delay"), nb::arg("rows"),
               "Edges in the order of their chains: of each run of a chain its number, the end, and whether it ends with the "
               "chain's last edge; of each edge its floor and row; and the edges that have a delay or a long floor.");
    module.def("scale_groups", &scale_groups, nb::arg("runs"), nb::arg("bounds"), nb::arg("ends"), nb::arg("floors"),
               nb::arg("rows"), nb::arg("marked").none(), nb::arg("times"), nb::arg("upper"), nb::arg("near"),
               nb::arg("lower"),
               "Scale the floors of grouped edges, those whose row is marked, in the sums of their chains, in place. Returns "
               "how much longer all of them take.");
    module.def("select_edges", &select_edges, nb::arg("edges"), nb::arg("rows"), nb::arg("marked"),
               "Those of the edges whose row is marked.");
    module.def("expand_chains", &expand_chains, nb::arg("first"), nb::arg("source"), nb::arg("points"), nb::arg("heads"),
               nb::arg("last"), nb::arg("path"), "The edges of consecutive chains, in order.");
    module.def("mark_extremes", &mark_extremes, nb::arg("first"), nb::arg("source"), nb::arg("usable"), nb::arg("group"),
               "The points of each group that no usable edge leads to from the group (1), or leaves into it (2).");
}
