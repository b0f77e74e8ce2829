// Events that are printed as events before them, without tokens; see kineto_event.hpp and kineto_layout.hpp.
//
// Values that would be counted as troubles, and those that few events have, are left to the tokens: a trouble is counted
// once, whichever way the event is read in the end.
#include "kineto_event.hpp"
#include "value_scan.hpp"

namespace etloom::kineto {

namespace {

bool is_letter(char c) { return static_cast<uint8_t>((c | 0x20) - 'a') < 26; }

}  // namespace

[[gnu::always_inline]] inline bool EventReader::set_known_text(std::string_view& into, const char*& at, const char* to) {
    const char* end = *at == '"' ? scan_text(at, to) : nullptr;
    if (end == nullptr) return false;
    into = {at + 1, static_cast<size_t>(end - at - 2)};
    at = end;
    return true;
}

[[gnu::always_inline]] inline bool EventReader::set_known_time(Scalar& into, const char*& at, const char* to) {
    const char* const from = at;
    into.form = Scalar::Form::kThousandths;
    if (!kineto_time(at, to, into.number) && !few_places(at, to, into.number)) {
        into.form = Scalar::Form::kText;
        at = scan_value(from, to);
        if (at == nullptr) return false;
    }
    into.token = {from, static_cast<size_t>(at - from)};
    return true;
}

[[gnu::always_inline]] inline bool EventReader::set_known_number(Scalar& into, Layout::Step& step, const char*& at, const char* to) {
    const char* const from = at;
    into.form = Scalar::Form::kWhole;
    if (step.recent.stands_at(at)) {
        at += step.recent.size();
        into.number = step.recent.number();
    } else if (few_digits(at, to, into.number)) {
        step.recent.keep(from, static_cast<size_t>(at - from), into.number);
    } else {
        into.form = Scalar::Form::kText;
        at = scan_value(from, to);
        if (at == nullptr) return false;
    }
    into.token = {from, static_cast<size_t>(at - from)};
    return true;
}

// A member that no column holds; false if it is to be counted as a trouble.
bool EventReader::keep_known(const Layout::Step& step, std::string_view token, std::string_view mark) {
    const ValueType type = type_of(token.front());
    if (type != ValueType::kText && type != ValueType::kNested && !is_scalar(token)) return false;
    event_.keep(step.key, token, mark, troubles_);
    return true;
}

[[gnu::always_inline]] inline bool EventReader::set_known_argument(Layout::Step& step, const char*& at, const char* to) {
    Event& e = event_;
    const char* const from = at;
    const auto scan = [&] {
        at = scan_value(from, to);
        return at == nullptr ? std::string_view() : std::string_view(from, static_cast<size_t>(at - from));
    };
    if (e.ph == 'C' || step.field == kFieldCount) {
        const std::string_view token = scan();
        if (token.empty()) return false;
        if (e.ph != 'C') return keep_known(step, token, "");
        e.samples.emplace_back(step.key, token);
        return true;
    }
    const Field& field = kFields[step.field];
    Value& value = e.values[step.field];
    bool none = false;
    if (is_whole(field.kind) && (step.recent.stands_at(at) || few_digits(at, to, value.whole))) {
        if (at == from) {
            at += step.recent.size();
            value.whole = step.recent.number();
        } else {
            step.recent.keep(from, static_cast<size_t>(at - from), value.whole);
        }
        value.token = {from, static_cast<size_t>(at - from)};
        if (!fits(field, value.whole, none)) return false;
    } else {
        value.token = scan();
        if (value.token.empty()) return false;
        none = field.kind == Kind::kIgnored || value.token == "null";
        if (!none && !convert(field, value.token, value, none)) return false;
    }
    const uint64_t bit = uint64_t{1} << step.field;
    e.present = none ? e.present & ~bit : e.present | bit;
    return true;
}

// False where the value, which is moved over, is not what it mostly is.
[[gnu::always_inline]] inline bool EventReader::set_known(Layout::Step& step, const char*& at, const char* to) {
    Event& e = event_;
    switch (step.target) {
        case Target::kPhase:
            if (at[0] != '"' || at[2] != '"' || !is_letter(at[1]) || at + 3 >= to) return false;
            e.ph = at[1];
            e.ph_text = {at + 1, 1};
            at += 3;
            return e.ph != 'M';  // whose args are read as a whole
        case Target::kCat: return set_known_text(e.cat, at, to);
        case Target::kName: return set_known_text(e.name, at, to);
        case Target::kTs: return set_known_time(e.ts, at, to);
        case Target::kDur: return set_known_time(e.dur, at, to);
        case Target::kPid: return set_known_number(e.pid, step, at, to);
        case Target::kTid: return set_known_number(e.tid, step, at, to);
        case Target::kId: return set_known_number(e.id, step, at, to);
        case Target::kArgument: return set_known_argument(step, at, to);
        case Target::kArgs:
        case Target::kDropped:
        case Target::kOther: break;
    }
    const char* const from = at;
    at = scan_value(from, to);
    return at != nullptr && (step.target == Target::kDropped || keep_known(step, {from, static_cast<size_t>(at - from)}, "."));
}

Event* EventReader::read_known(const char*& at, const char* to) {
    if (!tries_known()) return nullptr;
    ++tried_;
    event_.clear();
    const char* p = at;
    for (Layout::Step* step = layout_.start();;) {
        step = layout_.follow(step, p, to);
        if (step == nullptr) return nullptr;
        if (step->opens_args && event_.ph == 0) return nullptr;  // it says what args mean
        p += step->size;
        if (step->ends) break;
        if (p >= to || !set_known(*step, p, to)) return nullptr;
    }
    ++known_;
    at = p;
    return &event_;
}

}  // namespace etloom::kineto
