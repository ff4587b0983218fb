// The CPU twin of the GPU path: one table's lookup, publish, wait, fill and gather.
//
// kick     validates the ids, looks them up, claims slots for the missing rows and publishes
//          requests for these. Claimed is not filled.
// gather   waits for everything published, fills it in order (copies each row out of its page and
//          checks the row's tag on the copy), and decodes the rows of its own ids.
//
// What a request may leave behind. A request that failed, whose tags do not match, or that nobody
// answered in time, empties the directory words that it claimed, so none of its rows is ever
// served. One that was not answered stays in its ring until a server does answer: its pages and
// its descriptor belong to the server until then.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "channel.h"
#include "decode.h"
#include "page.h"
#include "row_cache.h"

namespace tierd {

// Row ids as the caller holds them: int32 or int64, any shape, any strides.
struct Ids {
    const void* data;
    bool wide;  // int64
    std::size_t count;
    std::vector<std::int64_t> shape;
    std::vector<std::int64_t> strides;  // in elements
};

struct TwinOptions {
    std::uint32_t table;  // number in the cache and in the channel
    ImageKey image;
    std::uint64_t rows;
    std::uint32_t dim;
    RowFormat format;
    bool canonical_zero;
    std::uint32_t quota;       // ways per set
    std::uint64_t timeout_ns;  // the most that one kick or gather waits for the servers
    std::uint32_t spin_us;
};

// One call at a time: a second thread waits for the first (a lock, not an error).
class TwinTable {
  public:
    TwinTable(std::shared_ptr<RowCache> cache, std::shared_ptr<Channel> channel,
              std::uint32_t ring, int wake_fd, const TwinOptions& options);
    ~TwinTable();
    TwinTable(const TwinTable&) = delete;
    TwinTable& operator=(const TwinTable&) = delete;

    const RowDecoder& decoder() const { return decoder_; }
    const RingStats& stats() const { return *client_.ring().stats; }

    // std::out_of_range names an id that is not in the table; then nothing has changed.
    // std::runtime_error if the ring had no room and a request in the way of it failed.
    void kick(const Ids& ids);
    // Writes decoder().output_bytes() per id. std::runtime_error names what failed; then the
    // contents of `out` are undefined and later calls work again.
    void gather(const Ids& ids, void* out);
    void drive(std::shared_ptr<Driver> driver) { client_.drive(std::move(driver)); }
    void rewake(int wake_fd) { client_.rewake(wake_fd); }
    // std::invalid_argument for more ways than a set has. A daemon's wish takes its place at the next kick.
    void set_quota(std::uint32_t ways);
    // From the next call on.
    void set_timeout(std::uint64_t timeout_ns);

  private:
    struct Miss {
        std::uint64_t row;
        std::uint32_t slot;   // kNoSlot: the row bypasses the cache ...
        std::uint32_t spill;  // ... and is copied here
    };
    struct Request {
        std::uint64_t kick = 0;  // whose bypass rows these are
        bool abandoned = false;  // not answered in time; only to be retired
        std::vector<Miss> misses;
    };
    enum class Fill { done, failed, timeout };

    void begin(const Ids& ids);
    void copy_ids(const Ids& ids);
    void check_ids() const;
    void look_up_and_publish();
    void follow_quota();
    void retire_replaced();
    void look_up();
    void sample(bool prefill);
    void publish_misses(std::size_t& next);
    void publish_request(std::size_t first, std::size_t count);
    Fill drain();
    Fill fill_next();
    bool copy_rows(std::uint32_t sequence, const Request& request);
    bool copy_row(const Miss& miss, const std::uint8_t* page, std::uint8_t* to) const;
    void abandon_outstanding();
    void empty_words(const Miss* misses, std::size_t count);
    void fail(const char* reason, std::uint64_t page);
    void decode(void* out) const;
    void finish_step();
    std::uint8_t* spill(std::uint32_t index) {
        return spill_.data() + static_cast<std::size_t>(index) * geometry_.stride;
    }

    std::mutex mutex_;
    std::shared_ptr<RowCache> cache_;
    RingClient client_;
    TwinOptions options_;
    const RowDecoder decoder_;
    const Geometry geometry_;
    const TagKey tag_key_;

    std::uint32_t filled_;  // last request filled (or given up); published is client_.published()
    std::array<Request, kRingDepth> requests_;  // by sequence % depth

    std::vector<std::int64_t> ids_;         // of this call
    std::vector<std::int64_t> kicked_ids_;  // that places_ belong to
    bool kicked_ = false;
    std::uint64_t kick_ = 0;             // the cache's number of the last lookup
    std::vector<std::uint32_t> places_;  // per id: slot, or kSpilled | index into spill_
    std::vector<Miss> misses_;           // of the last lookup
    std::vector<std::uint8_t> spill_;    // rows of the last lookup that bypass the cache
    std::array<std::vector<std::uint32_t>, 3> lists_;  // page, row, slot of a request being made

    std::uint64_t waited_ns_ = 0;  // in this call
    std::uint64_t stall_ns_ = 0;   // since the last gather
    std::string failure_;          // what fail() said
};

}  // namespace tierd
