// A JSON text as its tokens, found by simdjson's first stage, and steps along them.
//
// The first stage also checks the text as text: UTF-8, strings closed, no control character in them. The structure is
// checked by whoever steps along, as far as it is looked at: what is stepped over need only have its brackets closed.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>

#include "scalars.hpp"

namespace etloom {

// A key without its escapes, as it is compared with others: `n\u0061me` is `name`. As it is where it has none, and where
// it would need escapes again. Valid until this thread looks for the tokens of another text.
std::string_view unescaped_key(std::string_view key);
inline std::string_view plain_key(std::string_view key) {
    return key.find('\\') == std::string_view::npos ? key : unescaped_key(key);
}

// A place among the tokens of a text: brackets, commas, colons, and the first bytes of strings and of other scalars. The
// last token of a text closes a bracket, so that a scalar has one behind it. A step that fails leaves the place open.
class Cursor {
  public:
    Cursor() = default;
    Cursor(const char* text, const uint32_t* at, const uint32_t* end) : text_(text), at_(at), end_(end) {}

    bool at_end() const { return at_ == end_; }
    const char* here() const { return text_ + *at_; }
    char peek() const { return text_[*at_]; }
    void step(ptrdiff_t tokens = 1) { at_ += tokens; }
    ptrdiff_t left() const { return end_ - at_; }
    // To the first token at `place` or behind it, which is near more often than not.
    void skip_to(const char* place) {
        const auto wanted = static_cast<uint32_t>(place - text_);
        ptrdiff_t stride = 1;
        for (; left() > stride && at_[stride] < wanted; stride *= 2) at_ += stride;
        at_ = std::lower_bound(at_, at_ + std::min(left(), stride + 1), wanted);
    }
    ptrdiff_t since(const Cursor& before) const { return at_ - before.at_; }

    // Steps over one value; its text, empty where there is none.
    std::string_view value() {
        const char* from = here();
        const Sort sort = sort_of(*from);
        if (sort == Sort::kOpen) return skip() ? std::string_view(from, static_cast<size_t>(text_ + at_[-1] + 1 - from)) : std::string_view();
        if (sort != Sort::kScalar) return {};
        ++at_;
        return {from, static_cast<size_t>(behind_scalar() - from)};
    }

    // Calls take(key) for each member of the object that is here; it steps over the value and returns whether it could.
    // The key has no escapes (`plain_key`). False where the object is damaged.
    template <typename Take>
    bool members(Take take) {
        if (peek() != '{') return false;
        ++at_;
        if (peek() == '}') return close();
        for (;;) {
            const char* key = here();
            if (*key != '"') return false;
            ++at_;
            if (peek() != ':') return false;
            const char* key_end = behind_scalar() - 1;
            ++at_;
            if (!take(plain_key({key + 1, static_cast<size_t>(key_end - key - 1)}))) return false;
            const char next = peek();
            if (next == '}') return close();
            if (next != ',') return false;
            ++at_;
        }
    }

    // Calls take() for each item of the array that is here; as `members`.
    template <typename Take>
    bool items(Take take) {
        if (peek() != '[') return false;
        ++at_;
        if (peek() == ']') return close();
        for (;;) {
            if (!take()) return false;
            const char next = peek();
            if (next == ']') return close();
            if (next != ',') return false;
            ++at_;
        }
    }

    // Steps over a closing bracket. False where nothing is behind it, though something should be.
    bool close() {
        ++at_;
        return at_ != end_;
    }

  private:
    enum class Sort : uint8_t { kScalar, kOpen, kClose, kMark };
    static constexpr auto kSorts = [] {
        std::array<Sort, 256> sorts{};
        sorts['{'] = sorts['['] = Sort::kOpen;
        sorts['}'] = sorts[']'] = Sort::kClose;
        sorts[','] = sorts[':'] = Sort::kMark;
        return sorts;
    }();
    static Sort sort_of(char c) { return kSorts[static_cast<uint8_t>(c)]; }

    // The end of the scalar whose token was stepped over: white space is all there can be up to the next token.
    const char* behind_scalar() const {
        const char* to = here();
        while (is_space(to[-1])) --to;
        return to;
    }
    bool skip() {
        size_t depth = 0;
        do {
            const Sort sort = sort_of(peek());
            depth += sort == Sort::kOpen;
            depth -= sort == Sort::kClose;
            ++at_;
        } while (depth != 0 && at_ != end_);
        return at_ != end_;
    }

    const char* text_ = nullptr;
    const uint32_t *at_ = nullptr, *end_ = nullptr;
};

// The items of a list beside others, taken one by one; none where there is no list.
class List {
  public:
    List() = default;
    explicit List(Cursor at) : at_(at), open_(at.peek() == '[') {
        if (open_) at_.step();
    }
    // Whether there is a further item. `item` is at it then, and is to be stepped over before this is asked again.
    bool next() {
        if (!open_) return false;
        const char mark = at_.peek();
        if (first_ ? mark != ']' : mark == ',') {
            if (!first_) at_.step();
            first_ = false;
            return true;
        }
        open_ = false;
        sound_ = mark == ']';
        return false;
    }
    Cursor& item() { return at_; }
    bool is_open() const { return open_; }
    bool sound() const { return sound_; }

  private:
    Cursor at_;
    bool open_ = false, first_ = true, sound_ = true;
};

class Tokens {
  public:
    Tokens();
    ~Tokens();
    // Nothing for a text that is damaged as such, or does not end with a closing bracket. There is padding behind it.
    bool find(std::string_view json, Cursor& start);

  private:
    struct Stage;
    std::unique_ptr<Stage> stage_;
};

}  // namespace etloom
