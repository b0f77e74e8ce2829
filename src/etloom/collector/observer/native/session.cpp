#include "session.hpp"

#include <ATen/record_function.h>
#include <pthread.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

namespace etloom {

std::atomic<Session*> running{nullptr};
std::atomic<uint64_t> current_window{0};
std::mutex registry_mutex;
constinit thread_local Stream* thread_stream = nullptr;

std::vector<Stream*>& registry() {
  static auto* streams = new std::vector<Stream*>;
  return *streams;
}

namespace {

thread_local bool thread_exiting = false;

struct ThreadExit {
  ~ThreadExit() {
    thread_exiting = true;
    const std::lock_guard<std::mutex> lock(registry_mutex);
    if (thread_stream == nullptr) return;
    thread_stream->leave();  // also while a window stops, which skips this thread from here on
    thread_stream->window = 0;
    thread_stream->taken = false;
    thread_stream = nullptr;
  }
};

uint64_t os_thread() {
#ifdef __linux__
  return static_cast<uint64_t>(syscall(SYS_gettid));
#else
  uint64_t id = 0;
  pthread_threadid_np(nullptr, &id);
  return id;
#endif
}

}  // namespace

Stream* find_stream() {
  if (!thread_exiting) {
    thread_local ThreadExit thread_exit;
    (void)thread_exit;
    const std::lock_guard<std::mutex> lock(registry_mutex);
    for (Stream* stream : registry()) {
      if (!stream->taken) thread_stream = stream;
    }
    if (thread_stream == nullptr) {
      thread_stream = new Stream(static_cast<uint32_t>(registry().size()));
      registry().push_back(thread_stream);
    }
    thread_stream->taken = true;
  }
  return thread_stream;
}

void join_new_window(Stream& stream, File& file, uint64_t window) {
  stream.join(file, window, os_thread(), at::RecordFunction::currentThreadId());
}

void write_note(Stream& stream, uint64_t handle, uint32_t text) {
  const Note note{{kNote, 0, sizeof note / 8, text}, handle};
  stream.words.clear();
  if (text != 0) stream.write(note);
}

}  // namespace etloom
