// See kineto_event.hpp.
#include "kineto_event.hpp"

#include <optional>

#include "json_text.hpp"
#include "value_scan.hpp"

namespace etloom::kineto {

namespace {

bool is_letter(char c) { return static_cast<uint8_t>((c | 0x20) - 'a') < 26; }

bool is_flag(std::string_view token) { return token == "true" || token == "false"; }

// [x, y, z]; what follows them is not looked at.
bool read_triple(std::string_view token, int32_t (&triple)[3]) {
    if (token.front() != '[') return false;
    size_t at = 1;
    for (auto& axis : triple) {
        const size_t to = token.find_first_of(",]", at);
        if (to == std::string_view::npos) return false;
        const auto number = whole(trim(token.substr(at, to - at)));
        if (!number || *number < 0 || *number > INT32_MAX) return false;
        axis = static_cast<int32_t>(*number);
        at = to + 1;
    }
    return true;
}

bool is_whole(Kind kind) { return kind == Kind::kWhole || kind == Kind::kPositive || kind == Kind::kNatural; }

// Whether the column takes a whole number. none: it says that there is none.
bool fits(const Field& field, int64_t number, bool& none) {
    if (field.kind != Kind::kWhole) none = number == -1 || number == (field.kind == Kind::kPositive ? 0 : UINT32_MAX);
    return none || !field.narrow || (number >= INT32_MIN && number <= INT32_MAX);
}

template <typename T>
bool put(const std::optional<T>& number, T& into) {
    if (number) into = *number;
    return number.has_value();
}

}  // namespace

void Event::clear() {
    ph = 0;
    ph_text = cat = name = args = {};
    ts = dur = pid = tid = id = {};
    present = 0;
    samples.clear();
    rest.clear();
}

// What is no JSON (NaN, inf) is kept as text, so that one value does not cost the others.
void Event::keep(std::string_view key, std::string_view token, std::string_view mark, Troubles& troubles) {
    rest.append("\"").append(mark).append(key).append("\":");
    if (token.front() == '"' || token.front() == '{' || token.front() == '[' || is_scalar(token)) {
        rest.append(token);
    } else {
        troubles[is_nonfinite(token) ? "nonfinite" : "unexpected_type"].add(token);
        rest += '"';
        for (const char c : token) {
            if (c == '"' || c == '\\') rest += '\\';
            rest += c;
        }
        rest += '"';
    }
    rest += ',';
}

void Event::give_back(uint64_t mask, Troubles& troubles) {
    for (uint64_t left = present & mask; left != 0; left &= left - 1) {
        const auto which = static_cast<size_t>(__builtin_ctzll(left));
        keep(kFields[which].key, values[which].token, "", troubles);
    }
    present &= ~mask;
}

Event* EventReader::read(Cursor& at) {
    event_.clear();
    late_.clear();
    if (!at.members([&](std::string_view key) { return member(key, at); })) return nullptr;
    for (Cursor args : late_) {
        if (!arguments(args)) return nullptr;
    }
    return &event_;
}

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
    }
    into.token = {from, static_cast<size_t>(at - from)};
    return at != nullptr;
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
    }
    into.token = {from, static_cast<size_t>(at - from)};
    return at != nullptr;
}

// A member that no column holds; false if it is to be counted as a trouble.
bool EventReader::keep_known(const Layout::Step& step, std::string_view token, std::string_view mark) {
    const Sort sort = sort_of(token.front());
    if (sort != Sort::kText && sort != Sort::kNested && !is_scalar(token)) return false;
    event_.keep(step.key, token, mark, troubles_);
    return true;
}

[[gnu::always_inline]] inline bool EventReader::set_known_argument(Layout::Step& step, const char*& at, const char* to) {
    Event& e = event_;
    if (e.ph == 0) return false;  // it says what args mean
    const char* const from = at;
    const auto scan = [&] {
        at = scan_value(from, to);
        return std::string_view(from, at == nullptr ? 0 : static_cast<size_t>(at - from));
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
    // Files whose events are not alike are not tried for in vain.
    constexpr uint64_t kTries = 256;
    if (tried_ > kTries + 2 * known_) return nullptr;
    ++tried_;
    event_.clear();
    const char* p = at;
    for (Layout::Step* step = layout_.start();;) {
        step = layout_.follow(step, p, to);
        if (step == nullptr) return nullptr;
        p += step->size;
        if (step->ends) break;
        if (p >= to || !set_known(*step, p, to)) return nullptr;
    }
    ++known_;
    at = p;
    return &event_;
}

bool EventReader::member(std::string_view key, Cursor& at) {
    Event& e = event_;
    const Target target = target_of(key);
    if (target == Target::kArgs) {
        if (e.ph != 0 && late_.empty()) return arguments(at);
        late_.push_back(at);
    }
    const std::string_view token = at.value();
    if (token.empty()) return false;
    switch (target) {
        case Target::kPhase:
            text(key, token, e.ph_text);
            e.ph = e.ph_text.size() == 1 ? e.ph_text[0] : static_cast<char>(!e.ph_text.empty());
            break;
        case Target::kCat: text(key, token, e.cat); break;
        case Target::kName: text(key, token, e.name); break;
        case Target::kTs: e.ts = {token}; break;
        case Target::kDur: e.dur = {token}; break;
        case Target::kPid: e.pid = {token}; break;
        case Target::kTid: e.tid = {token}; break;
        case Target::kId: e.id = {token}; break;
        case Target::kArgs:
        case Target::kArgument:
        case Target::kDropped: break;
        case Target::kOther: e.keep(key, token, ".", troubles_);
    }
    return true;
}

void EventReader::text(std::string_view key, std::string_view token, std::string_view& into) {
    if (is_text(token)) {
        into = inside(token);
    } else if (token != "null") {
        odd(key, token);
        event_.keep(key, token, ".", troubles_);
    }
}

bool EventReader::arguments(Cursor& at) {
    Event& e = event_;
    if (at.peek() != '{') {
        const std::string_view token = at.value();
        if (!token.empty() && token != "null") {
            odd("args", token);
            e.keep("args", token, ".", troubles_);
        }
        return !token.empty();
    }
    if (e.ph == 'M') {
        e.args = at.value();
        return !e.args.empty();
    }
    return at.members([&](std::string_view key) {
        const std::string_view token = at.value();
        if (token.empty()) return false;
        if (e.ph == 'C') {
            e.samples.emplace_back(key, token);
        } else if (!argument(key, token)) {
            e.keep(key, token, "", troubles_);
        }
        return true;
    });
}

// False where no column takes the value: it is then kept as it is.
bool EventReader::argument(std::string_view key, std::string_view token) {
    const size_t which = index_.find(key);
    if (which == kFieldCount) return false;
    if (kFields[which].kind == Kind::kIgnored) return true;
    Event& e = event_;
    const uint64_t bit = uint64_t{1} << which;
    e.present &= ~bit;
    if (token == "null") return true;
    Value& value = e.values[which];
    value.token = token;
    bool none = false;
    if (!convert(kFields[which], token, value, none)) {
        odd(key, token);
        return false;
    }
    if (!none) e.present |= bit;
    return true;
}

// False where the value is not of the kind. none: it says that there is none.
bool EventReader::convert(const Field& field, std::string_view token, Value& value, bool& none) {
    switch (field.kind) {
        case Kind::kIgnored:
        case Kind::kJson: return true;
        case Kind::kText: return is_text(token);
        case Kind::kFlag: {
            const auto number = whole(token);
            value.whole = token == "true" || number.value_or(0) != 0;
            return number || is_flag(token);
        }
        case Kind::kReal: return put(real(token), value.real);
        case Kind::kUnsigned: return put(unsigned_whole(token), value.natural);
        case Kind::kTriple: return read_triple(token, value.triple);
        case Kind::kWhole:
        case Kind::kPositive:
        case Kind::kNatural: break;
    }
    return put(whole(token), value.whole) && fits(field, value.whole, none);
}

void EventReader::odd(std::string_view key, std::string_view token) {
    troubles_["unexpected_type"].add(std::string(key) + ": " + std::string(token.substr(0, 200)));
}

}  // namespace etloom::kineto
