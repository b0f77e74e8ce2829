// See json_text.hpp.
#include "json_text.hpp"

#include <array>
#include <cstring>

namespace etloom {

namespace {

enum class Mark : uint8_t { kNone, kOpen, kClose, kQuote };

constexpr auto kMarks = [] {
    std::array<Mark, 256> marks{};
    marks['{'] = marks['['] = Mark::kOpen;
    marks['}'] = marks[']'] = Mark::kClose;
    marks['"'] = Mark::kQuote;
    return marks;
}();

}  // namespace

const char* string_end(const char* from, const char* to) {
    for (const char* p = from + 1; p < to;) {
        const auto* quote = static_cast<const char*>(std::memchr(p, '"', static_cast<size_t>(to - p)));
        if (quote == nullptr) return nullptr;
        const char* back = quote;
        while (back > from + 1 && back[-1] == '\\') --back;
        if ((quote - back) % 2 == 0) return quote + 1;
        p = quote + 1;
    }
    return nullptr;
}

const char* value_end(const char* from, const char* to) {
    if (from == to) return nullptr;
    if (*from == '"') return string_end(from, to);
    if (*from != '{' && *from != '[') {
        const char* p = from;
        while (p < to && *p != ',' && *p != '}' && *p != ']' && !is_space(*p)) ++p;
        return p == to ? nullptr : p;
    }
    size_t depth = 0;
    for (const char* p = from; p < to;) {
        switch (kMarks[static_cast<uint8_t>(*p)]) {
            case Mark::kNone: ++p; break;
            case Mark::kOpen:
                ++depth;
                ++p;
                break;
            case Mark::kClose:
                ++p;
                if (--depth == 0) return p;
                break;
            case Mark::kQuote:
                p = string_end(p, to);
                if (p == nullptr) return nullptr;
        }
    }
    return nullptr;
}

namespace {

constexpr size_t kLongText = 1 << 20;

// Four hexadecimal digits at `at`, or -1.
int32_t hex4(std::string_view text, size_t at) {
    if (at + 4 > text.size()) return -1;
    int32_t value = 0;
    for (size_t i = at; i < at + 4; ++i) {
        const char c = text[i];
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0) return -1;
        value = value * 16 + digit;
    }
    return value;
}

constexpr std::string_view kEscapes = "\"\\/bfnrt", kPlain = "\"\\/\b\f\n\r\t";

// Whether the backslash at `at` begins an escape.
bool is_escape(std::string_view text, size_t at) {
    if (at + 1 >= text.size()) return false;
    return text[at + 1] == 'u' ? hex4(text, at + 2) >= 0 : kEscapes.find(text[at + 1]) != std::string_view::npos;
}

// The value in front of the text, up to white space or the next mark.
std::string_view bare(std::string_view text) { return text.substr(0, text.find_first_of(" \n\r\t,:]}[{\"")); }

// Steps through a JSON text; every function returns false where the text is at fault.
class Checker {
  public:
    explicit Checker(std::string_view text) : p_(text.data()), end_(text.data() + text.size()) {}

    Fault fault() {
        if (!value(0)) return Fault::kNoJson;
        space();
        return p_ != end_ ? Fault::kNoJson : non_finite_ ? Fault::kNonFinite : Fault::kNone;
    }

  private:
    static constexpr int kDeepest = 200;

    void space() { p_ = skip_space(p_, end_); }
    bool eat(char c) {
        if (p_ == end_ || *p_ != c) return false;
        ++p_;
        return true;
    }
    bool value(int depth) {
        space();
        if (p_ == end_ || depth > kDeepest) return false;
        if (*p_ == '"') return string();
        if (*p_ != '{' && *p_ != '[') {
            const std::string_view token = bare({p_, static_cast<size_t>(end_ - p_)});
            p_ += token.size();
            if (is_scalar(token)) return true;
            non_finite_ = true;
            return is_nonfinite(token);
        }
        const bool object = *p_ == '{';
        const char close = object ? '}' : ']';
        ++p_;
        space();
        if (eat(close)) return true;
        do {
            space();
            if (object) {
                if (!string()) return false;
                space();
                if (!eat(':')) return false;
            }
            if (!value(depth + 1)) return false;
            space();
        } while (eat(','));
        return eat(close);
    }
    bool string() {
        if (!eat('"')) return false;
        while (p_ < end_ && *p_ != '"') {
            if (static_cast<unsigned char>(*p_) < 0x20) return false;
            if (*p_ == '\\') {
                if (!is_escape({p_, static_cast<size_t>(end_ - p_)}, 0)) return false;
                ++p_;
            }
            ++p_;
        }
        return eat('"');
    }

    const char *p_, *end_;
    bool non_finite_ = false;
};

}  // namespace

Fault fault_of_json(std::string_view json) {
    const Fault fault = Checker(json).fault();
    return fault == Fault::kNone && json.size() > kLongText ? Fault::kLong : fault;
}

Fault fault_of_text(std::string_view quoted) {
    for (size_t at = quoted.find('\\'); at != std::string_view::npos; at = quoted.find('\\', at + 2)) {
        if (!is_escape(quoted, at)) return Fault::kBadEscape;
    }
    return quoted.size() > kLongText ? Fault::kLong : Fault::kNone;
}

namespace {

void append_utf8(std::string& out, uint32_t point) {
    if (point < 0x80) {
        out += static_cast<char>(point);
    } else if (point < 0x800) {
        out += static_cast<char>(0xC0 | (point >> 6));
        out += static_cast<char>(0x80 | (point & 0x3F));
    } else if (point < 0x10000) {
        out += static_cast<char>(0xE0 | (point >> 12));
        out += static_cast<char>(0x80 | ((point >> 6) & 0x3F));
        out += static_cast<char>(0x80 | (point & 0x3F));
    } else {
        out += static_cast<char>(0xF0 | (point >> 18));
        out += static_cast<char>(0x80 | ((point >> 12) & 0x3F));
        out += static_cast<char>(0x80 | ((point >> 6) & 0x3F));
        out += static_cast<char>(0x80 | (point & 0x3F));
    }
}

}  // namespace

namespace {

struct Character {
    uint32_t point;
    size_t length;  // of the escape
};

// The character of the \u escape at `at`, or of the two that are a pair. Half of a pair is none: U+FFFD in its place.
Character character(std::string_view text, size_t at) {
    const auto first = static_cast<uint32_t>(hex4(text, at + 2));
    if (first < 0xD800 || first >= 0xE000) return {first, 6};
    if (first < 0xDC00 && text.substr(at + 6, 2) == "\\u") {
        const int32_t low = hex4(text, at + 8);
        if (low >= 0xDC00 && low < 0xE000) return {0x10000 + ((first - 0xD800) << 10) + static_cast<uint32_t>(low - 0xDC00), 12};
    }
    return {0xFFFD, 6};
}

}  // namespace

std::string unescape(std::string_view quoted) {
    std::string out;
    out.reserve(quoted.size());
    for (size_t i = 0; i < quoted.size(); ++i) {
        if (quoted[i] != '\\' || !is_escape(quoted, i)) {
            out += quoted[i];
            continue;
        }
        const char kind = quoted[i + 1];
        if (kind != 'u') {
            out += kPlain[kEscapes.find(kind)];
            ++i;
            continue;
        }
        const auto [point, length] = character(quoted, i);
        append_utf8(out, point);
        i += length - 1;
    }
    return out;
}

std::string canonical(std::string_view json) {
    std::string out;
    out.reserve(json.size());
    bool in_string = false;
    for (size_t i = 0; i < json.size(); ++i) {
        const char c = json[i];
        if (in_string) {
            if (c == '\\' && i + 1 < json.size()) {
                const bool coded = json[i + 1] == 'u' && is_escape(json, i);
                const auto [point, length] = coded ? character(json, i) : Character{0, 2};
                out += point == 0xFFFD ? std::string_view("\\ufffd") : json.substr(i, length);
                i += length - 1;
            } else {
                out += c;
                in_string = c != '"';
            }
        } else if (const auto token = bare(json.substr(i)); !token.empty()) {
            is_nonfinite(token) ? out.append("\"").append(token).append("\"") : out.append(token);
            i += token.size() - 1;
        } else if (!is_space(c)) {
            out += c;
            in_string = c == '"';
            if (c == ',' || c == ':') out += ' ';
        }
    }
    return out;
}

}  // namespace etloom
