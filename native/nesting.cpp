// Which event of a thread encloses which: one pass over events sorted by start, a stack for each lane.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <unordered_map>
#include <utility>
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

// One thread: what is open (the ends descend), the event entered last, and up to when its time is charged.
struct Track {
    std::vector<Frame> open;
    int64_t last = -1;
    int64_t charged = std::numeric_limits<int64_t>::min();
};

struct PairHash {
    size_t operator()(const std::pair<int64_t, int64_t>& pair) const {
        return std::hash<uint64_t>()(static_cast<uint64_t>(pair.first) * 0x1000003u ^ static_cast<uint64_t>(pair.second));
    }
};

// How often an event of one name was certainly called by one of another name, less how often it certainly followed it.
class NamePairs {
public:
    void count(int64_t outer, int64_t inner, int change) { counts_[{outer, inner}] += change; }
    bool nest(int64_t outer, int64_t inner) const {
        const auto at = counts_.find({outer, inner});
        return at != counts_.end() && at->second > 0;
    }

private:
    std::unordered_map<std::pair<int64_t, int64_t>, int64_t, PairHash> counts_;
};

using Kinds = In<uint8_t>;
constexpr uint8_t OPERATOR = 1, PYTHON = 2, CALL = 4;  // an annotation is none of them

// Events that cross more open events than any program nests close them all: events that all cross each other would take
// quadratic time.
constexpr size_t MAX_CROSSED = 4096;

// Nests the timed events of host threads. Every instant of a track is charged to the innermost event open there, so
// exclusive times tile what the events cover.
class HostStacks {
public:
    HostStacks(Ints track, Ints start, Ints end, Kinds kind, Ints name, int64_t tolerance)
        : track_(track), start_(start), end_(end), kind_(kind), name_(name), tolerance_(tolerance) {}

    std::vector<int64_t> parent, exclusive, detached, crossed, clamped;
    std::vector<int16_t> depth;

    void run() {
        const size_t n = track_.shape(0);
        bool instants = false;
        for (size_t i = 0; i < n && !instants; ++i) instants = end_(i) <= start_(i);
        // Where the clock is coarse, an event without a duration may lie in one that ends where it starts, or follow it:
        // it lies in it if events of these names do so where the times are certain.
        if (instants) {
            learning_ = true;
            pass(n);
            learning_ = false;
        }
        pass(n);
    }

private:
    Ints track_, start_, end_;
    Kinds kind_;
    Ints name_;
    int64_t tolerance_;
    bool learning_ = false;
    NamePairs pairs_;

    void pass(size_t n) {
        parent.assign(n, -1);
        exclusive.assign(n, 0);
        depth.assign(n, 0);
        for (auto* rows : {&detached, &crossed, &clamped}) rows->clear();
        std::unordered_map<int64_t, Track> tracks;
        Track* on = nullptr;
        for (size_t i = 0; i < n; ++i) {
            if (on == nullptr || track_(i) != track_(i - 1)) on = &tracks[track_(i)];
            enter(*on, static_cast<int64_t>(i));
        }
        for (auto& [_, at] : tracks)
            while (!at.open.empty()) close(at);
    }

    void charge(Track& at, int64_t until) {
        if (until <= at.charged) return;
        if (!at.open.empty()) {
            int64_t& time = exclusive[at.open.back().row];
            time = plus(time, minus(until, at.charged));
        }
        at.charged = until;
    }

    void close(Track& at) {
        charge(at, at.open.back().end);
        at.open.pop_back();
    }

    void close_ended(Track& at, int64_t row, int64_t s, int64_t e) {
        while (!at.open.empty() && at.open.back().end <= s) {
            const Frame& top = at.open.back();
            const bool certain = top.end < s || e > s;
            if (!certain && pairs_.nest(name_(top.row), name_(row)) && !learning_) return;
            if (certain && learning_ && top.row == at.last) pairs_.count(name_(top.row), name_(row), -1);
            close(at);
        }
    }

    // An event follows the one around its start if that one ends at once, or, for a call in an annotation, before half of
    // the call: the recorder rounded or converted the times of the two apart. The earlier event is cut, never the later
    // one, which may be a long wait.
    void close_ending(Track& at, int64_t row, int64_t s, int64_t e) {
        while (!at.open.empty() && bounded_plus(at.open.back().end, tolerance_) < e) {
            const int64_t overlap = minus(at.open.back().end, s);
            const bool is_noted_call = kind_(row) & CALL && kind_(at.open.back().row) == 0;
            if (overlap > tolerance_ && !(is_noted_call && overlap < minus(e, s) / 2)) return;
            at.open.back().end = s;
            close(at);
        }
    }

    void enter(Track& at, int64_t row) {
        std::vector<Frame>& open = at.open;
        const int64_t s = start_(row);
        int64_t e = std::max(s, end_(row));
        close_ended(at, row, s, e);
        close_ending(at, row, s, e);
        size_t outer = open.size();  // so many of the open events enclose this one
        while (outer > 0 && bounded_plus(open[outer - 1].end, tolerance_) < e) --outer;
        if (outer < open.size()) {
            const auto any = [&](auto holds) { return std::any_of(open.begin() + outer, open.end(), holds); };
            if (kind_(row) & OPERATOR && any([&](const Frame& it) { return !(kind_(it.row) & PYTHON); })) {
                detached.push_back(row);
                depth[row] = -1;
                exclusive[row] = minus(e, s);
                return;
            }
            crossed.push_back(row);
            charge(at, s);
            if (open.size() - outer > MAX_CROSSED)
                open.resize(outer);
            else if (kind_(row) & CALL)
                outer = open.size();
            else if (!(kind_(row) & PYTHON) && !any([&](const Frame& it) { return kind_(it.row) & OPERATOR; }))
                open.resize(outer);
        }
        if (open.empty())
            at.charged = std::max(at.charged, s);
        else
            charge(at, s);
        if (outer > 0) {
            const Frame& around = open[outer - 1];
            parent[row] = around.row;
            depth[row] = std::min<int16_t>(depth[around.row], INT16_MAX - 1) + 1;
            if (learning_ && around.end > s) pairs_.count(name_(around.row), name_(row), 1);
            if (around.end < e) {
                clamped.push_back(row);
                e = around.end;
            }
        }
        open.insert(open.begin() + outer, {e, row});
        at.last = row;
    }
};

nb::tuple stack_tracks(Ints track, Ints start, Ints end, Kinds kind, Ints name, int64_t tolerance) {
    const size_t n = track.shape(0);
    if (start.shape(0) != n || end.shape(0) != n || kind.shape(0) != n || name.shape(0) != n)
        throw nb::value_error("the columns differ in length");
    HostStacks stacks(track, start, end, kind, name, tolerance);
    {
        nb::gil_scoped_release release;
        stacks.run();
    }
    return nb::make_tuple(to_numpy(std::move(stacks.parent)), to_numpy(std::move(stacks.depth)),
                          to_numpy(std::move(stacks.exclusive)), to_numpy(std::move(stacks.detached)),
                          to_numpy(std::move(stacks.crossed)), to_numpy(std::move(stacks.clamped)));
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
            // In a table by time nearly all lie in earlier rows, of which this is known.
            if (const T outer = around[row]; found[row] == OPEN && (marked[row] || outer < at)) {
                found[row] = marked[row] ? at : outer < 0 ? NONE : found[outer];
                continue;
            }
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

// The lines on which the events of a timeline are drawn: each takes the first line of its track, from a given one on,
// whose last event has ended; of `limit` lines the last one takes all others, which are counted.
nb::tuple draw_lines(Ints track, Ints start, Ints end, Ints first, int64_t limit) {
    const size_t n = track.shape(0);
    if (start.shape(0) != n || end.shape(0) != n || first.shape(0) != n) throw nb::value_error("columns of different lengths");
    if (limit < 1) throw nb::value_error("no lines");
    std::vector<int64_t> lines(n);
    size_t crowded = 0;
    bool valid = true;
    {
        nb::gil_scoped_release release;
        std::unordered_map<int64_t, std::vector<int64_t>> ends_by_track;
        for (size_t i = 0; i < n; ++i) {
            std::vector<int64_t>& ends = ends_by_track[track(i)];
            valid &= first(i) >= 0 && first(i) < limit;
            auto line = static_cast<size_t>(std::clamp<int64_t>(first(i), 0, limit - 1));
            while (line < ends.size() && ends[line] > start(i)) ++line;
            if (line < static_cast<size_t>(limit)) {
                if (line >= ends.size()) ends.resize(line + 1, 0);
                ends[line] = end(i);
            } else {
                line = static_cast<size_t>(limit) - 1;
                ++crowded;
                ends[line] = std::max(ends[line], end(i));
            }
            lines[i] = static_cast<int64_t>(line);
        }
    }
    if (!valid) throw nb::value_error("there is no such line");
    return nb::make_tuple(to_numpy(std::move(lines)), crowded);
}

// The calls of a part of the time as a tree: calls of one name by one caller are one node. A call that outlasts its caller
// counts up to the caller's end, and time outside of the part does not count.
nb::tuple sum_calls(Ints track, Ints start, Ints end, Ints name, int64_t from, int64_t to) {
    const size_t n = track.shape(0);
    if (start.shape(0) != n || end.shape(0) != n || name.shape(0) != n) throw nb::value_error("columns of different lengths");
    std::vector<int64_t> parents, firsts, counts, times;
    {
        nb::gil_scoped_release release;
        std::unordered_map<std::pair<int64_t, int64_t>, int64_t, PairHash> nodes;  // of a caller's node and a name
        std::vector<Open> stack;
        for (size_t i = 0; i < n; ++i) {
            if (i > 0 && track(i) != track(i - 1)) stack.clear();
            while (!stack.empty() && stack.back().end <= start(i)) stack.pop_back();
            const int64_t stop = std::min(end(i), stack.empty() ? to : stack.back().end);
            const int64_t caller = stack.empty() ? -1 : stack.back().row;
            const auto [at, added] = nodes.try_emplace({caller, name(i)}, static_cast<int64_t>(parents.size()));
            if (added) {
                parents.push_back(caller);
                firsts.push_back(static_cast<int64_t>(i));
                counts.push_back(0);
                times.push_back(0);
            }
            ++counts[at->second];
            times[at->second] = plus(times[at->second], minus(stop, std::max(start(i), from)));
            stack.push_back({stop, at->second});
        }
    }
    return nb::make_tuple(to_numpy(std::move(parents)), to_numpy(std::move(firsts)), to_numpy(std::move(counts)),
                          to_numpy(std::move(times)));
}

}  // namespace

void bind_nesting(nb::module_& module) {
    const char* nearest_of = "Of each row the nearest wanted one among it and those around it (rows, negative for none), and of the row -1; -1 for none.";
    module.def("nearest", &nearest<int32_t>, nb::arg("parent"), nb::arg("wanted"), nearest_of);
    module.def("nearest", &nearest<int64_t>, nb::arg("parent"), nb::arg("wanted"), nearest_of);
    module.def("nest", &nest, nb::arg("lane"), nb::arg("start"), nb::arg("end"), nb::arg("tolerance") = 0,
               "Parent row (-1 for none), depth, and the rows that outlast the event around them, of events sorted by "
               "(start, -end). All int64; rows of one lane nest, lanes are independent.");
    module.def("draw_lines", &draw_lines, nb::arg("track"), nb::arg("start"), nb::arg("end"), nb::arg("first"),
               nb::arg("limit"),
               "The line (from 0) of each event of a timeline on its track, and the number of events that share the last "
               "line. Events are sorted by start; first is the first line that an event may take. All int64.");
    module.def("sum_calls", &sum_calls, nb::arg("track"), nb::arg("start"), nb::arg("end"), nb::arg("name"),
               nb::arg("from_time"), nb::arg("to_time"),
               "The call tree of events that overlap a time, sorted by (track, start, -end): parent node (-1 for none), "
               "first event, number of events and time inside of each node; callers come before callees. All int64.");
    module.def("stack_tracks", &stack_tracks, nb::arg("track"), nb::arg("start"), nb::arg("end"), nb::arg("kind"),
               nb::arg("name"), nb::arg("tolerance"),
               "Nest the events of host threads, in the order in which they were entered. Returns parent row (-1 for "
               "none), depth (-1 for detached events), exclusive time, and the rows that are detached, that cross the "
               "event around them and that are clamped to it. kind has bits: 1 operator, 2 Python function, 4 call.");
}
