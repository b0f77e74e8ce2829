// Keeps the threads of the job out of the callbacks of torch's profiler while it stops.
//
// With profile_all_threads, torch's profiler frees its events when it stops. A thread that is inside one of its
// callbacks then writes to freed memory; so does an operator that ends in a later window than it began in. Two
// callbacks of ours enclose those of the profiler: the outer one is registered before it, the inner one after it, and
// torch runs the callbacks of an operator in the order of their registration, at its begin and at its end. An operator
// that is created while the profiler starts lacks the inner callback: its thread counts as inside until it runs another
// operator, or for `kMaxCallback`.
#include <ATen/record_function.h>
#include <dlfcn.h>
#include <pthread.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace etloom::gate {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPause = std::chrono::microseconds(20);
constexpr auto kMaxWait = std::chrono::seconds(10);     // of the job's threads; the profiler needs microseconds
constexpr auto kMaxCallback = std::chrono::seconds(3);  // of the profiler, which needs microseconds

struct Unfinished;

// A thread of the job; never freed, reused by a new thread when its own has ended.
struct Visitor {
  std::atomic<bool> inside{false};       // between the outer callback and the inner one
  std::atomic<bool> has_inner{false};    // the inner callback is known to follow
  std::atomic<uint64_t> entries{0};      // how often the thread came inside
  Unfinished* beginning = nullptr;       // the operator whose callbacks run at its begin
  bool taken = true;                     // guarded by `mutex`, as all below
  uint64_t entry_seen = 0;               // the entry that was seen last, and when it was first seen
  Clock::time_point seen_at{};

  void come_inside(bool inner_follows) {
    has_inner.store(inner_follows, std::memory_order_relaxed);
    entries.fetch_add(1, std::memory_order_relaxed);
    inside.store(true);
  }

  // Whether the thread may be in a callback of the profiler.
  bool may_be_inside(Clock::time_point now) {
    if (!inside.load()) return false;
    const uint64_t entry = entries.load(std::memory_order_relaxed);
    if (entry != entry_seen) {
      entry_seen = entry;
      seen_at = now;
    }
    return has_inner.load(std::memory_order_relaxed) || now - seen_at < kMaxCallback;
  }
};

std::mutex mutex;
std::vector<Visitor*>& visitors() {
  static auto* all = new std::vector<Visitor*>;
  return *all;
}
constinit thread_local Visitor* thread_visitor = nullptr;
thread_local bool thread_exiting = false;

std::atomic<bool> closed{false};
std::atomic<int64_t> unfinished{0};  // operators that began in a window and have not ended
std::atomic<uint64_t> process{0};    // counts the forks that lead to this process
at::CallbackHandle outer = at::INVALID_CALLBACK_HANDLE, inner = at::INVALID_CALLBACK_HANDLE;

struct ThreadExit {
  ~ThreadExit() {
    thread_exiting = true;
    const std::lock_guard<std::mutex> lock(mutex);
    if (thread_visitor == nullptr) return;
    thread_visitor->inside.store(false);
    thread_visitor->beginning = nullptr;
    thread_visitor->taken = false;
    thread_visitor = nullptr;
  }
};

// Returns nullptr for a thread that is exiting.
Visitor* find_visitor() {
  if (thread_visitor != nullptr || thread_exiting) return thread_visitor;
  thread_local ThreadExit thread_exit;
  (void)thread_exit;
  const std::lock_guard<std::mutex> lock(mutex);
  for (Visitor* visitor : visitors()) {
    if (visitor->taken) continue;
    visitor->taken = true;
    return thread_visitor = visitor;
  }
  visitors().push_back(new Visitor);
  return thread_visitor = visitors().back();
}

// Python's C interface, found at run time: the process decides which library has it, if any.
class Interpreter {
 public:
  bool is_locked_by_this_thread() const { return check_ != nullptr && state_() != nullptr && check_() == 1; }
  void* unlock() const { return save_(); }
  void lock(void* state) const { restore_(state); }

 private:
  template <class Function>
  static Function find(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  }
  int (*check_)() = find<int (*)()>("PyGILState_Check");
  void* (*state_)() = find<void* (*)()>("PyGILState_GetThisThreadState");
  void* (*save_)() = find<void* (*)()>("PyEval_SaveThread");
  void (*restore_)(void*) = find<void (*)(void*)>("PyEval_RestoreThread");
};

// The profiler takes its state away before it touches the events; callbacks that find none do nothing.
template <class State>
bool has_no_global_state() {
  if constexpr (requires { State::get(true); }) {  // torch before 2.14
    return State::get(/*global=*/true) == nullptr;
  } else {
    return State::getGlobal() == nullptr;
  }
}
bool profiler_is_gone() { return has_no_global_state<torch::profiler::impl::ProfilerStateBase>(); }

void wait_until_open(Clock::time_point deadline) {
  static const Interpreter python;
  // The thread that stops the profiler needs the lock of Python.
  void* state = python.is_locked_by_this_thread() ? python.unlock() : nullptr;
  while (closed.load() && !profiler_is_gone() && Clock::now() < deadline) std::this_thread::sleep_for(kPause);
  if (state != nullptr) python.lock(state);
}

Visitor* enter(bool inner_follows) {
  Visitor* const visitor = find_visitor();
  if (visitor == nullptr) return nullptr;
  visitor->come_inside(inner_follows);
  if (!closed.load()) return visitor;
  const auto deadline = Clock::now() + kMaxWait;
  while (closed.load() && !profiler_is_gone() && Clock::now() < deadline) {
    visitor->inside.store(false);
    wait_until_open(deadline);
    visitor->come_inside(inner_follows);
  }
  return visitor;
}

struct Unfinished : at::ObserverContext {
  explicit Unfinished(uint64_t process) : process(process) {}
  uint64_t process;
  bool has_inner = false;
};

std::unique_ptr<at::ObserverContext> begin_outer(const at::RecordFunction&) {
  auto operation = std::make_unique<Unfinished>(process.load());
  if (Visitor* const visitor = enter(false)) visitor->beginning = operation.get();
  unfinished.fetch_add(1);
  return operation;
}

void end_outer(const at::RecordFunction&, at::ObserverContext* context) {
  const auto* const operation = static_cast<Unfinished*>(context);
  enter(operation->has_inner);
  if (operation->process == process.load()) unfinished.fetch_sub(1);
}

// An operator with the inner callback also has the outer one, which ran on this thread before it.
std::unique_ptr<at::ObserverContext> begin_inner(const at::RecordFunction&) {
  if (thread_visitor == nullptr) return nullptr;
  if (thread_visitor->beginning != nullptr) thread_visitor->beginning->has_inner = true;
  thread_visitor->beginning = nullptr;
  thread_visitor->inside.store(false);
  return nullptr;
}

void end_inner(const at::RecordFunction&, at::ObserverContext*) {
  if (thread_visitor != nullptr) thread_visitor->inside.store(false);
}

bool is_empty() {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto now = Clock::now();
  bool empty = true;
  for (Visitor* visitor : visitors()) empty = !visitor->may_be_inside(now) && empty;
  return empty;
}

template <class Condition>
bool wait_for(const Condition& condition, int64_t timeout_ms) {
  const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  while (!condition()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kPause);
  }
  return true;
}

void remove(at::CallbackHandle& handle) {
  if (handle != at::INVALID_CALLBACK_HANDLE) at::removeCallback(handle);
  handle = at::INVALID_CALLBACK_HANDLE;
}

// fork copies only the thread that forks.
void before_fork() { mutex.lock(); }
void in_parent() { mutex.unlock(); }
void in_child() {
  for (Visitor* visitor : visitors()) visitor->inside.store(false);
  closed.store(false);
  unfinished.store(0);
  process.fetch_add(1);
  mutex.unlock();
}

}  // namespace

}  // namespace etloom::gate

namespace gate = etloom::gate;

// Python calls these functions one at a time, under a lock.
extern "C" {

// Waits until no operator of an earlier window is unfinished; returns 0 if one still is.
int etloom_gate_is_clear(int64_t timeout_ms) {
  return gate::wait_for([] { return gate::unfinished.load() == 0 && gate::is_empty(); }, timeout_ms) ? 1 : 0;
}

// Registers the outer callback: called before the profiler starts.
void etloom_gate_add_outer() {
  static const int atfork = pthread_atfork(gate::before_fork, gate::in_parent, gate::in_child);
  (void)atfork;
  gate::outer = at::addGlobalCallback(at::RecordFunctionCallback(gate::begin_outer, gate::end_outer));
}

// Registers the inner callback: called when the profiler has started.
void etloom_gate_add_inner() {
  gate::inner = at::addGlobalCallback(at::RecordFunctionCallback(gate::begin_inner, gate::end_inner));
}

// Closes the gate and waits until no thread is inside; returns 0, with the gate open, if one still is.
int etloom_gate_close(int64_t timeout_ms) {
  gate::closed.store(true);
  if (gate::wait_for(gate::is_empty, timeout_ms)) return 1;
  gate::closed.store(false);
  return 0;
}

// Opens the gate and removes the callbacks.
void etloom_gate_remove() {
  gate::closed.store(false);
  gate::remove(gate::inner);
  gate::remove(gate::outer);
}
}
