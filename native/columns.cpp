// Columns to Arrow, and JSON escapes to UTF-8.
#include "columns.hpp"

#include "arrow_c.hpp"

namespace etloom {

namespace {

// What an exported array keeps alive until its consumer releases it.
struct Kept {
    std::shared_ptr<void> values;
    std::vector<uint8_t> valid;
    const void* buffers[3] = {nullptr, nullptr, nullptr};
    std::vector<int64_t> offsets;
    std::string bytes;
    std::unique_ptr<ArrowArray> dictionary;
};

void release_array(ArrowArray* array) {
    if (array->dictionary != nullptr && array->dictionary->release != nullptr) {
        array->dictionary->release(array->dictionary);
    }
    delete static_cast<Kept*>(array->private_data);
    array->release = nullptr;
}

void release_schema(ArrowSchema* schema) {
    if (schema->dictionary != nullptr) {
        if (schema->dictionary->release != nullptr) schema->dictionary->release(schema->dictionary);
        delete schema->dictionary;
    }
    schema->release = nullptr;
}

void fill_schema(ArrowSchema* schema, const char* format) {
    *schema = ArrowSchema{};
    schema->format = format;
    schema->name = "";
    schema->flags = ARROW_FLAG_NULLABLE;
    schema->release = release_schema;
}

void fill_array(ArrowArray* array, size_t rows, int64_t nulls, int64_t buffers, Kept* kept) {
    *array = ArrowArray{};
    array->length = static_cast<int64_t>(rows);
    array->null_count = nulls;
    array->n_buffers = buffers;
    array->buffers = kept->buffers;
    array->private_data = kept;
    array->release = release_array;
}

}  // namespace

void Column::leave_with(ArrowSchema* schema, ArrowArray* array, const char* format, size_t rows,
                        std::shared_ptr<void> values, const void* data, Dictionary* texts) {
    auto* kept = new Kept;
    kept->values = std::move(values);
    kept->valid = std::move(valid_);
    kept->buffers[0] = nulls_ == 0 ? nullptr : kept->valid.data();
    kept->buffers[1] = data;
    fill_schema(schema, format);
    fill_array(array, rows, nulls_, 2, kept);
    valid_ = {};
    nulls_ = 0;
    if (texts == nullptr) return;

    auto* words = new Kept;
    words->offsets.push_back(0);
    for (const auto& text : texts->texts()) {
        words->bytes.append(text);
        words->offsets.push_back(static_cast<int64_t>(words->bytes.size()));
    }
    words->buffers[1] = words->offsets.data();
    words->buffers[2] = words->bytes.data();
    kept->dictionary = std::make_unique<ArrowArray>();
    fill_array(kept->dictionary.get(), texts->texts().size(), 0, 3, words);
    array->dictionary = kept->dictionary.get();
    schema->dictionary = new ArrowSchema;
    fill_schema(schema->dictionary, "U");
}

void Texts::leave(ArrowSchema* schema, ArrowArray* array) {
    Dictionary finished;
    std::vector<uint32_t> codes;
    codes.reserve(dictionary_.texts().size());
    for (const auto& text : dictionary_.texts()) {
        codes.push_back(finished.code(finish_ == Finish::kUnescape ? unescape(text) : canonical(text)));
    }
    for (auto& code : values_) code = codes.empty() ? 0 : codes[code];
    leave_as(schema, array, "I", &finished);
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

}  // namespace

std::string unescape(std::string_view quoted) {
    constexpr std::string_view kEscapes = "\"\\/bfnrt", kPlain = "\"\\/\b\f\n\r\t";
    std::string out;
    out.reserve(quoted.size());
    for (size_t i = 0; i < quoted.size(); ++i) {
        if (quoted[i] != '\\' || i + 1 == quoted.size()) {
            out += quoted[i];
            continue;
        }
        const char kind = quoted[i + 1];
        if (const size_t which = kEscapes.find(kind); which != std::string_view::npos) {
            out += kPlain[which];
            ++i;
            continue;
        }
        int32_t point = kind == 'u' ? hex4(quoted, i + 2) : -1;
        if (point < 0) {
            out += quoted[i];
            continue;
        }
        i += 5;
        if (point >= 0xD800 && point < 0xDC00 && i + 2 < quoted.size() && quoted[i + 1] == '\\' && quoted[i + 2] == 'u') {
            const int32_t low = hex4(quoted, i + 3);
            if (low >= 0xDC00 && low < 0xE000) {
                point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
                i += 6;
            }
        }
        // Half of a surrogate pair is no character: U+FFFD in its place.
        append_utf8(out, point >= 0xD800 && point < 0xE000 ? 0xFFFD : static_cast<uint32_t>(point));
    }
    return out;
}

namespace {

// The value in front of the text, up to white space or the next mark.
std::string_view bare(std::string_view text) { return text.substr(0, text.find_first_of(" \n\r\t,:]}[{\"")); }

// Steps through a JSON text; every function returns false where the text is at fault.
class Checker {
  public:
    explicit Checker(std::string_view text) : p_(text.data()), end_(text.data() + text.size()) {}

    bool whole() {
        if (!value(0)) return false;
        space();
        return p_ == end_;
    }

  private:
    static constexpr int kDeepest = 200;

    void space() {
        while (p_ < end_ && (*p_ == ' ' || *p_ == '\n' || *p_ == '\r' || *p_ == '\t')) ++p_;
    }
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
            return is_scalar(token) || is_nonfinite(token);
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
                const std::string_view left(p_ + 1, static_cast<size_t>(end_ - p_ - 1));
                if (left.empty() || std::string_view("\"\\/bfnrtu").find(left[0]) == std::string_view::npos) return false;
                if (left[0] == 'u' && hex4(left, 1) < 0) return false;
                ++p_;
            }
            ++p_;
        }
        return eat('"');
    }

    const char *p_, *end_;
};

}  // namespace

bool is_json(std::string_view text) { return Checker(text).whole(); }

std::string canonical(std::string_view json) {
    std::string out;
    out.reserve(json.size());
    bool in_string = false;
    for (size_t i = 0; i < json.size(); ++i) {
        const char c = json[i];
        if (in_string) {
            out += c;
            if (c == '\\' && i + 1 < json.size()) out += json[++i];
            in_string = c != '"';
        } else if (const auto token = bare(json.substr(i)); !token.empty()) {
            is_nonfinite(token) ? out.append("\"").append(token).append("\"") : out.append(token);
            i += token.size() - 1;
        } else if (c != ' ' && c != '\n' && c != '\r' && c != '\t') {
            out += c;
            in_string = c == '"';
            if (c == ',' || c == ':') out += ' ';
        }
    }
    return out;
}

}  // namespace etloom
