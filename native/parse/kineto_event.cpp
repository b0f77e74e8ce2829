// See kineto_event.hpp.
#include "kineto_event.hpp"

#include <cmath>
#include <optional>
#include <string>

#include "json_text.hpp"

namespace etloom::kineto {

namespace {

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

template <typename T>
bool put(const std::optional<T>& number, T& into) {
    if (number) into = *number;
    return number.has_value();
}

}  // namespace

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
        std::string number;
        if (values[which].token.empty()) {
            is_whole(kFields[which].kind) ? append_whole(number, values[which].whole) : append_real(number, values[which].real);
        }
        keep(kFields[which].key, number.empty() ? values[which].token : number, "", troubles);
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
            e.ph_text = plain_key(e.ph_text);
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

bool EventReader::add_number(std::string_view key, int64_t number) {
    constexpr int64_t kShort = 1'000'000'000'000'000'000;
    const size_t which = index_.find(key);
    if (which == kFieldCount || !is_whole(kFields[which].kind) || number >= kShort || number <= -kShort) return false;
    bool none = false;
    if (!fits(kFields[which], number, none)) return false;
    event_.present = (event_.present & ~(uint64_t{1} << which)) | (uint64_t{!none} << which);
    event_.values[which].token = {};
    event_.values[which].whole = number;
    return true;
}

bool EventReader::add_number(std::string_view key, double number) {
    const size_t which = index_.find(key);
    if (which == kFieldCount || kFields[which].kind != Kind::kReal || !std::isfinite(number)) return false;
    event_.present |= uint64_t{1} << which;
    event_.values[which].token = {};
    event_.values[which].real = number;
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
