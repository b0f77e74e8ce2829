// A memory-mapped file that grows chunk by chunk. What is written survives the process, however that ends.
#pragma once

#include <deque>
#include <mutex>
#include <string>

#include "format.hpp"

namespace etloom {

int64_t monotonic_ns();
int64_t wall_ns();

// What is known of a chunk while one thread writes to it; only `header` is in the file.
struct OpenChunk {
  ChunkHeader* header = nullptr;
  uint64_t words = 0, sum = 0, weighted = 0;
  uint64_t operators = 0;  // that began
  int64_t last_ns = 0;     // of the last begin or end

  uint64_t* end() const { return reinterpret_cast<uint64_t*>(header + 1) + words; }
  // Writes `count` words `after` others that are not yet part of the file. Summed now, while they are in the cache.
  void put(size_t after, const uint64_t* from, size_t count) {
    uint64_t* const at = end() + after;
    uint64_t all = 0, each = 0;
#pragma GCC unroll 8
    for (size_t i = 0; i < count; ++i) {
      at[i] = from[i];
      all += from[i];
      each += from[i] * (i + 1);
    }
    sum += all;
    weighted += all * (words + after) + each;
  }
  // What was put is part of the file from here on.
  void commit(size_t more) {
    words += more;
    header->used.store(static_cast<uint32_t>(words * 8), std::memory_order_release);
  }
};

class File {
 public:
  // Throws std::runtime_error with the reason.
  File(const std::string& path, const std::string& torch, uint64_t max_bytes, bool ring, bool detail);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // A fresh chunk, or one without a header where the cap is reached or the disk is full.
  OpenChunk take(ChunkKind kind, uint32_t stream, uint64_t os_tid, uint64_t rf_tid, uint64_t window);
  // No more is written to it: sums are set, and the ring may use it again.
  void close_chunk(const OpenChunk& chunk);
  // Cut to what is used and marked whole. Nothing may write any more.
  void finish();

  const uint64_t serial;  // no two files of a process share it

  void count(Counter counter, uint64_t by = 1) {
    header_->counters[counter].fetch_add(by, std::memory_order_relaxed);
  }
  // Whether the name of a scope of so many bytes may be defined: those take half of the dictionary of a ring at most,
  // which is not overwritten, and leave the rest to the names of operators.
  bool grant_scope(uint64_t bytes) {
    return !header_->ring || scope_bytes_.fetch_add(bytes, std::memory_order_relaxed) + bytes <= dictionary_bytes() / 2;
  }
  // A window opens.
  void open_window() {
    if (header_->first_ns.load() == 0) header_->first_ns.store(monotonic_ns());
  }
  // Monotonic: what the ring holds is whole from here on; 0 where nothing was overwritten.
  int64_t overwritten_ns() const { return header_->overwritten_ns.load(); }
  uint64_t counted(int counter) const { return header_->counters[counter].load(std::memory_order_relaxed); }

 private:
  bool grow(uint64_t bytes);
  uint64_t all_chunks() const { return (mapped_ - kHeaderBytes) / kChunkBytes; }
  uint64_t dictionary_bytes() const { return all_chunks() / 4 * kPayloadWords * 8; }  // of a ring
  ChunkHeader* at(uint64_t index) {
    return reinterpret_cast<ChunkHeader*>(map_ + kHeaderBytes + index * kChunkBytes);
  }

  std::mutex mutex_;
  int descriptor_ = -1;
  char* map_ = nullptr;
  FileHeader* header_ = nullptr;
  uint64_t mapped_ = 0;
  uint64_t size_ = 0;  // of the file: all of it is on the disk
  uint64_t order_ = 0;
  uint64_t event_chunks_ = 0;
  std::atomic<uint64_t> scope_bytes_{0};
  bool full_ = false;
  std::deque<OpenChunk> again_;  // of a ring: closed event chunks, oldest first
};

}  // namespace etloom
