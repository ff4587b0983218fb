#include "reader_remote.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "channel.h"
#include "protocol.h"

namespace tierd {
namespace {

// Remote reads finish in some 10 to 300 us and wake nobody, so a pump that waits for them looks
// again and again: without a pause at first, then with short ones, which news interrupts.
constexpr std::uint64_t kSpinNs = 20'000;
constexpr std::uint64_t kNapNs = 50'000;
constexpr std::uint64_t kHeldNapNs = 2'000'000;

}  // namespace

RemoteReader::RemoteReader(const ReaderOptions& options, std::unique_ptr<Reader> local,
                           std::uint64_t hold_ns, std::function<bool(std::uint32_t)> released)
    : local_(std::move(local)),
      hold_ns_(hold_ns),
      released_(std::move(released)),
      buffers_(kBuffersMax) {
    local_batch_.reserve(options.queue_depth);
    remote_batch_.reserve(options.queue_depth);
    finished_.reserve(options.queue_depth);
    held_.reserve(options.queue_depth);
}

void RemoteReader::end() {
    // No read is in flight: the pump has drained its channels.
    for (const auto& link : links_) link->fail("the pump has stopped");
    poll_links(monotonic_ns());
    while (!leaving_.empty()) clear_leaving();
    local_->end();
}

void RemoteReader::remove_device(std::uint32_t device) {
    if (devices_[device].remote)
        devices_[device] = {};
    else
        local_->remove_device(device);
}

// --- memory to read into -------------------------------------------------------------------------

std::int32_t RemoteReader::reserve_buffers(std::uint32_t count) {
    const auto at = std::search_n(buffers_.begin(), buffers_.end(), count, true,
                                  [](const Buffer& b, bool) { return !b.used; });
    if (at == buffers_.end()) return kNoBuffer;
    const std::int32_t local = local_->reserve_buffers(count);
    for (std::uint32_t i = 0; i < count; ++i)
        at[i] = {true, local == kNoBuffer ? kNoBuffer : local + static_cast<std::int32_t>(i), nullptr, 0};
    const auto first = static_cast<std::size_t>(at - buffers_.begin());
    buffers_end_ = std::max(buffers_end_, first + count);
    return static_cast<std::int32_t>(first);
}

bool RemoteReader::register_buffer(std::int32_t buffer, std::uint8_t* base, std::uint64_t bytes) {
    Buffer& b = buffers_[static_cast<std::size_t>(buffer)];
    b.base = base;
    b.bytes = bytes;
    // Either may be refused by itself: the reads go on without, and each says why.
    if (b.local != kNoBuffer && !local_->register_buffer(b.local, base, bytes)) {
        local_->release_buffers(b.local, 1);
        b.local = kNoBuffer;
    }
    for (const auto& link : links_) link->add_buffer(static_cast<std::uint32_t>(buffer), base, bytes);
    return true;
}

void RemoteReader::release_buffers(std::int32_t first, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) {
        const auto number = static_cast<std::size_t>(first) + i;
        Buffer& b = buffers_[number];
        if (b.base != nullptr) {
            for (const auto& link : links_) link->remove_buffer(static_cast<std::uint32_t>(number));
            for (const Leaving& one : leaving_)
                one.link->remove_buffer(static_cast<std::uint32_t>(number));
            if (joining_ != nullptr) joining_->remove_buffer(static_cast<std::uint32_t>(number));
        }
        if (b.local != kNoBuffer) local_->release_buffers(b.local, 1);
        b = {};
    }
}

bool RemoteReader::join(const std::shared_ptr<RemoteLink>& link, std::int32_t& next_buffer) {
    // What the last link has pinned, its successor can use.
    if (!leaving_.empty()) {
        clear_leaving();
        return false;
    }
    joining_ = link;  // channels drain meanwhile, and release buffers that it has already
    for (auto i = static_cast<std::size_t>(next_buffer); i < buffers_end_; ++i) {
        const Buffer& b = buffers_[i];
        if (b.base == nullptr) continue;
        link->add_buffer(static_cast<std::uint32_t>(i), b.base, b.bytes);
        next_buffer = static_cast<std::int32_t>(i) + 1;
        return false;
    }
    links_.push_back(std::move(joining_));
    return true;
}

void RemoteReader::attach(std::uint32_t device, RemoteLink& link, std::vector<RemotePlace> places) {
    devices_[device].link = &link;
    devices_[device].places = std::move(places);
}

// --- reads ---------------------------------------------------------------------------------------

void RemoteReader::push(const Read* reads, std::size_t count) {
    const std::uint64_t now = links_.empty() && held_.empty() ? 0 : monotonic_ns();
    local_batch_.clear();
    for (std::size_t i = 0; i < count;) {
        const RemoteDevice& device = devices_[reads[i].device];
        if (!device.remote) {
            Read read = reads[i++];
            if (read.buffer != kNoBuffer) read.buffer = buffers_[static_cast<std::size_t>(read.buffer)].local;
            local_batch_.push_back(read);
            continue;
        }
        std::size_t run = 1;
        while (i + run < count && reads[i + run].device == reads[i].device) ++run;
        if (!post(reads + i, run, now))
            for (std::size_t k = i; k < i + run; ++k) refuse(reads[k], now);
        i += run;
    }
    if (!local_batch_.empty()) local_->push(local_batch_.data(), local_batch_.size());
}

// Reads of one device. False if its peer is away.
bool RemoteReader::post(const Read* reads, std::size_t count, std::uint64_t now_ns) {
    const RemoteDevice& device = devices_[reads[0].device];
    if (device.link == nullptr || !device.link->up()) return false;
    remote_batch_.clear();
    const RemotePlace* place = &device.places.front();
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t page = reads[i].offset / kPageBytes;
        if (page - place->first_page >= place->pages) {
            const auto after =
                std::upper_bound(device.places.begin(), device.places.end(), page,
                                 [](std::uint64_t p, const RemotePlace& r) { return p < r.first_page; });
            place = &*(after - 1);
        }
        remote_batch_.push_back({reads[i].target, place->address + (page - place->first_page) * kPageBytes,
                                 place->key, static_cast<std::uint32_t>(reads[i].buffer), reads[i].token});
    }
    device.link->post(remote_batch_.data(), remote_batch_.size(), now_ns);
    return true;
}

// The pump only reads from a peer that is away when there is no other tier left: the read waits for
// a while, since the peer may be back soon.
void RemoteReader::refuse(const Read& read, std::uint64_t now_ns) {
    if (hold_ns_ == 0) {
        finished_.push_back({read.token, kHeldInVain});
        return;
    }
    held_.push_back({read, (now_ns != 0 ? now_ns : monotonic_ns()) + hold_ns_});
}

void RemoteReader::retry_held(std::uint64_t now_ns) {
    for (std::size_t i = 0; i < held_.size();) {
        const Read read = held_[i].read;
        if (!ready(read.device) && now_ns < held_[i].until_ns &&
            !(released_ && released_(read.token))) {
            ++i;
            continue;
        }
        held_[i] = held_.back();
        held_.pop_back();
        if (!post(&read, 1, now_ns)) finished_.push_back({read.token, kHeldInVain});
    }
}

void RemoteReader::poll_links(std::uint64_t now_ns) {
    for (std::size_t i = 0; i < links_.size();) {
        RemoteLink& link = *links_[i];
        link.poll(finished_, now_ns);
        if (link.up() || link.in_flight() != 0) {
            ++i;
            continue;
        }
        for (RemoteDevice& device : devices_)
            if (device.link == &link) device = {true, nullptr, {}};
        leaving_.push_back({std::move(links_[i]), 0});
        links_.erase(links_.begin() + static_cast<std::ptrdiff_t>(i));
    }
}

// One buffer a round, as everywhere else: the kernel unpins page by page.
void RemoteReader::clear_leaving() {
    Leaving& last = leaving_.back();
    while (last.next_buffer < buffers_end_) {
        const std::size_t number = last.next_buffer++;
        if (buffers_[number].base == nullptr) continue;
        last.link->remove_buffer(static_cast<std::uint32_t>(number));
        return;
    }
    ended_.push_back(std::move(last.link));
    leaving_.pop_back();
}

std::size_t RemoteReader::reap(ReadDone* done, std::size_t room) {
    if (!leaving_.empty()) clear_leaving();
    if (!links_.empty() || !held_.empty()) {
        const std::uint64_t now = monotonic_ns();
        poll_links(now);
        if (!held_.empty()) retry_held(now);
    }
    std::size_t n = std::min(room, finished_.size());
    std::copy_n(finished_.begin(), n, done);
    finished_.erase(finished_.begin(), finished_.begin() + static_cast<std::ptrdiff_t>(n));
    if (n < room) n += local_->reap(done + n, room - n);
    return n;
}

std::uint32_t RemoteReader::remote_in_flight() const {
    std::uint32_t count = 0;
    for (const auto& link : links_) count += link->in_flight();
    return count;
}

void RemoteReader::wait(std::uint32_t count, std::uint64_t timeout_ns) {
    local_->submit();
    if (!finished_.empty()) return;
    if (!leaving_.empty()) timeout_ns = std::min(timeout_ns, kNapNs);
    if (remote_in_flight() == 0) {
        local_->wait(count, held_.empty() ? timeout_ns : std::min(timeout_ns, kHeldNapNs));
        return;
    }
    const std::uint64_t start = monotonic_ns();
    for (std::uint64_t now = start; now - start < kSpinNs; now = monotonic_ns()) {
        poll_links(now);
        if (!finished_.empty()) return;
    }
    local_->wait(1, std::min(timeout_ns, kNapNs));
}

}  // namespace tierd
