// One event of a Kineto / Chrome trace, from its JSON.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kineto_fields.hpp"
#include "kineto_layout.hpp"
#include "tokens.hpp"
#include "troubles.hpp"

namespace etloom::kineto {

struct Value {
    std::string_view token;  // empty: that of the number
    union {
        int64_t whole;
        uint64_t natural;
        double real;
    };
    int32_t triple[3];
};

// A value that is mostly a number, and that number if it is known already.
struct Scalar {
    enum class Form : uint8_t { kText, kWhole, kThousandths };
    std::string_view token;
    int64_t number = 0;  // as the form says
    Form form = Form::kText;
    bool empty() const { return token.empty(); }
    void clear() {
        token = {};
        form = Form::kText;
    }
};

// The texts are those of the file.
struct Event {
    char ph = 0;  // 0: absent, 1: more than one letter
    std::string_view ph_text, cat, name;
    Scalar ts, dur, pid, tid, id;
    uint64_t present = 0;  // bit i: kFields[i] was there and had a value
    Value values[kFieldCount];
    std::string_view args;                                              // of a metadata event (M), whole
    std::vector<std::pair<std::string_view, std::string_view>> samples;  // of a counter (C): series and value
    std::string rest;  // members that no column holds, as `"key":value,`; those beside args have a dot before the key

    bool has(size_t field) const { return (present >> field) & 1; }
    void keep(std::string_view key, std::string_view token, std::string_view mark, Troubles& troubles);
    // Takes values back out of their fields.
    void give_back(uint64_t mask, Troubles& troubles);
    void clear() {
        ph = 0;
        ph_text = cat = name = args = {};
        for (Scalar* scalar : {&ts, &dur, &pid, &tid, &id}) scalar->clear();
        present = 0;
        samples.clear();
        rest.clear();
    }
};

class EventReader {
  public:
    explicit EventReader(Troubles& troubles) : troubles_(troubles) {}
    // The event that `at` is at, which it steps over; nullptr: it is damaged.
    Event* read(Cursor& at);
    // Reads the event at `at`, which is moved behind it, without tokens; nullptr: its tokens have to be read.
    Event* read_known(const char*& at, const char* to);
    // An event without members, which `add_argument` and its caller fill.
    Event& start() {
        event_.clear();
        return event_;
    }
    // Adds an argument whose value is the JSON text `token`, which is valid as long as the event is used.
    void add_argument(std::string_view key, std::string_view token) {
        if (!argument(key, token)) event_.keep(key, token, "", troubles_);
    }
    // Adds an argument whose value is a number, if a column holds such numbers; its text is made only where it is needed.
    bool add_number(std::string_view key, int64_t number);
    bool add_number(std::string_view key, double number);
    // Adds the layout of an event that `read` has read.
    void learn(std::string_view event, const Cursor& at) {
        if (tries_known()) layout_.learn(event, at);
    }

  private:
    bool member(std::string_view key, Cursor& at);
    bool arguments(Cursor& at);
    bool read_known_member(Layout::Separator& separator, const char*& at, const char* to);
    bool read_known_argument(Layout::Separator& separator, const char*& at, const char* to);
    bool keep_known(const Layout::Separator& separator, std::string_view token, std::string_view mark);
    static bool read_known_text(std::string_view& into, const char*& at, const char* to);
    static bool read_known_time(Scalar& into, const char*& at, const char* to);
    static bool read_known_number(Scalar& into, Layout::Separator& separator, const char*& at, const char* to);
    bool argument(std::string_view key, std::string_view token);
    static bool convert(const Field& field, std::string_view token, Value& value, bool& none);
    // False once fewer than a third of the events have a known layout.
    bool tries_known() const { return tried_ <= 256 + 2 * known_; }
    void odd(std::string_view key, std::string_view token);
    void text(std::string_view key, std::string_view token, std::string_view& into);

    Troubles& troubles_;
    Event event_;
    FieldIndex index_;
    Layout layout_;
    uint64_t known_ = 0, tried_ = 0;  // events read without tokens, and attempts to do so
    std::vector<Cursor> late_;  // args that came before the phase, which says what they mean
};

}  // namespace etloom::kineto
