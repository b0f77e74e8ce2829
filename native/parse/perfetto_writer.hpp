// Events of a Chrome trace to the packets of a Perfetto trace, which perfetto.hpp reads.
#pragma once
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "dictionary.hpp"
#include "tokens.hpp"

namespace etloom::perfetto {

class Writer {
  public:
    // The first packet: `epoch` is the time in ns since 1970 at which the times of events begin; 0: not known.
    std::string start(int64_t epoch);
    // A member of the file next to its events; its value is JSON.
    std::string member(std::string_view key, std::string_view json);
    // Packets of events as JSON objects, with commas between them. Names of processes and threads come before their events.
    std::string add(std::string_view events);
    // Events that could not be read.
    uint64_t damaged() const { return damaged_; }

  private:
    struct Track {
        uint64_t uuid = 0;
        std::string pid, tid;  // as JSON; no tid: a process
        std::string name, labels, order, parent;
        bool is_written = false;
    };
    struct Event {
        std::string_view ph, cat, name, pid, tid, ts, dur, id, flows, ends;
        void clear() { *this = {}; }
    };

    bool read_event(Cursor& at);
    void add_annotation(std::string_view key, std::string_view token);
    void write_event();
    void write_packet(int64_t ts, std::string_view track_event);
    void describe(const Event& event);
    void add_counters();
    Track& track_of(std::string_view pid, std::string_view tid);
    void write_track(Track& track, int depth = 0);
    uint64_t counter_track(std::string_view pid, const std::string& name, const std::string& series);
    uint64_t intern(Dictionary& texts, uint32_t kind, std::string_view text);

    Tokens tokens_;
    Event event_;
    std::string out_, interned_, annotations_, body_, text_;
    std::vector<std::pair<std::string_view, std::string_view>> args_;
    std::deque<std::string> keys_;
    Dictionary categories_, names_, annotation_names_;
    std::unordered_map<std::string, Track> tracks_;
    std::unordered_map<std::string, uint64_t> counters_;
    std::string last_key_;
    Track* last_ = nullptr;
    std::vector<Track*> described_;  // since the last call
    uint64_t uuids_ = 0, damaged_ = 0;
};

}  // namespace etloom::perfetto
