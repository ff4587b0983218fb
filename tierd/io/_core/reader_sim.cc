#include "reader_sim.h"

#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "protocol.h"
#include "sim_device.h"

namespace tierd {
namespace {

constexpr std::uint32_t kTurnsMax = 4;  // of a read that is not slow

class SimReader final : public Reader {
  public:
    SimReader(const ReaderOptions& options, std::uint64_t seed) : random_(seed) {
        in_flight_.reserve(options.queue_depth);
    }

    const char* name() const override { return "simulated"; }
    std::string reason() const override { return {}; }
    void begin() override {}
    // What is in flight when its pump is killed still lands, as a kernel's reads do.
    void end() override {
        while (!in_flight_.empty()) land(random_.below(in_flight_.size()));
    }

    void add_device(std::uint32_t device, int fd) override {
        devices_[device] = find_sim_device(fd);
        if (devices_[device] == nullptr)
            throw std::invalid_argument("device: the fd is not of a simulated device");
    }
    void remove_device(std::uint32_t device) override { devices_[device].reset(); }

    std::int32_t reserve_buffers(std::uint32_t) override { return kNoBuffer; }
    bool register_buffer(std::int32_t, std::uint8_t*, std::uint64_t) override { return false; }
    void release_buffers(std::int32_t, std::uint32_t) override {}

    void push(const Read* reads, std::size_t count) override {
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint64_t turns =
                1 + random_.below(kTurnsMax) + devices_[reads[i].device]->draw_delay(reads[i].offset);
            in_flight_.push_back({reads[i], turn_ + turns});
        }
    }
    void submit() override {}

    std::size_t reap(ReadDone* done, std::size_t room) override {
        ++turn_;
        std::size_t finished = 0;
        for (std::size_t left = in_flight_.size(); left != 0 && finished < room; --left) {
            // A random one of those not looked at yet; finished ones leave, others move behind.
            const std::size_t at = random_.below(left);
            if (in_flight_[at].due > turn_) {
                std::swap(in_flight_[at], in_flight_[left - 1]);
                continue;
            }
            std::swap(in_flight_[at], in_flight_[left - 1]);
            done[finished++] = land(left - 1);
        }
        return finished;
    }

    void wait(std::uint32_t, std::uint64_t) override {}
    std::uint64_t wakes() const override { return 0; }

  private:
    struct InFlight {
        Read read;
        std::uint64_t due;  // turn
    };

    ReadDone land(std::size_t at) {
        const Read read = in_flight_[at].read;
        in_flight_[at] = in_flight_.back();
        in_flight_.pop_back();
        const std::int64_t result =
            devices_[read.device]->read(read.offset, read.target, kPageBytes);
        return {read.token, static_cast<std::int32_t>(result)};
    }

    SimRandom random_;
    std::uint64_t turn_ = 0;
    std::array<std::shared_ptr<SimDevice>, kDevicesMax> devices_;
    std::vector<InFlight> in_flight_;
};

}  // namespace

std::unique_ptr<Reader> make_sim_reader(const ReaderOptions& options, std::uint64_t seed) {
    return std::make_unique<SimReader>(options, seed);
}

}  // namespace tierd
