// See worker.hpp.
#include "worker.hpp"

#include <atomic>
#include <system_error>
#include <utility>

namespace etloom {

namespace {

std::atomic<unsigned> computing{0};

// What the job threw, if anything.
std::exception_ptr run(const std::function<void()>& job) {
    const Computing counted;
    try {
        job();
    } catch (...) {
        return std::current_exception();
    }
    return nullptr;
}

}  // namespace

Worker::~Worker() {
    if (!thread_.joinable()) return;
    {
        const std::lock_guard lock(mutex_);
        ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void Worker::run_both(std::function<void()> background, const std::function<void()>& foreground) {
    wait();
    if (!start(background)) {
        foreground();
        return background();
    }
    const std::exception_ptr error = run(foreground);
    wait_until_idle();
    if (error) error_ = error;
    rethrow();
}

void Worker::run_in_background(std::function<void()> job) {
    wait();
    if (!start(job)) job();
}

void Worker::wait() {
    wait_until_idle();
    rethrow();
}

void Worker::rethrow() {
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

bool Worker::start(std::function<void()> job) {
    if (!thread_.joinable()) {
        try {
            thread_ = std::thread([this] { work(); });
        } catch (const std::system_error&) {
            return false;
        }
    }
    {
        const std::lock_guard lock(mutex_);
        job_ = std::move(job);
    }
    changed_.notify_all();
    return true;
}

void Worker::wait_until_idle() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !job_; });
}

void Worker::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return job_ || ended_; });
        if (ended_) return;
        lock.unlock();
        error_ = run(job_);
        lock.lock();
        job_ = nullptr;
        changed_.notify_all();
    }
}

Computing::Computing() { ++computing; }
Computing::~Computing() { --computing; }

bool Computing::has_room() {
    static const unsigned processors = std::thread::hardware_concurrency();
    return computing < processors;
}

}  // namespace etloom
