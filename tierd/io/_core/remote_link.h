// A connection through which pages of another node's memory are read: one interface, two kinds
// (verbs, and a queue that an outside transfer engine works off).
//
// Life: a link is made and connected by a control thread, then joins a pump, whose thread alone
// calls it from then on. It is up until its first failure; then it fails what is in flight, lets go
// of the wire and stays down for ever: a new link takes its place.
//
// Fault model: the peer may answer late, wrongly or not at all, may be killed or restarted at any
// time, and the wire may come and go. Each posted page comes back from poll() exactly once, and
// once it has, nothing writes to its target any more.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "reader.h"

namespace tierd {

// Where a contiguous run of an image's pages lies in the peer's memory.
struct RemotePlace {
    std::uint64_t first_page;
    std::uint64_t pages;
    std::uint64_t address;
    std::uint32_t key;
};

// One page to read from the peer.
struct RemotePage {
    std::uint8_t* target;
    std::uint64_t address;
    std::uint32_t key;     // the peer's, of the region that holds `address`
    std::uint32_t buffer;  // add_buffer()'s number of what holds `target`
    std::uint32_t token;
};

class RemoteLink {
  public:
    virtual ~RemoteLink() = default;
    RemoteLink() = default;
    RemoteLink(const RemoteLink&) = delete;
    RemoteLink& operator=(const RemoteLink&) = delete;

    virtual const char* transport() const = 0;

    // --- the pump's thread, or the control thread before the link joins ---------------------------
    // Memory that pages may be read into; false where it cannot be registered (then reads into it
    // fail, and trouble() says why). No page of it is in flight when it is removed.
    virtual bool add_buffer(std::uint32_t buffer, std::uint8_t* base, std::uint64_t bytes) = 0;
    virtual void remove_buffer(std::uint32_t buffer) = 0;
    virtual void post(const RemotePage* pages, std::size_t count, std::uint64_t now_ns) = 0;
    // Appends what has finished: 4,096 or a negative errno for each.
    virtual void poll(std::vector<ReadDone>& done, std::uint64_t now_ns) = 0;
    virtual std::uint32_t in_flight() const = 0;
    // Ends the link; what is in flight comes back from poll() as failed.
    virtual void fail(const std::string& why) = 0;

    // --- any thread ------------------------------------------------------------------------------
    bool up() const { return up_.load(std::memory_order_acquire); }
    // "" or why it is down.
    std::string failure() const {
        const std::lock_guard lock(mutex_);
        return failure_;
    }
    // "" or what is not as it should be although it is up.
    std::string trouble() const {
        const std::lock_guard lock(mutex_);
        return trouble_;
    }

  protected:
    void set_up() { up_.store(true, std::memory_order_release); }
    void set_down(const std::string& why) {
        const std::lock_guard lock(mutex_);
        if (failure_.empty()) failure_ = why;
        up_.store(false, std::memory_order_release);
    }
    void set_trouble(const std::string& what) {
        const std::lock_guard lock(mutex_);
        if (trouble_.empty()) trouble_ = what;
    }

  private:
    std::atomic<bool> up_{false};
    mutable std::mutex mutex_;
    std::string failure_;
    std::string trouble_;
};

}  // namespace tierd
