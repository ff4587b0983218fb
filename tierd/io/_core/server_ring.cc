#include "server_ring.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>

namespace tierd {
namespace {

std::uint32_t load_relaxed(const std::uint32_t& word) {
    return std::atomic_ref<std::uint32_t>(const_cast<std::uint32_t&>(word))
        .load(std::memory_order_relaxed);
}

void wake_futex(std::uint32_t* word) {
    // Not FUTEX_PRIVATE: the sleeper is in another process.
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

ServerRing::ServerRing(const RingView& view, ServedTable* table, Owner role)
    : view_(view),
      table_(table),
      role_(role),
      arena_(role == Owner::daemon ? view.arena_d : view.arena_g),
      done_word_(role == Owner::daemon ? view.control->done_d : view.control->done_g),
      status_(role == Owner::daemon ? view.control->status_d : view.control->status_g),
      page_numbers_(new std::uint32_t[2 * static_cast<std::size_t>(kRingDepth) * view.rows_max]) {
    for (std::uint32_t i = 0; i < kRingDepth; ++i) {
        requests_[i].pages = page_numbers_.get() + 2 * static_cast<std::size_t>(i) * view.rows_max;
        requests_[i].rows = requests_[i].pages + view.rows_max;
    }
    if (is_hint()) staging_.reserve(view.arena_pages);
}

void ServerRing::start_at(std::uint32_t base) {
    accepted_ = done_ = base;
    issue_ = base + 1;
}

bool ServerRing::adopt() {
    if (closing_) return false;
    RingControl& c = *view_.control;
    const Tenure now = load_tenure(c.tenure);
    if (load_relaxed(c.drained.value) != now.epoch) store_release(c.drained.value, now.epoch);
    if (now.owner != static_cast<std::uint32_t>(Owner::daemon)) return false;
    start_behind_answers();
    epoch_ = now.epoch;
    return serving_ = true;
}

void ServerRing::start_behind_answers() {
    // The later of the two done words, seen from the doorbell, which both can trail by at most a
    // ring's depth. Anything else is nonsense and restarts the ring at its doorbell.
    const std::uint32_t doorbell = load_acquire(view_.control->doorbell.value);
    const std::uint32_t behind = unanswered(*view_.control);
    start_at(doorbell - std::min(behind, kRingDepth));
}

void ServerRing::take() {
    if (closing_) return;
    TenureLine& tenure = view_.control->tenure;
    epoch_ = load_tenure(tenure).epoch + 1;
    store_tenure(tenure, {static_cast<std::uint32_t>(Owner::guardian), epoch_});
    // The daemon may answer one more request after its last look at the tenure, and then it is
    // answered twice; both answers are right.
    start_behind_answers();
    yielding_ = false;
    serving_ = true;
    ++counters.takeovers;
}

bool ServerRing::hand_back() {
    yielding_ = true;
    if (accepted_ != done_ || in_flight != 0) return false;
    serving_ = false;
    store_tenure(view_.control->tenure, {static_cast<std::uint32_t>(Owner::daemon), epoch_ + 1});
    return true;
}

void ServerRing::lose() {
    serving_ = false;
    ++counters.takeovers;
}


bool ServerRing::has_news() const {
    if (!serving_ || closing_ || yielding_) return false;
    const std::uint32_t doorbell = load_acquire(view_.control->doorbell.value);
    return is_news(doorbell);
}

bool ServerRing::is_news(std::uint32_t doorbell) const {
    // A doorbell that went back, or ahead of what a ring can hold, has to wait: what is being
    // served is finished first.
    const std::uint32_t ahead = doorbell - done_, taken = accepted_ - done_;
    return ahead != taken && (taken == 0 || (ahead <= kRingDepth && ahead > taken));
}

void ServerRing::accept(std::uint64_t now_ns) {
    const std::uint32_t doorbell = load_acquire(view_.control->doorbell.value);
    if (!is_news(doorbell)) return;  // it has changed since has_news()
    if (doorbell - done_ > kRingDepth) {
        // Nonsense, or the client would be within a ring's depth. The ring goes on at the doorbell,
        // and what the descriptors before it hold gets its refusals like any other request.
        ++counters.jumps;
        start_at(doorbell - kRingDepth);
    }
    while (accepted_ != doorbell) take_in(accepted_ + 1, now_ns);
}

void ServerRing::take_in(std::uint32_t sequence, std::uint64_t now_ns) {
    const Descriptor d = view_.descriptor(sequence);
    ServerRequest& q = requests_[sequence % kRingDepth];
    const std::uint32_t count = load_relaxed(d.header->count);
    const std::uint32_t priority = load_relaxed(d.header->priority);
    q.sequence = sequence;
    q.first_page = load_relaxed(d.header->first_page);
    q.issued = q.in_flight = q.limit = 0;
    bool sane = load_relaxed(d.header->sequence) == sequence && count != 0 &&
                count <= view_.rows_max && q.first_page < view_.arena_pages &&
                priority <= static_cast<std::uint32_t>(Priority::prefill);
    if (sane) {
        const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(std::uint32_t);
        std::memcpy(q.pages, d.page, bytes);
        q.hinted = hint != nullptr;
        if (q.hinted) std::memcpy(q.rows, d.row, bytes);
        std::uint32_t last = 0;
        for (std::uint32_t i = 0; i < count; ++i) last = std::max(last, q.pages[i]);
        sane = last < table_->geometry.pages;
    }
    q.status = sane ? Status::ok : Status::bad_request;
    q.limit = sane ? count : 0;
    q.seen_ns = now_ns;
    q.key = request_key(sane ? priority : 0, now_ns, table_->window_ns);
    if (is_hint()) q.key = ~std::uint64_t{0};  // after whatever somebody waits for
    accepted_ = sequence;
    // Requests of a ring are answered in order, so what stands before an urgent one is as urgent.
    for (std::uint32_t s = sequence - 1; s != issue_ - 1; --s) {
        ServerRequest& earlier = requests_[s % kRingDepth];
        if (earlier.key <= q.key) break;
        earlier.key = q.key;
    }
    advance_issue();
}

void ServerRing::advance_issue() {
    while (issue_ != accepted_ + 1) {
        const ServerRequest& q = requests_[issue_ % kRingDepth];
        if (q.issued < q.limit) {
            key = q.key;
            return;
        }
        ++issue_;
    }
}

bool ServerRing::blocked() {
    const ServerRequest& next = requests_[issue_ % kRingDepth];
    if (next.issued != 0) return false;  // it was judged when it began
    for (std::uint32_t s = done_ + 1; s != issue_; ++s) {
        const ServerRequest& q = requests_[s % kRingDepth];
        if (q.in_flight == 0) continue;
        // Two runs of a circle meet if either one's first page lies in the other.
        const std::uint32_t size = view_.arena_pages;
        const std::uint32_t ahead = (next.first_page + size - q.first_page) % size;
        const std::uint32_t back = (q.first_page + size - next.first_page) % size;
        if (ahead < q.issued || back < next.limit) return true;
    }
    return false;
}

void ServerRing::fail(ServerRequest& request, Status status) {
    if (request.status == Status::ok) request.status = status;
    request.limit = request.issued;
}

std::uint32_t ServerRing::head_remaining() const {
    if (done_ == accepted_) return 0;
    const ServerRequest& q = requests_[(done_ + 1) % kRingDepth];
    return q.limit - q.issued + q.in_flight;
}

void ServerRing::answer(std::uint32_t sequence, Status status) {
    store_release(status_.word[sequence % kRingDepth], status_word(sequence, status));
    store_release(done_word_.value, sequence);
    done_ = sequence;
    ++counters.answered[static_cast<std::uint32_t>(status)];
}

void ServerRing::complete(std::uint64_t now_ns) {
    bool answered = false;
    while (serving_ && done_ != accepted_) {
        const ServerRequest& q = requests_[(done_ + 1) % kRingDepth];
        if (q.issued < q.limit || q.in_flight != 0) break;
        if (!ours()) break;  // the pump notices and drains
        answer(q.sequence, q.status);
        if (q.status == Status::ok) counters.pages += q.limit;
        if (q.status == Status::ok && is_hint()) stage(q);
        if (now_ns > q.seen_ns) {
            counters.read_ns += now_ns - q.seen_ns;
            ++counters.read_times[read_time_bucket(now_ns - q.seen_ns)];
        }
        answered = true;
    }
    if (answered) wake_waiter();
}

void ServerRing::stage(const ServerRequest& request) {
    for (std::uint32_t row = 0; row < request.limit; ++row)
        staging_.put(request.pages[row], arena_page(request, row), request.sequence);
}

const std::uint8_t* ServerRing::staged_page(std::uint32_t page) {
    const auto* entry = staging_.find(page, load_acquire(view_.control->retired.value));
    return entry == nullptr ? nullptr : arena(entry->place);
}

bool ServerRing::take_staged(const ServerRequest& request, std::uint32_t row) {
    constexpr std::uint32_t kAhead = 8;
    const Geometry& g = table_->geometry;
    const std::uint32_t tags = g.rows_per_page * g.stride;
    if (row + kAhead < request.limit) {
        const std::uint8_t* next = hint->staged_page(request.pages[row + kAhead]);
        if (next != nullptr) {
            const std::uint32_t at = std::min(request.rows[row + kAhead], g.rows_per_page - 1);
            __builtin_prefetch(next + tags + at * 4);
            __builtin_prefetch(next + kPageBytes - kTrailerBytes);
            for (std::uint32_t b = 0; b < g.stride; b += kLineBytes)
                __builtin_prefetch(next + at * g.stride + b);
        }
    }
    const std::uint32_t in_page = request.rows[row];
    const std::uint8_t* page = hint->staged_page(request.pages[row]);
    if (page == nullptr || in_page >= g.rows_per_page) return false;
    if (check_page(page, request.pages[row], g, table_->key, false, false) != PageFault::ok)
        return false;
    std::uint8_t* to = arena(arena_page(request, row));
    std::memcpy(to + in_page * g.stride, page + in_page * g.stride, g.stride);
    std::memcpy(to + tags + in_page * 4, page + tags + in_page * 4, 4);
    ++counters.staged;
    return true;
}

void ServerRing::wake_waiter() {
    // The client stores waiter, fences, and looks at done once more before it sleeps; we stored
    // done, fence, and look at waiter: one of the two sees the other.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    RingControl& c = *view_.control;
    // Clients sleep on done_d, whoever answers.
    if (load_acquire(c.waiter.value) != 0) wake_futex(&c.done_d.value);
}

void ServerRing::close() {
    if (closing_) return;
    closing_ = true;
    if (others_go_on()) return;  // what is not read as a whole is theirs
    for (std::uint32_t s = done_ + 1; s != accepted_ + 1; ++s) {
        ServerRequest& q = requests_[s % kRingDepth];
        if (q.issued < q.limit) fail(q, Status::cancelled);
    }
    advance_issue();
}

void ServerRing::cancel_rest() {
    if (!serving_) return;
    complete();
    if (others_go_on()) {
        serving_ = false;
        return;
    }
    const std::uint32_t doorbell = load_acquire(view_.control->doorbell.value);
    if (doorbell - done_ > kRingDepth) start_at(doorbell - kRingDepth);
    while (done_ != doorbell && ours()) answer(done_ + 1, Status::cancelled);
    start_at(done_);
    serving_ = false;
    wake_waiter();
}

}  // namespace tierd
