// A memory-mapped file that grows chunk by chunk. Written data survives the process, even if it is killed.
#pragma once

#include <deque>
#include <mutex>
#include <string>

#include "format.hpp"

namespace etloom {

int64_t monotonic_ns();
int64_t wall_ns();

// State of a chunk while one thread writes to it; only `header` is in the file.
struct OpenChunk {
  ChunkHeader* header = nullptr;
  uint64_t words = 0, sum = 0, weighted = 0;
  uint64_t operators = 0;  // that began in this chunk
  int64_t last_ns = 0;     // of the last begin or end

  uint64_t* end() const { return reinterpret_cast<uint64_t*>(header + 1) + words; }
  // Writes `count` words, `after` words beyond the committed ones. Sums them now, while they are in the CPU cache.
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
  // Makes the next `more` words, written by put, part of the file.
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

  // Returns a fresh chunk, or one without a header if the size limit is reached or the disk is full.
  OpenChunk allocate_chunk(ChunkKind kind, uint32_t stream, uint64_t os_tid, uint64_t rf_tid, uint64_t window);
  // Sets the sums of a chunk that nothing writes to any more; the ring may reuse it.
  void close_chunk(const OpenChunk& chunk);
  // Truncates the file to its used part and marks it complete. Nothing may write afterwards.
  void finish();
  // In a child of fork: gives the file up, which belongs to the parent. Counters then read as zero.
  void release();

  const uint64_t serial;  // unique among the files of a process

  void count(Counter counter, uint64_t by = 1) {
    header_->counters[counter].fetch_add(by, std::memory_order_relaxed);
  }
  // Returns whether the name of a scope may take `bytes` of the dictionary. A ring never overwrites its dictionary, so
  // names of scopes get at most half of it; the rest is for the names of operators.
  bool reserve_scope_bytes(uint64_t bytes) {
    return !header_->ring || scope_bytes_.fetch_add(bytes, std::memory_order_relaxed) + bytes <= dictionary_bytes() / 2;
  }
  // Records the time of the first window.
  void open_window() {
    if (header_->first_ns.load() == 0) header_->first_ns.store(monotonic_ns());
  }
  // Monotonic time from which on the ring's contents are complete; 0 if nothing was overwritten.
  int64_t overwritten_ns() const { return header_->overwritten_ns.load(); }
  uint64_t counter_value(int counter) const { return header_->counters[counter].load(std::memory_order_relaxed); }

 private:
  bool grow(uint64_t bytes);
  bool owns_descriptor() const;
  uint64_t all_chunks() const { return (mapped_ - kHeaderBytes) / kChunkBytes; }
  uint64_t dictionary_bytes() const { return all_chunks() / 4 * kPayloadWords * 8; }  // of a ring
  ChunkHeader* at(uint64_t index) {
    return reinterpret_cast<ChunkHeader*>(map_ + kHeaderBytes + index * kChunkBytes);
  }

  std::mutex mutex_;
  int descriptor_ = -1;
  uint64_t device_ = 0, inode_ = 0;
  char* map_ = nullptr;
  FileHeader* header_ = nullptr;
  uint64_t mapped_ = 0;
  uint64_t size_ = 0;  // of the file; all of it is allocated on the disk
  uint64_t order_ = 0;
  uint64_t event_chunks_ = 0;
  std::atomic<uint64_t> scope_bytes_{0};
  bool full_ = false;
  std::deque<OpenChunk> reusable_;  // closed event chunks of a ring, oldest first
};

}  // namespace etloom
