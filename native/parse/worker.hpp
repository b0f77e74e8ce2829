// A second thread for a parser.
#pragma once
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace etloom {

// A thread that starts with its first job and ends with the object.
class Worker {
  public:
    Worker() = default;
    Worker(const Worker&) = delete;
    ~Worker();

    // Runs `background` in the thread and `foreground` in that of the caller, one after the other where the system has no
    // thread left. Throws what one of them threw, when both are over.
    void run_both(std::function<void()> background, const std::function<void()>& foreground);
    // Starts a job, for which the next call waits.
    void run_in_background(std::function<void()> job);
    // Waits until the thread has nothing to do. Throws what its job threw.
    void wait();

  private:
    bool start(std::function<void()> job);
    void wait_until_idle();
    void rethrow();
    void work();

    std::thread thread_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::function<void()> job_;
    std::exception_ptr error_;
    bool ended_ = false;
};

// The same in the thread of the caller if there is no worker.
inline void run_both(Worker* worker, const std::function<void()>& background, const std::function<void()>& foreground) {
    if (worker != nullptr) return worker->run_both(background, foreground);
    foreground();
    background();
}

// Counts a thread that computes, for as long as it lives.
class Computing {
  public:
    Computing();
    Computing(const Computing&) = delete;
    ~Computing();
    // Whether fewer threads compute in this process than it has processors.
    static bool has_room();
};

}  // namespace etloom
