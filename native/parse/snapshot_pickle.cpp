#include "snapshot_pickle.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace etloom {

namespace {

using Value = SnapshotParser::Value;
using Type = SnapshotParser::Type;
constexpr int64_t LARGEST = (int64_t{1} << 59) - 1;

Value integer(int64_t number) {
    Value value;
    value.type = number >= -LARGEST && number <= LARGEST ? SnapshotParser::INT : SnapshotParser::BIG;
    value.number = value.type == SnapshotParser::INT ? number : 0;
    return value;
}

Value indexed(Type type, size_t index) {
    Value value;
    value.type = type;
    value.number = static_cast<int64_t>(index);
    return value;
}

uint64_t little_endian(const char* data, size_t count) {
    uint64_t number = 0;
    for (size_t i = 0; i < count; ++i) number |= uint64_t{static_cast<unsigned char>(data[i])} << (8 * i);
    return number;
}

// A two's complement integer of any length, as LONG1 has it.
Value long_integer(const char* data, size_t count) {
    if (count == 0) return integer(0);
    if (count > 8) return indexed(SnapshotParser::BIG, 0);
    uint64_t number = little_endian(data, count);
    if (count < 8 && (data[count - 1] & 0x80) != 0) number |= ~uint64_t{0} << (8 * count);
    return integer(static_cast<int64_t>(number));
}

Value decimal(std::string_view text) {
    if (!text.empty() && text.back() == 'L') text.remove_suffix(1);
    if (text == "00" || text == "01") return indexed(SnapshotParser::BOOL, text == "01");
    int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    return error == std::errc{} && end == text.data() + text.size() ? integer(number) : indexed(SnapshotParser::BIG, 0);
}

}  // namespace

SnapshotParser::SnapshotParser() {
    for (const char* key : {"action", "time_us", "addr", "size", "stream", "device_free", "user_metadata", "pool_id",
                            "frames"})
        make_text(key);
}

void SnapshotParser::fail(const std::string& what) const {
    throw std::runtime_error(what + " at byte " + std::to_string(consumed_));
}

void SnapshotParser::feed(const char* data, size_t size) {
    if (!pending_.empty()) {
        // One opcode spans both pieces: extend it until it is complete, then go on in the new piece.
        const size_t before = pending_.size();
        pending_.append(data, size);
        size_t at = 0;
        while (at < before && !is_done_) {
            const size_t length = step(pending_.data() + at, pending_.size() - at);
            if (length == 0) {
                pending_.erase(0, at);
                return;
            }
            at += length;
            consumed_ += length;
        }
        pending_.clear();
        if (is_done_) return;
        data += at - before;
        size -= at - before;
    }
    while (size > 0 && !is_done_) {
        const size_t length = step(data, size);
        if (length == 0) {
            pending_.assign(data, size);
            return;
        }
        data += length;
        size -= length;
        consumed_ += length;
    }
}

Value SnapshotParser::finish() const {
    if (!is_done_ || values_.empty()) fail("is a damaged pickle: it ends");
    return values_.back();
}

void SnapshotParser::clear() {
    forget();
    decltype(dicts_)().swap(dicts_);
    decltype(lists_)().swap(lists_);
    decltype(row_of_dict_)().swap(row_of_dict_);
    decltype(stack_of_list_)().swap(stack_of_list_);
    decltype(values_)().swap(values_);
    decltype(stacks)().swap(stacks);
    decltype(number_of_stack_)().swap(number_of_stack_);
#ifdef __GLIBC__
    malloc_trim(0);  // small blocks between those still in use: 100 bytes per entry of the history
#endif
}

const SnapshotParser::Pairs* SnapshotParser::pairs(const Value& dict) const {
    return dict.type == DICT ? dicts_[static_cast<size_t>(dict.number)].get() : nullptr;
}

const SnapshotParser::Items* SnapshotParser::items(const Value& list) const {
    const bool is_list = list.type == SnapshotParser::LIST || list.type == SnapshotParser::TUPLE;
    return is_list ? lists_[static_cast<size_t>(list.number)].get() : nullptr;
}

const Value* SnapshotParser::find(const Pairs& pairs, std::string_view key) const {
    for (auto pair = pairs.rbegin(); pair != pairs.rend(); ++pair)
        if (pair->first.type == SnapshotParser::TEXT && text(pair->first) == key) return &pair->second;
    return nullptr;
}

Value SnapshotParser::resolve(const Value& value) const {
    const size_t place = static_cast<size_t>(value.number);
    if (value.type == DICT && row_of_dict_[place] >= 0) return indexed(ROW, static_cast<size_t>(row_of_dict_[place]));
    if (value.type == LIST && stack_of_list_[place] >= 0)
        return indexed(STACK, static_cast<size_t>(stack_of_list_[place]));
    return value;
}

size_t SnapshotParser::HashOfFrames::operator()(const std::vector<int32_t>& frames) const {
    const auto* bytes = reinterpret_cast<const char*>(frames.data());
    return std::hash<std::string_view>{}({bytes, frames.size() * sizeof(int32_t)});
}

Value SnapshotParser::pop() {
    if (values_.empty() || (!marks_.empty() && marks_.back() == values_.size())) fail("is a damaged pickle: no value");
    const Value value = values_.back();
    values_.pop_back();
    return value;
}

SnapshotParser::Items SnapshotParser::pop_to_mark() {
    if (marks_.empty()) fail("is a damaged pickle: no mark");
    Items taken(values_.begin() + static_cast<std::ptrdiff_t>(marks_.back()), values_.end());
    values_.resize(marks_.back());
    marks_.pop_back();
    return taken;
}

void SnapshotParser::memoize(size_t place) {
    // A pickler numbers what it remembers one after the other: a few bytes cannot ask for all memory.
    if (place > memo_.size() || values_.empty()) fail("is a damaged pickle: memo " + std::to_string(place));
    if (place == memo_.size()) memo_.emplace_back();
    memo_[place] = values_.back();
}

Value SnapshotParser::remembered(size_t place) const {
    if (place >= memo_.size()) fail("is a damaged pickle: memo " + std::to_string(place));
    return memo_[place];
}

Value SnapshotParser::make_text(std::string_view text) {
    const auto [it, is_new] = number_of_text_.try_emplace(std::string(text), static_cast<int32_t>(texts_.size()));
    if (is_new) texts_.push_back(&it->first);
    return indexed(SnapshotParser::TEXT, static_cast<size_t>(it->second));
}

Value SnapshotParser::make_list(Items items, Type type) {
    lists_.push_back(std::make_unique<Items>());
    stack_of_list_.push_back(-1);
    const Value list = indexed(type, lists_.size() - 1);
    append(list, std::move(items));
    return list;
}

Value SnapshotParser::make_dict() {
    dicts_.push_back(std::make_unique<Pairs>());
    row_of_dict_.push_back(-1);
    return indexed(DICT, dicts_.size() - 1);
}

void SnapshotParser::append(const Value& list, Items added) {
    if ((list.type != SnapshotParser::LIST && list.type != SnapshotParser::TUPLE) || items(list) == nullptr)
        fail("is a damaged pickle: no list");
    for (Value& value : added) value = to_row(value);
    Items& all = *lists_[static_cast<size_t>(list.number)];
    all.insert(all.end(), added.begin(), added.end());
}

void SnapshotParser::set(const Value& dict, const Items& keys_and_values) {
    if (dict.type != SnapshotParser::DICT || pairs(dict) == nullptr || keys_and_values.size() % 2 != 0)
        fail("is a damaged pickle: no dict");
    Pairs& all = *dicts_[static_cast<size_t>(dict.number)];
    all.reserve(all.size() + keys_and_values.size() / 2);
    for (size_t i = 0; i < keys_and_values.size(); i += 2) {
        const Value &key = keys_and_values[i], &value = keys_and_values[i + 1];
        const bool has_frames = key.type == TEXT && key.number == FRAMES;
        all.emplace_back(key, has_frames ? to_stack(value) : value);
    }
}

// A dict that is an entry of the history as a row of the columns.
Value SnapshotParser::to_row(const Value& value) {
    if (value.type != DICT) return value;
    const Value known = resolve(value);
    if (known.type == ROW) return known;
    std::array<Value, FRAMES + 1> fields;
    bool is_entry = false;
    for (const auto& [key, field] : *pairs(value)) {
        if (key.type != TEXT || key.number > FRAMES) continue;
        fields[static_cast<size_t>(key.number)] = field;
        is_entry |= key.number == ACTION;
    }
    if (!is_entry || time.size() >= INT32_MAX) return value;
    const auto number = [&](Key key) {
        return fields[key].type == INT && fields[key].number >= 0 ? fields[key].number : ABSENT;
    };
    const auto place = [&](Key key, Type type) {
        return fields[key].type == type ? static_cast<int32_t>(fields[key].number) : -1;
    };
    time.push_back(number(TIME));
    address.push_back(number(ADDRESS));
    size.push_back(number(SIZE));
    stream.push_back(number(STREAM));
    device_free.push_back(number(DEVICE_FREE));
    action.push_back(place(ACTION, TEXT));
    annotation.push_back(place(METADATA, TEXT));
    stack.push_back(place(FRAMES, STACK));
    pool.push_back(to_pool(fields[POOL]));
    row_of_dict_[static_cast<size_t>(value.number)] = static_cast<int32_t>(time.size() - 1);
    dicts_[static_cast<size_t>(value.number)].reset();
    return indexed(ROW, time.size() - 1);
}

// The two numbers of a private pool as the number of a text, -1 for the default pool.
int32_t SnapshotParser::to_pool(const Value& value) {
    const Items* const numbers = value.type == LIST || value.type == TUPLE ? items(value) : nullptr;
    if (numbers == nullptr || numbers->size() != 2 || (*numbers)[0].type != INT || (*numbers)[1].type != INT) return -1;
    const int64_t first = (*numbers)[0].number, second = (*numbers)[1].number;
    if (first == 0 && second == 0) return -1;
    return static_cast<int32_t>(make_text("[" + std::to_string(first) + ", " + std::to_string(second) + "]").number);
}

// A list of frames as the number of its stack.
Value SnapshotParser::to_stack(const Value& value) {
    if (value.type != LIST) return value;
    const Value known = resolve(value);
    if (known.type == STACK) return known;
    const Items& all = *items(value);
    if (all.empty()) return {};
    std::vector<int32_t> frames;
    frames.reserve(std::min(all.size(), MAX_FRAMES));
    for (const Value& frame : all) {
        if (frames.size() == MAX_FRAMES) break;
        if (frame.type == DICT && frame.number <= INT32_MAX) frames.push_back(static_cast<int32_t>(frame.number));
    }
    const auto [it, is_new] = number_of_stack_.try_emplace(frames, static_cast<int32_t>(stacks.size()));
    if (is_new) stacks.push_back(std::move(frames));
    stack_of_list_[static_cast<size_t>(value.number)] = it->second;
    lists_[static_cast<size_t>(value.number)].reset();
    return indexed(STACK, static_cast<size_t>(it->second));
}

size_t SnapshotParser::step(const char* data, size_t size) {
    const auto opcode = static_cast<unsigned char>(data[0]);
    const char* const argument = data + 1;
    const size_t room = size - 1;
    const auto has = [&](size_t count) { return room >= count; };
    const auto push = [&](const Value& value) { values_.push_back(value); };
    // The argument of a text opcode: its length in `width` bytes, then the bytes. Returns the length of the opcode.
    const auto counted = [&](size_t width, auto use) -> size_t {
        if (!has(width)) return 0;
        const uint64_t length = little_endian(argument, width);
        if (length > (uint64_t{1} << 40)) fail("is a damaged pickle: a text of " + std::to_string(length) + " bytes");
        if (room - width < length) return 0;
        use(std::string_view(argument + width, length));
        return 1 + width + length;
    };
    const auto line = [&](auto use) -> size_t {
        const void* const end = std::memchr(argument, '\n', room);
        if (end == nullptr) return 0;
        std::string_view text(argument, static_cast<size_t>(static_cast<const char*>(end) - argument));
        use(text);
        return text.size() + 2;
    };
    const auto push_text = [&](std::string_view text) { push(make_text(text)); };
    const auto push_tuple = [&](size_t count) {
        Items items(count);
        for (size_t i = count; i-- > 0;) items[i] = pop();
        push(make_list(std::move(items), SnapshotParser::TUPLE));
        return size_t{1};
    };
    const auto top = [&]() -> Value {
        if (values_.empty() || (!marks_.empty() && marks_.back() == values_.size())) fail("is a damaged pickle: no value");
        return values_.back();
    };
    const auto place = [&](std::string_view text) {
        const Value number = decimal(text);
        if (number.type == SnapshotParser::BIG || number.number < 0) fail("is a damaged pickle: memo");
        return static_cast<size_t>(number.number);
    };
    switch (opcode) {
        case 0x80: return has(1) ? 2 : 0;  // PROTO
        case 0x95: return has(8) ? 9 : 0;  // FRAME
        case '.': is_done_ = true; return 1;
        case '(': marks_.push_back(values_.size()); return 1;
        case '0':  // POP, of a mark too
            if (!marks_.empty() && marks_.back() == values_.size())
                marks_.pop_back();
            else
                pop();
            return 1;
        case '1': pop_to_mark(); return 1;
        case 0x94: memoize(memo_.size()); return 1;
        case 'p': return line([&](std::string_view text) { memoize(place(text)); });
        case 'q': return has(1) ? (memoize(little_endian(argument, 1)), 2) : 0;
        case 'r': return has(4) ? (memoize(little_endian(argument, 4)), 5) : 0;
        case 'g': return line([&](std::string_view text) { push(remembered(place(text))); });
        case 'h': return has(1) ? (push(remembered(little_endian(argument, 1))), 2) : 0;
        case 'j': return has(4) ? (push(remembered(little_endian(argument, 4))), 5) : 0;
        case 'N': push({}); return 1;
        case 0x88: push(indexed(SnapshotParser::BOOL, 1)); return 1;
        case 0x89: push(indexed(SnapshotParser::BOOL, 0)); return 1;
        case 'I':
        case 'L': return line([&](std::string_view text) { push(decimal(text)); });
        case 'J': return has(4) ? (push(integer(static_cast<int32_t>(little_endian(argument, 4)))), 5) : 0;
        case 'K': return has(1) ? (push(integer(static_cast<int64_t>(little_endian(argument, 1)))), 2) : 0;
        case 'M': return has(2) ? (push(integer(static_cast<int64_t>(little_endian(argument, 2)))), 3) : 0;
        case 0x8a: return counted(1, [&](std::string_view bytes) { push(long_integer(bytes.data(), bytes.size())); });
        case 0x8b: return counted(4, [&](std::string_view bytes) { push(long_integer(bytes.data(), bytes.size())); });
        case 'F': return line([&](std::string_view) { push(indexed(SnapshotParser::NONE, 0)); });
        case 'G': {
            if (!has(8)) return 0;
            uint64_t bits = 0;
            for (size_t i = 0; i < 8; ++i) bits = bits << 8 | static_cast<unsigned char>(argument[i]);
            reals_.push_back(std::bit_cast<double>(bits));
            push(indexed(REAL, reals_.size() - 1));
            return 9;
        }
        case 'S':
            return line([&](std::string_view text) {
                push_text(text.size() >= 2 ? text.substr(1, text.size() - 2) : std::string_view());
            });
        case 'V': return line(push_text);
        case 'U':
        case 'C':
        case 0x8c: return counted(1, push_text);
        case 'T':
        case 'B':
        case 'X': return counted(4, push_text);
        case 0x8d:
        case 0x8e: return counted(8, push_text);
        case ']': push(make_list({}, SnapshotParser::LIST)); return 1;
        case ')': return push_tuple(0);
        case 0x85: return push_tuple(1);
        case 0x86: return push_tuple(2);
        case 0x87: return push_tuple(3);
        case 'l': push(make_list(pop_to_mark(), SnapshotParser::LIST)); return 1;
        case 't': push(make_list(pop_to_mark(), SnapshotParser::TUPLE)); return 1;
        case 'a': {
            const Value value = pop();
            append(top(), {value});
            return 1;
        }
        case 'e': {
            Items added = pop_to_mark();
            append(top(), std::move(added));
            return 1;
        }
        case '}':
            push(make_dict());
            return 1;
        case 'd': {
            const Items added = pop_to_mark();
            const Value dict = make_dict();
            set(dict, added);
            push(dict);
            return 1;
        }
        case 's': {
            const Value value = pop(), key = pop();
            set(top(), {key, value});
            return 1;
        }
        case 'u': {
            const Items added = pop_to_mark();
            set(top(), added);
            return 1;
        }
        default: fail("is a pickle with more than plain values: opcode " + std::to_string(opcode));
    }
}

}  // namespace etloom
