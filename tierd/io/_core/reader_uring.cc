// Reads by io_uring: a fixed file table, fixed buffers over the arenas, one issuing thread.
//
// What the kernel does not have or does not allow is given up one step at a time, and each step
// that costs something leaves one line in reason(): first the task-run flags (silent: they only
// save interrupts), then fixed files, then the fixed buffers of an arena, then io_uring itself.
#include <liburing.h>
#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <mutex>
#include <utility>
#include <vector>

#include "protocol.h"
#include "reader.h"

namespace tierd {
namespace {

constexpr std::uint64_t kWakeData = 1ull << 40;  // the poll on the eventfd; reads carry their token

std::string first_word_of(const char* path) {
    std::ifstream file(path);
    std::string word;
    file >> word;
    return word;
}

bool seccomp_filtered() {
    std::ifstream file("/proc/thread-self/status");
    std::string line;
    while (std::getline(file, line))
        if (line.rfind("Seccomp:", 0) == 0) return line.find('2') != std::string::npos;
    return false;
}

std::string memlock_limit() {
    rlimit limit{};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
    if (limit.rlim_cur == RLIM_INFINITY) return "unlimited";
    return std::to_string(limit.rlim_cur / 1024) + " KiB";
}

std::string memlock_cure() {
    return "RLIMIT_MEMLOCK is " + memlock_limit() +
           "; raise LimitMEMLOCK= of the unit (in a shell: ulimit -l unlimited)";
}

// Why a call of io_uring said no: sysctl, seccomp and memlock look alike to the caller.
std::string explain_refusal(const char* call, int error) {
    const std::string head = std::string(call) + " refused (" + strerrorname_np(error) + "): ";
    const bool filtered = seccomp_filtered();
    if (error == EPERM) {
        const std::string disabled = first_word_of("/proc/sys/kernel/io_uring_disabled");
        if (disabled == "1" || disabled == "2")
            return head + "kernel.io_uring_disabled is " + disabled +
                   "; run: sysctl kernel.io_uring_disabled=0";
        if (filtered) return head + "a seccomp filter forbids it (container or SystemCallFilter=)";
        return head + "a security module forbids it";
    }
    if (error == ENOSYS)
        return head + (filtered ? "a seccomp filter hides it (container or SystemCallFilter=)"
                                : "this kernel is built without it");
    if (error == ENOMEM) return head + memlock_cure();
    if (error == EINVAL) return head + "this kernel is older than 5.10";
    return head + strerrordesc_np(error);
}

class UringReader final : public Reader {
  public:
    // "" or why this process cannot use io_uring.
    std::string open(const ReaderOptions& options) {
        wake_fd_ = options.wake_fd;
        constexpr std::array<unsigned, 4> kSteps{
            IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG,
            IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG,
            IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG, 0};
        int error = 0;
        for (const unsigned flags : kSteps) {
            io_uring_params params{};
            // Disabled until begin(): the thread that enables a single-issuer ring is its issuer.
            params.flags = flags | IORING_SETUP_R_DISABLED | IORING_SETUP_CLAMP;
            error = -io_uring_queue_init_params(options.queue_depth, &ring_, &params);
            if (error == 0) {
                open_ = true;
                task_run_flag_ = (flags & IORING_SETUP_TASKRUN_FLAG) != 0;
                break;
            }
            if (error != EINVAL) break;
        }
        if (!open_) return explain_refusal("io_uring_setup", error);
        // A filter may allow the first of the three system calls and not the others.
        error = -io_uring_enter(static_cast<unsigned>(ring_.ring_fd), 0, 0, 0, nullptr);
        if (error == EPERM || error == ENOSYS) return explain_refusal("io_uring_enter", error);
        error = register_tables();
        if (error == EPERM || error == ENOSYS) return explain_refusal("io_uring_register", error);
        return "";
    }

    ~UringReader() override {
        if (open_) io_uring_queue_exit(&ring_);
    }

    const char* name() const override { return "io_uring"; }

    std::string reason() const override {
        const std::lock_guard lock(reason_mutex_);
        if (files_reason_.empty()) return buffers_reason_;
        return buffers_reason_.empty() ? files_reason_ : files_reason_ + "; " + buffers_reason_;
    }

    void begin() override {
        const int rc = io_uring_enable_rings(&ring_);
        if (rc < 0) reader_fault("io_uring_register(ENABLE_RINGS)", -rc);
        io_uring_register_ring_fd(&ring_);  // saves a look-up per call; no loss where it is refused
    }

    void end() override {
        // Without this the kernel would drop the files only when it gets round to the closed ring.
        if (files_fixed_) io_uring_unregister_files(&ring_);
        if (buffers_fixed_) io_uring_unregister_buffers(&ring_);
        files_fixed_ = buffers_fixed_ = false;
        fixed_file_.fill(false);
        io_uring_unregister_ring_fd(&ring_);
    }

    void add_device(std::uint32_t device, int fd) override {
        fds_[device] = fd;
        fixed_file_[device] = false;
        if (!files_fixed_) return;
        const int rc = io_uring_register_files_update(&ring_, device, &fd, 1);
        fixed_file_[device] = rc == 1;
        if (rc != 1) set_reason(files_reason_, explain_register("fixed files", rc));
    }

    void remove_device(std::uint32_t device) override {
        if (fixed_file_[device]) {
            int none = -1;
            io_uring_register_files_update(&ring_, device, &none, 1);
        }
        fixed_file_[device] = false;
        fds_[device] = -1;
    }

    std::int32_t reserve_buffers(std::uint32_t count) override {
        if (!buffers_fixed_) return kNoBuffer;
        const auto at = std::search_n(buffer_used_.begin(), buffer_used_.end(), count, false);
        if (at == buffer_used_.end()) {
            set_reason(buffers_reason_, "fixed buffers: all 16,384 are in use");
            return kNoBuffer;
        }
        std::fill_n(at, count, true);
        return static_cast<std::int32_t>(at - buffer_used_.begin());
    }

    bool register_buffer(std::int32_t buffer, std::uint8_t* base, std::uint64_t bytes) override {
        const int rc = update_buffer(static_cast<unsigned>(buffer), base, bytes);
        if (rc == 1) return true;
        set_reason(buffers_reason_, explain_register("fixed buffers", rc));
        return false;
    }

    void release_buffers(std::int32_t first, std::uint32_t count) override {
        for (std::uint32_t i = 0; i < count; ++i) {
            const auto buffer = static_cast<unsigned>(first) + i;
            if (buffers_fixed_) update_buffer(buffer, nullptr, 0);
            buffer_used_[buffer] = false;
        }
    }

    void push(const Read* reads, std::size_t count) override {
        for (std::size_t i = 0; i < count; ++i) {
            const Read& read = reads[i];
            io_uring_sqe* sqe = next_sqe();
            const bool fixed_file = fixed_file_[read.device];
            const int fd = fixed_file ? static_cast<int>(read.device) : fds_[read.device];
            if (read.buffer != kNoBuffer)
                io_uring_prep_read_fixed(sqe, fd, read.target, kPageBytes, read.offset, read.buffer);
            else
                io_uring_prep_read(sqe, fd, read.target, kPageBytes, read.offset);
            if (fixed_file) sqe->flags |= IOSQE_FIXED_FILE;
            sqe->user_data = read.token;
        }
    }

    void submit() override {
        if (io_uring_sq_ready(&ring_) == 0) return;
        // One call that also posts what has finished meanwhile.
        const int rc = task_run_flag_ ? io_uring_submit_and_get_events(&ring_) : io_uring_submit(&ring_);
        check_enter(rc);
    }

    std::size_t reap(ReadDone* done, std::size_t room) override {
        if (io_uring_cq_ready(&ring_) == 0) {
            if (!task_run_flag_) return 0;
            const unsigned flags = __atomic_load_n(ring_.sq.kflags, __ATOMIC_ACQUIRE);
            if ((flags & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW)) == 0) return 0;
            check_enter(io_uring_get_events(&ring_));
        }
        std::size_t n = 0;
        unsigned seen = 0;
        unsigned head = 0;
        io_uring_cqe* cqe = nullptr;
        io_uring_for_each_cqe(&ring_, head, cqe) {
            if (n == room) break;
            ++seen;
            if (cqe->user_data < kWakeData)
                done[n++] = {static_cast<std::uint32_t>(cqe->user_data), cqe->res};
            else if (cqe->user_data == kWakeData)
                woken();
        }
        io_uring_cq_advance(&ring_, seen);
        return n;
    }

    void wait(std::uint32_t count, std::uint64_t timeout_ns) override {
        if (!poll_armed_) {
            io_uring_sqe* sqe = next_sqe();
            io_uring_prep_poll_add(sqe, wake_fd_, POLLIN);
            sqe->user_data = kWakeData;
            poll_armed_ = true;
        }
        __kernel_timespec limit{static_cast<long long>(timeout_ns / 1'000'000'000),
                                static_cast<long long>(timeout_ns % 1'000'000'000)};
        io_uring_cqe* cqe = nullptr;
        check_enter(io_uring_submit_and_wait_timeout(&ring_, &cqe, count, &limit, nullptr));
    }

    std::uint64_t wakes() const override { return wakes_; }

  private:
    // Returns the errno with which the file table was refused, or 0.
    int register_tables() {
        fds_.fill(-1);
        int rc = io_uring_register_files_sparse(&ring_, kDevicesMax);
        files_fixed_ = rc == 0;
        const int error = -rc;
        if (rc != 0) set_reason(files_reason_, explain_register("fixed files", rc));
        rc = io_uring_register_buffers_sparse(&ring_, kBuffersMax);
        buffers_fixed_ = rc == 0;
        buffer_used_.assign(kBuffersMax, false);
        if (rc != 0) set_reason(buffers_reason_, explain_register("fixed buffers", rc));
        return error;
    }

    // `rc` is a negative errno, or 0 where the kernel updated nothing.
    static std::string explain_register(const char* what, int rc) {
        const std::string head = std::string(what) + " refused (" +
                                 (rc < 0 ? strerrorname_np(-rc) : "nothing updated") + "): ";
        if (rc == -ENOMEM) return head + memlock_cure();
        if (rc == -EMFILE) return head + "RLIMIT_NOFILE is too small; raise LimitNOFILE= of the unit";
        if (rc == -EINVAL) return head + "this kernel is older than 5.19";
        if (rc == -EFAULT) return head + "the channel's memory cannot be pinned";
        return head + (rc < 0 ? strerrordesc_np(-rc) : "unexpected answer");
    }

    int update_buffer(unsigned buffer, void* base, std::uint64_t bytes) {
        const iovec part{base, bytes};
        const __u64 tag = 0;
        return io_uring_register_buffers_update_tag(&ring_, buffer, &part, &tag, 1);
    }

    io_uring_sqe* next_sqe() {
        io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
        if (sqe != nullptr) return sqe;
        submit();  // the ring has queue_depth entries, and the poll on the eventfd is one more
        sqe = io_uring_get_sqe(&ring_);
        if (sqe == nullptr) reader_fault("io_uring_get_sqe", ENOSPC);
        return sqe;
    }

    void woken() {
        poll_armed_ = false;
        drain_eventfd(wake_fd_);
        ++wakes_;
    }

    static void check_enter(int rc) {
        // What is left unsubmitted goes in with the next call.
        if (rc >= 0 || rc == -EINTR || rc == -ETIME || rc == -EAGAIN || rc == -EBUSY || rc == -ENOMEM)
            return;
        reader_fault("io_uring_enter", -rc);
    }

    void set_reason(std::string& where, std::string text) {
        const std::lock_guard lock(reason_mutex_);
        if (where.empty()) where = std::move(text);  // the first cause is the useful one
    }

    io_uring ring_{};
    bool open_ = false;
    bool task_run_flag_ = false;
    bool files_fixed_ = false;
    bool buffers_fixed_ = false;
    bool poll_armed_ = false;
    int wake_fd_ = -1;
    std::uint64_t wakes_ = 0;
    std::array<int, kDevicesMax> fds_{};
    std::array<bool, kDevicesMax> fixed_file_{};
    std::vector<bool> buffer_used_;
    mutable std::mutex reason_mutex_;
    std::string files_reason_;
    std::string buffers_reason_;
};

}  // namespace

std::unique_ptr<Reader> make_uring_reader(const ReaderOptions& options, std::string& reason) {
    auto reader = std::make_unique<UringReader>();
    reason = reader->open(options);
    if (!reason.empty()) return nullptr;
    return reader;
}

}  // namespace tierd
