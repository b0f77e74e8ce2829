// The points of host threads in their order: what is open when.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

#include "arrays.hpp"
#include "bindings.hpp"
#include "times.hpp"

namespace {

// The marked rows lane by lane, each by start and depth, so that what is around comes first.
Paged<int32_t> lane_by_lane(const bool* marked, const int32_t* lane, const int64_t* start, const int16_t* depth, size_t all) {
    std::vector<size_t> at;
    size_t count = 0;
    for (size_t row = 0; row < all; ++row) {
        if (!marked[row]) continue;
        const auto of = static_cast<size_t>(lane[row]);
        if (of + 2 > at.size()) at.resize(of + 2);
        ++at[of + 1];
        ++count;
    }
    for (size_t l = 1; l < at.size(); ++l) at[l] += at[l - 1];
    Paged<int32_t> rows(count);
    for (size_t row = 0; row < all; ++row)
        if (marked[row]) rows[at[lane[row]]++] = static_cast<int32_t>(row);
    // A table in the order of time needs no more than this.
    const auto before = [&](int32_t a, int32_t b) {
        return std::tuple(lane[a], start[a], depth[a]) < std::tuple(lane[b], start[b], depth[b]);
    };
    if (!std::is_sorted(rows.begin(), rows.end(), before)) std::stable_sort(rows.begin(), rows.end(), before);
    return rows;
}

// The points of host lanes in their order, of the marked events. A parent is a row, -1 for none. An event ends no later
// than the next one that is not its child begins, and than its parent if it outlasts that by no more than ROUNDING: else
// the parent ends as late, since the child may be a wait. Of `calls` (ascending rows) those with `submit`
// inside them have one more point. Each point gets the row of its event, its role (0 start, 1 end, 2 submit), its time,
// and the event innermost open just before it: IDLE where none was, FIRST where it is the first of its lane. Also the
// places of the start and the end of each event, and of the submission of each call, -1 for none.
nb::tuple tour(In<bool> marks, In<int32_t> lanes, In<int64_t> starts, In<int64_t> ends, In<int16_t> depths,
               In<int32_t> parents, In<int32_t> calls, In<int64_t> submit) {
    constexpr int32_t IDLE = -1, FIRST = -2;
    constexpr int64_t ROUNDING = 1'000;  // ns, the tolerance of nesting
    enum : uint8_t { START, END, SUBMIT };
    const size_t all = lanes.shape(0);
    for (size_t length : {marks.shape(0), starts.shape(0), ends.shape(0), depths.shape(0), parents.shape(0)})
        if (length != all) throw nb::value_error("the columns of the events differ in length");
    if (calls.shape(0) != submit.shape(0)) throw nb::value_error("the columns of the calls differ in length");
    const int32_t *const lane = lanes.data(), *const parent = parents.data();
    const int64_t *const start = starts.data(), *const end = ends.data();
    for (size_t row = 0; row < all; ++row)
        if (lane[row] < 0) throw nb::value_error("there is no such lane");
    Paged<int32_t> event, before, places[2], submission(calls.shape(0), -1);
    Paged<uint8_t> role;
    Paged<int64_t> time;
    {
        nb::gil_scoped_release release;
        const Paged<int32_t> rows = lane_by_lane(marks.data(), lane, start, depths.data(), all);
        const size_t n = rows.size();
        for (auto* each : {&event, &before}) each->reserve(2 * n + n / 4);
        role.reserve(2 * n + n / 4);
        time.reserve(2 * n + n / 4);
        for (auto& of_role : places) of_role.assign(all, -1);
        struct Span {
            int32_t row;
            int64_t end;
        };
        struct Submission {
            size_t call;
            int64_t at;
        };
        std::vector<Span> open;
        std::vector<Submission> pending;  // those not reached yet, the next one last
        // The rows of a lane ascend, mostly: then the next call is the last one or the one after it.
        const int32_t* const begin = calls.data();
        const size_t none = calls.shape(0);
        size_t next = 0;
        const auto call_of = [&](int32_t row) {
            if (next < none && begin[next] < row) ++next;
            if ((next < none && begin[next] < row) || (next > 0 && begin[next - 1] >= row))
                next = std::lower_bound(begin, begin + none, row) - begin;
            return next < none && begin[next] == row ? next : none;
        };
        int64_t now = 0;
        bool fresh = true;
        const auto put = [&](int32_t row, uint8_t what, int64_t at) {
            now = fresh ? at : std::max(now, at);
            event.push_back(row);
            role.push_back(what);
            time.push_back(now);
            before.push_back(fresh ? FIRST : open.empty() ? IDLE : open.back().row);
            fresh = false;
        };
        const auto submit_until = [&](int64_t at) {
            while (!pending.empty() && pending.back().at <= at) {
                submission[pending.back().call] = static_cast<int32_t>(event.size());
                put(calls(pending.back().call), SUBMIT, pending.back().at);
                pending.pop_back();
            }
        };
        const auto close = [&](int64_t at) {
            const Span one = open.back();
            const int64_t until = std::min(one.end, at);
            submit_until(until);
            places[END][one.row] = static_cast<int32_t>(event.size());
            put(one.row, END, until);
            open.pop_back();
        };
        for (size_t i = 0; i <= n; ++i) {
            const bool other_lane = i == n || (i > 0 && lane[rows[i]] != lane[rows[i - 1]]);
            const int64_t at = other_lane ? std::numeric_limits<int64_t>::max() : start[rows[i]];
            // A parent that ended as a sibling began, in the microsecond in which its child starts, is not open any more.
            int64_t around = other_lane ? -1 : parent[rows[i]];
            while (around >= 0 && (places[START][around] < 0 || places[END][around] >= 0)) around = parent[around];
            while (!open.empty() && open.back().row != around) close(at);
            if (i == n) break;
            if (other_lane) {
                pending.clear();
                fresh = true;
            }
            const int32_t row = rows[i];
            submit_until(start[row]);
            places[START][row] = static_cast<int32_t>(event.size());
            put(row, START, start[row]);
            int64_t until = std::max(end[row], start[row]);
            if (!open.empty() && minus(until, open.back().end) <= ROUNDING)
                until = std::min(until, std::max(open.back().end, start[row]));
            open.push_back({row, until});
            const size_t call = call_of(row);
            if (call != none && submit(call) > start[row] && submit(call) < until) {
                pending.push_back({call, submit(call)});
                std::sort(pending.begin(), pending.end(),
                          [](const Submission& a, const Submission& b) { return a.at > b.at; });
            }
        }
    }
    return nb::make_tuple(to_numpy(std::move(event)), to_numpy(std::move(role)), to_numpy(std::move(time)),
                          to_numpy(std::move(before)), to_numpy(std::move(places[START])),
                          to_numpy(std::move(places[END])), to_numpy(std::move(submission)));
}

}  // namespace

void bind_tour(nb::module_& module) {
    module.def("tour", &tour, nb::arg("marked"), nb::arg("lane"), nb::arg("start"), nb::arg("end"), nb::arg("depth"),
               nb::arg("parent"), nb::arg("calls"), nb::arg("submit"),
               "The points of host lanes in order: event, role, time, and the event open before (-1 none, -2 first); of "
               "each event the places of its start and end, of each call that of its submission.");
}
