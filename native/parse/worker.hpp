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

  private:
    bool start(std::function<void()> job);
    void wait();
    void work();

    std::thread thread_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::function<void()> job_;
    std::exception_ptr error_;
    bool ended_ = false;
};

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
