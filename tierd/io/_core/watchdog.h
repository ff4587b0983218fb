// Tells whether the daemon's threads still turn, from a thread of its own that needs no lock of
// theirs, no event loop and not the interpreter. When asked to, it ends a process that does not.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace tierd {

class Watchdog {
  public:
    // A counter that stands still for `interval_ms` is stuck. With `ends`, the process is aborted
    // when it has been stuck for another interval, so that its supervisor starts it anew.
    Watchdog(std::uint32_t interval_ms, bool ends);
    ~Watchdog();
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;

    // `counter` must live as long as the watchdog runs.
    void watch(const std::string& name, const std::atomic<std::uint64_t>& counter);
    // The counter of whoever calls this, such as an event loop.
    void beat() { own_.fetch_add(1, std::memory_order_relaxed); }
    // "" or the names of what stands still, joined with ", ".
    std::string stuck() const;
    void stop();

  private:
    struct Source {
        std::string name;
        const std::atomic<std::uint64_t>* counter;
        std::uint64_t seen;
        std::uint32_t still_looks = 0;  // in a row
    };
    void run();
    void look();

    const std::uint32_t interval_ms_;
    const bool ends_;
    std::atomic<std::uint64_t> own_{0};
    mutable std::mutex mutex_;  // guards everything below
    std::condition_variable stop_;
    bool stopping_ = false;
    std::vector<Source> sources_;
    std::string stuck_;
    std::thread thread_;
};

}  // namespace tierd
