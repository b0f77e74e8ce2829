// The events of a Perfetto trace as rows; see perfetto.hpp.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <limits>
#include <numeric>
#include <set>

#include "perfetto.hpp"

namespace etloom::perfetto {

using kineto::Event;
using kineto::Scalar;
using wire::each_number;
using wire::Field;
using wire::kFixed64;
using wire::kLength;
using wire::kVarint;
using wire::Message;
using wire::real_of;

namespace {

constexpr int kDeepest = 32;
constexpr size_t kMostParents = 64;
constexpr uint64_t kFlowIds = (uint64_t{1} << 61) - 1;

Scalar number_scalar(int64_t number, Scalar::Form form = Scalar::Form::kWhole) { return {"0", number, form}; }

// How many bytes of the text at `from` are one character of UTF-8; 0: none.
size_t character_at(std::string_view text, size_t from) {
    const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[from + i]); };
    const uint8_t first = byte(0);
    const size_t size = first < 0x80 ? 1 : first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 0;
    if (size == 0 || from + size > text.size()) return 0;
    for (size_t i = 1; i < size; ++i) {
        if ((byte(i) & 0xC0) != 0x80) return 0;
    }
    if (size == 3 && ((first == 0xE0 && byte(1) < 0xA0) || (first == 0xED && byte(1) > 0x9F))) return 0;
    if (size == 4 && ((first == 0xF0 && byte(1) < 0x90) || (first == 0xF4 && byte(1) > 0x8F))) return 0;
    return size;
}

bool is_utf8(std::string_view text) {
    for (size_t at = 0; at < text.size();) {
        const size_t size = static_cast<uint8_t>(text[at]) < 0x80 ? 1 : character_at(text, at);
        if (size == 0) return false;
        at += size;
    }
    return true;
}

bool is_plain(std::string_view text) {
    return std::none_of(text.begin(), text.end(), [](char c) {
        return static_cast<uint8_t>(c) < 0x20 || static_cast<uint8_t>(c) >= 0x7F || c == '"' || c == '\\';
    });
}

void append_escaped(std::string& json, std::string_view raw) {
    for (size_t at = 0; at < raw.size();) {
        const char c = raw[at];
        const size_t size = character_at(raw, at);
        if (size == 0) {
            json += "\xEF\xBF\xBD";
        } else if (c == '"' || c == '\\') {
            json += '\\';
            json += c;
        } else if (const size_t letter = std::string_view("\b\f\n\r\t").find(c); letter != std::string_view::npos) {
            json += '\\';
            json += "bfnrt"[letter];
        } else if (static_cast<uint8_t>(c) < 0x20) {
            char text[8];
            std::snprintf(text, sizeof text, "\\u%04x", static_cast<unsigned>(c));
            json += text;
        } else {
            json.append(raw, at, size);
        }
        at += std::max<size_t>(size, 1);
    }
}

template <typename T>
void append_number(std::string& json, T number) {
    char text[32];
    json.append(text, std::to_chars(text, text + sizeof text, number).ptr);
}

bool is_device_category(std::string_view cat) { return cat == "kernel" || cat == "gpu_memcpy" || cat == "gpu_memset"; }

// The text with JSON's escapes: itself if it needs none, else `room`.
std::string_view escape(std::string_view raw, std::string& room) {
    if (is_plain(raw)) return raw;
    append_escaped(room, raw);
    return room;
}

}  // namespace

void append_text(std::string& json, std::string_view raw) {
    json += '"';
    is_plain(raw) ? json.append(raw) : (append_escaped(json, raw), json);
    json += '"';
}

namespace {

// A text that stands in the file as JSON, if it is one value.
void append_json(std::string& json, std::string_view text) {
    const std::string_view value = trim(text);
    const bool is_value = !value.empty() && (value.front() == '{' || value.front() == '[' || value.front() == '"')
                              ? value_end(value.data(), value.data() + value.size()) == value.data() + value.size()
                              : is_scalar(value);
    const bool is_plain_text = std::none_of(value.begin(), value.end(), [](char c) { return static_cast<uint8_t>(c) < 0x20; });
    is_value && is_plain_text && is_utf8(value) ? static_cast<void>(json.append(value)) : append_text(json, text);
}

}  // namespace

void Trace::append_annotation(std::string& json, std::string_view bytes, const State& state, int depth, std::string_view& key) {
    const size_t before = json.size();
    char bracket = 0;  // of a list or object that is not closed
    const auto restart = [&] {
        json.resize(before);
        bracket = 0;
    };
    Message annotation(bytes);
    for (Field field; annotation.next(field);) {
        const bool is_number = field.type == kVarint, is_bytes = field.type == kLength;
        switch (field.number) {
            case 1: if (is_number) key = is_affordable(state.keys.find(field.value)) ? state.keys.find(field.value) : ""; break;
            case 2: if (is_number) restart(), json += field.value != 0 ? "true" : "false"; break;
            case 3: case 7: if (is_number) restart(), append_number(json, field.value); break;
            case 4: if (is_number) restart(), append_number(json, static_cast<int64_t>(field.value)); break;
            case 5: if (field.type == kFixed64) restart(), append_real(json, real_of(field.value)); break;
            case 6: if (is_bytes) restart(), append_text(json, field.bytes); break;
            case 8: if (is_bytes) restart(), append_nested(json, field.bytes, depth + 1); break;
            case 9: if (is_bytes) restart(), append_json(json, field.bytes); break;
            case 10: if (is_bytes) key = escape(field.bytes, room()); break;
            case 11: case 12: {
                const char closing = field.number == 11 ? '}' : ']';
                if (!is_bytes) break;
                if (bracket != closing) restart();
                json += bracket != 0 ? ',' : closing == '}' ? '{' : '[';
                bracket = closing;
                std::string_view name;
                std::string& value = room();
                if (depth < kDeepest) append_annotation(value, field.bytes, state, depth + 1, name);
                if (closing == '}') json.append("\"").append(name).append("\":");
                json += value.empty() ? "null" : value;
                break;
            }
            case 17: if (is_number) restart(), append_interned(json, state.texts.find(field.value)); break;
            default: ++unread_fields[kAnnotationFields + field.number];
        }
    }
    if (annotation.is_damaged()) ++damaged;
    if (bracket != 0) json += bracket;
}

// Whether a text of the file, which any number of events may repeat, takes no more memory than the file lets expect.
bool Trace::is_affordable(std::string_view text) {
    constexpr size_t kTimes = 16, kAlways = 1 << 25;
    spent_ += text.size();
    return spent_ <= bytes_.size() * kTimes + kAlways;
}

void Trace::append_interned(std::string& json, std::string_view text) {
    if (text.data() == nullptr || !is_affordable(text)) return troubles["pftrace_no_name"].add("a text of an annotation");
    json.append("\"").append(text).append("\"");
}

// The older form of lists and objects.
void Trace::append_nested(std::string& json, std::string_view bytes, int depth) {
    uint64_t type = 0;
    std::vector<std::string_view> keys, members, items;
    std::string value;
    Message nested(bytes);
    for (Field field; nested.next(field);) {
        if (field.is(1, kVarint)) type = field.value;
        if (field.is(2, kLength)) keys.push_back(field.bytes);
        if (field.is(3, kLength)) members.push_back(field.bytes);
        if (field.is(4, kLength)) items.push_back(field.bytes);
        if (field.is(5, kVarint)) value.clear(), append_number(value, static_cast<int64_t>(field.value));
        if (field.is(6, kFixed64)) value.clear(), append_real(value, real_of(field.value));
        if (field.is(7, kVarint)) value = field.value != 0 ? "true" : "false";
        if (field.is(8, kLength)) value.clear(), append_text(value, field.bytes);
    }
    if (type != 1 && type != 2) {
        json += value.empty() ? "null" : value;
        return;
    }
    if (depth >= kDeepest) {
        json += "null";
        return;
    }
    const auto& parts = type == 1 ? members : items;
    json += type == 1 ? '{' : '[';
    for (size_t i = 0; i < parts.size(); ++i) {
        if (i > 0) json += ',';
        if (type == 1) append_text(json, i < keys.size() ? keys[i] : std::string_view()), json += ':';
        append_nested(json, parts[i], depth + 1);
    }
    json += type == 1 ? '}' : ']';
}

std::string_view Trace::keep(std::string_view raw) {
    if (is_plain(raw)) return raw;
    append_escaped(kept_.emplace_back(), raw);
    return kept_.back();
}

// How events state the processes and threads of their tracks. A track that belongs to none is identified by its name.
void Trace::settle_tracks() {
    std::set<std::pair<std::string_view, std::string>> used;  // of a process (its number or name)
    std::unordered_map<std::string, Scalar> pids;  // by process or root
    std::vector<uint64_t> uuids(tracks_.size());
    for (const auto& [uuid, index] : track_numbers_) uuids[index] = uuid;
    const auto label = [&](uint32_t index) {
        const std::string_view name = tracks_[index].name;
        return name.data() == nullptr ? "track " + std::to_string(uuids[index]) : std::string(name);
    };
    const auto text_scalar = [&](std::string_view text) {
        std::string& json = kept_.emplace_back();
        append_text(json, text);
        const size_t size = json.size();
        json.append(kPadding, '\0');
        return Scalar{{json.data(), size}};
    };
    for (uint32_t index = 0; index < uuids.size(); ++index) {
        Track& track = tracks_[index];
        uint32_t root = index, parents = 0;
        for (bool is_owned = false; !is_owned && ++parents < kMostParents;) {
            is_owned = tracks_[root].has_process || tracks_[root].has_thread;
            const auto parent = track_numbers_.find(tracks_[root].parent);
            if (is_owned || tracks_[root].parent == 0 || parent == track_numbers_.end()) break;
            root = parent->second;
        }
        const Track& owner = tracks_[root];
        const bool is_owned = owner.has_process || owner.has_thread;
        if (!is_owned && root == index && uuids[index] == 0 && track.name.data() == nullptr) continue;  // no track at all
        // The name of the root is kept once, however many tracks are below it.
        auto& pid_text = pids[is_owned ? std::to_string(owner.pid) : "\n" + std::to_string(root)];
        if (pid_text.empty()) pid_text = is_owned ? Scalar{kept_.emplace_back(std::to_string(owner.pid))} : text_scalar(label(root));
        track.pid_scalar = is_owned ? number_scalar(owner.pid) : pid_text;
        if (track.has_thread) {
            track.tid_scalar = number_scalar(track.tid);
            add_name(track, "thread_name", "name", track.name);
            if (track.has_order) add_order(track, "thread_sort_index");
            continue;
        }
        if (track.has_process) {
            track.tid_scalar = number_scalar(0);
            add_name(track, "process_name", "name", track.name);
            add_name(track, "process_labels", "labels", track.labels);
            if (track.has_order) add_order(track, "process_sort_index");
        }
        const auto parent = track_numbers_.find(track.parent);
        if (track.is_sub_track && parent != track_numbers_.end() && parent->second != index) {
            track.tid_scalar = {};
            continue;
        }
        std::string name = track.has_process ? "events of the process" : label(index);
        const std::string_view pid = pid_text.token;
        if ((is_owned || root != index) && !used.emplace(pid, name).second) used.emplace(pid, name += " (" + std::to_string(uuids[index]) + ")");
        track.tid_scalar = text_scalar(name);
        if (is_owned && !track.has_process && !track.is_counter) add_name(track, "thread_name", "name", name);
        if (track.has_order && !track.has_process) add_order(track, root == index ? "process_sort_index" : "thread_sort_index");
    }
    for (Track& track : tracks_) {
        if (track.is_sub_track && track.tid_scalar.empty()) {
            const auto parent = track_numbers_.find(track.parent);
            if (parent != track_numbers_.end()) track.tid_scalar = tracks_[parent->second].tid_scalar;
        }
    }
}

void Trace::add_metadata(const Track& track, std::string_view kind, std::string_view key, std::string_view value) {
    Event& event = reader_.start();
    used_ = 0;
    event.ph = 'M';
    event.ph_text = "M";
    event.name = kind;
    event.pid = track.pid_scalar;
    event.tid = track.tid_scalar;
    std::string& args = room();
    args.append("{\"").append(key).append("\":").append(value).append("}");
    event.args = args;
    events_.add(event, 0);
}

void Trace::add_name(const Track& track, std::string_view kind, std::string_view key, std::string_view text) {
    if (text.empty()) return;
    std::string value;
    append_text(value, text);
    add_metadata(track, kind, key, value);
}

void Trace::add_order(const Track& track, std::string_view kind) {
    add_metadata(track, kind, "sort_index", std::to_string(track.order));
}

// An end closes the last slice that began on its track.
void Trace::pair_slices() {
    struct Mark {
        int64_t ts;
        uint32_t row;
        bool begins;
    };
    std::vector<size_t> ends(tracks_.size() + 1);  // of the marks of each track, and in the end those before it
    for (const Record& record : records_) ends[record.track] += record.phase == 'B' || record.phase == 'E';
    std::exclusive_scan(ends.begin(), ends.end(), ends.begin(), size_t{0});
    Buffer<Mark> marks;
    marks.resize_unset(ends.back());
    for (uint32_t row = 0; row < records_.size(); ++row) {
        const Record& record = records_[row];
        if (record.phase == 'B' || record.phase == 'E') marks[ends[record.track]++] = {record.ts, row, record.phase == 'B'};
    }
    std::vector<uint32_t> open;
    const auto is_before = [](const Mark& a, const Mark& b) { return a.ts < b.ts; };
    for (size_t track = 0, from = 0; track < tracks_.size(); from = ends[track++]) {
        Mark *const first = marks.data() + from, *const last = marks.data() + ends[track];
        if (!std::is_sorted(first, last, is_before)) std::stable_sort(first, last, is_before);
        open.clear();
        for (const Mark* mark = first; mark != last; ++mark) {
            if (mark->begins) {
                open.push_back(mark->row);
            } else if (!open.empty()) {
                records_[open.back()].end = mark->row;
                records_[mark->row].phase = 0;
                open.pop_back();
            }
        }
    }
}

void Trace::add_events() {
    for (uint32_t number = 0; number < records_.size(); ++number) {
        if (records_[number].phase != 0) add_event(records_[number], number);
    }
}

void Trace::add_category(Event& event, std::string_view category, std::string*& joined) {
    if (category.empty() || event.cat.empty()) {
        if (!category.empty()) event.cat = category;
        return;
    }
    constexpr size_t kLongest = 1 << 10;
    if (joined == nullptr) joined = &room(), joined->append(event.cat);
    if (joined->size() > kLongest) return;
    joined->append(",").append(category);
    event.cat = *joined;
}

// The common argument: a number of a column, which needs no text.
bool Trace::add_number(std::string_view bytes, const State& state) {
    Message annotation(bytes);
    Field key, number;
    if (!annotation.next(key) || !annotation.next(number) || annotation.here() != bytes.data() + bytes.size()) return false;
    if (number.number == 1 || number.number == 10) std::swap(key, number);
    const std::string_view name = key.is(10, kLength) ? key.bytes : key.is(1, kVarint) ? state.keys.find(key.value) : "";
    if (number.is(5, kFixed64)) return reader_.add_number(name, real_of(number.value));
    const auto whole = static_cast<int64_t>(number.value);
    return (number.is(4, kVarint) || (number.is(3, kVarint) && whole >= 0)) && reader_.add_number(name, whole);
}

void Trace::add_argument(std::string_view bytes, const State& state) {
    if (add_number(bytes, state)) return;
    std::string& json = room();
    std::string_view key;
    append_annotation(json, bytes, state, 0, key);
    if (json.empty()) json = "null";
    const size_t size = json.size();
    json.append(kPadding, '\0');
    if (key.empty()) troubles["pftrace_no_name"].add("an annotation");
    reader_.add_argument(key, {json.data(), size});
}

void Trace::add_event(const Record& record, uint32_t number) {
    if (record.ts == std::numeric_limits<int64_t>::min()) return troubles["no_time"].add("a track event");
    const State& state = states_[record.state];
    const Track& track = tracks_[record.track];
    Event& event = reader_.start();
    used_ = 0;
    event.ph = record.end == kNoRecord ? record.phase : 'X';
    event.ph_text = record.end == kNoRecord ? std::string_view(&record.phase, 1) : "X";
    event.ts = number_scalar(record.ts, Scalar::Form::kThousandths);
    event.pid = track.pid_scalar;
    event.tid = track.tid_scalar;
    if (record.end != kNoRecord) {
        const auto length = static_cast<uint64_t>(records_[record.end].ts) - static_cast<uint64_t>(record.ts);
        event.dur = number_scalar(static_cast<int64_t>(length), Scalar::Form::kThousandths);
    }
    std::string* joined = nullptr;  // categories
    const size_t first_flow = flow_ends_.size();
    Message message(record.body());
    for (Field field; message.next(field);) {
        switch (field.number) {
            case 10:
                if (field.type == kVarint && event.name.empty()) event.name = state.names.find(field.value);
                break;
            case 23: if (field.type == kLength) event.name = escape(field.bytes, room()); break;
            case 22: if (field.type == kLength) add_category(event, escape(field.bytes, room()), joined); break;
            case 3: each_number(field, kVarint, [&](uint64_t id) { add_category(event, state.categories.find(id), joined); }); break;
            case 4: if (field.type == kLength) add_argument(field.bytes, state); break;
            case 6: if (field.type == kLength) add_legacy(event, field.bytes, state, number); break;
            case 36: case 42: case 47: case 48: add_flow_ends(field, number); break;
            case 1: case 9: case 11: case 12: case 16: case 30: case 31: case 44: case 45: case 46: break;
            default: ++unread_fields[field.number];
        }
    }
    if (event.name.empty() && record.phase != 'E') troubles["pftrace_no_name"].add("an event");
    if (record.end != kNoRecord && records_[record.end].has_arguments) {
        Message end(records_[record.end].body());
        for (Field field; end.next(field);) {
            if (field.is(4, kLength)) add_argument(field.bytes, states_[records_[record.end].state]);
        }
    }
    for (size_t i = first_flow; i < flow_ends_.size(); ++i) flow_ends_[i].is_device = is_device_category(event.cat);
    events_.add(event, number);
}

void Trace::add_legacy(Event& event, std::string_view bytes, const State& state, uint32_t number) {
    Message legacy(bytes);
    uint64_t bind = 0, direction = 0;
    for (Field field; legacy.next(field);) {
        if (field.is(1, kVarint)) event.name = state.names.find(field.value);
        if (field.is(3, kVarint) && event.ph == 'X' && field.value < kFlowIds / 1000) {
            event.dur = number_scalar(static_cast<int64_t>(field.value) * 1000, Scalar::Form::kThousandths);
        }
        if (field.is(6, kVarint) || field.is(10, kVarint) || field.is(11, kVarint)) {
            std::string& json = room();
            append_number(json, static_cast<int64_t>(field.value));
            const size_t size = json.size();
            json.append(kPadding, '\0');
            event.id = {{json.data(), size}, static_cast<int64_t>(field.value), Scalar::Form::kText};
        }
        if (field.is(8, kVarint)) bind = field.value;
        if (field.is(13, kVarint)) direction = field.value;
    }
    if (bind != 0 && direction != 0) flow_ends_.push_back({bind, records_[number].ts, records_[number].track, direction == 1, false});
}

void Trace::add_flow_ends(const Field& field, uint32_t number) {
    const bool terminates = field.number == 42 || field.number == 48;
    each_number(field, field.number >= 47 ? kFixed64 : kVarint, [&](uint64_t id) {
        flow_ends_.push_back({id, records_[number].ts, records_[number].track, terminates, false});
    });
}

// Events with the same flow id are connected by arrows in the order of time, up to the event at which the flow ends.
void Trace::add_flows() {
    std::stable_sort(flow_ends_.begin(), flow_ends_.end(), [](const FlowEnd& a, const FlowEnd& b) {
        return a.id != b.id ? a.id < b.id : a.ts < b.ts;
    });
    for (size_t from = 0, to = 0; from < flow_ends_.size(); from = to) {
        for (to = from + 1; to < flow_ends_.size() && flow_ends_[to].id == flow_ends_[from].id && !flow_ends_[to - 1].terminates;) ++to;
        const bool is_launch = to - from > 1 && flow_ends_[to - 1].is_device;
        for (size_t i = from; i < to; ++i) {
            const FlowEnd& end = flow_ends_[i];
            const Track& track = tracks_[end.track];
            Event& event = reader_.start();
            const bool is_last = i + 1 == to && (i > from || end.terminates);
            event.ph = is_last ? 'f' : i == from ? 's' : 't';
            event.ph_text = {&event.ph, 1};
            if (is_launch) event.cat = event.name = "ac2g";
            event.ts = number_scalar(end.ts, Scalar::Form::kThousandths);
            event.pid = track.pid_scalar;
            event.tid = track.tid_scalar;
            event.id = number_scalar(static_cast<int64_t>(end.id & kFlowIds));
            events_.add(event, 0);
        }
    }
}

void Trace::add_counters() {
    for (const Sample& sample : samples_) {
        Track& track = tracks_[sample.track];
        const double value = sample.value * static_cast<double>(track.multiplier);
        track.sum = track.is_incremental ? track.sum + value : value;
        Event& event = reader_.start();
        used_ = 0;
        event.ph = 'C';
        event.ph_text = "C";
        event.ts = number_scalar(sample.ts, Scalar::Form::kThousandths);
        event.pid = track.pid_scalar;
        // The series of one counter share its name as the key of their axis.
        const std::string_view key = track.counter_key, name = track.name;
        const bool has_series = !key.empty() && name.size() > key.size() + 1 && name.substr(0, key.size()) == key && name[key.size()] == ' ';
        event.name = escape(has_series ? key : name, room());
        std::string& json = room();
        append_real(json, track.sum);
        const size_t size = json.size();
        json.append(kPadding, '\0');
        event.samples.emplace_back(has_series ? escape(name.substr(key.size() + 1), room()) : "value", std::string_view(json.data(), size));
        events_.add(event, 0);
    }
}

}  // namespace etloom::perfetto
