// An RDMA device, opened: its port, one protection domain, and memory registered in it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "verbs_api.h"

namespace tierd {

// Regions are registered in pieces of at most this: several NICs take no larger ones.
inline constexpr std::uint64_t kRegionBytesMax = 64ull << 30;

struct VerbsPort {
    std::uint32_t port;
    std::string state;       // "active", "down", ...
    std::string link_layer;  // "InfiniBand" or "Ethernet"
    std::uint32_t mtu;       // bytes
    std::uint32_t mtu_max;
    std::uint32_t lid;
    std::uint32_t gids;
};

struct VerbsDevice {
    std::string name;
    std::string trouble;  // why it cannot be opened, "" if it can
    std::uint64_t region_bytes_max;
    std::uint32_t queue_pair_depth_max, read_depth_in, read_depth_out;
    std::vector<VerbsPort> ports;
};

// VerbsError where there is no RDMA at all; empty where there is, and no device.
std::vector<VerbsDevice> list_verbs_devices();

// How a queue pair finds its peer: what both sides tell each other, and what was agreed on.
struct VerbsPeer {
    std::array<std::uint8_t, 16> gid;
    std::uint32_t lid;
    std::uint32_t queue_pair;
    std::uint32_t first_packet;  // sequence number
    std::uint32_t mtu;           // bytes, the smaller of both
    std::uint32_t read_depth;    // READs in flight on the wire, the smaller of both
};

class VerbsContext {
  public:
    VerbsContext(const std::string& device, std::uint32_t port);
    ~VerbsContext();
    VerbsContext(const VerbsContext&) = delete;
    VerbsContext& operator=(const VerbsContext&) = delete;

    ibv_mr* reg(std::uint8_t* base, std::uint64_t bytes, int access) const;
    // Memory that is read into, registered once however many links use it.
    ibv_mr* acquire(std::uint8_t* base, std::uint64_t bytes);
    void release(std::uint8_t* base);

    std::string name() const { return name_; }
    ibv_context* context() const { return context_; }
    ibv_pd* domain() const { return domain_; }
    const ibv_device_attr& attributes() const { return attributes_; }
    std::uint8_t port() const { return port_; }
    // Down to RTS. `gid_index` is ours; `timeout_ns` is what a read may take in all.
    void connect(ibv_qp* qp, const VerbsPeer& peer, std::uint32_t gid_index, std::uint32_t first_packet,
                 std::uint64_t timeout_ns) const;
    ibv_qp* make_queue_pair(ibv_cq* cq, std::uint32_t depth, int access) const;

  private:
    struct Shared {
        ibv_mr* region;
        std::uint32_t users;
    };
    std::string name_;
    ibv_context* context_ = nullptr;
    ibv_pd* domain_ = nullptr;
    ibv_device_attr attributes_{};
    std::uint8_t port_;
    std::uint8_t link_layer_ = IBV_LINK_LAYER_UNSPECIFIED;
    std::mutex mutex_;
    std::map<std::uint8_t*, Shared> shared_;
};

// "errno NAME: why that is likely", for calls of libibverbs.
std::string explain_verbs(const std::string& what, int error);
std::uint32_t random_packet();

}  // namespace tierd
