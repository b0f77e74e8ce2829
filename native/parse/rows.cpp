// Cutting a document into pieces of whole rows; see rows.hpp.
#include "rows.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "json_text.hpp"
#include "worker.hpp"

namespace etloom {

RowStream::RowStream(std::string_view rows_key, bool bare_array, bool uniform, std::vector<std::string_view> row_keys)
    : rows_key_(rows_key), bare_array_(bare_array), uniform_(uniform), row_keys_(std::move(row_keys)) {
    reserve(1 << 16);
}

void RowStream::reserve(size_t size) {
    const size_t need = size + kPadding + 1;
    if (buffer_.size() < need) buffer_.resize(std::max(need, buffer_.size() + buffer_.size() / 2));
}

void RowStream::consume(size_t bytes) {
    std::memmove(begin(), begin() + bytes, size_ - bytes);
    size_ -= bytes;
    searched_ = retry_at_ = 0;
}

void RowStream::feed(const char* data, size_t size) {
    if (size != 0) std::memcpy(room(size), data, size);
    extend(size);
}

char* RowStream::room(size_t size) {
    reserve(size_ + size);
    return end();
}

void RowStream::extend(size_t size) {
    const Computing counted;
    if (size > buffer_.size() - size_ - kPadding - 1) throw std::length_error("more bytes than there is room for");
    bytes_ += size;
    size_ += size;
    while (step(false)) {
    }
    count_trailing();
}

// White space may follow the document, anything else is lost.
void RowStream::count_trailing() {
    if (state_ != State::kDone) return;
    trailing_ += static_cast<uint64_t>(end() - skip_space(begin(), end()));
    size_ = 0;
}

void RowStream::finish() {
    retry_at_ = 0;
    while (step(true)) {
    }
    // Only now: a member of many pieces may not have been looked at before.
    if (state_ == State::kTop && !found_rows_ && skip_to_rows({})) {
        while (step(true)) {
        }
    }
    if (state_ != State::kDone) truncated_ = true;
    count_trailing();
}

// One unit of progress; false when more bytes are needed or the document is over.
bool RowStream::step(bool last) {
    switch (state_) {
        case State::kStart: {
            // A byte order mark is no JSON, but some tools write one.
            if (size_ >= 3 && std::memcmp(begin(), "\xEF\xBB\xBF", 3) == 0) consume(3);
            const char* p = skip_space(begin(), end());
            if (p == end()) return false;
            if (*p == '{') {
                in_object_ = true;
                state_ = State::kTop;
            } else if (*p == '[' && bare_array_) {
                found_rows_ = true;
                state_ = State::kRows;
            } else {
                state_ = State::kDone;
                return false;
            }
            consume(static_cast<size_t>(p + 1 - begin()));
            return true;
        }
        case State::kTop: return step_top();
        case State::kRows: return step_rows(last);
        case State::kDone: return false;
    }
    return false;
}

bool RowStream::step_top() {
    if (head_damaged_ && !found_rows_) return skip_to_rows({});
    // A member of many pieces is looked at when it has doubled: at each piece would be quadratic.
    if (size_ < retry_at_) return false;
    const char* to = end();
    const char* p = begin();
    while (p < to && (is_space(*p) || *p == ',')) ++p;
    if (p == to) return false;
    if (*p == '}' && found_rows_) {
        consume(static_cast<size_t>(p + 1 - begin()));
        state_ = State::kDone;
        return false;
    }
    if (*p != '"') return skip_to_rows({});
    const char* key_end = string_end(p, to);
    if (key_end == nullptr) return false;
    const std::string key = unescape({p + 1, static_cast<size_t>(key_end - p - 2)});
    const char* value = skip_space(key_end, to);
    if (value == to) return false;
    if (*value != ':') return skip_to_rows(key);
    value = skip_space(value + 1, to);
    if (value == to) return false;
    if (key == rows_key_ && *value == '[') {
        found_rows_ = true;
        state_ = State::kRows;
        consume(static_cast<size_t>(value + 1 - begin()));
        return true;
    }
    const char* after = value_end(value, to);
    if (after == nullptr) {
        retry_at_ = size_ * 2;
        return false;
    }
    const std::string_view member(value, static_cast<size_t>(after - value));
    if (!found_rows_) {
        const char* next = skip_space(after, to);
        // Where a closing brace is missing, the rest of the document is taken for the member: `finish` sees whether it is.
        if (next == to) {
            retry_at_ = size_ * 2;
            return false;
        }
        // A key in the place of a value, or in a number.
        const bool holds_key = *next == ':' || (std::strchr("\"{[", *value) == nullptr && member.find('"') != std::string_view::npos);
        // Where a quote is missing, what follows is taken for text and the other way round.
        const bool swaps_text = find_rows(value, after) != nullptr && fault_of_json(member) == Fault::kNoJson;
        if (holds_key || swaps_text) return skip_to_rows(key);
    }
    const bool bad_key = fault_of_text({p, static_cast<size_t>(key_end - p)}) == Fault::kBadEscape;
    header_.emplace_back(key, bad_key ? "damaged" : member);
    consume(static_cast<size_t>(after - begin()));
    return true;
}

// The first row behind the key of the rows in [from, to), or nullptr.
const char* RowStream::find_rows(const char* from, const char* to) const {
    const std::string quoted = '"' + rows_key_ + '"';
    for (const char* p = from;; ++p) {
        p = std::search(p, to, quoted.begin(), quoted.end());
        if (p == to) return nullptr;
        const char* mark = skip_space(p + quoted.size(), to);
        const char* bracket = mark < to && *mark == ':' ? skip_space(mark + 1, to) : to;
        if (bracket < to && *bracket == '[') return bracket + 1;
    }
}

// Leaves a damaged member `key` of the head out, and goes on with the rows where their key is found.
bool RowStream::skip_to_rows(std::string_view key) {
    if (found_rows_) {
        state_ = State::kDone;
        return false;
    }
    constexpr size_t kExample = 40, kLongest = 256;  // bytes of an example, and of the key with what follows it
    if (!head_damaged_) {
        const std::string_view text(begin(), std::min(size_, kExample));
        header_.emplace_back(key.empty() ? text : key, "damaged");
        head_damaged_ = true;
    }
    const char* rows = find_rows(begin(), end());
    if (rows == nullptr) {
        if (size_ > kLongest) consume(size_ - kLongest);
        return false;
    }
    found_rows_ = true;
    state_ = State::kRows;
    consume(static_cast<size_t>(rows - begin()));
    return true;
}

bool RowStream::step_rows(bool last) {
    if (last) {
        const char* stop = crawl(begin(), end(), true);
        consume(static_cast<size_t>(stop - begin()));
        return state_ != State::kRows;
    }
    if (size_ < retry_at_ || (uniform_ && !settle_row_key())) return false;
    char* cut = last_boundary(begin() + searched_, end());
    // A boundary may begin in the last bytes; everything before them need not be looked at again.
    constexpr size_t kLongest = 64;
    if (cut == nullptr) {
        searched_ = size_ > kLongest ? size_ - kLongest : 0;
        return false;
    }
    const char* stop = parse_halves(begin(), cut) || parse(begin(), cut) ? cut : crawl(begin(), cut, false);
    const bool whole = stop == cut && state_ == State::kRows;
    consume(static_cast<size_t>(stop - begin()) + (whole ? 1 : 0));
    searched_ = whole || size_ < kLongest ? 0 : size_ - kLongest;
    // A row without an end in sight is looked at again when it has doubled.
    retry_at_ = whole ? 0 : size_ * 2;
    return state_ != State::kRows;
}

// Keeps of the keys the one that the first row begins with. False: it has not come yet.
bool RowStream::settle_row_key() {
    const char* p = skip_space(begin(), end());
    if (p < end() && *p == '{') p = skip_space(p + 1, end());
    const char* key_end = p < end() && *p == '"' ? string_end(p, end()) : nullptr;
    if (key_end == nullptr) return p < end() && *p != '"';
    const std::string_view key(p + 1, static_cast<size_t>(key_end - p - 1));
    if (std::find(row_keys_.begin(), row_keys_.end(), key) != row_keys_.end()) {
        std::erase_if(row_keys_, [&](std::string_view other) { return other != key; });
    }
    uniform_ = false;
    return true;
}

// `brace` is a '{'. A row starts there if a comma and a closing brace stand before it and a row's key follows: inside a
// valid string that sequence cannot occur, since the key's quote would end the string.
bool RowStream::is_boundary(const char* brace, const char* to) const {
    const char* p = brace + 1;
    while (p < to && is_space(*p)) ++p;
    if (p == to || *p != '"') return false;
    ++p;
    const auto left = static_cast<size_t>(to - p);
    return std::any_of(row_keys_.begin(), row_keys_.end(), [&](std::string_view key) {
        return key.size() <= left && std::memcmp(p, key.data(), key.size()) == 0;
    });
}

// The comma of the last boundary in [from, to), or nullptr.
char* RowStream::last_boundary(char* from, char* to) {
    for (char* p = to; p > from;) {
        if (*--p != '{' || !is_boundary(p, to)) continue;
        char* back = p;
        while (back > begin() && is_space(back[-1])) --back;
        if (back == begin() || back[-1] != ',') continue;
        char* comma = --back;
        while (back > begin() && is_space(back[-1])) --back;
        if (back > begin() && back[-1] == '}') return comma;
    }
    return nullptr;
}

// The comma of the first boundary behind `from`, or nullptr. For rows that are damaged the closing brace is not asked
// for, since it may be what is missing.
char* RowStream::next_boundary(char* from, char* to) {
    for (char* p = from + 1; p < to; ++p) {
        p = static_cast<char*>(std::memchr(p, '{', static_cast<size_t>(to - p)));
        if (p == nullptr) return nullptr;
        if (!is_boundary(p, to)) continue;
        char* back = p;
        while (back > from && is_space(back[-1])) --back;
        if (back > from && (back[-1] == ',' || back[-1] == '}')) return back[-1] == ',' ? back - 1 : back;
    }
    return nullptr;
}

// The rows in [from, to), as one array: the byte behind them is a bracket for a moment. All or nothing.
bool RowStream::parse(char* from, char* to) {
    const char saved_to = *to;
    *to = ']';
    uint64_t position = rows_seen_;
    checkpoint();
    const bool good = rows({from, static_cast<size_t>(to + 1 - from)}, position);
    *to = saved_to;
    if (good) {
        rows_seen_ = position;
    } else {
        rewind();
    }
    return good;
}

// The same by two threads, where that is worth while. The cut between them is right if the rows before it parse.
bool RowStream::parse_halves(char* from, char* to) {
    constexpr size_t kTries = 8;
    checkpoint();  // before `is_for_two`, for which a second thread that still works is not free
    if (!is_for_two(static_cast<size_t>(to - from)) || not_halved_ > kTries + halved_) return false;
    char* middle = last_boundary(from, from + (to - from) / 2);
    if (middle == nullptr) return false;
    const char saved_to = *to;
    *middle = *to = ']';
    uint64_t position = rows_seen_;
    const bool good = rows_of_both({from, static_cast<size_t>(middle + 1 - from)},
                                   {middle + 1, static_cast<size_t>(to - middle)}, position);
    *middle = ',';
    *to = saved_to;
    ++(good ? halved_ : not_halved_);
    if (good) {
        rows_seen_ = position;
    } else {
        rewind();
    }
    return good;
}

char* RowStream::crawl(char* from, char* to, bool last) {
    // How long a row that has no end in sight is waited for, before it is taken for damaged.
    constexpr ptrdiff_t kPatience = 1 << 24;
    // Rows without an end, one after the other, would each be sought through the rest: when that has cost too much, an
    // end is expected to be near.
    constexpr uint64_t kVain = 1 << 28;
    constexpr ptrdiff_t kNear = 1 << 13;
    char *p = from, *next = nullptr;
    bool sought = false;
    for (;;) {
        while (p < to && (is_space(*p) || *p == ',')) ++p;
        if (p == to) return to;
        if (*p == ']') {
            // A bracket with rows behind it is no end of theirs: it is stray, or the rest of a row that is damaged.
            char* behind = p + 1;
            while (behind < to && (is_space(*behind) || *behind == ']' || *behind == '}')) ++behind;
            const char* brace = behind < to && *behind == ',' ? skip_space(behind + 1, to) : to;
            if ((behind == to && !last) || (brace < to && *brace == '{' && is_boundary(brace, to))) {
                damaged_.add(std::string_view(p, static_cast<size_t>(behind - p)));
                ++rows_seen_;
                p = behind;
                continue;
            }
            state_ = in_object_ ? State::kTop : State::kDone;
            return p + 1;
        }
        char* until = in_vain_ > kVain + 16 * bytes_ ? std::min(to, p + std::min(kNear, to - p)) : to;
        auto* after = const_cast<char*>(value_end(p, until));
        if (after == p) ++after;  // a closing brace too many is no value
        if (after != nullptr && *p == '{' && parse(p, after)) {
            p = after;
            continue;
        }
        if (!sought || (next != nullptr && next <= p)) next = next_boundary(p, to);
        sought = true;
        if (after == nullptr && !last && (next == nullptr || to - p < kPatience)) return p;
        char* resume = after == nullptr ? next : next == nullptr ? after : std::min(after, next);
        if (resume == nullptr) {
            // The file ends inside this row.
            truncated_ = true;
            resume = to;
        }
        if (after == nullptr) in_vain_ += static_cast<uint64_t>(until - p);
        damaged_.add(std::string_view(p, static_cast<size_t>(resume - p)));
        ++rows_seen_;
        p = resume;
    }
}

}  // namespace etloom
