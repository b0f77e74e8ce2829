// What records now, and with which stream each thread does.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "stream.hpp"

namespace etloom {

struct Session {
  std::unique_ptr<File> file;
  bool detail;
  bool stuck = false;  // a thread did not come back from the file
};

extern std::atomic<Session*> running;
extern std::atomic<uint64_t> current_window;

// Streams live for ever: another thread may be about to pop from one. A new thread takes that of a dead one.
extern std::mutex registry_mutex;
std::vector<Stream*>& registry();

extern constinit thread_local Stream* own;
Stream* find_stream();
// The calling thread's, or nullptr where the thread is being torn down.
inline Stream* stream_of_thread() {
  Stream* const stream = own;
  return stream != nullptr ? stream : find_stream();
}

void join_anew(Stream& stream, File& file, uint64_t window);
// After it the stream records in this window.
inline void join_window(Stream& stream, File& file, uint64_t window) {
  if (stream.window.load(std::memory_order_relaxed) != window) join_anew(stream, file, window);
}

void write_note(Stream& stream, uint64_t handle, uint32_t text);

}  // namespace etloom
