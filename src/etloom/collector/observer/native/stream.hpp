// The recording of one thread: its chunks, its dictionary, its stack of open operators.
#pragma once

#include <array>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "file.hpp"

namespace etloom {

// Scratch space for the values of one call, which grows several values at a time.
template <class T>
class Scratch {
 public:
  // Returns where to write `count` further values.
  T* extend(size_t count) {
    if (size_ + count > values_.size()) grow(count);
    T* const at = values_.data() + size_;
    size_ += count;
    return at;
  }
  void push(T value) { *extend(1) = value; }
  void clear() { size_ = 0; }
  const T* data() const { return values_.data(); }
  size_t size() const { return size_; }

 private:
  [[gnu::noinline]] void grow(size_t count) { values_.resize((size_ + count) * 2); }
  std::vector<T> values_ = std::vector<T>(256);
  size_t size_ = 0;
};

// Assigns ids to distinct byte strings in order of appearance.
class Interner {
 public:
  // Returns the id of `key`, or 0 if it has none.
  uint32_t find(std::string_view key) const;
  // Assigns the next id, from 1 on, to a `key` that has none.
  void add(std::string_view key);
  void clear();
  size_t size() const { return size_; }

 private:
  struct Slot {
    uint64_t hash = 0;
    uint32_t id = 0;
    std::string key;
  };
  void insert(Slot slot);
  std::vector<Slot> slots_;
  size_t size_ = 0;
};

// Cache entry for a registered operator, found by the address of its name; fills one cache line.
struct alignas(64) Operator {
  const char* address = nullptr;
  uint32_t id = 0;
  uint8_t overload_at = 0;
  bool communicates = false;
  char key[50] = {};  // name and overload, each terminated by a zero byte

  bool is(const char* name, const char* overload) const {
    return address == name && std::strcmp(key, name) == 0 && std::strcmp(key + overload_at, overload) == 0;
  }
};
static_assert(sizeof(Operator) == 64);

class Stream {
 public:
  explicit Stream(uint32_t index) : index(index) {}

  // Starts recording into `file`; drops all state of an earlier window.
  void join(File& file, uint64_t window, uint64_t os_tid, uint64_t rf_tid);
  // Stops recording into the file.
  void leave();

  // Writes a record of `head` and `words`; returns false if there is no room.
  template <class Head>
  bool write(const Head& head) {
    constexpr size_t head_words = sizeof head / 8;
    const size_t size = head_words + words.size();
    if (!make_room(events_, kEvents, size)) return false;
    events_.operators += std::is_same_v<Head, Begin>;
    if constexpr (std::is_same_v<Head, Begin> || std::is_same_v<Head, End>) events_.last_ns = head.ns;
    events_.put(0, head.packed().data(), head_words);
    events_.put(head_words, words.data(), words.size());
    events_.commit(size);
    return true;
  }

  // Returns the id of a definition; `text` returns the bytes to write for a new one. Returns 0, and counts it, if the
  // dictionary is full. `scope`: it is the name of a scope; a program may create new ones without limit.
  template <class Text>
  uint32_t define(Definition kind, std::string_view key, const Text& text, bool scope = false) {
    Interner& known = dictionary_[kind];
    if (const uint32_t id = known.find(key)) return id;
    if (!has_number(known, scope) || !write_definition(kind, known.size() + 1, text(), scope)) {
      file_->count(kNoDictionary);
      return 0;
    }
    known.add(key);
    scopes_ += scope;
    return static_cast<uint32_t>(known.size());
  }
  uint32_t text(std::string_view value) {
    return define(kText, value, [&] { return value; });
  }

  void push(uint64_t handle) {
    apply_remote_pops();
    stack_.push_back(handle);
  }
  uint64_t top() {
    apply_remote_pops();
    return stack_.empty() ? 0 : stack_.back();
  }
  void pop(uint64_t handle);
  // The same, called by another thread.
  void pop_from_other_thread(uint64_t handle);

  Operator& cached_operator(const char* address) {
    return operators_[(reinterpret_cast<uintptr_t>(address) >> 4) % operators_.size()];
  }
  File& file() { return *file_; }

  const uint32_t index;
  std::atomic<bool> busy{false};
  std::atomic<bool> taken{true};  // in use by a live thread
  std::atomic<uint64_t> window{0};
  Scratch<char> form;  // of the arguments that are encoded
  Scratch<uint64_t> words;

 private:
  bool has_number(const Interner& known, bool scope) const;
  bool write_definition(Definition kind, size_t id, std::string_view text, bool scope);
  void apply_remote_pops_locked();
  void apply_remote_pops() {
    if (remote_count_.load(std::memory_order_acquire) != 0) apply_remote_pops_locked();
  }
  bool make_room(OpenChunk& chunk, ChunkKind kind, size_t words) {
    return (chunk.header != nullptr && chunk.words + words <= kPayloadWords) || next_chunk(chunk, kind, words);
  }
  bool next_chunk(OpenChunk& chunk, ChunkKind kind, size_t words);

  File* file_ = nullptr;
  uint64_t serial_ = 0;
  OpenChunk events_, definitions_;
  uint64_t os_tid_ = 0, rf_tid_ = 0;
  std::array<Interner, 5> dictionary_;
  size_t scopes_ = 0;  // number of scope names
  bool exhausted_ = false;  // no chunk is available for definitions
  std::array<Operator, 1024> operators_;
  std::vector<uint64_t> stack_;
  std::mutex remote_mutex_;
  std::vector<uint64_t> remote_pops_;
  std::atomic<uint32_t> remote_count_{0};
};

}  // namespace etloom
