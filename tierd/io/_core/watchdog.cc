#include "watchdog.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace tierd {
namespace {

// Looks in an interval. Time is counted in looks: a process that was stopped as a whole, with this
// thread in it, has stood still for one of them.
constexpr std::uint32_t kLooks = 4;
constexpr std::uint32_t kIntervalLeastMs = 200;

}  // namespace

Watchdog::Watchdog(std::uint32_t interval_ms, bool ends) : interval_ms_(interval_ms), ends_(ends) {
    if (interval_ms < kIntervalLeastMs)
        throw std::invalid_argument("interval_ms must be at least " +
                                    std::to_string(kIntervalLeastMs) + ", got " +
                                    std::to_string(interval_ms));
    watch("event loop", own_);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { run(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Watchdog::~Watchdog() { stop(); }

void Watchdog::watch(const std::string& name, const std::atomic<std::uint64_t>& counter) {
    const std::lock_guard lock(mutex_);
    sources_.push_back({name, &counter, counter.load(std::memory_order_relaxed)});
}

std::string Watchdog::stuck() const {
    const std::lock_guard lock(mutex_);
    return stuck_;
}

void Watchdog::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    stop_.notify_all();
    if (thread_.joinable()) thread_.join();
}

void Watchdog::run() {
    pthread_setname_np(pthread_self(), "tierd-watchdog");
    const std::chrono::milliseconds pause(interval_ms_ / kLooks);
    std::unique_lock lock(mutex_);
    while (!stop_.wait_for(lock, pause, [this] { return stopping_; })) look();
}

void Watchdog::look() {
    stuck_.clear();
    bool ending = false;
    for (Source& source : sources_) {
        const std::uint64_t now = source.counter->load(std::memory_order_relaxed);
        source.still_looks = now == source.seen ? source.still_looks + 1 : 0;
        source.seen = now;
        if (source.still_looks < kLooks) continue;
        stuck_ += (stuck_.empty() ? "" : ", ") + source.name;
        ending |= source.still_looks >= 2 * kLooks;
    }
    if (!ending || !ends_) return;
    std::fprintf(stderr, "tierd: %s stood still for %u ms; ending the process (daemon.watchdog_ends)\n",
                 stuck_.c_str(), 2 * interval_ms_);
    std::abort();
}

}  // namespace tierd
