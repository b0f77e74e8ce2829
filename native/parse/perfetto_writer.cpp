// See perfetto_writer.hpp. https://perfetto.dev/docs/reference/trace-packet-proto
#include "perfetto_writer.hpp"

#include <charconv>
#include <cstdlib>
#include <optional>

#include "json_text.hpp"

namespace etloom::perfetto {

namespace {

constexpr uint64_t kSequence = 1;
constexpr int kDeepest = 32;  // of tracks below tracks
constexpr uint32_t kBootClock = 6, kRealtime = 1;
constexpr std::string_view kSubTrack = "overlaps its parent track";  // perfetto.cpp reads it

void put_varint(std::string& out, uint64_t value) {
    for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
    out += static_cast<char>(value);
}
void put(std::string& out, uint32_t field, uint64_t value) {
    put_varint(out, field << 3);
    put_varint(out, value);
}
void put(std::string& out, uint32_t field, std::string_view bytes) {
    put_varint(out, field << 3 | 2);
    put_varint(out, bytes.size());
    out += bytes;
}
void put_fixed(std::string& out, uint32_t field, uint64_t bits) {
    put_varint(out, field << 3 | 1);
    for (int i = 0; i < 8; ++i) out += static_cast<char>(bits >> (8 * i));
}
void put_real(std::string& out, uint32_t field, double real) {
    uint64_t bits;
    std::memcpy(&bits, &real, sizeof bits);
    put_fixed(out, field, bits);
}

// The text of a JSON string; a value of another type as it is.
std::string plain(std::string_view token) { return is_text(token) ? unescape(inside(token)) : std::string(token); }

template <typename T>
std::optional<T> exactly(std::string_view token) {
    T number{};
    const auto [end, error] = std::from_chars(token.data(), token.data() + token.size(), number);
    if (error != std::errc() || end != token.data() + token.size()) return {};
    return number;
}

bool is_process(std::string_view pid) {
    const auto number = exactly<int32_t>(pid);
    return number && *number >= 0;
}

}  // namespace

std::string Writer::start(int64_t epoch) {
    out_.clear();
    std::string packet;
    put(packet, 10, kSequence);
    put(packet, 13, uint64_t{1});
    if (epoch != 0) {
        std::string snapshot, clock;
        for (const auto& [id, time] : {std::pair(kBootClock, int64_t{0}), std::pair(kRealtime, epoch)}) {
            clock.clear();
            put(clock, 1, uint64_t{id});
            put(clock, 2, static_cast<uint64_t>(time));
            put(snapshot, 1, clock);
        }
        put(packet, 6, snapshot);
    }
    put(out_, 1, packet);
    return std::move(out_);
}

std::string Writer::member(std::string_view key, std::string_view json) {
    std::string metadata, bundle, packet, out;
    put(metadata, 1, key);
    put(metadata, 5, json);
    put(bundle, 2, metadata);
    put(packet, 10, kSequence);
    put(packet, 5, bundle);
    put(out, 1, packet);
    return out;
}

std::string Writer::add(std::string_view events) {
    out_.clear();
    text_.assign(events);
    text_ += ']';
    const size_t size = text_.size();
    text_.append(kPadding, '\0');
    Cursor at;
    if (!tokens_.find({text_.data(), size}, at)) {
        ++damaged_;
        return {};
    }
    while (read_event(at)) {
        write_event();
        if (at.peek() != ',') break;
        at.step();
    }
    damaged_ += at.at_end() || at.peek() != ']';
    for (Track* track : described_) {
        if (!track->is_written) write_track(*track);
    }
    described_.clear();
    return std::move(out_);
}

bool Writer::read_event(Cursor& at) {
    event_.clear();
    annotations_.clear();
    interned_.clear();
    args_.clear();
    keys_.clear();
    return at.members([&](std::string_view key) {
        if (key == "args" && at.peek() == '{') {
            return at.members([&](std::string_view name) {
                const std::string_view token = at.value();
                args_.emplace_back(name, token);
                return !token.empty();
            });
        }
        const std::string_view token = at.value();
        Event& e = event_;
        if (key == "ph") e.ph = token;
        else if (key == "cat") e.cat = token;
        else if (key == "name") e.name = token;
        else if (key == "pid") e.pid = token;
        else if (key == "tid") e.tid = token;
        else if (key == "ts") e.ts = token;
        else if (key == "dur") e.dur = token;
        else if (key == "id") e.id = token;
        else if (key == "flow_ids") e.flows = token;
        else if (key == "terminating_flow_ids") e.ends = token;
        else if (key != "bp" && key != "s") args_.emplace_back(keys_.emplace_back(".").append(key), token);
        return !token.empty();
    });
}

uint64_t Writer::intern(Dictionary& texts, uint32_t kind, std::string_view text) {
    const size_t before = texts.texts().size();
    const uint64_t id = texts.code(text) + 1;
    if (texts.texts().size() > before) {
        std::string entry;
        put(entry, 1, id);
        put(entry, 2, unescape(text));
        put(interned_, kind, entry);
    }
    return id;
}

void Writer::add_annotation(std::string_view key, std::string_view token) {
    body_.clear();
    put(body_, 1, intern(annotation_names_, 3, key));
    const char first = token.front();
    if (first == '"') {
        put(body_, 6, unescape(inside(token)));
    } else if (first == '{' || first == '[') {
        put(body_, 9, token);
    } else if (first == 't' || first == 'f') {
        put(body_, 2, uint64_t{first == 't'});
    } else if (const auto whole = exactly<int64_t>(token)) {
        put(body_, 4, static_cast<uint64_t>(*whole));
    } else if (const auto natural = exactly<uint64_t>(token)) {
        put(body_, 3, *natural);
    } else if (first != 'n') {
        put_real(body_, 5, real(token).value_or(0));
    }
    put(annotations_, 4, body_);
}

void Writer::write_event() {
    const Event& e = event_;
    const char phase = is_text(e.ph) ? e.ph[1] : 0;
    if (phase == 'M') return describe(e);
    if (phase == 'C') return add_counters();
    const auto ts = thousandths(e.ts), dur = e.dur.empty() ? std::nullopt : thousandths(e.dur);
    if (!ts) {
        ++damaged_;
        return;
    }
    Track& track = track_of(e.pid, e.tid);
    if (!track.is_written) write_track(track);
    for (const auto& [key, token] : args_) add_annotation(key, token);
    const bool is_slice = phase == 'X' && dur, is_flow = phase == 's' || phase == 't' || phase == 'f';
    std::string event;
    if (is_slice || phase == 'i') put(event, 9, uint64_t{is_slice ? 1U : 3U});
    put(event, 11, track.uuid);
    if (is_text(e.cat)) put(event, 3, intern(categories_, 1, inside(e.cat)));
    if (is_text(e.name)) put(event, 10, intern(names_, 2, inside(e.name)));
    event += annotations_;
    if (!is_slice && phase != 'i') {
        std::string legacy;
        put(legacy, 2, static_cast<uint64_t>(phase));
        if (const auto id = e.id.empty() ? std::nullopt : whole(e.id)) put(legacy, 6, static_cast<uint64_t>(*id));
        if (is_flow) put(legacy, 12, uint64_t{1});
        put(event, 6, legacy);
    }
    for (const auto& [field, token] : {std::pair(47, e.flows), std::pair(48, e.ends)}) {
        for (size_t at = 1; at < token.size();) {
            const size_t to = std::min(token.find_first_of(",]", at), token.size());
            if (const auto id = exactly<uint64_t>(trim(token.substr(at, to - at)))) put_fixed(event, static_cast<uint32_t>(field), *id);
            at = to + 1;
        }
    }
    write_packet(*ts, event);
    if (!is_slice) return;
    event.clear();
    put(event, 9, uint64_t{2});
    put(event, 11, track.uuid);
    write_packet(static_cast<int64_t>(static_cast<uint64_t>(*ts) + static_cast<uint64_t>(*dur)), event);
}

void Writer::write_packet(int64_t ts, std::string_view track_event) {
    body_.clear();
    put(body_, 8, static_cast<uint64_t>(ts));
    put(body_, 10, kSequence);
    put(body_, 13, uint64_t{2});
    if (!interned_.empty()) put(body_, 12, interned_);
    interned_.clear();
    put(body_, 11, track_event);
    put(out_, 1, body_);
}

Writer::Track& Writer::track_of(std::string_view pid, std::string_view tid) {
    std::string key(pid);
    key.append("\n").append(tid);
    if (last_ != nullptr && key == last_key_) return *last_;
    const auto [at, is_new] = tracks_.try_emplace(key);
    if (is_new) {
        at->second.uuid = ++uuids_;
        at->second.pid = pid;
        at->second.tid = tid;
    }
    last_key_ = std::move(key);
    last_ = &at->second;
    return *last_;
}

// Keeps what a metadata event states of a process or thread.
void Writer::describe(const Event& e) {
    const std::string name = plain(e.name);
    const bool is_process = name.starts_with("process_");
    if (!is_process && !name.starts_with("thread_")) return;
    Track& track = track_of(e.pid, is_process ? std::string_view() : e.tid);
    for (const auto& [key, token] : args_) {
        if (key == "name") track.name = plain(token);
        if (key == "labels") track.labels = plain(token);
        if (key == "sort_index") track.order = token;
        if (key == "parent") track.parent = token;
    }
    track.is_written = false;
    described_.push_back(&track);
}

void Writer::write_track(Track& track, int depth) {
    track.is_written = true;
    const bool has_process = is_process(track.pid), is_thread = !track.tid.empty();
    std::string descriptor, inner;
    put(descriptor, 1, track.uuid);
    const auto order = exactly<int32_t>(track.order);
    const auto put_order = [&](std::string& to, uint32_t field) {
        if (order) put(to, field, static_cast<uint64_t>(static_cast<int64_t>(*order)));
    };
    if (!is_thread) {
        if (has_process) {
            put(inner, 1, static_cast<uint64_t>(*exactly<int32_t>(track.pid)));
            put_order(inner, 3);
            if (!track.name.empty()) put(inner, 6, track.name);
            if (!track.labels.empty()) put(inner, 8, track.labels);
            put(descriptor, 3, inner);
        } else {
            put(descriptor, 2, plain(track.pid));
            put_order(descriptor, 12);
        }
    } else {
        const std::string pid = track.pid, tid = track.tid;
        Track& parent = track_of(pid, track.parent);
        if (!parent.is_written && depth < kDeepest) write_track(parent, depth + 1);
        put(descriptor, 5, parent.uuid);
        const auto number = exactly<int64_t>(tid);
        if (!track.parent.empty()) {
            put(descriptor, 2, track.name);
            put(descriptor, 14, kSubTrack);
        } else if (has_process && number) {
            put(inner, 1, static_cast<uint64_t>(*exactly<int32_t>(pid)));
            put(inner, 2, static_cast<uint64_t>(*number));
            put_order(inner, 3);
            if (!track.name.empty()) put(inner, 5, track.name);
            put(descriptor, 4, inner);
        } else {
            put(descriptor, 2, plain(tid));
            put_order(descriptor, 12);
        }
    }
    std::string packet;
    put(packet, 10, kSequence);
    put(packet, 60, descriptor);
    put(out_, 1, packet);
}

uint64_t Writer::counter_track(std::string_view pid, const std::string& name, const std::string& series) {
    const auto [at, is_new] = counters_.try_emplace(std::string(pid) + "\n" + name + "\n" + series);
    if (!is_new) return at->second;
    Track& process = track_of(pid, {});
    if (!process.is_written) write_track(process);
    std::string descriptor, counter, packet;
    put(descriptor, 1, at->second = ++uuids_);
    put(descriptor, 5, process.uuid);
    const bool has_series = series != "value";
    put(descriptor, 2, has_series ? name + " " + series : name);
    if (has_series) put(counter, 7, name);
    put(descriptor, 8, counter);
    put(packet, 10, kSequence);
    put(packet, 60, descriptor);
    put(out_, 1, packet);
    return at->second;
}

void Writer::add_counters() {
    const auto ts = thousandths(event_.ts);
    const std::string name = plain(event_.name);
    for (const auto& [series, token] : args_) {
        const auto value = real(token);
        if (!ts || !value) {
            ++damaged_;
            continue;
        }
        std::string event;
        put(event, 9, uint64_t{4});
        put(event, 11, counter_track(event_.pid, name, unescape(series)));
        put_real(event, 44, *value);
        write_packet(*ts, event);
    }
}

}  // namespace etloom::perfetto
