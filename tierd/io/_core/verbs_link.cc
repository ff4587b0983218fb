#if TIERD_VERBS
#include "verbs_link.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <utility>

#include "channel.h"
#include "protocol.h"

namespace tierd {
namespace {

constexpr std::size_t kBatch = 64;         // reads in one call of the provider
constexpr std::size_t kSignalEvery = 16;   // reads a completion
constexpr std::size_t kPollBatch = 16;     // completions in one call
constexpr std::uint64_t kFlushNs = 50'000'000;  // for a NIC to give back what was in flight
constexpr unsigned kSignaled = IBV_SEND_SIGNALED;
constexpr std::uint32_t kNumberBits = 32;  // of a work request's id; the queue pair stands above

ibv_cq* make_cq(const VerbsContext& context, std::uint32_t entries) {
    const auto most = static_cast<std::uint32_t>(std::max(context.attributes().max_cqe, 1));
    errno = 0;
    ibv_cq* cq = verbs_api().create_cq(context.context(), static_cast<int>(std::min(entries, most)),
                                       nullptr, nullptr, 0);
    if (cq == nullptr)
        throw VerbsError(explain_verbs(context.name() + ": making a completion queue", errno));
    return cq;
}

// What a completion's status means to an operator.
std::string explain_status(ibv_wc_status status) {
    const std::string head = std::string("a read failed (") + verbs_api().wc_status_str(status) + "): ";
    switch (status) {
        case IBV_WC_RETRY_EXC_ERR:
        case IBV_WC_RNR_RETRY_EXC_ERR: return head + "the peer or the way to it is gone";
        case IBV_WC_REM_ACCESS_ERR:
        case IBV_WC_REM_INV_REQ_ERR:
        case IBV_WC_REM_OP_ERR: return head + "the peer does not offer this memory any more";
        case IBV_WC_LOC_PROT_ERR:
        case IBV_WC_LOC_LEN_ERR: return head + "this side's memory is not registered";
        default: return head + "the queue pair is in error";
    }
}

}  // namespace

VerbsLink::VerbsLink(std::shared_ptr<VerbsContext> context, std::uint32_t queue_pairs,
                     std::uint32_t depth, std::uint64_t timeout_ns)
    : context_(std::move(context)), timeout_ns_(timeout_ns), buffers_(kBuffersMax) {
    if (queue_pairs == 0 || queue_pairs > kQueuePairsMax)
        throw std::invalid_argument("queue_pairs must be between 1 and " + std::to_string(kQueuePairsMax));
    const auto most = static_cast<std::uint32_t>(std::max(context_->attributes().max_qp_wr, 1));
    if (depth > most)
        throw VerbsError(context_->name() + " takes " + std::to_string(most) +
                         " reads a queue pair, pump.queue_depth is " + std::to_string(depth));
    cq_ = make_cq(*context_, 2 * depth);  // the pump has at most `depth` reads in flight
    const std::uint32_t slots = std::bit_ceil(depth + 1);
    slot_mask_ = slots - 1;
    refused_.reserve(depth);
    try {
        for (std::uint32_t i = 0; i < queue_pairs; ++i)
            pairs_.push_back({context_->make_queue_pair(cq_, depth, 0), random_packet(), 0, 0,
                              std::vector<Slot>(slots)});
    } catch (...) {
        for (const Pair& pair : pairs_) verbs_api().destroy_qp(pair.qp);
        verbs_api().destroy_cq(cq_);
        throw;
    }
}

VerbsLink::~VerbsLink() {
    std::vector<ReadDone> nobody;
    destroy_pairs(nobody);
    for (std::uint32_t i = 0; i < buffers_.size(); ++i) remove_buffer(i);
    verbs_api().destroy_cq(cq_);
}

std::vector<QueuePairName> VerbsLink::names() const {
    std::vector<QueuePairName> out;
    for (const Pair& pair : pairs_) out.push_back({pair.qp->qp_num, pair.first_packet});
    return out;
}

void VerbsLink::connect(const std::vector<VerbsPeer>& peers, std::uint32_t gid_index) {
    if (peers.size() != pairs_.size())
        throw VerbsError("the peer has " + std::to_string(peers.size()) + " queue pairs, this side " +
                         std::to_string(pairs_.size()));
    for (std::size_t i = 0; i < pairs_.size(); ++i)
        context_->connect(pairs_[i].qp, peers[i], gid_index, pairs_[i].first_packet, timeout_ns_);
    set_up();
}

std::uint64_t VerbsLink::probe(const std::vector<RemotePage>& pages, std::uint8_t* out) {
    constexpr std::uint32_t kProbeBuffer = kBuffersMax - 1;
    if (pages.size() > slot_mask_) throw std::invalid_argument("a probe reads fewer pages than the depth");
    if (!add_buffer(kProbeBuffer, out, pages.size() * kPageBytes)) throw VerbsError(trouble());
    std::vector<RemotePage> reads(pages);
    for (std::size_t i = 0; i < reads.size(); ++i) {
        reads[i].target = out + i * kPageBytes;
        reads[i].buffer = kProbeBuffer;
        reads[i].token = static_cast<std::uint32_t>(i);
    }
    const std::uint64_t start = monotonic_ns();
    post(reads.data(), reads.size(), start);
    std::vector<ReadDone> done;
    while (done.size() < reads.size()) poll(done, monotonic_ns());
    const std::uint64_t took = monotonic_ns() - start;
    remove_buffer(kProbeBuffer);
    if (!up()) throw VerbsError(failure());
    return took;
}

bool VerbsLink::add_buffer(std::uint32_t buffer, std::uint8_t* base, std::uint64_t bytes) {
    remove_buffer(buffer);  // what stands there would stay registered for ever
    try {
        buffers_[buffer] = {base, context_->acquire(base, bytes)->lkey};
        return true;
    } catch (const VerbsError& error) {
        set_trouble(error.what());
        return false;
    }
}

void VerbsLink::remove_buffer(std::uint32_t buffer) {
    if (buffers_[buffer].base != nullptr) context_->release(buffers_[buffer].base);
    buffers_[buffer] = {};
}

// --- the data path -------------------------------------------------------------------------------

void VerbsLink::post(const RemotePage* pages, std::size_t count, std::uint64_t now_ns) {
    // Spread over the queue pairs in runs, so that each call of a provider posts many.
    const std::size_t share = std::clamp((count + pairs_.size() - 1) / pairs_.size(), kSignalEvery, kBatch);
    while (count != 0) {
        const std::size_t size = std::min(share, count);
        post_batch(pairs_[next_pair_], next_pair_, pages, size, now_ns, refused_);
        next_pair_ = next_pair_ + 1 == pairs_.size() ? 0 : next_pair_ + 1;
        pages += size;
        count -= size;
    }
}

void VerbsLink::post_batch(Pair& pair, std::uint64_t number, const RemotePage* pages, std::size_t count,
                           std::uint64_t now_ns, std::vector<ReadDone>& refused) {
    std::array<ibv_send_wr, kBatch> requests;
    std::array<ibv_sge, kBatch> parts;
    std::size_t n = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const RemotePage& page = pages[i];
        const Buffer& buffer = buffers_[page.buffer];
        if (buffer.base == nullptr || failed_) {
            refused.push_back({page.token, failed_ ? -ENOTCONN : -ENOMEM});
            continue;
        }
        const std::uint32_t at = pair.tail++;
        pair.slots[at & slot_mask_] = {page.token, now_ns};
        parts[n] = {reinterpret_cast<std::uint64_t>(page.target), kPageBytes, buffer.key};
        ibv_send_wr& wr = requests[n];
        wr.wr_id = number << kNumberBits | at;
        wr.next = &requests[n + 1];
        wr.sg_list = &parts[n];
        wr.num_sge = 1;
        wr.opcode = IBV_WR_RDMA_READ;
        wr.send_flags = n % kSignalEvery == kSignalEvery - 1 ? kSignaled : 0u;
        wr.wr.rdma.remote_addr = page.address;
        wr.wr.rdma.rkey = page.key;
        ++n;
    }
    if (n == 0) return;
    requests[n - 1].next = nullptr;
    requests[n - 1].send_flags = kSignaled;
    in_flight_ += static_cast<std::uint32_t>(n);
    ibv_send_wr* bad = nullptr;
    const int error = ibv_post_send(pair.qp, requests.data(), &bad);
    if (error == 0) return;
    // From `bad` on nothing was posted.
    const auto posted = static_cast<std::size_t>(bad - requests.data());
    for (std::size_t i = posted; i < n; ++i)
        refused.push_back({pair.slots[(pair.tail - (n - i)) & slot_mask_].token, -error});
    pair.tail -= static_cast<std::uint32_t>(n - posted);
    in_flight_ -= static_cast<std::uint32_t>(n - posted);
    fail(explain_verbs(context_->name() + ": posting reads", error));
}

void VerbsLink::poll(std::vector<ReadDone>& done, std::uint64_t now_ns) {
    if (!refused_.empty()) {
        done.insert(done.end(), refused_.begin(), refused_.end());
        refused_.clear();
    }
    if (in_flight_ == 0 && !failed_) return;
    std::array<ibv_wc, kPollBatch> completions;
    int n = 0;
    do {
        n = ibv_poll_cq(cq_, static_cast<int>(kPollBatch), completions.data());
        for (int i = 0; i < n; ++i) take(completions[static_cast<std::size_t>(i)], done);
    } while (n == static_cast<int>(kPollBatch));
    if (n < 0) fail("the completion queue cannot be read");
    look_at_clock(now_ns);
    // The link may have failed just now, which is after the caller has looked at the clock.
    const bool late = now_ns > failed_ns_ && now_ns - failed_ns_ > kFlushNs;
    if (failed_ && (in_flight_ == 0 || late)) destroy_pairs(done);
}

void VerbsLink::take(const ibv_wc& wc, std::vector<ReadDone>& done) {
    Pair& pair = pairs_[wc.wr_id >> kNumberBits];
    const auto at = static_cast<std::uint32_t>(wc.wr_id);
    if (at - pair.head >= pair.tail - pair.head) return;  // given back already
    if (wc.status == IBV_WC_SUCCESS) {
        give_back(pair, at + 1, static_cast<std::int32_t>(kPageBytes), done);
        return;
    }
    fail(explain_status(wc.status));
    // What stood before the first failed read had arrived; it fails all the same, and is read
    // again elsewhere.
    give_back(pair, at + 1, -EIO, done);
}

void VerbsLink::give_back(Pair& pair, std::uint32_t end, std::int32_t result,
                          std::vector<ReadDone>& done) {
    in_flight_ -= end - pair.head;
    for (; pair.head != end; ++pair.head) done.push_back({pair.slots[pair.head & slot_mask_].token, result});
}

void VerbsLink::look_at_clock(std::uint64_t now_ns) {
    if (failed_) return;
    for (const Pair& pair : pairs_) {
        if (pair.head == pair.tail) continue;
        const std::uint64_t posted = pair.slots[pair.head & slot_mask_].posted_ns;
        if (now_ns > posted && now_ns - posted > timeout_ns_) {
            fail("a read was not answered within " + std::to_string(timeout_ns_ / 1000) +
                 " us (remote.timeout_us): the peer or the way to it is gone");
            return;
        }
    }
}

void VerbsLink::fail(const std::string& why) {
    if (failed_) return;
    failed_ = true;
    failed_ns_ = monotonic_ns();
    set_down(why);
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_ERR;
    for (const Pair& pair : pairs_)
        if (pair.qp != nullptr) verbs_api().modify_qp(pair.qp, &attr, IBV_QP_STATE);
}

void VerbsLink::destroy_pairs(std::vector<ReadDone>& done) {
    for (Pair& pair : pairs_) {
        if (pair.qp != nullptr) verbs_api().destroy_qp(std::exchange(pair.qp, nullptr));
        give_back(pair, pair.tail, -EIO, done);
    }
    failed_ = true;
    set_down("it was closed");
}

// --- the passive side ----------------------------------------------------------------------------

VerbsResponder::VerbsResponder(std::shared_ptr<VerbsContext> context, std::uint32_t queue_pairs)
    : context_(std::move(context)) {
    if (queue_pairs == 0 || queue_pairs > kQueuePairsMax)
        throw std::invalid_argument("queue_pairs must be between 1 and " + std::to_string(kQueuePairsMax));
    cq_ = make_cq(*context_, 2 * queue_pairs);
    try {
        for (std::uint32_t i = 0; i < queue_pairs; ++i)
            pairs_.push_back({context_->make_queue_pair(cq_, 1, IBV_ACCESS_REMOTE_READ), random_packet()});
    } catch (...) {
        close();
        throw;
    }
}

VerbsResponder::~VerbsResponder() { close(); }

std::vector<QueuePairName> VerbsResponder::names() const {
    std::vector<QueuePairName> out;
    for (const Pair& pair : pairs_) out.push_back({pair.qp->qp_num, pair.first_packet});
    return out;
}

void VerbsResponder::connect(const std::vector<VerbsPeer>& peers, std::uint32_t gid_index) {
    if (peers.size() != pairs_.size())
        throw VerbsError("the peer has " + std::to_string(peers.size()) + " queue pairs, this side " +
                         std::to_string(pairs_.size()));
    constexpr std::uint64_t kSecond = 1'000'000'000;  // this side sends no requests of its own
    for (std::size_t i = 0; i < pairs_.size(); ++i)
        context_->connect(pairs_[i].qp, peers[i], gid_index, pairs_[i].first_packet, kSecond);
}

void VerbsResponder::close() {
    for (const Pair& pair : pairs_) verbs_api().destroy_qp(pair.qp);
    pairs_.clear();
    if (cq_ != nullptr) verbs_api().destroy_cq(std::exchange(cq_, nullptr));
}

VerbsExport::VerbsExport(std::shared_ptr<VerbsContext> context, std::uint8_t* base, std::uint64_t bytes,
                         std::uint64_t piece_bytes)
    : context_(std::move(context)),
      piece_bytes_(std::min(piece_bytes, kRegionBytesMax) / kPageBytes * kPageBytes) {
    if (piece_bytes_ == 0 || bytes == 0 || bytes % kPageBytes != 0)
        throw std::invalid_argument("an export is whole pages, in pieces of at least one");
    try {
        for (std::uint64_t at = 0; at < bytes; at += piece_bytes_)
            regions_.push_back(context_->reg(base + at, std::min(piece_bytes_, bytes - at),
                                             IBV_ACCESS_REMOTE_READ));
    } catch (...) {
        close();
        throw;
    }
}

VerbsExport::~VerbsExport() { close(); }

std::vector<RemotePlace> VerbsExport::places() const {
    std::vector<RemotePlace> out;
    std::uint64_t page = 0;
    for (const ibv_mr* region : regions_) {
        const std::uint64_t pages = region->length / kPageBytes;
        out.push_back({page, pages, reinterpret_cast<std::uint64_t>(region->addr), region->rkey});
        page += pages;
    }
    return out;
}

void VerbsExport::close() {
    for (ibv_mr* region : regions_) verbs_api().dereg_mr(region);
    regions_.clear();
}

}  // namespace tierd
#endif
