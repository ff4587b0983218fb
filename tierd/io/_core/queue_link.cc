#include "queue_link.h"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "protocol.h"

namespace tierd {

QueueLink::QueueLink(std::uint32_t depth, std::uint64_t timeout_ns)
    : timeout_ns_(timeout_ns), slots_(depth) {
    if (depth == 0 || depth > kQueueDepthMax) throw std::invalid_argument("depth must be 1 to 4096");
    void* mapped = mmap(nullptr, static_cast<std::size_t>(depth) * kPageBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    memory_ = static_cast<std::uint8_t*>(mapped);
    event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    waiting_.reserve(depth);
    done_.reserve(depth);
    for (std::uint32_t i = depth; i-- != 0;) free_.push_back(static_cast<std::int32_t>(i));
}

QueueLink::~QueueLink() {
    munmap(memory_, slots_.size() * kPageBytes);
    close(event_fd_);
}

void QueueLink::post(const RemotePage* pages, std::size_t count, std::uint64_t now_ns) {
    bool news = false;
    in_flight_ += static_cast<std::uint32_t>(count);
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < count; ++i) {
        if (failed_ || free_.empty()) {  // slots of a slow engine may be taken for longer than reads
            done_.push_back({pages[i].token, failed_ ? -ENOTCONN : -EBUSY});
            continue;
        }
        const std::int32_t slot = free_.back();
        free_.pop_back();
        slots_[static_cast<std::size_t>(slot)] = {
            pages[i].target, pages[i].token, static_cast<std::int32_t>(pages[i].address / kPageBytes),
            now_ns};
        news |= waiting_.empty();
        waiting_.push_back(slot);
    }
    if (news) ring_eventfd(event_fd_);
}

std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>> QueueLink::take(std::uint32_t most) {
    const std::lock_guard lock(mutex_);
    drain_eventfd(event_fd_);
    const std::size_t count = std::min<std::size_t>(most, waiting_.size());
    const auto end = waiting_.begin() + static_cast<std::ptrdiff_t>(count);
    std::vector<std::int32_t> slots(waiting_.begin(), end), pages;
    waiting_.erase(waiting_.begin(), end);
    for (const std::int32_t slot : slots) pages.push_back(slots_[static_cast<std::size_t>(slot)].page);
    if (!waiting_.empty()) ring_eventfd(event_fd_);
    return {std::move(slots), std::move(pages)};
}

void QueueLink::finish(const std::int32_t* slots, std::size_t count, bool whole) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < count; ++i) {
        const auto number = static_cast<std::size_t>(slots[i]);
        if (number >= slots_.size()) throw std::invalid_argument("there is no such slot");
        Slot& slot = slots_[number];
        if (slot.target != nullptr) {
            if (whole) std::memcpy(slot.target, memory_ + number * kPageBytes, kPageBytes);
            done_.push_back({slot.token, whole ? static_cast<std::int32_t>(kPageBytes) : -EIO});
        }
        slot = {};
        free_.push_back(slots[i]);
    }
}

void QueueLink::poll(std::vector<ReadDone>& done, std::uint64_t now_ns) {
    if (in_flight_ == 0) return;
    const std::lock_guard lock(mutex_);
    if (!failed_ && done_.empty())
        for (const Slot& slot : slots_)
            if (slot.target != nullptr && now_ns > slot.posted_ns &&
                now_ns - slot.posted_ns > timeout_ns_) {
                fail_locked("a read was not answered within " + std::to_string(timeout_ns_ / 1000) +
                            " us (remote.timeout_us): the peer or the way to it is gone");
                break;
            }
    in_flight_ -= static_cast<std::uint32_t>(done_.size());
    done.insert(done.end(), done_.begin(), done_.end());
    done_.clear();
}

void QueueLink::fail(const std::string& why) {
    const std::lock_guard lock(mutex_);
    fail_locked(why);
}

void QueueLink::fail_locked(const std::string& why) {
    if (failed_) return;
    failed_ = true;
    set_down(why);
    waiting_.clear();
    for (Slot& slot : slots_) {
        if (slot.target == nullptr) continue;
        done_.push_back({slot.token, -EIO});
        slot.target = nullptr;  // what still comes meets nobody
    }
    ring_eventfd(event_fd_);
}

}  // namespace tierd
