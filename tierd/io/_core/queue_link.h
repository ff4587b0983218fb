// A link whose pages an outside transfer engine fetches: it takes batches of page numbers, reads
// them into memory of this link, and says when they have come; then they are copied to where the
// pump wants them.
//
// The copy (0.3 us a page) is what makes such an engine safe to use: it need not be able to cancel a
// read, since what it writes late meets nobody's page, and it registers one piece of memory once.
//
// A page's `address` is its number in the engine's own list, times 4,096; the key is not used.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "remote_link.h"

namespace tierd {

class QueueLink final : public RemoteLink {
  public:
    QueueLink(std::uint32_t depth, std::uint64_t timeout_ns);
    ~QueueLink() override;

    // --- the engine's thread ----------------------------------------------------------------------
    // The memory to read into: slot s is its page s.
    std::uint8_t* memory() const { return memory_; }
    std::uint32_t depth() const { return static_cast<std::uint32_t>(slots_.size()); }
    // An eventfd that is readable when there is something to take, or the link has failed.
    int event_fd() const { return event_fd_; }
    void open() { set_up(); }
    // Slots, and the page numbers to read into them; at most `most`.
    std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>> take(std::uint32_t most);
    // These slots hold their pages, or will never.
    void finish(const std::int32_t* slots, std::size_t count, bool whole);

    const char* transport() const override { return "nixl"; }
    bool add_buffer(std::uint32_t, std::uint8_t*, std::uint64_t) override { return true; }
    void remove_buffer(std::uint32_t) override {}
    void post(const RemotePage* pages, std::size_t count, std::uint64_t now_ns) override;
    void poll(std::vector<ReadDone>& done, std::uint64_t now_ns) override;
    std::uint32_t in_flight() const override { return in_flight_; }
    void fail(const std::string& why) override;

  private:
    struct Slot {
        std::uint8_t* target = nullptr;  // null: nobody waits for it
        std::uint32_t token = 0;
        std::int32_t page = 0;
        std::uint64_t posted_ns = 0;
    };
    void fail_locked(const std::string& why);

    const std::uint64_t timeout_ns_;
    std::uint8_t* memory_ = nullptr;
    int event_fd_ = -1;
    std::uint32_t in_flight_ = 0;  // the pump's thread alone: posted and not polled
    std::mutex mutex_;             // guards everything below
    std::vector<Slot> slots_;
    std::vector<std::int32_t> free_;
    std::vector<std::int32_t> waiting_;
    std::vector<ReadDone> done_;
    bool failed_ = false;
};

}  // namespace tierd
