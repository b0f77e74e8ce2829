// The running session and the stream of each thread.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "stream.hpp"
#include "values.hpp"

namespace etloom {

struct Session {
  std::unique_ptr<File> file;
  bool detail;
  SavedValues values;
  bool stuck = false;  // a thread has not returned from the file
};

extern std::atomic<Session*> running;
extern std::atomic<uint64_t> current_window;

// Streams are never freed: another thread may be about to pop from one. A new thread reuses the stream of a dead one.
extern std::mutex registry_mutex;
std::vector<Stream*>& registry();

extern constinit thread_local Stream* thread_stream;
Stream* find_stream();
// Returns the stream of the calling thread, or nullptr if the thread is exiting.
inline Stream* stream_of_thread() {
  Stream* const stream = thread_stream;
  return stream != nullptr ? stream : find_stream();
}

void join_new_window(Stream& stream, File& file, uint64_t window);
// Makes the stream record in this window.
inline void join_window(Stream& stream, File& file, uint64_t window) {
  if (stream.window.load(std::memory_order_relaxed) != window) join_new_window(stream, file, window);
}

void write_note(Stream& stream, uint64_t handle, uint32_t text);

}  // namespace etloom
