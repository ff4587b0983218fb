// Reads by a fixed number of threads that call pread(2): the transport where io_uring is refused.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "protocol.h"
#include "reader.h"

namespace tierd {

void drain_eventfd(int fd) {
    // RWF_NOWAIT: a client holds this eventfd too and may have made it blocking, or emptied it.
    std::uint64_t value = 0;
    iovec part{&value, sizeof value};
    [[maybe_unused]] const ssize_t n = preadv2(fd, &part, 1, -1, RWF_NOWAIT);
}

void ring_eventfd(int fd) {
    // EAGAIN means that the counter is full, and then it is already readable.
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(fd, &one, sizeof one);
}

void reader_fault(const char* call, int error) {
    std::fprintf(stderr, "tierd pump: %s: %s; stopping the process\n", call, std::strerror(error));
    std::abort();
}

namespace {

class ThreadReader final : public Reader {
  public:
    ThreadReader(const ReaderOptions& options, std::string reason)
        : wake_fd_(options.wake_fd),
          reason_(std::move(reason)),
          queue_(options.queue_depth),
          finished_(options.queue_depth) {
        fds_.fill(-1);
        done_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (done_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
        start_workers(options.read_threads);
    }

    ~ThreadReader() override {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        work_.notify_all();
        for (auto& worker : workers_) worker.join();
        close(done_fd_);
    }

    const char* name() const override { return "threads"; }
    std::string reason() const override { return reason_; }
    void begin() override {}
    void end() override {}

    void add_device(std::uint32_t device, int fd) override {
        const std::lock_guard lock(mutex_);
        fds_[device] = fd;
    }
    void remove_device(std::uint32_t device) override {
        const std::lock_guard lock(mutex_);
        fds_[device] = -1;
    }

    std::int32_t reserve_buffers(std::uint32_t) override { return kNoBuffer; }
    bool register_buffer(std::int32_t, std::uint8_t*, std::uint64_t) override { return false; }
    void release_buffers(std::int32_t, std::uint32_t) override {}

    void push(const Read* reads, std::size_t count) override {
        std::size_t sleepers = 0;
        {
            const std::lock_guard lock(mutex_);
            for (std::size_t i = 0; i < count; ++i) {
                queue_[queue_tail_] = reads[i];
                queue_tail_ = (queue_tail_ + 1) % queue_.size();
            }
            queued_ += count;
            sleepers = std::min(count, idle_);
        }
        for (std::size_t i = 0; i < sleepers; ++i) work_.notify_one();
    }

    void submit() override {}

    std::size_t reap(ReadDone* done, std::size_t room) override {
        if (finished_count_.load(std::memory_order_acquire) == 0) return 0;
        const std::lock_guard lock(mutex_);
        const std::size_t have = finished_count_.load(std::memory_order_relaxed);
        const std::size_t n = std::min(room, have);
        std::copy_n(finished_.begin(), n, done);
        std::move(finished_.begin() + static_cast<std::ptrdiff_t>(n),
                  finished_.begin() + static_cast<std::ptrdiff_t>(have), finished_.begin());
        finished_count_.store(have - n, std::memory_order_release);
        return n;
    }

    void wait(std::uint32_t count, std::uint64_t timeout_ns) override {
        {
            const std::lock_guard lock(mutex_);
            if (finished_count_.load(std::memory_order_relaxed) >= count) return;
            wait_target_ = count;
        }
        std::array<pollfd, 2> fds{{{wake_fd_, POLLIN, 0}, {done_fd_, POLLIN, 0}}};
        const timespec limit{static_cast<time_t>(timeout_ns / 1'000'000'000),
                             static_cast<long>(timeout_ns % 1'000'000'000)};
        ppoll(fds.data(), fds.size(), &limit, nullptr);
        {
            const std::lock_guard lock(mutex_);
            wait_target_ = 0;
        }
        if (fds[0].revents != 0) {
            drain_eventfd(wake_fd_);
            ++wakes_;
        }
        if (fds[1].revents != 0) drain_eventfd(done_fd_);
    }

    std::uint64_t wakes() const override { return wakes_; }

  private:
    void start_workers(std::uint32_t count) {
        // The pump's threads take no signals: Python's handlers belong to the main thread.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            workers_.reserve(count);
            for (std::uint32_t i = 0; i < count; ++i) workers_.emplace_back([this] { work(); });
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            {
                const std::lock_guard lock(mutex_);
                stopping_ = true;
            }
            work_.notify_all();
            for (auto& worker : workers_) worker.join();
            close(done_fd_);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void work() {
        std::unique_lock lock(mutex_);
        while (true) {
            while (queued_ == 0 && !stopping_) {
                ++idle_;
                work_.wait(lock);
                --idle_;
            }
            if (queued_ == 0) return;
            const Read read = queue_[queue_head_];
            queue_head_ = (queue_head_ + 1) % queue_.size();
            --queued_;
            const int fd = fds_[read.device];
            lock.unlock();
            const std::int32_t result = read_page(fd, read);
            lock.lock();
            const std::size_t have = finished_count_.load(std::memory_order_relaxed);
            finished_[have] = {read.token, result};
            finished_count_.store(have + 1, std::memory_order_release);
            if (wait_target_ != 0 && have + 1 >= wait_target_) {
                wait_target_ = 0;
                ring_eventfd(done_fd_);
            }
        }
    }

    static std::int32_t read_page(int fd, const Read& read) {
        while (true) {
            const ssize_t n = pread(fd, read.target, kPageBytes, static_cast<off_t>(read.offset));
            if (n >= 0) return static_cast<std::int32_t>(n);
            if (errno != EINTR) return -errno;
        }
    }

    const int wake_fd_;
    const std::string reason_;
    int done_fd_ = -1;
    std::uint64_t wakes_ = 0;

    std::mutex mutex_;  // guards everything below
    std::condition_variable work_;
    std::array<int, kDevicesMax> fds_{};
    std::vector<Read> queue_;  // a circle of queue_depth entries
    std::size_t queue_head_ = 0;
    std::size_t queue_tail_ = 0;
    std::size_t queued_ = 0;
    std::size_t idle_ = 0;
    std::vector<ReadDone> finished_;
    std::atomic<std::size_t> finished_count_{0};  // written under the mutex, peeked at without it
    std::size_t wait_target_ = 0;                 // finished reads that end the pump's sleep
    bool stopping_ = false;
    std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<Reader> make_thread_reader(const ReaderOptions& options, std::string reason) {
    return std::make_unique<ThreadReader>(options, std::move(reason));
}

}  // namespace tierd
