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

    // Runs `there` in the thread and `here` in that of the caller, one after the other where the system has no thread
    // left. Throws what one of them threw, when both are over.
    void run_both(std::function<void()> there, const std::function<void()>& here);
    // Starts `there`, which the next call of `run_both` or `wait` waits for.
    void run_meanwhile(std::function<void()> there);
    // Waits until the thread has nothing to do. Throws what its job threw.
    void wait();

  private:
    bool start(std::function<void()> job);
    void stand_by();
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
inline void run_both(Worker* worker, const std::function<void()>& there, const std::function<void()>& here) {
    if (worker != nullptr) return worker->run_both(there, here);
    here();
    there();
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
