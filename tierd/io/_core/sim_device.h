// A disk that lies: pages in memory, a volatile write cache, and faults that come from a seed.
//
// What the model holds apart:
//
//     volatile image   what a read returns: every acknowledged write, flushed or not
//     durable image    what is left after a power loss: flushed writes, and of the others a subset
//     older image      each page as it was before its last write, for stale reads; a discard in
//                      between changes nothing of it, as a disk may find what it had there before
//
// At a power loss every unflushed write survives, is lost, or is torn at sector granularity, each
// independently of the others: so the order of unflushed writes means nothing, as on a real disk.
// Overlapping survivors keep their order.
//
// Everything that happens follows from the seed and the calls made. A device belongs to one thread
// at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "protocol.h"

namespace tierd {

// splitmix64: one word of state, every seed is a good one.
class SimRandom {
  public:
    explicit SimRandom(std::uint64_t seed) : state_(seed) {}
    std::uint64_t next() {
        std::uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }
    // 0..limit-1; the bias of the modulo is below limit / 2^64.
    std::uint64_t below(std::uint64_t limit) { return limit == 0 ? 0 : next() % limit; }
    bool one_in(std::uint64_t n) { return below(n) == 0; }

  private:
    std::uint64_t state_;
};

inline constexpr std::uint32_t kSectorBytes = 512;

enum class SimZone : std::uint32_t { roots = 0, tables = 1, data = 2 };
inline constexpr std::size_t kSimZones = 3;

// A fault of a read concerns one page of it, drawn at random; `for ever` is until the page is
// written anew, as on a disk that remaps a bad sector.
enum class SimFault : std::uint32_t {
    short_read = 0,        // fewer bytes than asked
    read_error = 1,        // EIO, once
    dead_page = 2,         // EIO, for ever
    slow_read = 3,         // the completion is held back; for the pump's reads only
    misdirected_read = 4,  // another page's bytes
    stale_read = 5,        // the page as it was before its last write
    flipped_read = 6,      // one bit of what was read
    rotten_page = 7,       // one bit at rest, for ever
    write_error = 8,       // EIO; nothing or a part was written
    lost_write = 9,        // acknowledged, never written
    torn_write = 10,       // acknowledged, some sectors never written
    misdirected_write = 11,  // acknowledged, written somewhere else
    flush_error = 12,      // EIO; a part became durable
};
inline constexpr std::size_t kSimFaults = 13;
const char* sim_fault_name(SimFault fault);

// What becomes of unflushed writes at a power loss.
enum class SimLoss : std::uint32_t {
    random = 0,  // each survives, is lost or is torn
    none = 1,    // all survive (and so at a killed process)
    all = 2,     // all are lost
    first = 3,   // all but the first survive: later writes overtook an earlier one
    last = 4,    // all but the last survive
    torn = 5,    // each is torn
};

// The machine's power, shared by its devices: counts their writes and flushes, and goes when told.
class SimPower {
  public:
    // Right before write or flush number `operations` from now, or before flush number `flushes`.
    void cut_after(std::uint64_t operations) { cut_at_ = operations_ + operations; }
    void cut_after_flushes(std::uint64_t flushes) { cut_at_flush_ = flushes_ + flushes; }
    void cut_never() { cut_at_ = cut_at_flush_ = ~0ull; }
    bool cut() const { return cut_; }
    std::uint64_t operations() const { return operations_; }
    // Counts one; false if the power is gone.
    bool take(bool flush) {
        if (operations_ == cut_at_ || (flush && flushes_ == cut_at_flush_)) cut_ = true;
        if (cut_) return false;
        ++operations_;
        flushes_ += flush;
        return true;
    }
    void restore() {
        cut_ = false;
        cut_never();
    }

  private:
    std::uint64_t operations_ = 0;
    std::uint64_t flushes_ = 0;
    std::uint64_t cut_at_ = ~0ull;
    std::uint64_t cut_at_flush_ = ~0ull;
    bool cut_ = false;
};

class SimDevice {
  public:
    // `bytes` is a multiple of 4,096; zones end at `tables_start`, `data_start` and `bytes`.
    SimDevice(std::uint64_t bytes, std::uint64_t tables_start, std::uint64_t data_start,
              std::uint64_t seed, std::shared_ptr<SimPower> power);
    ~SimDevice();
    SimDevice(const SimDevice&) = delete;
    SimDevice& operator=(const SimDevice&) = delete;

    std::uint64_t bytes() const { return bytes_; }
    // An empty memfd of the device's size: stands for its file where a descriptor is wanted, so
    // that leases and descriptor passing are the real thing. Owned by the device.
    int fd() const { return fd_; }

    // How often (in millionths of the operations in a zone) and how many times at most.
    void set_fault(SimFault fault, SimZone zone, std::uint32_t millionths, std::uint32_t limit);
    void clear_faults();

    // As preadv, pwritev and fdatasync: bytes or -errno. -ESHUTDOWN once the power was cut.
    std::int64_t read(std::uint64_t offset, std::uint8_t* target, std::uint64_t size);
    std::int64_t write(std::uint64_t offset, const std::uint8_t* source, std::uint64_t size);
    std::int64_t flush();
    // The range's content is given up: it reads as zeroes or as before.
    std::int64_t discard(std::uint64_t offset, std::uint64_t size);

    // Turns by which a read's completion is to be delayed (a slow_read), mostly 0.
    std::uint32_t draw_delay(std::uint64_t offset);

    // After a power cut: decides what became of the unflushed writes.
    void settle(SimLoss loss);
    std::size_t unflushed() const { return pending_.size(); }

    // For checkers and tests: what lies there without any fault, changing it, and what is known to
    // be wrong with a page.
    void peek(std::uint64_t offset, std::uint8_t* target, std::uint64_t size) const;
    // One bit of a page rots, as a rotten_page fault does it.
    void rot(std::uint64_t page);
    void condemn(std::uint64_t page) { flags_[page] = durable_flags_[page] = kRotten; }
    void poke(std::uint64_t offset, const std::uint8_t* source, std::uint64_t size);
    bool damaged(std::uint64_t page) const { return flags_[page] != 0; }
    bool dead(std::uint64_t page) const { return (flags_[page] & kDead) != 0; }
    // Times that a read of this page gave anything but its right bytes.
    std::uint32_t faulty_reads(std::uint64_t page) const { return faulty_reads_[page]; }
    // Of those, times that a bit of it was flipped on the way.
    std::uint32_t flipped_reads(std::uint64_t page) const { return flipped_reads_[page]; }
    std::uint64_t count(SimFault fault, SimZone zone) const {
        return counts_[index(fault)][static_cast<std::size_t>(zone)];
    }
    // Faults that left a mark in a zone (rot, dead pages, writes that went wrong).
    std::uint64_t scars(SimZone zone) const { return scars_[static_cast<std::size_t>(zone)]; }

    // A copy of everything but the faults' settings, to return to.
    struct Snapshot {
        std::vector<std::uint8_t> durable;
        std::vector<std::uint8_t> flags;
    };
    Snapshot snapshot() const;  // of a flushed device
    void restore(const Snapshot& snapshot);

  private:
    struct Mapping {  // anonymous memory: zero pages cost nothing until they are written
        explicit Mapping(std::uint64_t bytes);
        ~Mapping();
        Mapping(const Mapping&) = delete;
        Mapping& operator=(const Mapping&) = delete;
        std::uint8_t* data;
        std::uint64_t bytes;
    };
    struct Fault {
        std::uint32_t millionths = 0;
        std::uint32_t left = 0;
    };
    struct Pending {
        std::uint64_t offset;
        std::vector<std::uint8_t> data;
        bool damaging;  // a write that went where it should not, or not whole
    };

    static constexpr std::uint8_t kRotten = 1;  // bytes differ from what should be there
    static constexpr std::uint8_t kDead = 2;    // EIO

    static std::size_t index(SimFault fault) { return static_cast<std::size_t>(fault); }
    SimZone zone_of(std::uint64_t offset) const;
    bool draw(SimFault fault, std::uint64_t offset);
    void note(std::uint64_t page) { ++faulty_reads_[page]; }
    void scar(std::uint64_t page, std::uint8_t flag);
    void hurt_at_rest(std::uint64_t page);
    void hurt_in_flight(std::uint64_t page, std::uint64_t offset, std::uint8_t* target,
                        std::uint64_t size);
    void put(std::uint64_t offset, const std::uint8_t* source, std::uint64_t size, bool damaging);
    void place(std::uint64_t offset, const std::uint8_t* source, std::uint64_t size, bool damaging);
    void remember(std::uint64_t offset, std::uint64_t size, bool discard);
    std::uint64_t byte_to_flip(const std::uint8_t* bytes, std::uint64_t size);
    void put_torn(std::uint64_t offset, const std::uint8_t* source, std::uint64_t size);
    std::uint64_t look_alike(std::uint64_t page);
    std::uint64_t misdirect(std::uint64_t offset, std::uint64_t size);
    void harden(const Pending& write);
    void harden_torn(const Pending& write);
    static void mark(std::vector<std::uint8_t>& flags, std::uint64_t offset, std::uint64_t size,
                     bool damaging);

    const std::uint64_t bytes_;
    const std::uint64_t tables_start_;
    const std::uint64_t data_start_;
    SimRandom random_;
    const std::shared_ptr<SimPower> power_;
    int fd_ = -1;
    Mapping volatile_;
    Mapping durable_;
    Mapping older_;
    std::vector<std::uint8_t> flags_;          // per page, of the volatile image
    std::vector<std::uint8_t> durable_flags_;  // of the durable one
    std::vector<std::uint8_t> has_older_;
    std::vector<std::uint8_t> discarded_;  // per page, since its last write
    std::vector<std::uint32_t> faulty_reads_;
    std::vector<std::uint32_t> flipped_reads_;
    std::vector<Pending> pending_;
    std::array<std::array<Fault, kSimZones>, kSimFaults> faults_{};
    std::array<std::array<std::uint64_t, kSimZones>, kSimFaults> counts_{};
    std::array<std::uint64_t, kSimZones> scars_{};
};

// The device whose fd() a descriptor was duplicated or reopened from, or null.
std::shared_ptr<SimDevice> find_sim_device(int fd);
// Makes a device and enters it where find_sim_device looks.
std::shared_ptr<SimDevice> make_sim_device(std::uint64_t bytes, std::uint64_t tables_start,
                                           std::uint64_t data_start, std::uint64_t seed,
                                           std::shared_ptr<SimPower> power);

}  // namespace tierd
