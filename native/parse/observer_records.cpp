// See observer.hpp.
#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "observer.hpp"

namespace etloom::observer {

namespace {

enum Type : uint8_t { kBegin = 1, kEnd = 2, kDefine = 3, kWindow = 4, kNote = 5 };
constexpr std::array<size_t, 6> kHeadWords = {0, 6, 3, 2, 3, 2};
constexpr uint32_t kChunkMagic = 0x4B4E4843;
constexpr size_t kChunkHead = 8;

struct Chunk {
    size_t at, end;  // of its records
    uint64_t order;
    uint32_t stream;
    int64_t os_tid, rf_tid;
};

// A begin or an end.
struct Record {
    uint64_t handle;
    size_t at;
    uint32_t chunk;
};

bool has_valid_sums(const uint64_t* chunk, size_t words) {
    uint64_t sum = 0, weighted = 0;
    for (size_t i = 0; i < words; ++i) {
        sum += chunk[kChunkHead + i];
        weighted += chunk[kChunkHead + i] * (i + 1);
    }
    return sum == chunk[5] && weighted == chunk[6];
}

bool is_valid(const uint64_t* chunk, size_t chunk_words) {
    const uint64_t kind = (chunk[0] >> 32) & 0xFF, closed = (chunk[0] >> 40) & 0xFF, used = chunk[2] >> 32;
    return static_cast<uint32_t>(chunk[0]) == kChunkMagic && (kind == 1 || kind == 2) && used <= (chunk_words - kChunkHead) * 8 &&
           used % 8 == 0 && (closed != 1 || has_valid_sums(chunk, used / 8));
}

// The valid chunks, in the order in which they were allocated.
std::vector<Chunk> find_chunks(const Words& words, size_t chunk_words, uint64_t declared, Records& out) {
    std::vector<Chunk> chunks;
    for (size_t number = 0; (number + 1) * chunk_words <= words.count; ++number) {
        const uint64_t* const head = words.data + number * chunk_words;
        if (is_valid(head, chunk_words)) {
            const size_t at = number * chunk_words + kChunkHead;
            chunks.push_back({at, at + (head[2] >> 32) / 8, head[1], static_cast<uint32_t>(head[2]), static_cast<int64_t>(head[3]),
                              static_cast<int64_t>(head[4])});
        } else if (head[0] != 0 || number < declared) {
            if (out.damaged_chunks++ == 0) out.first_damaged_chunk = number;
        }
    }
    std::stable_sort(chunks.begin(), chunks.end(), [](const Chunk& a, const Chunk& b) { return a.order < b.order; });
    return chunks;
}

class Walker {
  public:
    Walker(const Words& words, std::vector<Chunk> chunks, Records& out) : words_(words), chunks_(std::move(chunks)), out_(out) {
        for (uint32_t chunk = 0; chunk < chunks_.size(); ++chunk) walk(chunk);
    }
    void fill();

  private:
    using Key = std::tuple<uint8_t, uint32_t, uint32_t>;

    void walk(uint32_t chunk);
    void define(uint32_t stream, size_t at, size_t size);
    void append(const Record& begin, const Record* end);
    void append_list(Lists& lists, const Record* record, Type type);
    void find_parents();

    const Words& words_;
    const std::vector<Chunk> chunks_;
    Records& out_;
    std::vector<Record> begins_, ends_;
    std::map<Key, std::string> incomplete_;
    std::set<Key> defined_;
    std::unordered_set<uint64_t> forms_;
};

void Walker::walk(uint32_t number) {
    const Chunk& chunk = chunks_[number];
    for (size_t at = chunk.at; at < chunk.end;) {
        const uint64_t head = words_[at];
        const auto type = static_cast<uint8_t>(head);
        const size_t size = (head >> 16) & 0xFFFF;
        if (type < kBegin || type > kNote || size < kHeadWords[type] || size > chunk.end - at) {
            ++out_.damaged_records;
            return;
        }
        switch (type) {
            case kBegin: begins_.push_back({words_[at + 2], at, number}); break;
            case kEnd: ends_.push_back({words_[at + 2], at, number}); break;
            case kDefine: define(chunk.stream, at, size); break;
            case kWindow: out_.windows.push_back({((head >> 8) & 0xFF) == 1, static_cast<int64_t>(words_[at + 1])}); break;
            default: out_.notes.push_back({chunk.stream, static_cast<uint32_t>(head >> 32), words_[at + 1]});
        }
        at += size;
    }
}

void Walker::define(uint32_t stream, size_t at, size_t size) {
    const uint64_t head = words_[at];
    const auto length = static_cast<uint32_t>(words_[at + 1]);
    if (length > (size - 2) * 8) {
        ++out_.damaged_definitions;
        return;
    }
    const Key key(static_cast<uint8_t>(head >> 8), stream, static_cast<uint32_t>(head >> 32));
    const auto* bytes = reinterpret_cast<const char*>(words_.data + at + 2);
    std::string content;
    if (const auto begun = incomplete_.extract(key)) content = std::move(begun.mapped());
    content.append(bytes, length);
    if (words_[at + 1] >> 32 != 0) {
        incomplete_[key] = std::move(content);
    } else if (defined_.insert(key).second) {
        out_.definitions.push_back({std::get<0>(key), std::get<1>(key), std::get<2>(key), std::move(content)});
    }
}

// Sorts records by handle, stable: byte by byte, of which most are the same in all handles.
void sort_by_handle(std::vector<Record>& records) {
    std::vector<Record> sorted;
    uint64_t all = 0, any = ~uint64_t{0};
    for (const Record& record : records) {
        all |= record.handle;
        any &= record.handle;
    }
    for (unsigned shift = 0; shift < 64; shift += 8) {
        if ((((all ^ any) >> shift) & 0xFF) == 0) continue;
        std::array<size_t, 257> next{};
        for (const Record& record : records) ++next[((record.handle >> shift) & 0xFF) + 1];
        std::partial_sum(next.begin(), next.end(), next.begin());
        sorted.resize(records.size());
        for (const Record& record : records) sorted[next[(record.handle >> shift) & 0xFF]++] = record;
        records.swap(sorted);
    }
}

uint64_t drop_repeated(std::vector<Record>& records) {
    const size_t before = records.size();
    const auto same = [](const Record& a, const Record& b) { return a.handle == b.handle; };
    records.erase(std::unique(records.begin(), records.end(), same), records.end());
    return before - records.size();
}

void Walker::fill() {
    sort_by_handle(begins_);
    sort_by_handle(ends_);
    out_.duplicates = drop_repeated(begins_);
    drop_repeated(ends_);
    auto end = ends_.begin();
    size_t matched = 0;
    for (const Record& begin : begins_) {
        while (end != ends_.end() && end->handle < begin.handle) ++end;
        const bool has_end = end != ends_.end() && end->handle == begin.handle;
        matched += has_end;
        append(begin, has_end ? &*end : nullptr);
    }
    out_.ends_without_begin = ends_.size() - matched;
    find_parents();
    out_.forms.assign(forms_.begin(), forms_.end());
    std::sort(out_.forms.begin(), out_.forms.end());
}

void Walker::append(const Record& begin, const Record* end) {
    Operators& to = out_.operators;
    const uint64_t* const record = words_.data + begin.at;
    const Chunk& chunk = chunks_[begin.chunk];
    to.handle.push_back(begin.handle);
    to.start.push_back(static_cast<int64_t>(record[1]));
    to.parent.push_back(static_cast<int64_t>(record[3]));  // its handle, for now
    to.seq.push_back(static_cast<int64_t>(record[4]));
    to.name.push_back(uint64_t{chunk.stream} << 32 | static_cast<uint32_t>(record[5]));
    to.fw_tid.push_back(static_cast<uint16_t>(record[5] >> 32));
    to.scope.push_back(static_cast<uint8_t>(record[5] >> 48));
    to.rf_tid.push_back(chunk.rf_tid);
    to.os_tid.push_back(chunk.os_tid);
    to.has_end.push_back(end != nullptr);
    to.end.push_back(end == nullptr ? 0 : static_cast<int64_t>(words_[end->at + 1]));
    to.raised.push_back(end != nullptr && ((words_[end->at] >> 8) & 1) != 0);
    append_list(to.lists[0], &begin, kBegin);
    append_list(to.lists[1], end, kEnd);
}

void Walker::append_list(Lists& lists, const Record* record, Type type) {
    const uint64_t head = record == nullptr ? 0 : words_[record->at];
    const auto form = static_cast<uint32_t>(head >> 32);
    const uint64_t key = form == 0 ? 0 : uint64_t{chunks_[record->chunk].stream} << 32 | form;
    if (form != 0) forms_.insert(key);
    lists.key.push_back(key);
    lists.first.push_back(form == 0 ? 0 : record->at + kHeadWords[type]);
    lists.words.push_back(form == 0 ? 0 : static_cast<int64_t>(((head >> 16) & 0xFFFF) - kHeadWords[type]));
}

// A parent began earlier and has a smaller handle, mostly one of the last: the search widens backwards.
void Walker::find_parents() {
    const auto& handle = out_.operators.handle;
    auto& parent = out_.operators.parent;
    for (size_t row = 0; row < handle.size(); ++row) {
        const auto enclosing = static_cast<uint64_t>(parent[row]);
        parent[row] = -1;
        if (enclosing == 0 && handle[0] != 0) continue;
        size_t step = 1, high = row;
        while (step < row && handle[row - step] > enclosing) {
            high = row - step;
            step *= 2;
        }
        const auto* const low = handle.begin() + (step < row ? row - step : 0);
        const auto* const place = std::lower_bound(low, handle.begin() + high, enclosing);
        if (enclosing < handle[row] && place != handle.begin() + row && *place == enclosing) {
            parent[row] = place - handle.begin();
        } else if (enclosing != 0) {
            ++out_.missing_parents;
        }
    }
}

}  // namespace

Records read_records(const Words& words, size_t chunk_words, uint64_t declared) {
    Records out;
    if (chunk_words > kChunkHead) Walker(words, find_chunks(words, chunk_words, declared, out), out).fill();
    return out;
}

}  // namespace etloom::observer
