// Distinct texts, numbered.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "scalars.hpp"

namespace etloom {

// Texts are numbered in the order they came, and stay where they are.
class Dictionary {
  public:
    Dictionary() : slots_(1024, kEmpty) {}

    uint32_t code(std::string_view text) {
        if (text.data() == nullptr) text = "";  // memcpy takes no null pointer, not even for nothing
        const uint64_t hash = hash_of(text);
        const size_t slot = slot_of(text, hash);
        if (slots_[slot].code != kEmpty.code) return slots_[slot].code;
        const auto added = static_cast<uint32_t>(texts_.size());
        texts_.emplace_back(keep(text));
        slots_[slot] = {static_cast<uint32_t>(hash >> 32), added};
        if (texts_.size() * 2 > slots_.size()) fill_slots(slots_.size() * 2);
        return added;
    }

    const std::vector<std::string_view>& texts() const { return texts_; }

    // Removes all texts but the first `count`.
    void truncate(size_t count) {
        if (texts_.size() <= count) return;
        texts_.resize(count);
        fill_slots(slots_.size());
    }

  private:
    struct Slot {
        uint32_t tag;  // of the hash, to pass over most of the texts that are others
        uint32_t code;
    };
    static constexpr Slot kEmpty{0, UINT32_MAX};
    static constexpr size_t kBlock = 1 << 18;

    // Where the text is, or its place if it is not there.
    size_t slot_of(std::string_view text, uint64_t hash) const {
        const auto tag = static_cast<uint32_t>(hash >> 32);
        size_t slot = hash & (slots_.size() - 1);
        while (slots_[slot].code != kEmpty.code && !(slots_[slot].tag == tag && same(texts_[slots_[slot].code], text))) {
            slot = (slot + 1) & (slots_.size() - 1);
        }
        return slot;
    }

    static uint64_t mix(uint64_t a, uint64_t b) {
        const auto product = static_cast<unsigned __int128>(a) * b;
        return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }

    static uint64_t hash_of(std::string_view text) {
        constexpr uint64_t k0 = 0x9E3779B97F4A7C15ULL, k1 = 0xD6E8FEB86659FD93ULL;
        const char* p = text.data();
        size_t left = text.size();
        uint64_t h = mix(left ^ k0, k1), a = 0, b = 0;
        for (; left > 16; p += 16, left -= 16) h = mix(h ^ eight_bytes(p) ^ k0, eight_bytes(p + 8) ^ k1);
        if (left >= 8) {
            // Two words that may overlap: the length is part of the hash.
            a = eight_bytes(p);
            b = eight_bytes(p + left - 8);
        } else {
            std::memcpy(&a, p, left);
        }
        return mix(h ^ a ^ k1, b ^ k0);
    }

    std::string_view keep(std::string_view text) {
        if (text.size() > kBlock / 4) {
            blocks_.emplace_back(new char[text.size()]);
            std::memcpy(blocks_.back().get(), text.data(), text.size());
            return {blocks_.back().get(), text.size()};
        }
        if (used_ + text.size() > kBlock || current_ == nullptr) {
            blocks_.emplace_back(new char[kBlock]);  // not zeroed: small files need little of it
            current_ = blocks_.back().get();
            used_ = 0;
        }
        char* at = current_ + used_;
        std::memcpy(at, text.data(), text.size());
        used_ += text.size();
        return {at, text.size()};
    }

    void fill_slots(size_t slots) {
        slots_.assign(slots, kEmpty);
        for (uint32_t i = 0; i < texts_.size(); ++i) {
            const uint64_t hash = hash_of(texts_[i]);
            size_t slot = hash & (slots_.size() - 1);
            while (slots_[slot].code != kEmpty.code) slot = (slot + 1) & (slots_.size() - 1);
            slots_[slot] = {static_cast<uint32_t>(hash >> 32), i};
        }
    }

    std::vector<Slot> slots_;
    std::vector<std::string_view> texts_;
    std::vector<std::unique_ptr<char[]>> blocks_;
    char* current_ = nullptr;
    size_t used_ = 0;
};

}  // namespace etloom
