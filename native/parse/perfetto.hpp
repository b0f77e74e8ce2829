// Perfetto's protobuf traces (track events) to the tables that Kineto events are read into.
//
// Packets are read in the order of the file, since names and defaults hold from where they stand, and events are paired
// and written once all tracks and clocks are known. https://perfetto.dev/docs/reference/trace-packet-proto
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kineto_event.hpp"
#include "kineto_tables.hpp"
#include "wire.hpp"

namespace etloom::perfetto {

// Texts that a sequence of packets refers to by number.
class Interned {
  public:
    void set(uint64_t id, std::string_view text) {
        if (id < dense_.size()) return void(dense_[id] = text);
        if (id > dense_.size() + kGap) return void(sparse_[id] = text);
        dense_.resize(id + 1);
        dense_[id] = text;
    }
    // Without data: there is none.
    std::string_view find(uint64_t id) const {
        if (id < dense_.size() && dense_[id].data() != nullptr) return dense_[id];
        const auto at = sparse_.find(id);
        return at == sparse_.end() ? std::string_view() : at->second;
    }

  private:
    static constexpr uint64_t kGap = 16;  // A larger number after the last one takes no room for those between them.
    std::vector<std::string_view> dense_;
    std::unordered_map<uint64_t, std::string_view> sparse_;
};

// What holds for the packets of a sequence until it is cleared.
struct State {
    Interned categories, names, keys, texts;
    uint64_t track = 0;
    bool has_track = false;
    std::vector<uint64_t> counters, real_counters;
    uint32_t clock = 0;
};

struct Sequence {
    uint32_t id = 0, state = 0;
    bool is_valid = false;
    uint64_t thread = 0;  // track of a thread_descriptor
    int64_t time_us = 0;  // of the last event that states a difference
    std::map<uint32_t, uint32_t> clocks;
};

struct Clock {
    explicit Clock(uint32_t number) : id(number) {}
    uint32_t id;
    int64_t multiplier = 1;
    bool is_incremental = false;
    int64_t last = 0;
    std::vector<std::pair<int64_t, int64_t>> points;  // its time, and that of the trace's clock
};

struct Track {
    std::string_view name, labels, counter_key;  // raw
    uint64_t parent = 0;
    int64_t pid = 0, tid = 0, order = 0, multiplier = 1;
    bool has_process = false, has_thread = false, has_order = false, is_sub_track = false, is_counter = false, is_incremental = false;
    double sum = 0;
    kineto::Scalar pid_scalar, tid_scalar;  // as the events state them
};

constexpr uint32_t kNoRecord = UINT32_MAX;

// An event that is written when all are known.
struct Record {
    int64_t ts;
    const char* bytes;
    uint32_t size, track, state, clock;
    uint32_t end;  // the record that ends a slice
    char phase;    // of the Trace Event Format
    bool has_arguments;
    std::string_view body() const { return {bytes, size}; }
};
static_assert(sizeof(Record) == 40, "millions of them are in memory");

struct Sample {
    int64_t ts;
    uint32_t track, clock;
    double value;
};

// Appends a text as JSON, with quotes.
void append_text(std::string& json, std::string_view raw);

constexpr uint32_t kAnnotationFields = 1 << 30;

class Trace {
  public:
    // The bytes outlive the object. Reading stops behind `max_rows` rows: events, of which a slice has two, and samples; and
    // behind as many tracks and states of sequences, which take memory without events, too.
    Trace(std::string_view bytes, size_t max_rows);

    Tables tables;
    Troubles troubles;
    std::vector<std::pair<std::string, std::string>> header;  // members of a converted JSON trace: key, JSON
    std::map<uint32_t, uint64_t> unread_packets, unread_fields;  // by field number, of annotations from kAnnotationFields on
    uint64_t packets = 0, rows = 0, damaged = 0, trailing = 0;
    bool is_cut = false;
    int64_t epoch = 0;  // to be added to times; 0: not known

  private:
    void read_packet(std::string_view bytes);
    void read_interned(std::string_view bytes, State& state);
    void read_defaults(std::string_view bytes, Sequence& sequence, State& state);
    void read_clocks(std::string_view bytes, Sequence& sequence);
    void read_track(std::string_view bytes);
    void read_thread(std::string_view bytes, Sequence& sequence);
    void read_metadata(std::string_view bytes);
    void read_event(std::string_view bytes, Sequence& sequence, const State& state, int64_t ts, uint32_t clock);
    uint32_t track_of(uint64_t uuid);
    uint32_t clock_of(uint32_t id, Sequence& sequence);

    void settle_clocks();
    int64_t to_trace_time(int64_t ts, uint32_t clock);
    void settle_tracks();
    void pair_slices();
    void add_events();
    void add_event(const Record& record, uint32_t number);
    void add_legacy(kineto::Event& event, std::string_view bytes, const State& state, uint32_t number);
    void add_argument(std::string_view bytes, const State& state);
    bool add_number(std::string_view bytes, const State& state);
    void add_category(kineto::Event& event, std::string_view category, std::string*& joined);
    void add_flow_ends(const wire::Field& field, uint32_t number);
    void add_flows();
    void add_counters();
    void add_metadata(const Track& track, std::string_view kind, std::string_view key, std::string_view value);
    void add_name(const Track& track, std::string_view kind, std::string_view key, std::string_view text);
    void add_order(const Track& track, std::string_view kind);

    // Appends the JSON of an annotation's value, if it has one that is read. `key` is set where the annotation has a name.
    void append_annotation(std::string& json, std::string_view bytes, const State& state, int depth, std::string_view& key);
    void append_nested(std::string& json, std::string_view bytes, int depth);
    void append_interned(std::string& json, std::string_view text);
    bool is_affordable(std::string_view text);
    // The text with JSON's escapes, for as long as the object lives.
    std::string_view keep(std::string_view raw);
    // A text of the event that is being written, until the next one.
    std::string& room() {
        if (used_ == rooms_.size()) rooms_.emplace_back();
        std::string& text = rooms_[used_++];
        text.clear();
        return text;
    }

    size_t count_rows() const { return std::max(records_.size() + samples_.size(), tracks_.size() + states_.size()); }

    std::string_view bytes_;
    kineto::EventReader reader_{troubles};
    kineto::EventTables events_{tables, troubles};
    std::deque<State> states_;
    std::unordered_map<uint32_t, Sequence> sequences_;
    Sequence* last_sequence_ = nullptr;
    std::vector<Clock> clocks_;
    std::vector<std::vector<std::pair<uint32_t, int64_t>>> snapshots_;
    uint32_t trace_clock_ = 6;
    std::unordered_map<uint64_t, uint32_t> track_numbers_;
    uint64_t last_uuid_ = 0;
    uint32_t last_track_ = UINT32_MAX;
    std::deque<Track> tracks_;
    Buffer<Record> records_;
    Buffer<Sample> samples_;
    std::vector<double> values_, real_values_;  // of counters next to an event
    std::vector<uint64_t> counters_, real_counters_;
    struct FlowEnd {
        uint64_t id;
        int64_t ts;
        uint32_t track;
        bool terminates, is_device;
    };
    Buffer<FlowEnd> flow_ends_;
    std::deque<std::string> kept_;   // texts that differ from those of the file
    std::deque<std::string> rooms_;  // of the event that is being written
    size_t used_ = 0;
    size_t spent_ = 0;  // bytes of arguments that stand once in the file and are repeated by number
};

// Where the compressed packets of a trace are: the packet, and the compressed bytes in it.
struct Compressed {
    size_t from, to, data, size;
    bool is_zstd;
};
std::vector<Compressed> find_compressed(std::string_view bytes);

}  // namespace etloom::perfetto
