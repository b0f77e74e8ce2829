// The layout of a file's events: the text between their values, learned from events that are read by tokens.
//
// A recorder prints its events in a few formats, so the text between two values (white space, brackets, commas and the key
// of the next value: a separator) is one of some dozens. Each separator lists those that followed its value. An event that
// consists of known separators and of values is read by comparing; all other events are read by their tokens.
#pragma once
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "kineto_fields.hpp"
#include "tokens.hpp"

namespace etloom::kineto {

// The part of an event that a member holds.
enum class Target : uint8_t { kPhase, kCat, kName, kTs, kDur, kPid, kTid, kId, kDropped, kArgs, kOther, kArgument };

// Returns the target of a member next to args. The key is part of a buffer with `kPadding`.
Target target_of(std::string_view key);

// The last number of a member, if it had at most seven digits: most members repeat the same number.
class RecentNumber {
  public:
    bool matches(const char* at) const { return ((eight_bytes(at) ^ word_) & mask_) == 0; }
    int64_t value() const { return value_; }
    size_t size() const { return size_; }
    // Keeps the number of `size` bytes at `at`, and the byte behind it, which ends it.
    void set(const char* at, size_t size, int64_t value) {
        if (size > 7) return;
        mask_ = ~uint64_t{0} >> (8 * (7 - size));
        word_ = eight_bytes(at) & mask_;
        value_ = value;
        size_ = size;
    }

  private:
    uint64_t word_ = ~uint64_t{0}, mask_ = ~uint64_t{0};  // bytes that do not occur in UTF-8
    int64_t value_ = 0;
    size_t size_ = 0;
};

class Layout {
  public:
    static constexpr size_t kMaxText = 120;

    struct Separator {
        char text[kMaxText + 8] = {};      // with padding for `eight_bytes`
        size_t size = 0;                   // of the text
        uint64_t head = 0, head_mask = 0;  // its first eight bytes
        uint64_t tail = 0, tail_mask = 0;  // its last eight bytes, if it has more
        size_t tail_at = 0;
        bool from_args = false;            // the value before is part of args
        bool opens_args = false;           // args begin in the text
        bool ends_event = false;           // no value follows
        std::string key;
        Target target = Target::kOther;
        uint8_t field = kFieldCount;       // of an argument; kFieldCount: no column holds it
        RecentNumber recent;               // value
        std::vector<Separator*> next;      // all that followed, the frequent ones first
        Separator* likely = nullptr;       // the last one that followed

        void set_text(std::string_view to);
        bool in_args() const { return target == Target::kArgument; }
        bool is(std::string_view other) const { return std::string_view(text, size) == other; }
        // Compares the text with that at `at`, which ends before `to`. Few texts have more than a head and a tail.
        [[gnu::always_inline]] bool matches(const char* at, const char* to) const {
            if (size > static_cast<size_t>(to - at)) return false;
            const uint64_t other_head = (eight_bytes(at) ^ head) & head_mask;
            const uint64_t other_tail = (eight_bytes(at + tail_at) ^ tail) & tail_mask;
            if ((other_head | other_tail) != 0) return false;
            for (size_t i = 8; i < tail_at; i += 8) {
                if (eight_bytes(at + i) != eight_bytes(text + i)) return false;
            }
            return true;
        }
    };

    Separator* start() { return &start_; }
    // Returns the separator at `at`, behind the value of `last`; nullptr: none of those that followed it.
    Separator* find_next(Separator* last, const char* at, const char* to) {
        if (last->likely != nullptr && last->likely->matches(at, to)) return last->likely;
        return find_other(*last, at, to);
    }
    // Adds the separators of an event: `event` may begin with white space, and `at` is its first token.
    void learn(std::string_view event, Cursor at);

  private:
    struct Meaning {
        std::string_view key;
        Target target;
        bool opens_args, ends_event;
    };
    static Separator* find_other(Separator& last, const char* at, const char* to);
    Separator* add(Separator& last, std::string_view text, const Meaning& meaning);

    Separator start_;
    std::deque<Separator> separators_;
    size_t learned_ = 0;  // events
};

}  // namespace etloom::kineto
