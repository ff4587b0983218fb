// A reader that also reads from other nodes: local devices go to the reader below it, remote ones
// to their link. A remote device is the image of one peer; it comes and goes with its link.
#pragma once

#include <array>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reader.h"
#include "remote_link.h"

namespace tierd {

// The result of a read whose peer was away for as long as the read was held.
inline constexpr std::int32_t kHeldInVain = -ETIMEDOUT;

class RemoteReader final : public Reader {
  public:
    // `hold_ns`: how long a read that has nowhere else to go waits for its peer to come back.
    // `released`: whether a held read need not wait any more; it ends as if its time were over.
    RemoteReader(const ReaderOptions& options, std::unique_ptr<Reader> local, std::uint64_t hold_ns,
                 std::function<bool(std::uint32_t token)> released = {});

    const char* name() const override { return local_->name(); }
    std::string reason() const override { return local_->reason(); }
    void begin() override { local_->begin(); }
    void end() override;
    void add_device(std::uint32_t device, int fd) override { local_->add_device(device, fd); }
    void remove_device(std::uint32_t device) override;
    std::int32_t reserve_buffers(std::uint32_t count) override;
    bool register_buffer(std::int32_t buffer, std::uint8_t* base, std::uint64_t bytes) override;
    void release_buffers(std::int32_t first, std::uint32_t count) override;
    void push(const Read* reads, std::size_t count) override;
    void submit() override { local_->submit(); }
    std::size_t reap(ReadDone* done, std::size_t room) override;
    void wait(std::uint32_t count, std::uint64_t timeout_ns) override;
    std::uint64_t wakes() const override { return local_->wakes(); }

    // --- remote devices, the pump's thread --------------------------------------------------------
    void add_remote(std::uint32_t device) { devices_[device] = {true, nullptr, {}}; }
    bool is_remote(std::uint32_t device) const { return devices_[device].remote; }
    // Whether a read of the device would be posted now. Local ones always are.
    bool ready(std::uint32_t device) const {
        const RemoteDevice& d = devices_[device];
        return !d.remote || (d.link != nullptr && d.link->up());
    }
    // Registers the memory that is read into, one chunk a call; true once all of it is.
    bool join(const std::shared_ptr<RemoteLink>& link, std::int32_t& next_buffer);
    void attach(std::uint32_t device, RemoteLink& link, std::vector<RemotePlace> places);
    // Links that are done with, to be let go of on another thread: the last holder of one made in
    // Python waits for Python's lock, and taking a link apart takes a while in any case.
    std::vector<std::shared_ptr<RemoteLink>> take_ended() { return std::exchange(ended_, {}); }

  private:
    struct RemoteDevice {
        bool remote = false;
        RemoteLink* link = nullptr;
        std::vector<RemotePlace> places;  // sorted, without holes
    };
    struct Buffer {
        bool used = false;
        std::int32_t local = kNoBuffer;
        std::uint8_t* base = nullptr;
        std::uint64_t bytes = 0;
    };
    struct Leaving {
        std::shared_ptr<RemoteLink> link;
        std::size_t next_buffer = 0;
    };
    struct Held {
        Read read;
        std::uint64_t until_ns;
    };

    bool post(const Read* reads, std::size_t count, std::uint64_t now_ns);
    void refuse(const Read& read, std::uint64_t now_ns);
    void retry_held(std::uint64_t now_ns);
    void poll_links(std::uint64_t now_ns);
    void clear_leaving();
    std::uint32_t remote_in_flight() const;

    const std::unique_ptr<Reader> local_;
    const std::uint64_t hold_ns_;
    const std::function<bool(std::uint32_t token)> released_;
    std::array<RemoteDevice, kDevicesMax> devices_{};
    std::vector<std::shared_ptr<RemoteLink>> links_;
    // Those that hold buffers too, and so are told of each that is released: what stays registered
    // would be taken for the next memory that is mapped at the same address.
    std::shared_ptr<RemoteLink> joining_;
    std::vector<Leaving> leaving_;
    std::vector<std::shared_ptr<RemoteLink>> ended_;
    std::vector<Buffer> buffers_;
    std::size_t buffers_end_ = 0;  // none at or behind it was ever used
    std::vector<Read> local_batch_;
    std::vector<RemotePage> remote_batch_;
    std::vector<ReadDone> finished_;
    std::vector<Held> held_;
};

}  // namespace tierd
