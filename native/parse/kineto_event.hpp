// One event of a Kineto / Chrome trace, from its JSON.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kineto_fields.hpp"
#include "tokens.hpp"
#include "troubles.hpp"

namespace etloom::kineto {

struct Value {
    std::string_view token;
    union {
        int64_t whole;
        uint64_t natural;
        double real;
    };
    int32_t triple[3];
};

// The texts are those of the file.
struct Event {
    char ph = 0;  // 0: absent, 1: more than one letter
    std::string_view ph_text, cat, name;
    std::string_view ts, dur, pid, tid, id;
    uint64_t present = 0;  // bit i: kFields[i] was there and had a value
    Value values[kFieldCount];
    std::string_view args;                                              // of a metadata event (M), whole
    std::vector<std::pair<std::string_view, std::string_view>> samples;  // of a counter (C): series and value
    std::string rest;  // members that no column holds, as `"key":value,`; those beside args have a dot before the key

    bool has(size_t field) const { return (present >> field) & 1; }
    void keep(std::string_view key, std::string_view token, std::string_view mark, Troubles& troubles);
    // Takes values back out of their fields.
    void give_back(uint64_t mask, Troubles& troubles);
    void clear();
};

class EventReader {
  public:
    explicit EventReader(Troubles& troubles) : troubles_(troubles) {}
    // The event that `at` is at, which it steps over; nullptr: it is damaged.
    Event* read(Cursor& at);

  private:
    bool member(std::string_view key, Cursor& at);
    bool arguments(Cursor& at);
    bool argument(std::string_view key, std::string_view token);
    bool convert(const Field& field, std::string_view token, Value& value, bool& none);
    void odd(std::string_view key, std::string_view token);
    void text(std::string_view key, std::string_view token, std::string_view& into);

    Troubles& troubles_;
    Event event_;
    FieldIndex index_;
    std::vector<Cursor> late_;  // args that came before the phase, which says what they mean
};

}  // namespace etloom::kineto
