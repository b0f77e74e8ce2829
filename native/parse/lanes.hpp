// Eight bytes of a text compared at once, as the lanes of a word.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "scalars.hpp"

namespace etloom {

// The bytes at an address. Sixteen at once, by SSE2, would save some hundredths of the instructions of a parser.
class Lanes {
  public:
    static constexpr ptrdiff_t kCount = 8;
    using Mask = uint64_t;  // the highest bit of each byte, that of the first one lowest

    explicit Lanes(const char* from) : bytes_(eight_bytes(from)) {}
    Mask equal(char c) const {
        const uint64_t other = bytes_ ^ (kOnes * static_cast<uint8_t>(c));
        return ~(((other & ~kHigh) + ~kHigh) | other | ~kHigh);
    }
    // Bytes below `c`, which is below 0x80, and those above 0x7F.
    Mask below_or_high(char c) const {
        return (~((bytes_ & ~kHigh) + kOnes * (0x80U - static_cast<uint8_t>(c))) & kHigh) | high();
    }
    Mask high() const { return bytes_ & kHigh; }
    static ptrdiff_t first(Mask mask) { return std::countr_zero(mask) / 8; }
    // The first `count` lanes.
    static Mask up_to(ptrdiff_t count) { return (Mask{1} << (8 * count)) - 1; }

  private:
    static constexpr uint64_t kOnes = 0x0101010101010101, kHigh = 0x8080808080808080;
    uint64_t bytes_;
};

}  // namespace etloom
