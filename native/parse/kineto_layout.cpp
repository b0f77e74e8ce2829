// See kineto_layout.hpp.
#include "kineto_layout.hpp"

#include <algorithm>

namespace etloom::kineto {

namespace {

constexpr size_t kMaxSeparators = 512, kMaxNext = 32, kMaxLearned = 1 << 11;

// A key of up to four letters as a number, to switch on.
constexpr uint32_t short_key(std::string_view key) {
    uint32_t word = 0;
    for (size_t i = 0; i < key.size(); ++i) word |= static_cast<uint32_t>(static_cast<uint8_t>(key[i])) << (8 * i);
    return word;
}

}  // namespace

Target target_of(std::string_view key) {
    if (key.size() > 4) return Target::kOther;
    switch (static_cast<uint32_t>(eight_bytes(key.data()) & ((uint64_t{1} << (8 * key.size())) - 1))) {
        case short_key("ph"): return Target::kPhase;
        case short_key("cat"): return Target::kCat;
        case short_key("name"): return Target::kName;
        case short_key("ts"): return Target::kTs;
        case short_key("dur"): return Target::kDur;
        case short_key("pid"): return Target::kPid;
        case short_key("tid"): return Target::kTid;
        case short_key("id"): return Target::kId;
        case short_key("args"): return Target::kArgs;
        case short_key("bp"):
        case short_key("s"): return Target::kDropped;
        default: return Target::kOther;
    }
}

void Layout::Separator::set_text(std::string_view to) {
    std::copy(to.begin(), to.end(), text);
    size = to.size();
    head = eight_bytes(text);
    head_mask = size < 8 ? (uint64_t{1} << (8 * size)) - 1 : ~uint64_t{0};
    if (size <= 8) return;
    tail_at = size - 8;
    tail = eight_bytes(text + tail_at);
    tail_mask = ~uint64_t{0};
}

Layout::Separator* Layout::find_other(Separator& last, const char* at, const char* to) {
    auto& next = last.next;
    for (size_t i = 0; i < next.size(); ++i) {
        if (!next[i]->matches(at, to)) continue;
        last.likely = next[i];
        if (i > 0) std::swap(next[i], next[i - 1]);
        return last.likely;
    }
    return nullptr;
}

// Walks the members as the reader does, so that only text which the tokens accept between two values is added.
void Layout::learn(std::string_view event, Cursor at) {
    if (separators_.size() == kMaxSeparators || learned_ == kMaxLearned) return;
    ++learned_;
    Separator* last = &start_;
    const char* from = event.data();
    bool opens_args = false;
    const auto add_member = [&](Target target, std::string_view key) {
        const std::string_view value = at.value();
        if (value.empty()) return false;
        last = add(*last, {from, static_cast<size_t>(value.data() - from)}, {key, target, opens_args, false});
        from = value.data() + value.size();
        opens_args = false;
        return last != nullptr;
    };
    const bool is_complete = at.members([&](std::string_view key) {
        const Target target = target_of(key);
        if (target != Target::kArgs) return add_member(target, key);
        opens_args = true;
        return at.members([&](std::string_view name) { return add_member(Target::kArgument, name); });
    });
    const char* end = event.data() + event.size();
    if (is_complete) add(*last, {from, static_cast<size_t>(end - from)}, {{}, Target::kOther, opens_args, true});
}

// Returns the separator with this text behind the value of `last`, adding it if it is new; nullptr: there are too many.
Layout::Separator* Layout::add(Separator& last, std::string_view text, const Meaning& meaning) {
    for (Separator* next : last.next) {
        if (next->is(text)) return next;
    }
    if (text.size() > kMaxText) return nullptr;
    // The same text behind another value on the same level has the same meaning.
    const auto known = std::find_if(separators_.begin(), separators_.end(), [&](const Separator& other) {
        return other.from_args == last.in_args() && other.is(text);
    });
    Separator* added = nullptr;
    if (known != separators_.end()) {
        added = &*known;
    } else if (separators_.size() < kMaxSeparators) {
        added = &separators_.emplace_back();
        added->set_text(text);
        added->key = meaning.key;
        added->target = meaning.target;
        if (meaning.target == Target::kArgument) added->field = static_cast<uint8_t>(field_of(meaning.key));
        added->opens_args = meaning.opens_args;
        added->ends_event = meaning.ends_event;
        added->from_args = last.in_args();
    } else {
        return nullptr;
    }
    if (last.next.size() == kMaxNext) last.next.pop_back();
    last.next.push_back(added);
    return added;
}

}  // namespace etloom::kineto
