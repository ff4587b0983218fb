#include "reader_played.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <queue>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "channel.h"
#include "protocol.h"

namespace tierd {
namespace {

constexpr std::uint32_t kRealDepth = 96;   // reads that a real device has at a time
constexpr std::size_t kCopiesPerReap = 8;  // so that what was pushed first is answered first

class MemoryReader final : public Reader {
  public:
    ~MemoryReader() override {
        for (std::uint32_t device = 0; device < kDevicesMax; ++device) unmap(device);
    }

    const char* name() const override { return "memory"; }
    std::string reason() const override { return {}; }
    void begin() override {}
    void end() override {}

    void add_device(std::uint32_t device, int fd) override {
        struct stat info {};
        if (fstat(fd, &info) != 0) throw std::system_error(errno, std::generic_category(), "fstat");
        const auto bytes = static_cast<std::size_t>(info.st_size);
        void* base = mmap(nullptr, bytes, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
        if (base == MAP_FAILED)
            throw std::system_error(errno, std::generic_category(), "map a device of memory");
        devices_[device] = {static_cast<const std::uint8_t*>(base), bytes};
    }
    void remove_device(std::uint32_t device) override { unmap(device); }

    std::int32_t reserve_buffers(std::uint32_t) override { return kNoBuffer; }
    bool register_buffer(std::int32_t, std::uint8_t*, std::uint64_t) override { return false; }
    void release_buffers(std::int32_t, std::uint32_t) override {}

    void push(const Read* reads, std::size_t count) override {
        queue_.insert(queue_.end(), reads, reads + count);
    }
    void submit() override {}

    std::size_t reap(ReadDone* done, std::size_t room) override {
        std::size_t n = 0;
        for (; n < std::min(room, kCopiesPerReap) && !queue_.empty(); ++n) {
            const Read read = queue_.front();
            queue_.pop_front();
            const Device& device = devices_[read.device];
            const std::uint64_t left = device.bytes - std::min(device.bytes, read.offset);
            const auto size = std::min<std::uint64_t>(kPageBytes, left);
            std::memcpy(read.target, device.base + read.offset, size);
            done[n] = {read.token, static_cast<std::int32_t>(size)};
        }
        return n;
    }

    void wait(std::uint32_t, std::uint64_t timeout_ns) override {
        const timespec time{0, static_cast<long>(std::min<std::uint64_t>(timeout_ns, 1'000'000))};
        if (queue_.empty()) nanosleep(&time, nullptr);
    }
    std::uint64_t wakes() const override { return 0; }

  private:
    struct Device {
        const std::uint8_t* base = nullptr;
        std::uint64_t bytes = 0;
    };

    void unmap(std::uint32_t device) {
        Device& one = devices_[device];
        if (one.base != nullptr) munmap(const_cast<std::uint8_t*>(one.base), one.bytes);
        one = {};
    }

    std::array<Device, kDevicesMax> devices_{};
    std::deque<Read> queue_;
};

class PlayedReader final : public Reader {
  public:
    PlayedReader(const ReaderOptions& options, const PlayedDevice& played,
                 std::unique_ptr<Reader> inner)
        : inner_(std::move(inner)),
          played_(played),
          name_(std::string("played ") + inner_->name()),
          due_ns_(options.queue_depth),
          device_of_(options.queue_depth),
          finished_(options.queue_depth) {}

    const char* name() const override { return name_.c_str(); }
    std::string reason() const override { return inner_->reason(); }
    void begin() override { inner_->begin(); }
    void end() override { inner_->end(); }
    void add_device(std::uint32_t device, int fd) override {
        inner_->add_device(device, fd);
        free_ps_[device] = 0;
    }
    void remove_device(std::uint32_t device) override { inner_->remove_device(device); }
    std::int32_t reserve_buffers(std::uint32_t count) override {
        return inner_->reserve_buffers(count);
    }
    bool register_buffer(std::int32_t buffer, std::uint8_t* base, std::uint64_t bytes) override {
        return inner_->register_buffer(buffer, base, bytes);
    }
    void release_buffers(std::int32_t first, std::uint32_t count) override {
        inner_->release_buffers(first, count);
    }

    void push(const Read* reads, std::size_t count) override {
        const std::uint64_t now_ps = monotonic_ns() * 1000;
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint32_t device = reads[i].device;
            std::uint64_t& free_ps = free_ps_[played_.queues == 0 ? device : device % played_.queues];
            free_ps = std::max(free_ps, now_ps) + played_.page_ps;
            due_ns_[reads[i].token] = free_ps / 1000 + played_.base_ns;
            device_of_[reads[i].token] = device;
            real_[device].waiting.push_back(reads[i]);
            start(real_[device]);
        }
    }
    void submit() override { inner_->submit(); }

    std::size_t reap(ReadDone* done, std::size_t room) override {
        const std::size_t n = inner_->reap(finished_.data(), finished_.size());
        for (std::size_t i = 0; i < n; ++i) {
            Real& real = real_[device_of_[finished_[i].token]];
            --real.started;
            start(real);
            held_.push({due_ns_[finished_[i].token], finished_[i]});
        }
        if (n != 0) inner_->submit();
        if (held_.empty()) return 0;
        const std::uint64_t now = monotonic_ns();
        std::size_t out = 0;
        for (; out < room && !held_.empty() && held_.top().due_ns <= now; held_.pop())
            done[out++] = held_.top().done;
        return out;
    }

    void wait(std::uint32_t count, std::uint64_t timeout_ns) override {
        if (!held_.empty()) {
            const std::uint64_t now = monotonic_ns();
            timeout_ns = std::min(timeout_ns, held_.top().due_ns - std::min(now, held_.top().due_ns));
        }
        inner_->wait(count, timeout_ns);
    }
    std::uint64_t wakes() const override { return inner_->wakes(); }

  private:
    struct Real {
        std::deque<Read> waiting;
        std::uint32_t started = 0;
    };

    void start(Real& real) {
        while (real.started < kRealDepth && !real.waiting.empty()) {
            inner_->push(&real.waiting.front(), 1);
            real.waiting.pop_front();
            ++real.started;
        }
    }

    struct Held {
        std::uint64_t due_ns;
        ReadDone done;
        bool operator<(const Held& other) const { return due_ns > other.due_ns; }  // soonest on top
    };

    const std::unique_ptr<Reader> inner_;
    const PlayedDevice played_;
    const std::string name_;
    std::array<std::uint64_t, kDevicesMax> free_ps_{};  // when the device has served its queue
    std::array<Real, kDevicesMax> real_{};
    std::vector<std::uint64_t> due_ns_;       // by token
    std::vector<std::uint32_t> device_of_;    // by token
    std::vector<ReadDone> finished_;
    std::priority_queue<Held> held_;
};

}  // namespace

std::unique_ptr<Reader> make_memory_reader(const ReaderOptions&) {
    return std::make_unique<MemoryReader>();
}

std::unique_ptr<Reader> make_played_reader(const ReaderOptions& options, const PlayedDevice& played,
                                           std::unique_ptr<Reader> inner) {
    return std::make_unique<PlayedReader>(options, played, std::move(inner));
}

}  // namespace tierd
