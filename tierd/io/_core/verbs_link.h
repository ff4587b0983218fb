// Pages by one-sided RDMA READ, over a few RC queue pairs to one peer; and the passive side.
//
// Only every sixteenth read of a batch, and its last, asks for a completion: those of one queue pair
// finish in order. A failed read, or one that takes longer than it may, ends the link: all its queue
// pairs go to the error state, which makes the NIC give back what is in flight and write no more.
// Where it does not give it back in time the queue pairs are destroyed, which has the same effect.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "remote_link.h"
#include "verbs_context.h"

namespace tierd {

inline constexpr std::uint32_t kQueuePairsMax = 16;

// What one queue pair tells the peer about itself.
struct QueuePairName {
    std::uint32_t queue_pair;
    std::uint32_t first_packet;
};

class VerbsLink final : public RemoteLink {
  public:
    VerbsLink(std::shared_ptr<VerbsContext> context, std::uint32_t queue_pairs, std::uint32_t depth,
              std::uint64_t timeout_ns);
    ~VerbsLink() override;

    std::vector<QueuePairName> names() const;
    // The queue pairs' peers, in their order. The link is up then.
    void connect(const std::vector<VerbsPeer>& peers, std::uint32_t gid_index);
    // Before it joins a pump: reads pages into memory of its own and returns how long that took.
    // VerbsError if one fails.
    std::uint64_t probe(const std::vector<RemotePage>& pages, std::uint8_t* out);

    const char* transport() const override { return "verbs"; }
    bool add_buffer(std::uint32_t buffer, std::uint8_t* base, std::uint64_t bytes) override;
    void remove_buffer(std::uint32_t buffer) override;
    void post(const RemotePage* pages, std::size_t count, std::uint64_t now_ns) override;
    void poll(std::vector<ReadDone>& done, std::uint64_t now_ns) override;
    std::uint32_t in_flight() const override { return in_flight_; }
    void fail(const std::string& why) override;

  private:
    // A read's number counts up in each queue pair; its slot is the number modulo the size.
    struct Slot {
        std::uint32_t token;
        std::uint64_t posted_ns;
    };
    struct Pair {
        ibv_qp* qp = nullptr;
        std::uint32_t first_packet = 0;
        std::uint32_t head = 0;  // the oldest read that is not over
        std::uint32_t tail = 0;  // the next one
        std::vector<Slot> slots;
    };
    struct Buffer {
        std::uint8_t* base = nullptr;
        std::uint32_t key = 0;
    };

    void post_batch(Pair& pair, std::uint64_t number, const RemotePage* pages, std::size_t count,
                    std::uint64_t now_ns, std::vector<ReadDone>& refused);
    void take(const ibv_wc& wc, std::vector<ReadDone>& done);
    void give_back(Pair& pair, std::uint32_t end, std::int32_t result, std::vector<ReadDone>& done);
    void look_at_clock(std::uint64_t now_ns);
    void destroy_pairs(std::vector<ReadDone>& done);

    const std::shared_ptr<VerbsContext> context_;
    const std::uint64_t timeout_ns_;
    std::uint32_t slot_mask_ = 0;
    ibv_cq* cq_ = nullptr;
    std::vector<Pair> pairs_;
    std::size_t next_pair_ = 0;
    std::uint32_t in_flight_ = 0;
    bool failed_ = false;
    std::uint64_t failed_ns_ = 0;
    std::vector<Buffer> buffers_;
    std::vector<ReadDone> refused_;
};

// The passive side: a peer's READs are answered by the NIC alone.
class VerbsResponder {
  public:
    VerbsResponder(std::shared_ptr<VerbsContext> context, std::uint32_t queue_pairs);
    ~VerbsResponder();
    VerbsResponder(const VerbsResponder&) = delete;
    VerbsResponder& operator=(const VerbsResponder&) = delete;

    std::vector<QueuePairName> names() const;
    void connect(const std::vector<VerbsPeer>& peers, std::uint32_t gid_index);
    void close();

  private:
    struct Pair {
        ibv_qp* qp;
        std::uint32_t first_packet;
    };
    const std::shared_ptr<VerbsContext> context_;
    ibv_cq* cq_ = nullptr;
    std::vector<Pair> pairs_;
};

// Memory that peers may read, registered in pieces.
class VerbsExport {
  public:
    VerbsExport(std::shared_ptr<VerbsContext> context, std::uint8_t* base, std::uint64_t bytes,
                std::uint64_t piece_bytes);
    ~VerbsExport();
    VerbsExport(const VerbsExport&) = delete;
    VerbsExport& operator=(const VerbsExport&) = delete;

    // In pages of 4 KiB.
    std::vector<RemotePlace> places() const;
    void close();

  private:
    const std::shared_ptr<VerbsContext> context_;
    const std::uint64_t piece_bytes_;
    std::vector<ibv_mr*> regions_;
};

}  // namespace tierd
