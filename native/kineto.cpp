// Kineto / Chrome trace JSON to columns. The names of the tables and columns are those of etloom/schema.py.
#include <charconv>
#include <cstring>
#include <locale>
#include <sstream>

#include "columns.hpp"
#include "parser.hpp"
#include "rows.hpp"
#include "scalars.hpp"

namespace etloom {

std::optional<double> real(std::string_view token) {
    if (is_text(token)) token = inside(token);
    double value = 0;
#ifdef __cpp_lib_to_chars
    const auto [end, error] = std::from_chars(token.data(), token.data() + token.size(), value);
    if (error != std::errc{} || end != token.data() + token.size() || value - value != 0) return {};
#else  // the C++ library of macOS reads no doubles so
    std::istringstream stream{std::string(token)};
    stream.imbue(std::locale::classic());
    if (!is_scalar(token) || !(stream >> value)) return {};
#endif
    return value;
}

namespace {

// A process or thread that the file names by a text gets a number below all real ones.
constexpr int64_t kTextLane = -(int64_t{1} << 40);

// No time or length of a trace is larger (146 years), and two of them can be added.
constexpr int64_t kLongest = int64_t{1} << 62;

// What to do with the value of an argument.
enum class Kind : uint8_t {
    kWhole,     // int64
    kPositive,  // int64; 0 and -1 say "none"
    kNatural,   // int64; -1 and 2^32-1 say "none"
    kUnsigned,  // uint64
    kReal,
    kText,
    kJson,  // the text of the value, whatever it is
    kTriple,
    kFlag,
    kIgnored,
};

enum class Group : uint8_t { kEvent, kArguments, kKernel, kSync, kFrame, kComm, kMemory, kNone };

struct Field {
    std::string_view key;
    const char* column;
    Group group;
    Kind kind;
};

// "Ev Idx" numbers the file's own events: `position` says it.
constexpr Field kFields[] = {
    {"device", "device", Group::kEvent, Kind::kNatural},
    {"stream", "stream", Group::kEvent, Kind::kNatural},
    {"correlation", "correlation", Group::kEvent, Kind::kPositive},
    {"External id", "external_id", Group::kEvent, Kind::kPositive},
    {"Record function id", "rf_id", Group::kEvent, Kind::kPositive},
    {"Sequence number", "seq_id", Group::kEvent, Kind::kNatural},
    {"Fwd thread id", "fwd_tid", Group::kEvent, Kind::kPositive},
    {"Input Dims", "dims", Group::kArguments, Kind::kJson},
    {"Input type", "types", Group::kArguments, Kind::kJson},
    {"Input Strides", "strides", Group::kArguments, Kind::kJson},
    {"Concrete Inputs", "concrete_inputs", Group::kArguments, Kind::kJson},
    {"grid", "grid", Group::kKernel, Kind::kTriple},
    {"block", "block", Group::kKernel, Kind::kTriple},
    {"registers per thread", "registers", Group::kKernel, Kind::kWhole},
    {"shared memory", "shared_mem", Group::kKernel, Kind::kWhole},
    {"blocks per SM", "blocks_per_sm", Group::kKernel, Kind::kReal},
    {"warps per SM", "warps_per_sm", Group::kKernel, Kind::kReal},
    {"est. achieved occupancy %", "occupancy", Group::kKernel, Kind::kReal},
    {"bytes", "bytes", Group::kKernel, Kind::kWhole},
    {"memory bandwidth (GB/s)", "bandwidth", Group::kKernel, Kind::kReal},
    {"context", "context", Group::kKernel, Kind::kNatural},
    {"queued", "queued", Group::kKernel, Kind::kWhole},
    {"graph id", "graph_id", Group::kKernel, Kind::kPositive},
    {"graph node id", "graph_node_id", Group::kKernel, Kind::kPositive},
    {"cuda_sync_kind", "kind", Group::kSync, Kind::kText},
    {"wait_on_stream", "wait_stream", Group::kSync, Kind::kNatural},
    {"wait_on_cuda_event_id", "wait_event", Group::kSync, Kind::kNatural},
    {"wait_on_cuda_event_record_corr_id", "record_correlation", Group::kSync, Kind::kPositive},
    {"Python id", "python_id", Group::kFrame, Kind::kWhole},
    {"Python parent id", "python_parent_id", Group::kFrame, Kind::kWhole},
    {"Python module id", "module_id", Group::kFrame, Kind::kWhole},
    {"Collective name", "collective", Group::kComm, Kind::kText},
    {"Process Group Name", "pg_name", Group::kComm, Kind::kText},
    {"Process Group Description", "pg_desc", Group::kComm, Kind::kText},
    {"Process Group Ranks", "ranks", Group::kComm, Kind::kText},
    {"Group size", "group_size", Group::kComm, Kind::kWhole},
    {"Seq", "seq", Group::kComm, Kind::kNatural},
    {"dtype", "dtype", Group::kComm, Kind::kText},
    {"In msg nelems", "in_nelems", Group::kComm, Kind::kWhole},
    {"Out msg nelems", "out_nelems", Group::kComm, Kind::kWhole},
    {"In split size", "in_split", Group::kComm, Kind::kText},
    {"Out split size", "out_split", Group::kComm, Kind::kText},
    {"Src Rank", "root", Group::kComm, Kind::kNatural},
    {"Dst Rank", "peer", Group::kComm, Kind::kNatural},
    {"Is asynchronized op", "is_async", Group::kComm, Kind::kFlag},
    {"Comms Id", "comms_id", Group::kComm, Kind::kUnsigned},
    {"Addr", "addr", Group::kMemory, Kind::kUnsigned},
    {"Bytes", "bytes", Group::kMemory, Kind::kWhole},
    {"Total Allocated", "total_allocated", Group::kMemory, Kind::kWhole},
    {"Total Reserved", "total_reserved", Group::kMemory, Kind::kWhole},
    {"Device Type", "device_type", Group::kMemory, Kind::kWhole},
    {"Device Id", "device", Group::kMemory, Kind::kNatural},
    {"Ev Idx", nullptr, Group::kNone, Kind::kIgnored},
};
constexpr size_t kFieldCount = std::size(kFields);
static_assert(kFieldCount <= 64, "a bit a field");

constexpr uint64_t group_mask(Group group) {
    uint64_t mask = 0;
    for (size_t i = 0; i < kFieldCount; ++i) mask |= kFields[i].group == group ? uint64_t{1} << i : 0;
    return mask;
}

constexpr size_t field_at(std::string_view key) {
    for (size_t i = 0; i < kFieldCount; ++i) {
        if (kFields[i].key == key) return i;
    }
    return kFieldCount;
}
constexpr size_t kGrid = field_at("grid"), kBlock = field_at("block"), kCollective = field_at("Collective name"),
                 kSyncKind = field_at("cuda_sync_kind"), kPythonId = field_at("Python id"),
                 kGroupRanks = field_at("Process Group Ranks");
static_assert(kGrid < kFieldCount && kBlock < kFieldCount && kCollective < kFieldCount && kSyncKind < kFieldCount);

// Key to field, by length and some of its bytes.
class FieldIndex {
  public:
    FieldIndex() {
        slots_.fill(kFieldCount);
        for (size_t i = 0; i < kFieldCount; ++i) {
            size_t slot = hash(kFields[i].key);
            while (slots_[slot] != kFieldCount) slot = (slot + 1) % slots_.size();
            slots_[slot] = i;
        }
    }
    size_t find(std::string_view key) const {
        for (size_t slot = hash(key); slots_[slot] != kFieldCount; slot = (slot + 1) % slots_.size()) {
            if (same(kFields[slots_[slot]].key, key)) return slots_[slot];
        }
        return kFieldCount;
    }

  private:
    size_t hash(std::string_view key) const {
        if (key.empty()) return 0;
        const size_t n = key.size();
        return (n * 31 + static_cast<uint8_t>(key[0]) * 7 + static_cast<uint8_t>(key[n / 2]) * 13 +
                static_cast<uint8_t>(key[n - 1]) * 17) %
               slots_.size();
    }
    std::array<size_t, 256> slots_;
};

struct Value {
    std::string_view token;
    union {
        int64_t whole;
        uint64_t natural;
        double real;
    };
    int32_t triple[3];
};

// The event that is being read.
struct Event {
    char ph = 0;  // 0: absent, 1: more than one letter
    std::string_view ph_text, cat, name;
    std::string_view ts, dur, pid, tid, id;
    uint64_t present = 0;  // bit i: kFields[i] was there and had a value
    Value values[kFieldCount];
    bool said = false;  // a counter had a sample, a metadata event its args
    std::string rest;  // members of args that no column holds, as `"key":value,`

    bool has(size_t field) const { return (present >> field) & 1; }
};

enum class Role : uint8_t { kOther, kHost, kSync };

}  // namespace

class KinetoParser : public Parser {
  public:
    KinetoParser()
        : Parser("traceEvents", true, false,
                 {"ph\"", "name\"", "cat\"", "pid\"", "tid\"", "ts\"", "dur\"", "id\"", "args\"", "s\"", "bp\""}) {
        Table& events = table("events");
        ph_ = events.add<Texts>("ph", Finish::kUnescape);
        cat_ = events.add<Texts>("cat", Finish::kUnescape);
        name_ = events.add<Texts>("name", Finish::kUnescape);
        ts_ = events.add<Numbers<int64_t>>("ts");
        dur_ = events.add<Numbers<int64_t>>("dur");
        pid_ = events.add<Numbers<int64_t>>("pid");
        tid_ = events.add<Numbers<int64_t>>("tid");
        args_ = events.add<Texts>("args", Finish::kCanonical);
        position_ = events.add<Numbers<uint32_t>>("position");

        Table* tables[] = {&events, &table("arguments"), &table("kernels"), &table("syncs"), &table("frames"), &table("comms"), &table("memory")};
        for (size_t group = 1; group < 6; ++group) event_[group] = tables[group]->add<Numbers<uint32_t>>("event");
        memory_ts_ = tables[6]->add<Numbers<int64_t>>("ts");
        memory_pid_ = tables[6]->add<Numbers<int64_t>>("pid");
        memory_tid_ = tables[6]->add<Numbers<int64_t>>("tid");
        for (size_t i = 0; i < kFieldCount; ++i) {
            const Field& field = kFields[i];
            if (field.kind == Kind::kIgnored) continue;
            Table& in = *tables[static_cast<size_t>(field.group)];
            switch (field.kind) {
                case Kind::kText: columns_[i] = in.add<Texts>(field.column, Finish::kUnescape); break;
                case Kind::kJson: columns_[i] = in.add<Texts>(field.column, Finish::kCanonical); break;
                case Kind::kReal: columns_[i] = in.add<Numbers<double>>(field.column); break;
                case Kind::kUnsigned: columns_[i] = in.add<Numbers<uint64_t>>(field.column); break;
                case Kind::kTriple: {
                    const char* const* names = i == kGrid ? kGridNames : kBlockNames;
                    for (size_t axis = 0; axis < 3; ++axis) triples_[i == kGrid ? 0 : 1][axis] = in.add<Numbers<int32_t>>(names[axis]);
                    break;
                }
                default: columns_[i] = in.add<Numbers<int64_t>>(field.column);
            }
        }

        Table& counters = table("counters");
        counter_ts_ = counters.add<Numbers<int64_t>>("ts");
        counter_pid_ = counters.add<Numbers<int64_t>>("pid");
        counter_name_ = counters.add<Texts>("name", Finish::kUnescape);
        counter_series_ = counters.add<Texts>("series", Finish::kUnescape);
        counter_value_ = counters.add<Numbers<double>>("value");

        Table& flows = table("flows");
        flow_ph_ = flows.add<Texts>("ph", Finish::kUnescape);
        flow_cat_ = flows.add<Texts>("cat", Finish::kUnescape);
        flow_name_ = flows.add<Texts>("name", Finish::kUnescape);
        flow_ts_ = flows.add<Numbers<int64_t>>("ts");
        flow_pid_ = flows.add<Numbers<int64_t>>("pid");
        flow_tid_ = flows.add<Numbers<int64_t>>("tid");
        flow_id_ = flows.add<Numbers<int64_t>>("flow");

        // Metadata events (ph M): what a process or thread is called. The reader folds them into `threads`.
        Table& metadata = table("metadata");
        meta_kind_ = metadata.add<Texts>("kind", Finish::kUnescape);
        meta_pid_ = metadata.add<Numbers<int64_t>>("pid");
        meta_tid_ = metadata.add<Numbers<int64_t>>("tid");
        meta_args_ = metadata.add<Texts>("args", Finish::kCanonical);

        lane_names_ = table("lanes").add<Texts>("name", Finish::kUnescape);
    }

  protected:
    bool rows(std::string_view json, uint64_t& position) override {
        od::document document;
        od::array rows;
        if (parser_.iterate(padded(json)).get(document) || document.get_array().get(rows)) return false;
        for (auto element : rows) {
            od::value value;
            if (std::move(element).get(value) || !row(value, position)) return false;
            ++position;
        }
        const char* at = nullptr;
        return document.current_location().get(at) == simdjson::OUT_OF_BOUNDS;
    }

    bool row(od::value& value, uint64_t position) {
        od::object object;
        if (value.get_object().get(object)) return false;
        event_row_.ph = 0;
        event_row_.ph_text = event_row_.cat = event_row_.name = event_row_.ts = event_row_.dur = event_row_.pid = event_row_.tid = event_row_.id = {};
        event_row_.present = 0;
        event_row_.said = false;
        event_row_.rest.clear();
        bool late = false;
        if (!members(object, false, late)) return false;
        if (late) {
            if (object.reset().error()) return false;
            if (!members(object, true, late)) return false;
        }
        if (event_row_.ph != 'M' && event_row_.ph != 'C') {
            emit(position);
        } else if (!event_row_.said) {
            trouble(event_row_.ph == 'M' ? "no_metadata" : "odd_counter").add(event_row_.name);
        }
        return true;
    }

    // The order of events: by start, the longest first, then as in the file; and of what hangs on them.
    void sort() override {
        for (const auto& name : lanes_.texts()) lane_names_->push_text(name);
        Table& events = table("events");
        const auto& ts = ts_->values();
        const auto& dur = dur_->values();
        const auto order = sorting_order(events.rows(), [&](uint32_t a, uint32_t b) {
            return ts[a] != ts[b] ? ts[a] < ts[b] : dur[a] > dur[b];
        });
        if (!order.empty()) {
            std::vector<uint32_t> place(order.size());
            for (size_t i = 0; i < order.size(); ++i) place[order[i]] = static_cast<uint32_t>(i);
            events.take(order);
            for (size_t group = 1; group < 6; ++group) {
                for (auto& event : event_[group]->values()) event = place[event];
            }
        }
        const char* const names[] = {"", "arguments", "kernels", "syncs", "frames", "comms"};
        for (size_t group = 1; group < 6; ++group) sort_by(table(names[group]), event_[group]->values());
        sort_by(table("memory"), memory_ts_->values());
        sort_by(table("counters"), counter_ts_->values());
        sort_by(table("flows"), flow_ts_->values());
    }

  private:
    static constexpr const char* kGridNames[] = {"grid_x", "grid_y", "grid_z"};
    static constexpr const char* kBlockNames[] = {"block_x", "block_y", "block_z"};

    template <typename T>
    static void sort_by(Table& rows, const std::vector<T>& key) {
        const auto order = sorting_order(rows.rows(), [&](uint32_t a, uint32_t b) { return key[a] < key[b]; });
        if (!order.empty()) rows.take(order);
    }

    // A key of up to four letters as a number, to switch on; 0 for a longer one.
    static constexpr uint32_t short_key(std::string_view key) {
        if (key.size() > 4) return 0;
        uint32_t word = 0;
        for (const char c : key) word = word << 8 | static_cast<uint8_t>(c);
        return word;
    }

    // The members of one event. only_args: all others were read before.
    bool members(od::object& object, bool only_args, bool& late) {
        Event& e = event_row_;
        for (auto result : object) {
            Member member;
            if (!member_of(result, member)) return false;
            const uint32_t word = short_key(member.key);
            if (word == short_key("args")) {
                // What they mean depends on members that may yet come.
                if (!only_args && (e.ph == 0 || e.ph == 'C' || e.ph == 'M')) {
                    late = true;
                    continue;
                }
                if (!arguments(member)) return false;
                continue;
            }
            if (only_args) continue;
            if (!whole_token(member)) return false;
            const std::string_view token = member.token;
            switch (word) {
                case short_key("ph"):
                    if (!is_text(token)) continue;
                    e.ph_text = inside(token);
                    e.ph = e.ph_text.size() == 1 ? e.ph_text[0] : 1;
                    break;
                case short_key("cat"):
                    if (is_text(token)) e.cat = inside(token);
                    break;
                case short_key("name"):
                    if (is_text(token)) e.name = inside(token);
                    break;
                case short_key("ts"): e.ts = token; break;
                case short_key("dur"): e.dur = token; break;
                case short_key("pid"): e.pid = token; break;
                case short_key("tid"): e.tid = token; break;
                case short_key("id"): e.id = token; break;
                case short_key("bp"): break;
                case short_key("s"): break;
                // A leading dot marks a member of the event itself among those of its args.
                default: rest(member.key, token, ".");
            }
        }
        return true;
    }

    bool arguments(Member& of) {
        Event& e = event_row_;
        if (of.token.front() != '{') return true;
        od::object args;
        if (of.value->get_object().get(args)) return false;
        if (e.ph == 'M') {
            std::string_view text;
            if (args.raw_json().get(text)) return false;
            e.said = true;
            metadata(text);
            return true;
        }
        for (auto result : args) {
            Member member;
            if (!member_of(result, member) || !whole_token(member)) return false;
            if (e.ph == 'C') {
                e.said = true;
                counter(member.key, member.token);
                continue;
            }
            const size_t which = index_.find(member.key);
            if (which == kFieldCount || !argument(which, member.token)) {
                if (which == kFieldCount || kFields[which].kind != Kind::kIgnored) rest(member.key, member.token);
            }
        }
        return true;
    }

    // What is no JSON (NaN, inf) is kept as text, so that one value does not cost the others.
    void rest(std::string_view key, std::string_view token, std::string_view mark = "") {
        std::string& rest = event_row_.rest;
        rest.append("\"").append(mark).append(key).append("\":");
        if (token.front() == '"' || token.front() == '{' || token.front() == '[' || is_scalar(token)) {
            rest.append(token);
        } else {
            rest += '"';
            for (const char c : token) {
                if (c == '"' || c == '\\') rest += '\\';
                rest += c;
            }
            rest += '"';
        }
        rest += ',';
    }

    // False where the value is not of the kind expected: it is then kept as it is, in `args`.
    bool argument(size_t which, std::string_view token) {
        Event& e = event_row_;
        Value& value = e.values[which];
        const uint64_t bit = uint64_t{1} << which;
        e.present &= ~bit;
        value.token = token;
        if (token == "null") return true;
        switch (kFields[which].kind) {
            case Kind::kIgnored: return false;
            case Kind::kJson: break;
            case Kind::kText:
                if (!is_text(token)) return false;
                break;
            case Kind::kFlag:
                if (token != "true" && token != "false" && !whole(token)) return false;
                value.whole = token == "true" || whole(token).value_or(0) != 0;
                break;
            case Kind::kReal: {
                const auto number = real(token);
                if (!number) return odd(which, token);
                value.real = *number;
                break;
            }
            case Kind::kUnsigned: {
                const auto number = unsigned_whole(token);
                if (!number) return odd(which, token);
                value.natural = *number;
                break;
            }
            case Kind::kTriple: {
                int axis = 0;
                size_t at = 1;
                while (axis < 3 && token.front() == '[' && at < token.size()) {
                    size_t to = token.find_first_of(",]", at);
                    if (to == std::string_view::npos) break;
                    const auto number = whole(trim(token.substr(at, to - at)));
                    if (!number || *number < 0 || *number > INT32_MAX) break;
                    value.triple[axis++] = static_cast<int32_t>(*number);
                    at = to + 1;
                }
                if (axis < 3) return odd(which, token);
                break;
            }
            default: {
                const auto number = whole(token);
                if (!number) return odd(which, token);
                const Kind kind = kFields[which].kind;
                if (kind != Kind::kWhole && (*number == -1 || (*number == 0 && kind == Kind::kPositive) || (*number == UINT32_MAX && kind == Kind::kNatural))) return true;
                value.whole = *number;
            }
        }
        e.present |= bit;
        return true;
    }

    bool odd(size_t which, std::string_view token) {
        trouble("odd_value").add(std::string(kFields[which].key) + ": " + std::string(token));
        return false;
    }

    int64_t lane(std::string_view token) {
        if (const auto number = decimal(token, 0)) return *number;
        return kTextLane - static_cast<int64_t>(lanes_.code(is_text(token) ? inside(token) : token));
    }

    void metadata(std::string_view args) {
        Event& e = event_row_;
        meta_kind_->push_text(e.name);
        push_lane(meta_pid_, e.pid);
        push_lane(meta_tid_, e.tid);
        push_json(meta_args_, args);
    }

    void push_lane(Numbers<int64_t>* column, std::string_view token) {
        if (token.empty() || token == "null") {
            column->null();
        } else {
            column->push(lane(token));
        }
    }

    void counter(std::string_view series, std::string_view token) {
        Event& e = event_row_;
        const auto at = decimal(e.ts, 3);
        const auto value = real(token);
        if (!at || !value) {
            trouble("odd_counter").add(token);
            return;
        }
        counter_ts_->push(*at);
        push_lane(counter_pid_, e.pid);
        counter_name_->push_text(e.name);
        counter_series_->push_text(series);
        counter_value_->push(*value);
    }

    void emit(uint64_t position) {
        Event& e = event_row_;
        const auto at = decimal(e.ts, 3);
        if (e.ph == 0 || !at || *at > kLongest || *at < -kLongest) {
            trouble(e.ph == 0 ? "no_phase" : "no_time").add(e.name);
            return;
        }
        if (e.ph == 's' || e.ph == 't' || e.ph == 'f') {
            flow_ph_->push_text(e.ph_text);
            push_text(flow_cat_, e.cat);
            push_text(flow_name_, e.name);
            flow_ts_->push(*at);
            push_lane(flow_pid_, e.pid);
            push_lane(flow_tid_, e.tid);
            const auto id = whole(e.id);
            id ? flow_id_->push(*id) : flow_id_->null();
            return;
        }
        static constexpr uint64_t kMemory = group_mask(Group::kMemory);
        if (e.ph == 'i' && e.name == "[memory]") {
            memory_ts_->push(*at);
            push_lane(memory_pid_, e.pid);
            push_lane(memory_tid_, e.tid);
            push_fields(kMemory);
            return;
        }
        give_back(kMemory);

        const auto row = static_cast<uint32_t>(position_->size());
        const uint32_t cat = e.cat.empty() ? (cat_->null(), kNoCat) : cat_->push_text(e.cat);
        const Role role = role_of(cat, e.cat);
        side(Group::kArguments, row, true);
        side(Group::kKernel, row, role == Role::kOther && !e.has(kSyncKind) && e.ph == 'X');
        side(Group::kSync, row, e.has(kSyncKind));
        side(Group::kFrame, row, e.has(kPythonId));
        side(Group::kComm, row, e.has(kCollective) || (e.has(kGroupRanks)));

        ph_->push_text(e.ph_text);
        push_text(name_, e.name);
        ts_->push(*at);
        push_duration();
        push_lane(pid_, e.pid);
        push_lane(tid_, e.tid);
        push_fields(group_mask(Group::kEvent));
        if (!e.id.empty()) rest("id", e.id, ".");
        if (e.rest.empty()) {
            args_->null();
        } else {
            e.rest.insert(0, 1, '{');
            e.rest.back() = '}';
            push_json(args_, e.rest);
        }
        position_->push(static_cast<uint32_t>(position));
    }

    void push_duration() {
        Event& e = event_row_;
        if (e.dur.empty() || e.dur == "null") {
            if (e.ph == 'X') trouble("no_duration").add(e.name);
            return dur_->null();
        }
        const auto length = decimal(e.dur, 3);
        if (!length || *length < 0 || *length >= kLongest) {
            trouble(length && *length < 0 ? "negative_duration" : "odd_duration").add(std::string(e.name) + ": " + std::string(e.dur));
            return dur_->null();
        }
        dur_->push(*length);
    }

    static void push_text(Texts* column, std::string_view text) { text.empty() ? column->null() : static_cast<void>(column->push_text(text)); }

    // A row of a side table, if the event has any of its fields and is of the sort the table describes; else the fields
    // go to `args`, as any that no table knows.
    void side(Group group, uint32_t row, bool wanted) {
        const uint64_t mask = group_mask_[static_cast<size_t>(group)];
        if ((event_row_.present & mask) == 0) return;
        if (!wanted) return give_back(mask);
        event_[static_cast<size_t>(group)]->push(row);
        push_fields(mask);
    }

    void give_back(uint64_t mask) {
        for (uint64_t left = event_row_.present & mask; left != 0; left &= left - 1) {
            const auto which = static_cast<size_t>(__builtin_ctzll(left));
            rest(kFields[which].key, event_row_.values[which].token);
        }
        event_row_.present &= ~mask;
    }

    void push_fields(uint64_t mask) {
        const Event& e = event_row_;
        for (uint64_t left = mask; left != 0; left &= left - 1) {
            const auto i = static_cast<size_t>(__builtin_ctzll(left));
            const Value& value = e.values[i];
            const bool there = e.has(i);
            if (kFields[i].kind == Kind::kTriple) {
                for (size_t axis = 0; axis < 3; ++axis) {
                    auto* column = triples_[i == kGrid ? 0 : 1][axis];
                    there ? column->push(value.triple[axis]) : column->null();
                }
                continue;
            }
            if (!there) {
                columns_[i]->null();
                continue;
            }
            switch (kFields[i].kind) {
                case Kind::kText: static_cast<Texts*>(columns_[i])->push_text(inside(value.token)); break;
                case Kind::kJson: push_json(static_cast<Texts*>(columns_[i]), value.token); break;
                case Kind::kReal: static_cast<Numbers<double>*>(columns_[i])->push(value.real); break;
                case Kind::kUnsigned: static_cast<Numbers<uint64_t>*>(columns_[i])->push(value.natural); break;
                default: static_cast<Numbers<int64_t>*>(columns_[i])->push(value.whole);
            }
        }
    }

    // Host calls carry some arguments of the work they launch (ROCm does): these are no facts of a device event.
    Role role_of(uint32_t code, std::string_view cat) {
        if (code == kNoCat) return Role::kOther;
        while (roles_.size() <= code) roles_.push_back(cat_role(cat));
        return roles_[code];
    }

    static Role cat_role(std::string_view cat) {
        if (cat == "cpu_op" || cat == "user_annotation" || cat == "python_function" || cat == "cuda_runtime" ||
            cat == "cuda_driver" || cat == "overhead" || cat == "Trace") {
            return Role::kHost;
        }
        const auto ends = [&](std::string_view tail) { return cat.size() >= tail.size() && cat.substr(cat.size() - tail.size()) == tail; };
        return ends("_runtime") || ends("_driver") ? Role::kHost : Role::kOther;
    }

    static constexpr uint32_t kNoCat = UINT32_MAX;

    od::parser parser_;
    Event event_row_;
    std::vector<Role> roles_;  // by code of cat: codes come one by one
    const FieldIndex index_;
    const uint64_t group_mask_[7] = {group_mask(Group::kEvent), group_mask(Group::kArguments), group_mask(Group::kKernel), group_mask(Group::kSync), group_mask(Group::kFrame), group_mask(Group::kComm), group_mask(Group::kMemory)};
    Dictionary lanes_;
    Texts *ph_, *cat_, *name_, *args_, *lane_names_;
    Numbers<int64_t> *ts_, *dur_, *pid_, *tid_;
    Numbers<uint32_t>* position_;
    Numbers<uint32_t>* event_[7] = {};
    Column* columns_[kFieldCount] = {};
    Numbers<int32_t>* triples_[2][3] = {};
    Numbers<int64_t> *memory_ts_, *memory_pid_, *memory_tid_;
    Numbers<int64_t> *counter_ts_, *counter_pid_;
    Texts *counter_name_, *counter_series_;
    Numbers<double>* counter_value_;
    Texts *flow_ph_, *flow_cat_, *flow_name_;
    Numbers<int64_t> *flow_ts_, *flow_pid_, *flow_tid_, *flow_id_;
    Texts *meta_kind_, *meta_args_;
    Numbers<int64_t> *meta_pid_, *meta_tid_;
};

std::unique_ptr<Parser> kineto_parser() { return std::make_unique<KinetoParser>(); }

}  // namespace etloom
