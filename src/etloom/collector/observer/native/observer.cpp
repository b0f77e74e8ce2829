// The C interface of recording sessions, called from Python through ctypes.
#include <pthread.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "operators.hpp"
#include "session.hpp"

namespace etloom {

namespace {

at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;

// fork does not copy the other threads, and the file belongs to the parent: the child records nothing.
void before_fork() { registry_mutex.lock(); }
void in_parent() { registry_mutex.unlock(); }
// Other threads may have been inside their streams, so these are left as they are, and new ones are made.
void in_child() {
  running.store(nullptr);
  registry().clear();
  thread_stream = nullptr;
  current_window.fetch_add(1);
  registry_mutex.unlock();
}

void write_window_record(Session& session, bool opens) {
  Stream* stream = stream_of_thread();
  if (stream == nullptr) return;
  const uint64_t window = current_window.load();
  join_window(*stream, *session.file, window);
  const Window record{{kWindow, static_cast<uint8_t>(opens), sizeof record / 8, 0}, wall_ns(), monotonic_ns()};
  stream->words.clear();
  stream->write(record);
}

thread_local std::string last_error;

}  // namespace

}  // namespace etloom

using etloom::Session;

extern "C" {

const char* etloom_error() { return etloom::last_error.c_str(); }

// Returns a session that records to `path`, or null on failure (see etloom_error). Contents of tensors, if torch's
// environment variable asks for them, go to the folder `resources`.
void* etloom_open(const char* path, const char* torch, uint64_t max_bytes, int ring, int detail, const char* resources) {
  static const int atfork = pthread_atfork(etloom::before_fork, etloom::in_parent, etloom::in_child);
  (void)atfork;
  try {
    return new Session{std::make_unique<etloom::File>(path, torch, max_bytes, ring != 0, detail != 0), detail != 0,
                       etloom::SavedValues(resources)};
  } catch (const std::exception& error) {
    etloom::last_error = error.what();
    return nullptr;
  }
}

// Returns 0, or 1 if another session is recording. Python holds a lock around start and stop.
int etloom_start(void* handle) {
  auto* session = static_cast<Session*>(handle);
  if (etloom::running.load() != nullptr) return 1;
  if (etloom::callback == at::INVALID_CALLBACK_HANDLE) {
    etloom::callback = at::addGlobalCallback(at::RecordFunctionCallback(etloom::enter, etloom::leave)
                                                 .needsInputs(session->detail)
                                                 .needsOutputs(session->detail)
                                                 .needsIds(true));
  }
  etloom::current_window.fetch_add(1);
  session->file->open_window();
  etloom::write_window_record(*session, true);
  etloom::running.store(session);
  return 0;
}

void etloom_stop(void* handle) {
  auto* session = static_cast<Session*>(handle);
  Session* expected = session;
  if (!etloom::running.compare_exchange_strong(expected, nullptr)) return;
  at::removeCallback(etloom::callback);
  etloom::callback = at::INVALID_CALLBACK_HANDLE;
  etloom::write_window_record(*session, false);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  std::unique_lock<std::mutex> lock(etloom::registry_mutex);
  const std::vector<etloom::Stream*> streams = etloom::registry();
  for (etloom::Stream* stream : streams) {
    while (stream->busy.load() && std::chrono::steady_clock::now() < deadline) {
      lock.unlock();  // a fork waits for this lock, and the thread perhaps for the one that forks, which has the GIL
      std::this_thread::yield();
      lock.lock();
    }
    if (stream->busy.load()) {
      session->file->count(etloom::kStuck);
      session->stuck = true;
    } else if (stream->window == etloom::current_window) {
      stream->leave();
    }
  }
}

// Writes a JSON object about the whole file. Does nothing unless the session is recording.
void etloom_note(void* handle, const char* text) {
  auto* session = static_cast<Session*>(handle);
  etloom::Stream* stream = etloom::stream_of_thread();
  if (stream == nullptr || etloom::running.load() != session) return;
  const uint64_t window = etloom::current_window.load();
  etloom::join_window(*stream, *session->file, window);
  etloom::write_note(*stream, 0, stream->text(text));
}

int64_t etloom_overwritten_ns(void* handle) { return static_cast<Session*>(handle)->file->overwritten_ns(); }

uint64_t etloom_counter(void* handle, int counter) {
  return static_cast<Session*>(handle)->file->counter_value(counter);
}

// Gives up the file of the session in a child of fork. There, only counters may still be read.
void etloom_release(void* handle) { static_cast<Session*>(handle)->file->release(); }

// Frees the session, which must be stopped.
void etloom_close(void* handle, int finish) {
  auto* session = static_cast<Session*>(handle);
  // A thread that is blocked in the file, on a slow disk, may return at any time: keep all it uses.
  if (session->stuck) return;
  if (finish != 0) session->file->finish();
  delete session;
}
}
