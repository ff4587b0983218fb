#include "sim_device.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "page.h"

namespace tierd {
namespace {

constexpr std::uint32_t kMillion = 1'000'000;
constexpr std::uint32_t kDelayTurnsMin = 20;  // of a slow read
constexpr std::uint32_t kDelayTurnsMax = 200;
constexpr std::uint64_t kNeighbours = 8;  // pages away that a misdirected access mostly lands
constexpr int kFlipDraws = 4;             // for a byte that is not zero

std::uint64_t page_of(std::uint64_t offset) { return offset / kPageBytes; }
std::uint64_t pages_end(std::uint64_t offset, std::uint64_t size) {
    return (offset + size + kPageBytes - 1) / kPageBytes;
}

}  // namespace

const char* sim_fault_name(SimFault fault) {
    switch (fault) {
        case SimFault::short_read: return "short_read";
        case SimFault::read_error: return "read_error";
        case SimFault::dead_page: return "dead_page";
        case SimFault::slow_read: return "slow_read";
        case SimFault::misdirected_read: return "misdirected_read";
        case SimFault::stale_read: return "stale_read";
        case SimFault::flipped_read: return "flipped_read";
        case SimFault::rotten_page: return "rotten_page";
        case SimFault::write_error: return "write_error";
        case SimFault::lost_write: return "lost_write";
        case SimFault::torn_write: return "torn_write";
        case SimFault::misdirected_write: return "misdirected_write";
        case SimFault::flush_error: return "flush_error";
    }
    return "unknown";
}

SimDevice::Mapping::Mapping(std::uint64_t size) : data(nullptr), bytes(size) {
    void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    data = static_cast<std::uint8_t*>(mapped);
}

SimDevice::Mapping::~Mapping() { munmap(data, bytes); }

SimDevice::SimDevice(std::uint64_t bytes, std::uint64_t tables_start, std::uint64_t data_start,
                     std::uint64_t seed, std::shared_ptr<SimPower> power)
    : bytes_(bytes),
      tables_start_(tables_start),
      data_start_(data_start),
      random_(seed),
      power_(std::move(power)),
      volatile_(bytes),
      durable_(bytes),
      older_(bytes),
      flags_(page_of(bytes)),
      durable_flags_(page_of(bytes)),
      has_older_(page_of(bytes)),
      discarded_(page_of(bytes)),
      faulty_reads_(page_of(bytes)),
      flipped_reads_(page_of(bytes)) {
    fd_ = memfd_create("tierd-sim-device", MFD_CLOEXEC);
    if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(bytes)) != 0) {
        const int error = errno;
        if (fd_ >= 0) close(fd_);
        throw std::system_error(error, std::generic_category(), "memfd of a simulated device");
    }
}

SimDevice::~SimDevice() { close(fd_); }

SimZone SimDevice::zone_of(std::uint64_t offset) const {
    if (offset < tables_start_) return SimZone::roots;
    return offset < data_start_ ? SimZone::tables : SimZone::data;
}

void SimDevice::set_fault(SimFault fault, SimZone zone, std::uint32_t millionths,
                          std::uint32_t limit) {
    faults_[index(fault)][static_cast<std::size_t>(zone)] = {millionths, limit};
}

void SimDevice::clear_faults() { faults_ = {}; }

bool SimDevice::draw(SimFault fault, std::uint64_t offset) {
    const SimZone zone = zone_of(offset);
    Fault& setting = faults_[index(fault)][static_cast<std::size_t>(zone)];
    if (setting.left == 0 || random_.below(kMillion) >= setting.millionths) return false;
    --setting.left;
    ++counts_[index(fault)][static_cast<std::size_t>(zone)];
    return true;
}

void SimDevice::scar(std::uint64_t page, std::uint8_t flag) {
    flags_[page] |= flag;
    ++scars_[static_cast<std::size_t>(zone_of(page * kPageBytes))];
}

std::uint32_t SimDevice::draw_delay(std::uint64_t offset) {
    if (!draw(SimFault::slow_read, offset)) return 0;
    return kDelayTurnsMin +
           static_cast<std::uint32_t>(random_.below(kDelayTurnsMax - kDelayTurnsMin));
}

// --- reading -------------------------------------------------------------------------------------

std::int64_t SimDevice::read(std::uint64_t offset, std::uint8_t* target, std::uint64_t size) {
    if (power_->cut()) return -ESHUTDOWN;
    if (offset >= bytes_) return 0;
    size = std::min(size, bytes_ - offset);
    const std::uint64_t first = page_of(offset);
    const std::uint64_t end = pages_end(offset, size);
    const std::uint64_t page = first + random_.below(end - first);
    hurt_at_rest(page);
    bool dead = false;
    for (std::uint64_t p = first; p < end; ++p) {
        if (flags_[p] != 0) note(p);
        dead = dead || (flags_[p] & kDead) != 0;
    }
    if (dead) return -EIO;
    if (draw(SimFault::read_error, offset)) {
        note(page);
        return -EIO;
    }
    if (draw(SimFault::short_read, offset)) {
        note(page);
        size = random_.below(size / kSectorBytes) * kSectorBytes;
    }
    std::memcpy(target, volatile_.data + offset, size);
    if (size > (page * kPageBytes < offset ? 0 : page * kPageBytes - offset))
        hurt_in_flight(page, offset, target, size);
    return static_cast<std::int64_t>(size);
}

void SimDevice::hurt_at_rest(std::uint64_t page) {
    const std::uint64_t start = page * kPageBytes;
    if (draw(SimFault::dead_page, start)) {
        scar(page, kDead);
        durable_flags_[page] |= kDead;
    }
    if (draw(SimFault::rotten_page, start)) rot(page);
}

// Mostly one that holds something: a root and a short table are nearly all zeroes.
std::uint64_t SimDevice::byte_to_flip(const std::uint8_t* bytes, std::uint64_t size) {
    std::uint64_t byte = random_.below(size);
    for (int draw = 1; draw < kFlipDraws && bytes[byte] == 0; ++draw) byte = random_.below(size);
    return byte;
}

void SimDevice::rot(std::uint64_t page) {
    const std::uint64_t start = page * kPageBytes;
    const std::uint64_t byte = start + byte_to_flip(volatile_.data + start, kPageBytes);
    const auto bit = static_cast<std::uint8_t>(1u << random_.below(8));
    volatile_.data[byte] ^= bit;
    durable_.data[byte] ^= bit;
    scar(page, kRotten);
    durable_flags_[page] |= kRotten;
}

// Faults of one page's bytes on their way: the part of it that was asked for is what changes.
void SimDevice::hurt_in_flight(std::uint64_t page, std::uint64_t offset, std::uint8_t* target,
                               std::uint64_t size) {
    const std::uint64_t start = std::max(page * kPageBytes, offset);
    const std::uint64_t stop = std::min((page + 1) * std::uint64_t{kPageBytes}, offset + size);
    std::uint8_t* part = target + (start - offset);
    const std::uint64_t length = stop - start;
    const auto replace = [&](const std::uint8_t* source) {
        if (std::memcmp(part, source, length) == 0) return;
        std::memcpy(part, source, length);
        note(page);
    };
    if (draw(SimFault::misdirected_read, start))
        replace(volatile_.data + misdirect(start, kPageBytes) + start % kPageBytes);
    if (has_older_[page] != 0 && draw(SimFault::stale_read, start)) replace(older_.data + start);
    if (draw(SimFault::flipped_read, start)) {
        part[byte_to_flip(part, length)] ^= static_cast<std::uint8_t>(1u << random_.below(8));
        note(page);
        ++flipped_reads_[page];
    }
}

// A page of the same number in another generation, else in another image, else `page`: where a
// misdirected access does the most harm.
std::uint64_t SimDevice::look_alike(std::uint64_t page) {
    const auto trailer = [this](std::uint64_t number) {
        PageTrailer found;
        const std::uint8_t* end = volatile_.data + (number + 1) * kPageBytes;
        std::memcpy(&found, end - kTrailerBytes, kTrailerBytes);
        return found;
    };
    const PageTrailer own = trailer(page);
    std::vector<std::uint64_t> generations, images;
    for (std::uint64_t other = page_of(data_start_); other < page_of(bytes_); ++other) {
        const PageTrailer its = trailer(other);
        if (its.magic != kPageMagic || its.page != own.page) continue;
        if (its.image_id != own.image_id)
            images.push_back(other);
        else if (its.generation != own.generation)
            generations.push_back(other);
    }
    if (own.magic != kPageMagic || (generations.empty() && images.empty())) return page;
    const auto& found = generations.empty() || (!images.empty() && random_.one_in(3)) ? images : generations;
    return found[random_.below(found.size())];
}

// Another place of `size` bytes: a near one, the same place in a near stripe, one that looks alike,
// or anywhere.
std::uint64_t SimDevice::misdirect(std::uint64_t offset, std::uint64_t size) {
    const std::uint64_t page = page_of(offset);
    if (random_.one_in(2)) {
        const std::uint64_t alike = look_alike(page);
        if (alike != page) return alike * kPageBytes;
    }
    const std::uint64_t last = page_of(bytes_ - size);
    const std::uint64_t step = random_.one_in(2) ? kNeighbours : 1;
    const std::uint64_t low = page > kNeighbours * step ? page - kNeighbours * step : page % step;
    std::uint64_t other = std::min(last, low + step * random_.below(2 * kNeighbours + 1));
    if (random_.one_in(4)) other = random_.below(last + 1);
    if (other == page) other = page == last ? 0 : page + 1;
    return other * kPageBytes;
}

// --- writing -------------------------------------------------------------------------------------

void SimDevice::mark(std::vector<std::uint8_t>& flags, std::uint64_t offset, std::uint64_t size,
                     bool damaging) {
    for (std::uint64_t page = page_of(offset); page < pages_end(offset, size); ++page) {
        const bool whole = page * kPageBytes >= offset && (page + 1) * kPageBytes <= offset + size;
        if (damaging)
            flags[page] |= kRotten;
        else if (whole)
            flags[page] = 0;
    }
}

void SimDevice::remember(std::uint64_t offset, std::uint64_t size, bool discard) {
    for (std::uint64_t page = page_of(offset); page < pages_end(offset, size); ++page) {
        const std::uint64_t at = page * kPageBytes;
        if (discarded_[page] == 0) std::memcpy(older_.data + at, volatile_.data + at, kPageBytes);
        has_older_[page] = 1;
        discarded_[page] = discard;
    }
}

void SimDevice::put(std::uint64_t offset, const std::uint8_t* source, std::uint64_t size,
                    bool damaging) {
    remember(offset, size, false);
    place(offset, source, size, damaging);
}

void SimDevice::place(std::uint64_t offset, const std::uint8_t* source, std::uint64_t size,
                      bool damaging) {
    std::memcpy(volatile_.data + offset, source, size);
    mark(flags_, offset, size, damaging);
    if (damaging) ++scars_[static_cast<std::size_t>(zone_of(offset))];
    pending_.push_back({offset, {source, source + size}, damaging});
}

// Writes a random part of the sectors, never all of them.
void SimDevice::put_torn(std::uint64_t offset, const std::uint8_t* source, std::uint64_t size) {
    const std::uint64_t sectors = size / kSectorBytes;
    const std::uint64_t missing = random_.below(sectors);
    std::vector<std::uint8_t> mixed(volatile_.data + offset, volatile_.data + offset + size);
    for (std::uint64_t s = 0; s < sectors; ++s)
        if (s != missing && random_.one_in(2))
            std::memcpy(mixed.data() + s * kSectorBytes, source + s * kSectorBytes, kSectorBytes);
    put(offset, mixed.data(), size, true);
}

std::int64_t SimDevice::write(std::uint64_t offset, const std::uint8_t* source,
                              std::uint64_t size) {
    if (!power_->take(false)) return -ESHUTDOWN;
    if (offset % kSectorBytes != 0 || size % kSectorBytes != 0) return -EINVAL;
    if (offset >= bytes_) return -ENOSPC;
    size = std::min(size, bytes_ - offset);
    if (draw(SimFault::write_error, offset)) {
        if (random_.one_in(2)) put_torn(offset, source, size);
        return -EIO;
    }
    if (draw(SimFault::lost_write, offset)) {
        mark(flags_, offset, size, true);
        mark(durable_flags_, offset, size, true);
        ++scars_[static_cast<std::size_t>(zone_of(offset))];
    } else if (draw(SimFault::torn_write, offset)) {
        put_torn(offset, source, size);
    } else if (draw(SimFault::misdirected_write, offset)) {
        // One page of it goes astray, the others arrive.
        const std::uint64_t pages = size / kPageBytes;
        const std::uint64_t astray = random_.below(std::max<std::uint64_t>(pages, 1)) * kPageBytes;
        const std::uint64_t length = std::min<std::uint64_t>(kPageBytes, size - astray);
        std::vector<std::uint8_t> mixed(source, source + size);
        std::memcpy(mixed.data() + astray, volatile_.data + offset + astray, length);
        put(offset, mixed.data(), size, true);
        put(misdirect(offset + astray, kPageBytes), source + astray, length, true);
    } else {
        put(offset, source, size, false);
    }
    return static_cast<std::int64_t>(size);
}

std::int64_t SimDevice::discard(std::uint64_t offset, std::uint64_t size) {
    if (power_->cut()) return -ESHUTDOWN;
    if (offset >= bytes_) return -EINVAL;
    size = std::min(size, bytes_ - offset);
    if (random_.one_in(2)) return 0;  // a hint that the disk does not take
    const std::vector<std::uint8_t> zeroes(size);
    remember(offset, size, true);
    place(offset, zeroes.data(), size, false);
    return 0;
}

void SimDevice::harden(const Pending& write) {
    std::memcpy(durable_.data + write.offset, write.data.data(), write.data.size());
    mark(durable_flags_, write.offset, write.data.size(), write.damaging);
}

void SimDevice::harden_torn(const Pending& write) {
    for (std::size_t at = 0; at < write.data.size(); at += kSectorBytes)
        if (random_.one_in(2))
            std::memcpy(durable_.data + write.offset + at, write.data.data() + at, kSectorBytes);
    if (write.damaging) mark(durable_flags_, write.offset, write.data.size(), true);
}

std::int64_t SimDevice::flush() {
    if (!power_->take(true)) return -ESHUTDOWN;
    if (draw(SimFault::flush_error, pending_.empty() ? 0 : pending_.back().offset)) {
        for (const Pending& write : pending_)
            if (random_.one_in(2)) harden(write);
        return -EIO;
    }
    for (const Pending& write : pending_) harden(write);
    pending_.clear();
    return 0;
}

void SimDevice::settle(SimLoss loss) {
    std::size_t number = 0;
    for (const Pending& write : pending_) {
        const bool is_first = number == 0;
        const bool is_last = ++number == pending_.size();
        switch (loss) {
            case SimLoss::none: harden(write); break;
            case SimLoss::all: break;
            case SimLoss::first:
                if (!is_first) harden(write);
                break;
            case SimLoss::last:
                if (!is_last) harden(write);
                break;
            case SimLoss::torn: harden_torn(write); break;
            case SimLoss::random:
                switch (random_.below(3)) {
                    case 0: harden(write); break;
                    case 1: harden_torn(write); break;
                    default: break;
                }
        }
    }
    for (const Pending& write : pending_) {
        std::memcpy(volatile_.data + write.offset, durable_.data + write.offset, write.data.size());
        for (std::uint64_t page = page_of(write.offset);
             page < pages_end(write.offset, write.data.size()); ++page)
            flags_[page] = durable_flags_[page];
    }
    pending_.clear();
}

// --- for checkers and tests ----------------------------------------------------------------------

void SimDevice::peek(std::uint64_t offset, std::uint8_t* target, std::uint64_t size) const {
    if (offset > bytes_ || size > bytes_ - offset) throw std::invalid_argument("past the device");
    std::memcpy(target, volatile_.data + offset, size);
}

void SimDevice::poke(std::uint64_t offset, const std::uint8_t* source, std::uint64_t size) {
    if (offset > bytes_ || size > bytes_ - offset) throw std::invalid_argument("past the device");
    std::memcpy(volatile_.data + offset, source, size);
    std::memcpy(durable_.data + offset, source, size);
    for (std::uint64_t page = page_of(offset); page < pages_end(offset, size); ++page) {
        scar(page, kRotten);
        durable_flags_[page] |= kRotten;
    }
}

SimDevice::Snapshot SimDevice::snapshot() const {
    if (!pending_.empty()) throw std::invalid_argument("flush the device before a snapshot");
    return {{durable_.data, durable_.data + bytes_}, durable_flags_};
}

void SimDevice::restore(const Snapshot& snapshot) {
    if (snapshot.durable.size() != bytes_) throw std::invalid_argument("another device's snapshot");
    pending_.clear();
    std::memcpy(durable_.data, snapshot.durable.data(), bytes_);
    std::memcpy(volatile_.data, snapshot.durable.data(), bytes_);
    durable_flags_ = flags_ = snapshot.flags;
    std::fill(has_older_.begin(), has_older_.end(), std::uint8_t{0});
}

// --- by descriptor -------------------------------------------------------------------------------

namespace {

std::mutex registry_mutex;
std::map<ino_t, std::weak_ptr<SimDevice>> registry;  // memfds all live on one file system

ino_t inode_of(int fd) {
    struct stat info{};
    return fstat(fd, &info) == 0 ? info.st_ino : 0;
}

}  // namespace

std::shared_ptr<SimDevice> find_sim_device(int fd) {
    const std::lock_guard lock(registry_mutex);
    const auto found = registry.find(inode_of(fd));
    return found == registry.end() ? nullptr : found->second.lock();
}

std::shared_ptr<SimDevice> make_sim_device(std::uint64_t bytes, std::uint64_t tables_start,
                                           std::uint64_t data_start, std::uint64_t seed,
                                           std::shared_ptr<SimPower> power) {
    if (bytes == 0 || bytes % kPageBytes != 0 || tables_start > data_start || data_start > bytes)
        throw std::invalid_argument("a simulated device has whole pages and zones in order");
    auto device = std::make_shared<SimDevice>(bytes, tables_start, data_start, seed,
                                              std::move(power));
    const std::lock_guard lock(registry_mutex);
    std::erase_if(registry, [](const auto& entry) { return entry.second.expired(); });
    registry[inode_of(device->fd())] = device;
    return device;
}

}  // namespace tierd
