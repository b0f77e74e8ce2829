// See kineto_layout.hpp.
#include "kineto_layout.hpp"

#include <algorithm>

#include "json_text.hpp"
#include "value_scan.hpp"

namespace etloom::kineto {

namespace {

constexpr size_t kMaxSteps = 512, kMaxNext = 32, kMaxLearned = 1 << 11;

// A key of up to four letters as a number, to switch on.
constexpr uint32_t short_key(std::string_view key) {
    uint32_t word = 0;
    for (size_t i = 0; i < key.size(); ++i) word |= static_cast<uint32_t>(static_cast<uint8_t>(key[i])) << (8 * i);
    return word;
}

}  // namespace

// A key that stands in the file, so that bytes behind it can be read.
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

void Layout::Step::set_text(std::string_view to) {
    std::copy(to.begin(), to.end(), text);
    size = to.size();
    head = eight_bytes(text);
    head_mask = size < 8 ? (uint64_t{1} << (8 * size)) - 1 : ~uint64_t{0};
    if (size <= 8) return;
    tail_at = size - 8;
    tail = eight_bytes(text + tail_at);
    tail_mask = ~uint64_t{0};
}

Layout::Step* Layout::follow_rarer(Step& step, const char* at, const char* to) {
    auto& next = step.next;
    for (size_t i = 0; i < next.size(); ++i) {
        if (!stands_at(*next[i], at, to)) continue;
        step.likely = next[i];
        if (i > 0) std::swap(next[i], next[i - 1]);
        return step.likely;
    }
    return nullptr;
}

// Only texts of the grammar are kept: the tokens check args of metadata for their brackets alone.
void Layout::learn(const char* from, const char* to) {
    if (steps_.size() == kMaxSteps || learned_ == kMaxLearned) return;
    ++learned_;
    Step* step = &start_;
    const char *text = from, *p = skip_space(from, to) + 1;
    bool in_args = false, opens_args = false, is_first = true;
    while (step != nullptr) {
        p = skip_space(p, to);
        if (p >= to) return;
        if (*p == '}') {
            ++p;
            if (!in_args) {
                if (p == to) add(*step, {text, static_cast<size_t>(p - text)}, true, opens_args, Target::kOther, {});
                return;
            }
            in_args = is_first = false;
            continue;
        }
        if (!is_first && *p++ != ',') return;
        p = skip_space(p, to);
        const char* key_end = p < to && *p == '"' ? string_end(p, to) : nullptr;
        if (key_end == nullptr) return;
        const std::string_view key(p + 1, static_cast<size_t>(key_end - p - 2));
        p = skip_space(key_end, to);
        if (p >= to || *p != ':') return;
        p = skip_space(p + 1, to);
        if (p >= to) return;
        const Target target = in_args ? Target::kArgument : target_of(key);
        if (target == Target::kArgs) {
            if (*p++ != '{') return;
            in_args = is_first = opens_args = true;
            continue;
        }
        step = add(*step, {text, static_cast<size_t>(p - text)}, false, opens_args, target, key);
        p = text = scan_value(p, to);
        if (p == nullptr) return;
        is_first = opens_args = false;
    }
}

// The step with this text behind `step`, which is added unless it is there; nullptr: there are too many.
Layout::Step* Layout::add(Step& step, std::string_view text, bool ends, bool opens_args, Target target,
                          std::string_view key) {
    for (Step* next : step.next) {
        if (next->is(text)) return next;
    }
    if (text.size() > kMaxText) return nullptr;
    // The same text behind another value that stands as deep leads to the same.
    const auto same_step = std::find_if(steps_.begin(), steps_.end(), [&](const Step& other) {
        return other.from_args == step.in_args() && other.is(text);
    });
    Step* added = nullptr;
    if (same_step != steps_.end()) {
        added = &*same_step;
    } else if (steps_.size() < kMaxSteps) {
        added = &steps_.emplace_back();
        added->ends = ends;
        added->opens_args = opens_args;
        added->target = target;
        if (target == Target::kArgument) added->field = static_cast<uint8_t>(field_of(key));
        added->from_args = step.in_args();
        added->set_text(text);
        added->key = key;
    } else {
        return nullptr;
    }
    if (step.next.size() == kMaxNext) step.next.pop_back();
    step.next.push_back(added);
    return added;
}

}  // namespace etloom::kineto
