// The packets of a Perfetto trace; see perfetto.hpp. Events are written in perfetto_events.cpp.
#include "perfetto.hpp"

#include <algorithm>
#include <limits>

namespace etloom::perfetto {

using wire::each_number;
using wire::Field;
using wire::kFixed64;
using wire::kLength;
using wire::kVarint;
using wire::Message;
using wire::real_of;

namespace {

constexpr size_t kLargestEvent = UINT32_MAX;
constexpr size_t kLongestText = 1 << 15;  // of what is repeated by number
constexpr uint32_t kRealtime = 1, kFirstSequenceClock = 64, kLastSequenceClock = 127;
constexpr std::string_view kSubTrack = "overlaps its parent track";  // exports/perfetto writes it

// Fields of a packet that describe it, and hold no data.
bool is_about_packet(uint32_t number) {
    switch (number) {
        case 3: case 8: case 10: case 13: case 36: case 41: case 42: case 58: case 79: case 87: case 98: return true;
        default: return false;
    }
}

int64_t add(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); }
int64_t times(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)); }
int64_t signed_of(uint64_t bits) { return static_cast<int64_t>(bits); }

void read_process_fields(std::string_view bytes, Track& track) {
    Message process(bytes);
    std::string_view command;
    track.has_process = true;
    for (Field field; process.next(field);) {
        if (field.is(1, kVarint)) track.pid = static_cast<int32_t>(field.value);
        if (field.is(2, kLength) && command.empty()) command = field.bytes;
        if (field.is(3, kVarint)) track.order = static_cast<int32_t>(field.value), track.has_order = true;
        if (field.is(6, kLength)) track.name = field.bytes;
        if (field.is(8, kLength)) track.labels = field.bytes;
    }
    if (track.name.empty()) track.name = command;
}

void read_thread_fields(std::string_view bytes, Track& track) {
    Message thread(bytes);
    track.has_thread = true;
    for (Field field; thread.next(field);) {
        if (field.is(1, kVarint)) track.pid = static_cast<int32_t>(field.value);
        if (field.is(2, kVarint)) track.tid = signed_of(field.value);
        if (field.is(3, kVarint)) track.order = static_cast<int32_t>(field.value), track.has_order = true;
        if (field.is(5, kLength)) track.name = field.bytes;
    }
}

}  // namespace

std::vector<Compressed> find_compressed(std::string_view bytes) {
    std::vector<Compressed> found;
    Message trace(bytes);
    Field field, inner;
    for (const char* from = trace.here(); trace.next(field); from = trace.here()) {
        if (!field.is(1, kLength)) continue;
        Message packet(field.bytes);
        while (packet.next(inner)) {
            if (!inner.is(50, kLength) && !inner.is(133, kLength)) continue;
            const auto at = [&](const char* place) { return static_cast<size_t>(place - bytes.data()); };
            found.push_back({at(from), at(trace.here()), at(inner.bytes.data()), inner.bytes.size(), inner.number == 133});
            break;
        }
    }
    return found;
}

Trace::Trace(std::string_view bytes, size_t max_rows) : bytes_(bytes) {
    clocks_.emplace_back(trace_clock_);
    states_.emplace_back();
    Message trace(bytes);
    const char* last = trace.here();
    for (Field field; count_rows() <= max_rows && trace.next(field); last = trace.here()) {
        if (field.is(1, kLength)) {
            ++packets;
            read_packet(field.bytes);
        } else {
            ++damaged;
        }
    }
    rows = count_rows();
    is_cut = trace.is_cut();
    trailing = trace.is_damaged() ? static_cast<uint64_t>(bytes.data() + bytes.size() - last) : 0;
    settle_clocks();
    settle_tracks();
    pair_slices();
    add_events();
    add_flows();
    add_counters();
    for (auto& [name, table] : tables) table.settle(troubles);
    constexpr size_t kManyRows = 1 << 17;
    Worker worker;
    events_.order(records_.size() > kManyRows && Computing::has_room() ? &worker : nullptr);
}

void Trace::read_packet(std::string_view bytes) {
    Message packet(bytes);
    std::string_view event, interned, defaults, clocks, thread;
    bool has_event = false, has_defaults = false, has_time = false, is_cleared = false, is_lost = false, needs_state = false;
    uint32_t clock = 0, sequence_id = 0;
    bool has_clock = false;
    int64_t ts = 0;
    for (Field field; packet.next(field);) {
        if (field.type == kVarint) {
            switch (field.number) {
                case 8: ts = signed_of(field.value), has_time = true; continue;
                case 10: sequence_id = static_cast<uint32_t>(field.value); continue;
                case 13: is_cleared |= field.value & 1, needs_state = field.value & 2; continue;
                case 41: is_cleared |= field.value != 0; continue;
                case 42: is_lost = field.value != 0; continue;
                case 58: clock = static_cast<uint32_t>(field.value), has_clock = true; continue;
                default: continue;
            }
        }
        if (field.type != kLength || is_about_packet(field.number)) continue;
        switch (field.number) {
            case 5: read_metadata(field.bytes); break;
            case 6: clocks = field.bytes; break;
            case 11: event = field.bytes, has_event = true; break;
            case 12: interned = field.bytes; break;
            case 60: read_track(field.bytes); break;
            case 44: thread = field.bytes; break;
            case 59: defaults = field.bytes, has_defaults = true; break;
            default: ++unread_packets[field.number];
        }
    }
    if (packet.is_damaged()) ++damaged;
    if (last_sequence_ == nullptr || last_sequence_->id != sequence_id) {
        last_sequence_ = &sequences_[sequence_id];
        last_sequence_->id = sequence_id;
    }
    Sequence& sequence = *last_sequence_;
    if (is_cleared) {
        sequence.state = static_cast<uint32_t>(states_.size());
        sequence.is_valid = true;
        states_.emplace_back();
    } else if (is_lost) {
        sequence.is_valid = false;
        troubles["pftrace_lost"].add("sequence " + std::to_string(sequence_id));
    }
    if (sequence.state == 0) {
        sequence.state = static_cast<uint32_t>(states_.size());
        states_.emplace_back();
    }
    State& state = states_[sequence.state];
    if (!clocks.empty()) read_clocks(clocks, sequence);
    if (has_defaults) read_defaults(defaults, sequence, state);
    if (!interned.empty()) read_interned(interned, state);
    if (!thread.empty()) read_thread(thread, sequence);
    const uint32_t used = has_clock ? clock_of(clock, sequence) : state.clock;
    if (has_time) {
        Clock& own = clocks_[used];
        ts = times(ts, own.multiplier);
        if (own.is_incremental) ts = own.last = add(own.last, ts);
    } else if (has_event) {
        ts = std::numeric_limits<int64_t>::min();
    }
    if (!has_event) return;
    if (needs_state && !sequence.is_valid) {
        troubles["pftrace_no_state"].add("sequence " + std::to_string(sequence_id));
        return;
    }
    read_event(event, sequence, state, ts, used);
}

void Trace::read_interned(std::string_view bytes, State& state) {
    Message data(bytes);
    for (Field field, inner; data.next(field);) {
        Interned* into = nullptr;
        switch (field.number) {
            case 1: into = &state.categories; break;
            case 2: into = &state.names; break;
            case 3: into = &state.keys; break;
            case 29: into = &state.texts; break;
            default: break;
        }
        if (into == nullptr || field.type != kLength) continue;
        uint64_t id = 0;
        std::string_view text;
        Message entry(field.bytes);
        while (entry.next(inner)) {
            if (inner.is(1, kVarint)) id = inner.value;
            if (inner.is(2, kLength)) text = inner.bytes;
        }
        into->set(id, keep(text.substr(0, kLongestText)));
    }
    if (data.is_damaged()) ++damaged;
}

void Trace::read_defaults(std::string_view bytes, Sequence& sequence, State& state) {
    state.has_track = false;
    state.clock = 0;
    state.counters.clear();
    state.real_counters.clear();
    Message defaults(bytes);
    for (Field field, inner; defaults.next(field);) {
        if (field.is(58, kVarint)) state.clock = clock_of(static_cast<uint32_t>(field.value), sequence);
        if (!field.is(11, kLength)) continue;
        Message event(field.bytes);
        while (event.next(inner)) {
            if (inner.is(11, kVarint)) state.track = inner.value, state.has_track = true;
            if (inner.number == 31) each_number(inner, kVarint, [&](uint64_t uuid) { state.counters.push_back(uuid); });
            if (inner.number == 45) each_number(inner, kVarint, [&](uint64_t uuid) { state.real_counters.push_back(uuid); });
        }
    }
}

uint32_t Trace::clock_of(uint32_t id, Sequence& sequence) {
    if (id == clocks_[0].id || id == 0) return 0;
    const bool is_of_sequence = id >= kFirstSequenceClock && id <= kLastSequenceClock;
    auto& known = is_of_sequence ? sequence.clocks : sequences_[UINT32_MAX].clocks;
    const auto [at, is_new] = known.emplace(id, static_cast<uint32_t>(clocks_.size()));
    if (is_new) clocks_.emplace_back(id);
    return at->second;
}

void Trace::read_clocks(std::string_view bytes, Sequence& sequence) {
    auto& snapshot = snapshots_.emplace_back();
    Message message(bytes);
    for (Field field, inner; message.next(field);) {
        if (field.is(2, kVarint)) trace_clock_ = static_cast<uint32_t>(field.value);
        if (!field.is(1, kLength)) continue;
        uint32_t id = 0;
        int64_t time = 0, multiplier = 1;
        bool is_incremental = false;
        Message entry(field.bytes);
        while (entry.next(inner)) {
            if (inner.is(1, kVarint)) id = static_cast<uint32_t>(inner.value);
            if (inner.is(2, kVarint)) time = signed_of(inner.value);
            if (inner.is(3, kVarint)) is_incremental = inner.value != 0;
            if (inner.is(4, kVarint)) multiplier = std::max<int64_t>(1, signed_of(inner.value));
        }
        const uint32_t index = clock_of(id, sequence);
        Clock& clock = clocks_[index];
        clock.multiplier = multiplier;
        clock.is_incremental = is_incremental;
        clock.last = times(time, multiplier);
        snapshot.emplace_back(index, clock.last);
    }
}

// Relates the clocks to that of the trace, of which `epoch` is the difference to the wall clock.
void Trace::settle_clocks() {
    uint32_t base = 0;
    while (base + 1 < clocks_.size() && clocks_[base].id != trace_clock_) ++base;
    if (clocks_[base].id != trace_clock_) base = 0;
    const auto has_base = [&](const auto& snapshot) {
        return std::any_of(snapshot.begin(), snapshot.end(), [&](const auto& entry) { return entry.first == base; });
    };
    if (!snapshots_.empty() && std::none_of(snapshots_.begin(), snapshots_.end(), has_base) && !snapshots_[0].empty()) {
        base = snapshots_[0][0].first;
    }
    trace_clock_ = base;
    for (int pass = 0; pass < 2; ++pass) {  // the second relates clocks that stand with others than the base
        for (const auto& snapshot : snapshots_) {
            bool is_known = false;
            int64_t now = 0;
            for (const auto& [clock, time] : snapshot) {
                if (clock == base) now = time, is_known = true;
            }
            if (is_known == (pass == 1)) continue;
            for (const auto& [clock, time] : snapshot) {
                if (!is_known && !clocks_[clock].points.empty()) now = to_trace_time(time, clock), is_known = true;
            }
            if (!is_known) continue;
            for (const auto& [clock, time] : snapshot) {
                if (clock == base) continue;
                if (clocks_[clock].id == kRealtime && epoch == 0) epoch = add(time, times(now, -1));
                clocks_[clock].points.emplace_back(time, now);
            }
        }
        for (Clock& clock : clocks_) std::stable_sort(clock.points.begin(), clock.points.end());
    }
    for (Record& record : records_) record.ts = to_trace_time(record.ts, record.clock);
    for (Sample& sample : samples_) sample.ts = to_trace_time(sample.ts, sample.clock);
}

int64_t Trace::to_trace_time(int64_t ts, uint32_t clock) {
    if (clock == trace_clock_ || ts == std::numeric_limits<int64_t>::min()) return ts;
    const auto& points = clocks_[clock].points;
    if (points.empty()) {
        if (!snapshots_.empty() || clocks_[clock].id != kRealtime) {
            troubles["pftrace_clock"].add("clock " + std::to_string(clocks_[clock].id));
        }
        return ts;
    }
    auto after = std::upper_bound(points.begin(), points.end(), std::pair(ts, std::numeric_limits<int64_t>::max()));
    if (after != points.begin()) --after;
    return add(after->second, add(ts, times(after->first, -1)));
}

void Trace::read_track(std::string_view bytes) {
    uint64_t uuid = 0;
    Track read;
    Message message(bytes);
    for (Field field, inner; message.next(field);) {
        if (field.is(1, kVarint)) uuid = field.value;
        if (field.is(5, kVarint)) read.parent = field.value;
        if (field.is(12, kVarint)) read.order = static_cast<int32_t>(field.value), read.has_order = true;
        if (field.type != kLength) continue;
        switch (field.number) {
            case 2: case 10: case 13:
                if (read.name.empty()) read.name = field.bytes;  // an empty one is a name, too
                break;
            case 3: read_process_fields(field.bytes, read); break;
            case 4: read_thread_fields(field.bytes, read); break;
            case 8: {
                read.is_counter = true;
                Message counter(field.bytes);
                while (counter.next(inner)) {
                    if (inner.is(4, kVarint)) read.multiplier = std::max<int64_t>(1, signed_of(inner.value));
                    if (inner.is(5, kVarint)) read.is_incremental = inner.value != 0;
                    if (inner.is(7, kLength)) read.counter_key = inner.bytes;
                }
                break;
            }
            case 14: read.is_sub_track = field.bytes == kSubTrack; break;
            default: break;
        }
    }
    if (message.is_damaged()) ++damaged;
    tracks_[track_of(uuid)] = read;
}

uint32_t Trace::track_of(uint64_t uuid) {
    if (last_track_ != UINT32_MAX && uuid == last_uuid_) return last_track_;
    const auto [at, is_new] = track_numbers_.emplace(uuid, static_cast<uint32_t>(tracks_.size()));
    if (is_new) tracks_.emplace_back();
    last_uuid_ = uuid;
    return last_track_ = at->second;
}

// Older packets state the thread of a whole sequence. Its track gets a number that no file states by chance.
void Trace::read_thread(std::string_view bytes, Sequence& sequence) {
    sequence.thread = 0xE71000AA00000000 + sequence.id;
    Track read;
    read_thread_fields(bytes, read);
    tracks_[track_of(sequence.thread)] = read;
    Message thread(bytes);
    for (Field field; thread.next(field);) {
        if (field.is(6, kVarint)) sequence.time_us = signed_of(field.value);
    }
}

// Members next to the events of a JSON trace that was converted.
void Trace::read_metadata(std::string_view bytes) {
    Message bundle(bytes);
    for (Field field, inner; bundle.next(field);) {
        if (field.type != kLength) continue;
        if (field.number != 2) {
            ++unread_packets[5];
            continue;
        }
        std::string key, value;
        Message entry(field.bytes);
        while (entry.next(inner)) {
            if (inner.is(1, kLength)) key = inner.bytes;
            if (inner.is(2, kLength)) value.clear(), append_text(value, inner.bytes);
            if (inner.is(3, kVarint)) value = inner.value != 0 ? "true" : "false";
            if (inner.is(4, kVarint)) value = std::to_string(signed_of(inner.value));
            if (inner.is(5, kLength)) value = inner.bytes;
        }
        header.emplace_back(key, value);
    }
}

void Trace::read_event(std::string_view bytes, Sequence& sequence, const State& state, int64_t ts, uint32_t clock) {
    uint64_t type = 0, uuid = state.has_track ? state.track : sequence.thread;
    bool has_counter = false, has_legacy = false, has_arguments = false;
    double value = 0;
    int64_t pid = 0, tid = 0;
    bool has_tid = false;
    char phase = 0;
    const std::vector<uint64_t>*counters = &state.counters, *real_counters = &state.real_counters;
    counters_.clear();
    real_counters_.clear();
    values_.clear();
    real_values_.clear();
    Message event(bytes);
    const auto set_time = [&](int64_t us) { ts = times(sequence.time_us = us, 1000); };
    for (Field field, inner; event.next(field);) {
        switch (field.number) {
            case 1: if (field.type == kVarint) set_time(add(sequence.time_us, signed_of(field.value))); break;
            case 4: has_arguments = true; break;
            case 6: {
                if (field.type != kLength) break;
                has_legacy = true;
                Message legacy(field.bytes);
                while (legacy.next(inner)) {
                    if (inner.is(2, kVarint)) phase = inner.value < 128 ? static_cast<char>(inner.value) : 0;
                    if (inner.is(18, kVarint)) pid = static_cast<int32_t>(inner.value);
                    if (inner.is(19, kVarint)) tid = static_cast<int32_t>(inner.value), has_tid = true;
                }
                break;
            }
            case 9: if (field.type == kVarint) type = field.value; break;
            case 11: if (field.type == kVarint) uuid = field.value; break;
            case 12: each_number(field, kVarint, [&](uint64_t v) { values_.push_back(static_cast<double>(signed_of(v))); }); break;
            case 16: if (field.type == kVarint) set_time(signed_of(field.value)); break;
            case 30: if (field.type == kVarint) value = static_cast<double>(signed_of(field.value)), has_counter = true; break;
            case 31: each_number(field, kVarint, [&](uint64_t v) { counters_.push_back(v); }); counters = &counters_; break;
            case 44: if (field.type == kFixed64) value = real_of(field.value), has_counter = true; break;
            case 45: each_number(field, kVarint, [&](uint64_t v) { real_counters_.push_back(v); }); real_counters = &real_counters_; break;
            case 46: each_number(field, kFixed64, [&](uint64_t v) { real_values_.push_back(real_of(v)); }); break;
            default: break;
        }
    }
    if (event.is_damaged()) ++damaged;
    const auto add_samples = [&](const std::vector<uint64_t>& tracks, const std::vector<double>& of) {
        for (size_t i = 0; i < std::min(tracks.size(), of.size()); ++i) samples_.push_back({ts, track_of(tracks[i]), clock, of[i]});
    };
    if (!values_.empty()) add_samples(*counters, values_);
    if (!real_values_.empty()) add_samples(*real_counters, real_values_);
    if (type == 4 && has_counter) {
        samples_.push_back({ts, track_of(uuid), clock, value});
        return;
    }
    if (type >= 1 && type <= 3) {
        phase = "BEi"[type - 1];
    } else if (type != 0 || !has_legacy || phase < 'A' || phase == 'M' || phase == 'C') {
        troubles["pftrace_no_type"].add(type == 4 ? "a counter without a value" : "type " + std::to_string(type));
        return;
    }
    uint32_t track = track_of(uuid);
    if (has_tid) {
        track = track_of(0xE71000BB00000000 ^ static_cast<uint64_t>(tid) ^ static_cast<uint64_t>(pid) << 32);
        tracks_[track].has_thread = true;
        tracks_[track].pid = pid;
        tracks_[track].tid = tid;
    }
    const auto size = static_cast<uint32_t>(std::min<size_t>(bytes.size(), kLargestEvent));
    records_.push_back({ts, bytes.data(), size, track, sequence.state, clock, kNoRecord, phase, has_arguments});
}

}  // namespace etloom::perfetto
