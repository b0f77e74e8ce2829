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

void Worker::run_both(std::function<void()> there, const std::function<void()>& here) {
    wait();
    if (!start(there)) {
        here();
        return there();
    }
    const std::exception_ptr error = run(here);
    stand_by();
    if (error) std::rethrow_exception(error);
    rethrow();
}

void Worker::run_meanwhile(std::function<void()> there) {
    wait();
    if (!start(there)) there();
}

void Worker::wait() {
    stand_by();
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

void Worker::stand_by() {
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
