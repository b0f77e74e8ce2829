// The texts between the values of events, learned while events are read by tokens.
//
// A recorder prints its events from a few formats, so that one of some dozens of texts stands between two values: white
// space, brackets, commas, and the key of the next value. The texts that follow a value are kept with it. An event that
// consists of such texts and of values is read by comparing, without tokens; any other one is left to the tokens.
#pragma once
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "kineto_fields.hpp"

namespace etloom::kineto {

// The part of an event that the value of a member is.
enum class Target : uint8_t { kPhase, kCat, kName, kTs, kDur, kPid, kTid, kId, kDropped, kArgs, kOther, kArgument };

Target target_of(std::string_view key);

// The last value of a member, if it was a number of up to seven digits: most members say the same again and again.
class Recent {
  public:
    // Whether the text at `at` is that number again.
    bool stands_at(const char* at) const { return ((eight_bytes(at) ^ word_) & mask_) == 0; }
    int64_t number() const { return number_; }
    size_t size() const { return size_; }
    // A number of `size` bytes at `at`, with a byte behind it that belongs to no number.
    void keep(const char* at, size_t size, int64_t number) {
        if (size > 7) return;
        mask_ = ~uint64_t{0} >> (8 * (7 - size));
        word_ = eight_bytes(at) & mask_;
        number_ = number;
        size_ = size;
    }

  private:
    uint64_t word_ = ~uint64_t{0}, mask_ = ~uint64_t{0};  // of bytes that no UTF-8 has
    int64_t number_ = 0;
    size_t size_ = 0;
};

class Layout {
  public:
    static constexpr size_t kMaxText = 120;

    // A text, and the member whose value follows it.
    struct Step {
        char text[kMaxText + 8] = {};      // eight bytes behind it are read though they are not looked at
        size_t size = 0;                   // of the text
        uint64_t head = 0, head_mask = 0;  // its first eight bytes
        uint64_t tail = 0, tail_mask = 0;  // its last eight bytes, if it has more
        size_t tail_at = 0;
        bool ends = false;                 // the event: no value follows
        bool from_args = false;            // whether the value before stands in args
        bool opens_args = false;           // whether args begin in the text
        std::string key;
        Target target = Target::kOther;
        uint8_t field = kFieldCount;       // of an argument; kFieldCount: no column holds it
        Recent recent;                     // value
        std::vector<Step*> next;           // all that followed, the frequent ones first
        Step* likely = nullptr;            // the one that followed the last time

        void set_text(std::string_view to);
        bool in_args() const { return target == Target::kArgument; }
        bool is(std::string_view other) const { return std::string_view(text, size) == other; }
    };

    Step* start() { return &start_; }
    // The step behind the value of `step`, whose text stands at `at`, before `to`; nullptr: none that is known.
    Step* follow(Step* step, const char* at, const char* to) {
        if (step->likely != nullptr && stands_at(*step->likely, at, to)) return step->likely;
        return follow_rarer(*step, at, to);
    }
    // Keeps the texts of the event at `from`, whose tokens were sound and end before `to`.
    void learn(const char* from, const char* to);

  private:
    // Its first and its last eight bytes are compared first: few texts have more. There is padding behind `to`.
    [[gnu::always_inline]] static bool stands_at(const Step& step, const char* at, const char* to) {
        if (step.size > static_cast<size_t>(to - at)) return false;
        const uint64_t head = (eight_bytes(at) ^ step.head) & step.head_mask;
        const uint64_t tail = (eight_bytes(at + step.tail_at) ^ step.tail) & step.tail_mask;
        if ((head | tail) != 0) return false;
        for (size_t i = 8; i < step.tail_at; i += 8) {
            if (eight_bytes(at + i) != eight_bytes(step.text + i)) return false;
        }
        return true;
    }
    static Step* follow_rarer(Step& step, const char* at, const char* to);
    Step* add(Step& step, std::string_view text, bool ends, bool opens_args, Target target, std::string_view key);

    Step start_;
    std::deque<Step> steps_;
    size_t learned_ = 0;  // events
};

}  // namespace etloom::kineto
