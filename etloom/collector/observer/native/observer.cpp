// The callbacks around every operator of the process, and the C functions that Python calls (through ctypes).
#include <ATen/core/function_schema.h>
#include <pthread.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

#include <chrono>
#include <exception>
#include <memory>
#include <sstream>
#include <thread>

#include "encode.hpp"

namespace etloom {

namespace {

struct Session {
  std::unique_ptr<File> file;
  bool detail;
};

std::atomic<Session*> running{nullptr};
std::atomic<uint64_t> current_window{0};
at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;

// Streams live for ever: another thread may be about to pop from one. A new thread takes that of a dead one.
std::mutex registry_mutex;
std::vector<Stream*>& registry() {
  static auto* streams = new std::vector<Stream*>;
  return *streams;
}

thread_local Stream* own = nullptr;
thread_local bool gone = false;

struct Leaver {
  ~Leaver() {
    gone = true;
    const std::lock_guard<std::mutex> lock(registry_mutex);
    if (own == nullptr) return;
    if (running.load() != nullptr) own->leave();
    own->window = 0;
    own->taken = false;
    own = nullptr;
  }
};

Stream* stream_of_thread() {
  if (own == nullptr && !gone) {
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

uint64_t os_thread() {
#ifdef __linux__
  return static_cast<uint64_t>(syscall(SYS_gettid));
#else
  uint64_t id = 0;
  pthread_threadid_np(nullptr, &id);
  return id;
#endif
}

struct Context : at::ObserverContext {
  Context(Stream* home, uint64_t handle, uint64_t window, bool pushed, int exceptions)
      : home(home), handle(handle), window(window), exceptions(exceptions), pushed(pushed) {}
  Stream* home;
  uint64_t handle, window;
  int exceptions;
  bool pushed;
};

// While one lives, the session it holds stays: stop waits for it.
struct Visit {
  explicit Visit(Stream* stream) : stream(stream) {
    stream->busy.store(true, std::memory_order_seq_cst);
    session = running.load(std::memory_order_seq_cst);
  }
  ~Visit() { stream->busy.store(false, std::memory_order_release); }
  Stream* stream;
  Session* session;
};

struct Named {
  uint32_t id;
  bool registered;  // an operator of the dispatcher
  bool communicates;
};

Named name_of(Stream& stream, const at::RecordFunction& function) {
  static const char* const without = at::RecordFunction().overload_name();
  const char* name = function.name();
  const char* overload = function.overload_name();
  if (overload == without) {
    return {stream.define(kName, name, [&] { return std::string_view(name); }), false,
            std::string_view(name) == at::kParamCommsCallName};
  }
  Operator& known = stream.cached(name);
  if (known.address != name || known.name != name || known.overload != overload) {
    known.address = name;
    known.name = name;
    known.overload = overload;
    // The operator, not its name alone: overloads have schemas of their own.
    const std::string key = known.name + '\0' + known.overload;
    known.id = stream.define(kName, key, [&] {
      std::ostringstream text;
      text << key << '\0';
      if (const auto schema = function.operator_schema()) text << *schema;
      return text.str();
    });
    known.communicates = known.name == at::kParamCommsCallName;
  }
  return {known.id, true, known.communicates};
}

// A number of kernel_backend and kernel_file, which Triton's launcher gives as keywords; 0 for none.
uint32_t kernel_of(Stream& stream, const at::RecordFunction& function) {
  const auto keywords = function.kwinputs();
  const auto backend = keywords.find("kernel_backend");
  if (backend == keywords.end() || !backend->second.isString()) return 0;
  std::string text = "{\"kernel_backend\":";
  append_json(text, backend->second.toStringRef());
  const auto file = keywords.find("kernel_file");
  if (file != keywords.end() && file->second.isString()) {
    text += ",\"kernel_file\":";
    append_json(text, file->second.toStringRef());
  }
  return stream.text(text + "}");
}

// Encodes into the stream's scratch; gives the number of the form, 0 for no arguments. `left` tells what was left out.
uint32_t form_of(Stream& stream, c10::ArrayRef<c10::IValue> values, size_t head, bool& left) {
  stream.form.clear();
  stream.words.clear();
  if (values.empty()) return 0;
  File& file = stream.file();
  uint32_t form = 0;
  try {
    encode(stream, values);
    if (head + stream.words.size() > (kChunkBytes - sizeof(ChunkHeader)) / 8) {
      file.count(kArgumentsLeft);
    } else {
      form = stream.define(kForm, stream.form, [&] { return std::string_view(stream.form); });
    }
  } catch (...) {
    file.count(kFailed);
  }
  left = form == 0;
  if (left) stream.words.clear();
  return form;
}

bool write(Stream& stream, const void* head, size_t head_words) {
  const size_t words = head_words + stream.words.size();
  uint64_t* at = stream.room(words);
  if (at == nullptr) return false;
  std::memcpy(at, head, head_words * 8);
  if (!stream.words.empty()) std::memcpy(at + head_words, stream.words.data(), stream.words.size() * 8);
  stream.commit(words);
  return true;
}

void write_note(Stream& stream, uint64_t handle, uint32_t text) {
  const Note note{{kNote, 0, sizeof note / 8, text}, handle};
  stream.words.clear();
  if (text != 0) write(stream, &note, sizeof note / 8);
}

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  Stream* stream = stream_of_thread();
  if (stream == nullptr || stream->busy.load(std::memory_order_relaxed)) {
    if (Session* session = stream == nullptr ? nullptr : running.load()) session->file->count(kReentrant);
    return nullptr;
  }
  const Visit visit(stream);
  if (visit.session == nullptr) return nullptr;
  File& file = *visit.session->file;
  const uint64_t window = current_window.load(std::memory_order_relaxed);
  if (stream->window.load(std::memory_order_relaxed) != window) {
    stream->join(file, window, os_thread(), at::RecordFunction::currentThreadId());
  }
  const uint64_t handle = function.handle();
  const bool async = function.isAsync();
  Begin begin{};
  begin.handle = handle;
  begin.parent = stream->top();
  begin.sequence = function.seqNr();
  begin.forward_tid = static_cast<uint16_t>(function.forwardThreadId());
  begin.scope = static_cast<uint8_t>(function.scope());
  const Named name = name_of(*stream, function);
  begin.name = name.id;
  bool left = false;
  if (visit.session->detail) begin.record.id = form_of(*stream, function.inputs(), sizeof begin / 8, left);
  else stream->words.clear();
  begin.record.type = kBegin;
  begin.record.flags = static_cast<uint8_t>((async ? kAsync : 0) | (left ? kWithoutArguments : 0));
  begin.record.words = static_cast<uint16_t>(sizeof begin / 8 + stream->words.size());
  begin.ns = monotonic_ns();
  if (!write(*stream, &begin, sizeof begin / 8)) {
    file.count(kNoSpace);
    return nullptr;
  }
  if (name.communicates) {
    write_note(*stream, handle, stream->text(communication_facts()));
  } else if (visit.session->detail && !name.registered && function.scope() == at::RecordScope::FUNCTION) {
    write_note(*stream, handle, kernel_of(*stream, function));
  }
  if (!async) stream->push(handle);
  return std::make_unique<Context>(stream, handle, window, !async, std::uncaught_exceptions());
}

void leave(const at::RecordFunction& function, at::ObserverContext* given) {
  auto* context = static_cast<Context*>(given);
  Stream* stream = context == nullptr ? nullptr : stream_of_thread();
  if (stream == nullptr || stream->busy.load(std::memory_order_relaxed)) return;
  const int64_t now = monotonic_ns();
  const Visit visit(stream);
  if (visit.session == nullptr) return;
  File& file = *visit.session->file;
  const uint64_t window = current_window.load(std::memory_order_relaxed);
  if (context->window != window) {
    file.count(kEndedOutside);
    return;
  }
  if (stream->window.load(std::memory_order_relaxed) != window) {
    stream->join(file, window, os_thread(), at::RecordFunction::currentThreadId());
  }
  if (stream != context->home) file.count(kEndedElsewhere);
  if (context->pushed) {
    stream == context->home ? stream->pop(context->handle) : context->home->pop_from_afar(context->handle);
  }
  const bool raised = std::uncaught_exceptions() > context->exceptions;
  if (raised) file.count(kRaised);
  bool left = false;
  End end{};
  if (visit.session->detail && !raised) end.record.id = form_of(*stream, function.outputs(), sizeof end / 8, left);
  else stream->words.clear();
  end.record.type = kEnd;
  end.record.flags = static_cast<uint8_t>((raised ? kEndRaised : 0) | (left ? kEndWithoutArguments : 0));
  end.record.words = static_cast<uint16_t>(sizeof end / 8 + stream->words.size());
  end.ns = now;
  end.handle = context->handle;
  if (!write(*stream, &end, sizeof end / 8)) file.count(kNoSpace);
}

// fork copies neither the other threads nor our right to the file: the child records nothing.
void before_fork() { registry_mutex.lock(); }
void in_parent() { registry_mutex.unlock(); }
void in_child() {
  registry_mutex.unlock();
  running.store(nullptr);
  current_window.fetch_add(1);
}

void mark(Session& session, bool opens) {
  Stream* stream = stream_of_thread();
  if (stream == nullptr) return;
  const uint64_t window = current_window.load();
  if (stream->window != window) stream->join(*session.file, window, os_thread(), at::RecordFunction::currentThreadId());
  const Window record{{kWindow, static_cast<uint8_t>(opens), sizeof record / 8, 0}, wall_ns(), monotonic_ns()};
  stream->words.clear();
  write(*stream, &record, sizeof record / 8);
}

thread_local std::string last_error;

}  // namespace

}  // namespace etloom

using etloom::Session;

extern "C" {

const char* etloom_error() { return etloom::last_error.c_str(); }

// A session that records to `path`, or null: see etloom_error.
void* etloom_open(const char* path, const char* torch, uint64_t max_bytes, int ring, int detail) {
  static const int atfork = pthread_atfork(etloom::before_fork, etloom::in_parent, etloom::in_child);
  (void)atfork;
  try {
    return new Session{std::make_unique<etloom::File>(path, torch, max_bytes, ring != 0, detail != 0), detail != 0};
  } catch (const std::exception& error) {
    etloom::last_error = error.what();
    return nullptr;
  }
}

// 0, or 1 where another session records. Python holds a lock around start and stop.
int etloom_start(void* given) {
  auto* session = static_cast<Session*>(given);
  if (etloom::running.load() != nullptr) return 1;
  if (etloom::callback == at::INVALID_CALLBACK_HANDLE) {
    etloom::callback = at::addGlobalCallback(at::RecordFunctionCallback(etloom::enter, etloom::leave)
                                                 .needsInputs(session->detail)
                                                 .needsOutputs(session->detail)
                                                 .needsIds(true));
  }
  etloom::current_window.fetch_add(1);
  etloom::mark(*session, true);
  etloom::running.store(session);
  return 0;
}

void etloom_stop(void* given) {
  auto* session = static_cast<Session*>(given);
  Session* expected = session;
  if (!etloom::running.compare_exchange_strong(expected, nullptr)) return;
  at::removeCallback(etloom::callback);
  etloom::callback = at::INVALID_CALLBACK_HANDLE;
  etloom::mark(*session, false);
  const std::lock_guard<std::mutex> lock(etloom::registry_mutex);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  bool stuck = false;
  for (etloom::Stream* stream : etloom::registry()) {
    while (stream->busy.load() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    if (stream->busy.load()) {
      session->file->count(etloom::kStuck);
      stuck = true;
    } else if (stream->window == etloom::current_window) {
      stream->leave();
    }
  }
  if (stuck) session->file->abandon();
}

// What holds for the whole file: a JSON object. Only while the session records.
void etloom_note(void* given, const char* text) {
  auto* session = static_cast<Session*>(given);
  etloom::Stream* stream = etloom::stream_of_thread();
  if (stream == nullptr || etloom::running.load() != session) return;
  const uint64_t window = etloom::current_window.load();
  if (stream->window != window) {
    stream->join(*session->file, window, etloom::os_thread(), at::RecordFunction::currentThreadId());
  }
  etloom::write_note(*stream, 0, stream->text(text));
}

uint64_t etloom_counter(void* given, int counter) { return static_cast<Session*>(given)->file->counted(counter); }

// Ends the session; it must not run.
void etloom_close(void* given, int finish) {
  auto* session = static_cast<Session*>(given);
  if (finish != 0) session->file->finish();
  delete session;
}
}
