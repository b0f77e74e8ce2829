// The fields of a protobuf message, one after the other. https://protobuf.dev/programming-guides/encoding/
#pragma once
#include <cstdint>
#include <cstring>
#include <string_view>

namespace etloom::wire {

enum Type : uint8_t { kVarint = 0, kFixed64 = 1, kLength = 2, kFixed32 = 5 };

struct Field {
    uint32_t number;
    uint8_t type;
    uint64_t value;          // of a number: its bits
    std::string_view bytes;  // of text or a message
    bool is(uint32_t wanted, Type of) const { return number == wanted && type == of; }
};

// Nothing is trusted: what is no field, or exceeds the message, ends the message and makes it damaged.
class Message {
  public:
    explicit Message(std::string_view bytes) : at_(bytes.data()), end_(at_ + bytes.size()) {}

    [[gnu::always_inline]] bool next(Field& field) {
        if (at_ == end_) return false;
        uint64_t key;
        if (!varint(key) || key >> 3 == 0 || key >> 3 > kLargestNumber) return fail();
        field.number = static_cast<uint32_t>(key >> 3);
        field.type = key & 7;
        switch (field.type) {
            case kVarint: return varint(field.value) || fail();
            case kFixed64: return fixed<uint64_t>(field.value) || fail();
            case kFixed32: return fixed<uint32_t>(field.value) || fail();
            case kLength:
                if (!varint(field.value)) return fail();
                if (field.value > static_cast<uint64_t>(end_ - at_)) return is_cut_ = true, fail();
                field.bytes = {at_, static_cast<size_t>(field.value)};
                at_ += field.value;
                return true;
            default: return fail();
        }
    }
    // The next number of a packed field.
    bool next_packed(uint8_t type, uint64_t& value) {
        if (at_ == end_) return false;
        return (type == kVarint ? varint(value) : fixed<uint64_t>(value)) || fail();
    }
    const char* here() const { return at_; }
    bool is_damaged() const { return is_damaged_; }
    // Whether the damage is a field that goes on behind the end.
    bool is_cut() const { return is_cut_; }

  private:
    static constexpr uint64_t kLargestNumber = (1 << 29) - 1;

    [[gnu::always_inline]] bool varint(uint64_t& value) {
        if (at_ < end_ && static_cast<uint8_t>(*at_) < 0x80) return value = static_cast<uint8_t>(*at_++), true;
        return long_varint(value);
    }
    bool long_varint(uint64_t& value) {
        value = 0;
        for (unsigned shift = 0; at_ < end_ && shift < 70; shift += 7) {
            const auto byte = static_cast<uint8_t>(*at_++);
            value |= static_cast<uint64_t>(byte & 0x7F) << shift;
            if (byte < 0x80) return true;
        }
        is_cut_ = at_ == end_;
        return false;
    }
    template <typename T>
    bool fixed(uint64_t& value) {
        if (static_cast<size_t>(end_ - at_) < sizeof(T)) return is_cut_ = true, false;
        T number;
        std::memcpy(&number, at_, sizeof number);
        at_ += sizeof number;
        value = number;
        return true;
    }
    bool fail() {
        is_damaged_ = true;
        at_ = end_;
        return false;
    }

    const char *at_, *end_;
    bool is_damaged_ = false, is_cut_ = false;
};

// The numbers of a repeated field, packed or not.
template <typename Take>
void each_number(const Field& field, uint8_t type, Take take) {
    if (field.type == type) return void(take(field.value));
    if (field.type != kLength) return;
    Message numbers(field.bytes);
    for (uint64_t value; numbers.next_packed(type, value);) take(value);
}

inline double real_of(uint64_t bits) {
    double real;
    std::memcpy(&real, &bits, sizeof real);
    return real;
}

}  // namespace etloom::wire
