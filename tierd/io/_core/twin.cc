#include "twin.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace tierd {

namespace {

constexpr std::uint32_t kSpilled = 1u << 31;  // slot numbers are smaller
constexpr std::uint64_t kLateNs = 20'000;
constexpr std::size_t kAhead = 8;  // ids and rows fetched into cache ahead of their use

template <class T>
void copy_strided(const Ids& ids, std::int64_t* to) {
    const T* from = static_cast<const T*>(ids.data);
    const std::size_t dims = ids.shape.size();
    if (dims == 0) {
        *to = from[0];
        return;
    }
    // The innermost dimension is a plain loop; the others count up like an odometer.
    const std::int64_t inner = ids.shape[dims - 1], inner_stride = ids.strides[dims - 1];
    std::vector<std::int64_t> at(dims, 0);
    std::int64_t offset = 0;
    for (std::size_t done = 0; done < ids.count; done += static_cast<std::size_t>(inner)) {
        for (std::int64_t i = 0; i < inner; ++i) *to++ = from[offset + i * inner_stride];
        for (std::size_t d = dims - 1; d-- > 0;) {
            offset += ids.strides[d];
            if (++at[d] < ids.shape[d]) break;
            offset -= at[d] * ids.strides[d];
            at[d] = 0;
        }
    }
}

Geometry checked_geometry(const TwinOptions& o, const RowDecoder& decoder) {
    if (o.rows == 0 || o.rows > kRowsLimit)
        throw std::invalid_argument("rows must be between 1 and 2^34 - 2, got " +
                                    std::to_string(o.rows));
    const Geometry g = make_geometry(decoder.row_bytes(), o.rows);
    if (g.pages > ~std::uint32_t{0})
        throw std::invalid_argument("a table has at most 2^32 - 1 pages, this one " +
                                    std::to_string(g.pages));
    return g;
}

}  // namespace

TwinTable::TwinTable(std::shared_ptr<RowCache> cache, std::shared_ptr<Channel> channel,
                     std::uint32_t ring, int wake_fd, const TwinOptions& options)
    : cache_(std::move(cache)),
      client_(std::move(channel), ring, wake_fd, options.spin_us),
      options_(options),
      decoder_(options.format, options.dim, options.canonical_zero),
      geometry_(checked_geometry(options, decoder_)),
      tag_key_(tag_key(options.image)),
      filled_(client_.published()) {
    if (decoder_.row_bytes() != cache_->row_bytes())
        throw std::invalid_argument("the cache holds rows of " +
                                    std::to_string(cache_->row_bytes()) +
                                    " bytes, the table's have " +
                                    std::to_string(decoder_.row_bytes()));
    if (client_.ring().table != options.table)
        throw std::invalid_argument("the ring is for table " +
                                    std::to_string(client_.ring().table) + ", not " +
                                    std::to_string(options.table));
    cache_->attach(options.table, options.quota);
    store_relaxed(client_.ring().stats->quota, std::uint64_t{1} + options.quota);
    kick_ = cache_->kicks();
}

TwinTable::~TwinTable() { cache_->detach(options_.table); }

void TwinTable::set_quota(std::uint32_t ways) {
    cache_->set_quota(options_.table, ways);
    store_relaxed(client_.ring().stats->quota, std::uint64_t{1} + ways);
}

// The daemon's wish for this table's ways; nonsense is nobody's wish. The wishes of a cache's tables
// are followed one by one: until all are, quotas may add up to more or less than there are ways, which
// costs hits, no more.
void TwinTable::follow_quota() {
    const std::uint32_t wish = load_relaxed(client_.ring().control->quota.value);
    if (wish == 0 || wish > kWays + 1 || wish == load_relaxed(client_.ring().stats->quota)) return;
    set_quota(wish - 1);
}

// --- a step --------------------------------------------------------------------------------------

void TwinTable::kick(const Ids& ids) {
    const std::lock_guard lock(mutex_);
    begin(ids);
    look_up_and_publish();
    stall_ns_ += waited_ns_;
}

void TwinTable::gather(const Ids& ids, void* out) {
    const std::lock_guard lock(mutex_);
    begin(ids);
    if (!kicked_ || ids_ != kicked_ids_) {
        add_relaxed(client_.ring().stats->demands, ids_.size());
        look_up_and_publish();
    }
    const Fill result = drain();
    // Whatever happened, nothing is left to fill. The places are used once, since their slots may
    // go to others as soon as the stamp is retired; and not at all after a failure, since the
    // lookup may have hit on claims of an earlier kick that are now taken back.
    kicked_ = false;
    if (result == Fill::done) decode(out);
    cache_->retire(options_.table, kick_);
    finish_step();
    if (result != Fill::done) throw std::runtime_error(failure_);
}

void TwinTable::set_timeout(std::uint64_t timeout_ns) {
    const std::lock_guard lock(mutex_);
    options_.timeout_ns = timeout_ns;
}

void TwinTable::begin(const Ids& ids) {
    waited_ns_ = 0;
    copy_ids(ids);
    check_ids();
}

void TwinTable::copy_ids(const Ids& ids) {
    ids_.resize(ids.count);
    if (ids.count == 0) return;
    if (ids.wide)
        copy_strided<std::int64_t>(ids, ids_.data());
    else
        copy_strided<std::int32_t>(ids, ids_.data());
}

void TwinTable::check_ids() const {
    // One comparison finds negative ids as well. The first pass has no branch in it.
    bool bad = false;
    for (const std::int64_t id : ids_) bad |= static_cast<std::uint64_t>(id) >= options_.rows;
    if (!bad) return;
    const auto at = std::find_if(ids_.begin(), ids_.end(), [&](std::int64_t id) {
        return static_cast<std::uint64_t>(id) >= options_.rows;
    });
    throw std::out_of_range("id " + std::to_string(*at) + " at position " +
                            std::to_string(at - ids_.begin()) + " is outside the table's " +
                            std::to_string(options_.rows) + " rows");
}

void TwinTable::finish_step() {
    stall_ns_ += waited_ns_;
    RingStats& s = *client_.ring().stats;
    add_relaxed(s.steps, 1);
    add_relaxed(s.stall_ns, stall_ns_);
    if (stall_ns_ > kLateNs) add_relaxed(s.late_steps, 1);
    stall_ns_ = 0;
}

void TwinTable::decode(void* out) const {
    auto* to = static_cast<std::uint8_t*>(out);
    const auto row_at = [&](std::uint32_t place) -> const std::uint8_t* {
        if ((place & kSpilled) == 0) return cache_->bytes(place);
        return spill_.data() + static_cast<std::size_t>(place & ~kSpilled) * geometry_.stride;
    };
    for (std::size_t i = 0; i < places_.size(); ++i) {
        if (i + kAhead < places_.size()) {
            const std::uint8_t* next = row_at(places_[i + kAhead]);
            for (std::uint32_t b = 0; b < geometry_.stride; b += kLineBytes)
                __builtin_prefetch(next + b);
        }
        decoder_.decode(row_at(places_[i]), to + i * decoder_.output_bytes());
    }
}

// --- lookup and publish --------------------------------------------------------------------------

void TwinTable::look_up_and_publish() {
    kicked_ = false;
    follow_quota();
    retire_replaced();
    look_up();
    std::size_t next = 0;  // the first miss that is not published
    try {
        publish_misses(next);
    } catch (...) {
        empty_words(misses_.data() + next, misses_.size() - next);
        stall_ns_ += waited_ns_;
        throw;
    }
    kicked_ids_.swap(ids_);
    kicked_ = true;
}

// The places of the last kick are forgotten when another lookup follows. What it and earlier kicks
// touched may then go, but for slots that are still to be filled: kicks without a gather must not
// hold the cache for ever.
void TwinTable::retire_replaced() {
    for (std::uint32_t s = filled_ + 1; s != client_.published() + 1; ++s) {
        const Request& request = requests_[s % kRingDepth];
        if (request.abandoned) continue;  // its claims are emptied already
        cache_->retire_before(options_.table, request.kick);
        return;
    }
    cache_->retire(options_.table, kick_);
}

void TwinTable::look_up() {
    const std::size_t count = ids_.size();
    places_.resize(count);
    misses_.clear();
    misses_.reserve(count);  // no allocation may fail once a slot is claimed
    std::uint32_t spilled = 0;
    {
        const RowCache::Lookup lookup(*cache_, options_.table);
        kick_ = lookup.kick();
        for (std::size_t i = 0; i < count; ++i) {
            if (i + kAhead < count) lookup.prefetch(static_cast<std::uint64_t>(ids_[i + kAhead]));
            const auto row = static_cast<std::uint64_t>(ids_[i]);
            const RowCache::Lookup::Place place = lookup.find_or_claim(row);
            places_[i] = place.slot;
            if (place.hit) continue;
            const bool bypass = place.slot == kNoSlot;
            if (bypass) places_[i] = kSpilled | spilled;
            misses_.push_back({row, place.slot, bypass ? spilled++ : 0});
        }
    }
    RingStats& s = *client_.ring().stats;
    add_relaxed(s.lookups, count);
    add_relaxed(s.hits, count - misses_.size());
    add_relaxed(s.misses, misses_.size() - spilled);
    add_relaxed(s.bypasses, spilled);
    sample(count > client_.ring().rows_max);
}

// Tells the daemon which rows were looked up, for those that the hash picks.
void TwinTable::sample(bool prefill) {
    SampleHeader& header = *client_.ring().samples;
    auto* entries = reinterpret_cast<std::uint64_t*>(&header + 1);
    std::uint64_t written = header.written;
    for (const std::int64_t id : ids_) {
        const auto row = static_cast<std::uint64_t>(id);
        if (sample_hash(row) >= header.threshold) continue;
        const std::uint64_t entry =
            row | (prefill ? kSamplePrefill : 0) | kick_ << kSampleStampShift;
        std::atomic_ref(entries[written++ % kSampleCapacity]).store(entry, std::memory_order_relaxed);
    }
    store_release(header.written, written);
}

void TwinTable::publish_misses(std::size_t& next) {
    const auto spilled = std::count_if(misses_.begin(), misses_.end(),
                                       [](const Miss& m) { return m.slot == kNoSlot; });
    spill_.resize(static_cast<std::size_t>(spilled) * geometry_.stride);
    while (next < misses_.size()) {
        const std::size_t count =
            std::min<std::size_t>(misses_.size() - next, client_.ring().rows_max);
        if (!client_.has_room(static_cast<std::uint32_t>(count)))
            add_relaxed(client_.ring().stats->ring_full, 1);
        // Filling our own earlier requests gives their pages back, so room always comes.
        while (!client_.has_room(static_cast<std::uint32_t>(count)))
            if (fill_next() != Fill::done) throw std::runtime_error(failure_);
        publish_request(next, count);
        next += count;
    }
}

void TwinTable::publish_request(std::size_t first, std::size_t count) {
    for (auto& list : lists_) list.resize(count);
    for (std::size_t k = 0; k < count; ++k) {
        const Miss& miss = misses_[first + k];
        lists_[0][k] = static_cast<std::uint32_t>(miss.row / geometry_.rows_per_page);
        lists_[1][k] = static_cast<std::uint32_t>(miss.row % geometry_.rows_per_page);
        lists_[2][k] = miss.slot;
    }
    Request& request = requests_[(client_.published() + 1) % kRingDepth];
    const auto begin = misses_.begin() + static_cast<std::ptrdiff_t>(first);
    request.misses.assign(begin, begin + static_cast<std::ptrdiff_t>(count));
    request.kick = kick_;
    request.abandoned = false;
    // Only a prefill misses more rows than a request takes.
    const bool prefill = misses_.size() > client_.ring().rows_max;
    client_.publish({lists_[0].data(), lists_[1].data(), lists_[2].data(),
                     static_cast<std::uint32_t>(count)},
                    prefill ? Priority::prefill : Priority::decode);
}

// --- wait and fill -------------------------------------------------------------------------------

TwinTable::Fill TwinTable::drain() {
    Fill result = Fill::done;
    std::string first;
    while (filled_ != client_.published()) {
        // Once a request is given up, so are all before it. If that is all there is, nobody needs
        // an answer: hits are served although no server is there.
        const bool needed = !requests_[client_.published() % kRingDepth].abandoned;
        if (!needed && !client_.answered(filled_ + 1)) break;
        const Fill one = fill_next();
        if (one == Fill::done) continue;
        if (result == Fill::done) first = failure_;
        result = one;
        if (one == Fill::timeout) break;  // nothing after it can be answered
    }
    if (result != Fill::done) failure_ = first;
    return result;
}

TwinTable::Fill TwinTable::fill_next() {
    const std::uint32_t sequence = filled_ + 1;
    Request& request = requests_[sequence % kRingDepth];
    const std::uint64_t page =
        request.misses.empty() ? 0 : request.misses[0].row / geometry_.rows_per_page;
    std::optional<Status> status;
    if (client_.answered(sequence)) {
        status = client_.wait(sequence, 0);
    } else {
        const std::uint64_t start = client_.now_ns();
        const std::uint64_t left = options_.timeout_ns - std::min(options_.timeout_ns, waited_ns_);
        status = client_.wait(sequence, left);
        waited_ns_ += client_.now_ns() - start;
    }
    if (!status) {
        fail("timeout", page);
        abandon_outstanding();
        return Fill::timeout;
    }
    Fill result = Fill::done;
    if (!request.abandoned) {
        if (*status != Status::ok) fail(status_name(*status), page);
        if (*status != Status::ok || !copy_rows(sequence, request)) {
            empty_words(request.misses.data(), request.misses.size());
            add_relaxed(client_.ring().stats->failed, 1);
            result = Fill::failed;
        }
    }
    request.misses.clear();
    filled_ = sequence;
    client_.retire(sequence);
    return result;
}

bool TwinTable::copy_rows(std::uint32_t sequence, const Request& request) {
    const std::uint8_t* arena = client_.arena(sequence);
    for (std::size_t k = 0; k < request.misses.size(); ++k) {
        const Miss& miss = request.misses[k];
        // Bypass rows of a kick that another one has replaced: nobody will ask for them.
        if (miss.slot == kNoSlot && request.kick != kick_) continue;
        // A slot that another row has by now must not get this one's bytes.
        if (miss.slot != kNoSlot && !cache_->names(options_.table, miss.row, miss.slot)) continue;
        const std::uint8_t* page = client_.page(arena, sequence, static_cast<std::uint32_t>(k));
        std::uint8_t* to = miss.slot == kNoSlot ? spill(miss.spill) : cache_->bytes(miss.slot);
        if (copy_row(miss, page, to)) continue;
        add_relaxed(client_.ring().stats->tag_errors, 1);
        fail("row tag does not match", miss.row / geometry_.rows_per_page);
        return false;
    }
    return true;
}

// The tag is recomputed on the copy, so what the cache holds is checked and not what the page
// held a moment earlier.
bool TwinTable::copy_row(const Miss& miss, const std::uint8_t* page, std::uint8_t* to) const {
    const std::size_t row = miss.row % geometry_.rows_per_page;
    std::memcpy(to, page + row * geometry_.stride, geometry_.stride);
    const std::size_t tags = static_cast<std::size_t>(geometry_.rows_per_page) * geometry_.stride;
    std::uint32_t stored;
    std::memcpy(&stored, page + tags + 4 * row, sizeof stored);
    return row_tag(to, geometry_.stride, miss.row, tag_key_) == stored;
}

void TwinTable::abandon_outstanding() {
    for (std::uint32_t s = filled_ + 1; s != client_.published() + 1; ++s) {
        Request& request = requests_[s % kRingDepth];
        if (request.abandoned) continue;
        empty_words(request.misses.data(), request.misses.size());
        request.abandoned = true;
        add_relaxed(client_.ring().stats->failed, 1);
    }
}

void TwinTable::empty_words(const Miss* misses, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i)
        if (misses[i].slot != kNoSlot)
            cache_->empty(options_.table, misses[i].row, misses[i].slot);
}

void TwinTable::fail(const char* reason, std::uint64_t page) {
    char text[160];
    std::snprintf(text, sizeof text,
                  "request failed: %s, image %016" PRIx64 ", generation %" PRIu32
                  ", page %" PRIu64,
                  reason, options_.image.image_id, options_.image.generation, page);
    failure_ = text;
}

}  // namespace tierd
