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
constinit thread_local Stream* own = nullptr;

std::vector<Stream*>& registry() {
  static auto* streams = new std::vector<Stream*>;
  return *streams;
}

namespace {

thread_local bool gone = false;

struct Leaver {
  ~Leaver() {
    gone = true;
    const std::lock_guard<std::mutex> lock(registry_mutex);
    if (own == nullptr) return;
    own->leave();  // also while a window stops, which would pass over this thread from here on
    own->window = 0;
    own->taken = false;
    own = nullptr;
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
  if (!gone) {
    thread_local Leaver leaver;
    (void)leaver;
    const std::lock_guard<std::mutex> lock(registry_mutex);
    for (Stream* stream : registry()) {
      if (!stream->taken) own = stream;
    }
    if (own == nullptr) {
      own = new Stream(static_cast<uint32_t>(registry().size()));
      registry().push_back(own);
    }
    own->taken = true;
  }
  return own;
}

void join_anew(Stream& stream, File& file, uint64_t window) {
  stream.join(file, window, os_thread(), at::RecordFunction::currentThreadId());
}

void write_note(Stream& stream, uint64_t handle, uint32_t text) {
  const Note note{{kNote, 0, sizeof note / 8, text}, handle};
  stream.words.clear();
  if (text != 0) stream.write(note);
}

}  // namespace etloom
