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
};

extern std::atomic<Session*> running;
extern std::atomic<uint64_t> current_window;

// Streams live for ever: another thread may be about to pop from one. A new thread takes that of a dead one.
extern std::mutex registry_mutex;
std::vector<Stream*>& registry();

// The calling thread's, or nullptr where the thread is being torn down.
Stream* stream_of_thread();
// As stream_of_thread's, after it joined the window if it had not yet.
void join_window(Stream& stream, File& file, uint64_t window);

// A record of `head_words` and the stream's scratch words; false where there is no room.
bool write(Stream& stream, const void* head, size_t head_words);
void write_note(Stream& stream, uint64_t handle, uint32_t text);

}  // namespace etloom
