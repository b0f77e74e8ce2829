#include "stream.hpp"

#include <algorithm>

namespace etloom {

namespace {

constexpr size_t kMaxDefinitions = 1 << 17;  // per kind and thread: limits host memory
constexpr size_t kMaxScopes = kMaxDefinitions / 2;  // of the names: leaves ids for those of operators

// The functions of `find`, which runs for every tensor, are inlined even where the compiler finds them too large.
template <class Word>
Word load(const char* at) {
  Word word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

// Returns the last 1 to 8 bytes of `key`, or 0 for an empty one. Copying a variable number of bytes would be a call.
[[gnu::always_inline]] inline uint64_t last_word(std::string_view key) {
  const size_t size = key.size();
  const char* const end = key.data() + size;
  if (size >= 8) return load<uint64_t>(end - 8);
  if (size >= 4) return load<uint32_t>(key.data()) | uint64_t{load<uint32_t>(end - 4)} << 32;
  if (size == 0) return 0;
  const auto byte = [&](size_t index) { return uint64_t{static_cast<unsigned char>(key[index])}; };
  return byte(0) | byte(size / 2) << 8 | byte(size - 1) << 16;
}

[[gnu::always_inline]] inline uint64_t hash_of(std::string_view key) {
  uint64_t hash = key.size();
  for (size_t at = 0; at + 8 < key.size(); at += 8) {
    hash = (hash + load<uint64_t>(key.data() + at)) * 0xff51afd7ed558ccdull;
  }
  hash = (hash + last_word(key)) * 0xc4ceb9fe1a85ec53ull;
  return __builtin_bswap64(hash);  // the slot is chosen by the low bits, but the high ones depend on all of the key
}

[[gnu::always_inline]] inline bool equal(std::string_view first, std::string_view second) {
  if (first.size() != second.size()) return false;
  for (size_t at = 0; at + 8 < first.size(); at += 8) {
    if (load<uint64_t>(first.data() + at) != load<uint64_t>(second.data() + at)) return false;
  }
  return last_word(first) == last_word(second);
}

}  // namespace

uint32_t Interner::find(std::string_view key) const {
  if (slots_.empty()) return 0;
  const uint64_t hash = hash_of(key);
  size_t place = hash & (slots_.size() - 1);
  while (slots_[place].id != 0) {
    if (slots_[place].hash == hash && equal(slots_[place].key, key)) return slots_[place].id;
    place = (place + 1) & (slots_.size() - 1);
  }
  return 0;
}

void Interner::add(std::string_view key) {
  if ((size_ + 1) * 2 > slots_.size()) {
    std::vector<Slot> before(std::max<size_t>(slots_.size() * 2, 256));
    before.swap(slots_);
    for (Slot& slot : before) {
      if (slot.id != 0) insert(std::move(slot));
    }
  }
  insert({hash_of(key), static_cast<uint32_t>(size_ + 1), std::string(key)});
  ++size_;
}

void Interner::insert(Slot slot) {
  size_t place = slot.hash & (slots_.size() - 1);
  while (slots_[place].id != 0) place = (place + 1) & (slots_.size() - 1);
  slots_[place] = std::move(slot);
}

void Interner::clear() {
  slots_.clear();
  size_ = 0;
}

void Stream::join(File& file, uint64_t new_window, uint64_t os_tid, uint64_t rf_tid) {
  if (file.serial != serial_) {
    for (Interner& interner : dictionary_) interner.clear();
    operators_.fill({});
    scopes_ = 0;
    exhausted_ = false;
    events_ = definitions_ = {};  // of a file that is unmapped
  }
  file_ = &file;
  serial_ = file.serial;
  os_tid_ = os_tid;
  rf_tid_ = rf_tid;
  apply_remote_pops();
  stack_.clear();
  window.store(new_window, std::memory_order_relaxed);
}

void Stream::leave() {
  for (OpenChunk* chunk : {&events_, &definitions_}) {
    if (chunk->header != nullptr) file_->close_chunk(*chunk);
    *chunk = {};
  }
}

bool Stream::next_chunk(OpenChunk& chunk, ChunkKind kind, size_t size) {
  if (size > kPayloadWords) return false;
  if (chunk.header != nullptr) file_->close_chunk(chunk);
  chunk = file_->allocate_chunk(kind, index, os_tid_, rf_tid_, window.load(std::memory_order_relaxed));
  return chunk.header != nullptr;
}

bool Stream::has_number(const Interner& known, bool scope) const {
  return !exhausted_ && known.size() < kMaxDefinitions && !(scope && scopes_ >= kMaxScopes);
}

bool Stream::write_definition(Definition kind, size_t id, std::string_view text, bool scope) {
  if (scope && !file_->reserve_scope_bytes(sizeof(Define) + (text.size() + 7) / 8 * 8)) return false;
  constexpr size_t max_part = 32 << 10;  // longer texts are written in parts
  do {
    const std::string_view part = text.substr(0, max_part);
    text.remove_prefix(part.size());
    const size_t size = 2 + (part.size() + 7) / 8;
    if (!make_room(definitions_, kDictionary, size)) {
      exhausted_ = true;  // permanently: a part of this id may be written, so the id is not reused
      return false;
    }
    const Define head{{kDefine, kind, static_cast<uint16_t>(size), static_cast<uint32_t>(id)},
                      static_cast<uint32_t>(part.size()),
                      text.empty() ? 0u : 1u};
    std::vector<uint64_t> record(size);
    std::memcpy(record.data(), &head, sizeof head);
    if (!part.empty()) std::memcpy(record.data() + 2, part.data(), part.size());
    definitions_.put(0, record.data(), size);
    definitions_.commit(size);
  } while (!text.empty());
  return true;
}

void Stream::pop(uint64_t handle) {
  apply_remote_pops();
  if (!stack_.empty() && stack_.back() == handle) {
    stack_.pop_back();
    return;
  }
  const auto match = std::find(stack_.rbegin(), stack_.rend(), handle);
  if (match != stack_.rend()) stack_.erase(std::next(match).base());
}

void Stream::pop_from_other_thread(uint64_t handle) {
  const std::lock_guard<std::mutex> lock(remote_mutex_);
  remote_pops_.push_back(handle);
  remote_count_.store(static_cast<uint32_t>(remote_pops_.size()), std::memory_order_release);
}

void Stream::apply_remote_pops_locked() {
  const std::lock_guard<std::mutex> lock(remote_mutex_);
  const auto is_popped = [&](uint64_t open) {
    return std::find(remote_pops_.begin(), remote_pops_.end(), open) != remote_pops_.end();
  };
  stack_.erase(std::remove_if(stack_.begin(), stack_.end(), is_popped), stack_.end());
  remote_pops_.clear();
  remote_count_.store(0, std::memory_order_release);
}

}  // namespace etloom
