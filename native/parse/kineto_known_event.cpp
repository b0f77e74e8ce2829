// Reading events of a known layout, without tokens; see kineto_event.hpp and kineto_layout.hpp.
//
// Values that are counted as troubles, and those that few events have, are left to the tokens, so that no trouble is counted
// twice. `at` is the value to read, and is moved behind it; false: the tokens have to read the event.
#include "kineto_event.hpp"
#include "value_scan.hpp"

namespace etloom::kineto {

namespace {

bool is_letter(char c) { return static_cast<uint8_t>((c | 0x20) - 'a') < 26; }

}  // namespace

[[gnu::always_inline]] inline bool EventReader::read_known_text(std::string_view& into, const char*& at, const char* to) {
    const char* end = *at == '"' ? scan_text(at, to) : nullptr;
    if (end == nullptr) return false;
    into = {at + 1, static_cast<size_t>(end - at - 2)};
    at = end;
    return true;
}

[[gnu::always_inline]] inline bool EventReader::read_known_time(Scalar& into, const char*& at, const char* to) {
    const char* const from = at;
    into.form = Scalar::Form::kThousandths;
    if (!parse_kineto_time(at, to, into.number) && !parse_short_decimal(at, to, into.number)) {
        into.form = Scalar::Form::kText;
        at = scan_value(from, to);
        if (at == nullptr) return false;
    }
    into.token = {from, static_cast<size_t>(at - from)};
    return true;
}

[[gnu::always_inline]] inline bool EventReader::read_known_number(Scalar& into, Layout::Separator& separator, const char*& at, const char* to) {
    const char* const from = at;
    into.form = Scalar::Form::kWhole;
    if (separator.recent.matches(at)) {
        at += separator.recent.size();
        into.number = separator.recent.value();
    } else if (parse_short_integer(at, to, into.number)) {
        separator.recent.set(from, static_cast<size_t>(at - from), into.number);
    } else {
        into.form = Scalar::Form::kText;
        at = scan_value(from, to);
        if (at == nullptr) return false;
    }
    into.token = {from, static_cast<size_t>(at - from)};
    return true;
}

// Keeps a member that no column holds.
bool EventReader::keep_known(const Layout::Separator& separator, std::string_view token, std::string_view mark) {
    const ValueType type = type_of(token.front());
    if (type != ValueType::kText && type != ValueType::kNested && !is_scalar(token)) return false;
    event_.keep(separator.key, token, mark, troubles_);
    return true;
}

[[gnu::always_inline]] inline bool EventReader::read_known_argument(Layout::Separator& separator, const char*& at, const char* to) {
    Event& e = event_;
    const char* const from = at;
    const auto scan = [&] {
        at = scan_value(from, to);
        return at == nullptr ? std::string_view() : std::string_view(from, static_cast<size_t>(at - from));
    };
    if (e.ph == 'C' || separator.field == kFieldCount) {
        const std::string_view token = scan();
        if (token.empty()) return false;
        if (e.ph != 'C') return keep_known(separator, token, "");
        e.samples.emplace_back(separator.key, token);
        return true;
    }
    const Field& field = kFields[separator.field];
    Value& value = e.values[separator.field];
    bool none = false;
    if (is_whole(field.kind) && (separator.recent.matches(at) || parse_short_integer(at, to, value.whole))) {
        if (at == from) {
            at += separator.recent.size();
            value.whole = separator.recent.value();
        } else {
            separator.recent.set(from, static_cast<size_t>(at - from), value.whole);
        }
        value.token = {from, static_cast<size_t>(at - from)};
        if (!fits(field, value.whole, none)) return false;
    } else {
        value.token = scan();
        if (value.token.empty()) return false;
        none = field.kind == Kind::kIgnored || value.token == "null";
        if (!none && !convert(field, value.token, value, none)) return false;
    }
    const uint64_t bit = uint64_t{1} << separator.field;
    e.present = none ? e.present & ~bit : e.present | bit;
    return true;
}

[[gnu::always_inline]] inline bool EventReader::read_known_member(Layout::Separator& separator, const char*& at, const char* to) {
    Event& e = event_;
    switch (separator.target) {
        case Target::kPhase:
            if (at[0] != '"' || at[2] != '"' || !is_letter(at[1]) || at + 3 >= to) return false;
            e.ph = at[1];
            e.ph_text = {at + 1, 1};
            at += 3;
            return e.ph != 'M';  // args of metadata are one value
        case Target::kCat: return read_known_text(e.cat, at, to);
        case Target::kName: return read_known_text(e.name, at, to);
        case Target::kTs: return read_known_time(e.ts, at, to);
        case Target::kDur: return read_known_time(e.dur, at, to);
        case Target::kPid: return read_known_number(e.pid, separator, at, to);
        case Target::kTid: return read_known_number(e.tid, separator, at, to);
        case Target::kId: return read_known_number(e.id, separator, at, to);
        case Target::kArgument: return read_known_argument(separator, at, to);
        case Target::kArgs:
        case Target::kDropped:
        case Target::kOther: break;
    }
    const char* const from = at;
    at = scan_value(from, to);
    return at != nullptr && (separator.target == Target::kDropped || keep_known(separator, {from, static_cast<size_t>(at - from)}, "."));
}

Event* EventReader::read_known(const char*& at, const char* to) {
    if (!tries_known()) return nullptr;
    ++tried_;
    event_.clear();
    const char* p = at;
    for (Layout::Separator* separator = layout_.start();;) {
        separator = layout_.find_next(separator, p, to);
        if (separator == nullptr) return nullptr;
        if (separator->opens_args && event_.ph == 0) return nullptr;  // args depend on it
        p += separator->size;
        if (separator->ends_event) break;
        if (p >= to || !read_known_member(*separator, p, to)) return nullptr;
    }
    ++known_;
    at = p;
    return &event_;
}

}  // namespace etloom::kineto
