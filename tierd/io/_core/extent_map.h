// Where the pages of an image lie: page number -> (device, byte offset).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "protocol.h"

namespace tierd {

// One extent as the control plane hands it over; numbers in pages.
struct ExtentRow {
    std::uint64_t first_page;
    std::uint64_t pages;
    std::uint64_t device;
    std::uint64_t device_page;
};

struct PagePlace {
    std::uint32_t device;
    std::uint64_t offset;  // bytes
};

// Look-ups take one step where extents are 2 MiB or longer, as staging makes them: a hint per 512
// pages names the extent that holds the first of them, and the rest is a binary search among the
// extents that begin within the same 512 pages.
class ExtentMap {
  public:
    ExtentMap() = default;
    // `rows` is sorted and without holes (checked by the caller, who can say what is wrong).
    explicit ExtentMap(const std::vector<ExtentRow>& rows) {
        runs_.reserve(rows.size());
        for (const ExtentRow& row : rows)
            runs_.push_back({row.first_page, static_cast<std::uint32_t>(row.device),
                             (row.device_page - row.first_page) * kPageBytes});
        const std::uint64_t end = rows.empty() ? 0 : rows.back().first_page + rows.back().pages;
        for (std::uint64_t page = 0; page < end; page += kBucketPages)
            hints_.push_back(static_cast<std::uint32_t>(run_before(page, 0, runs_.size())));
        hints_.push_back(static_cast<std::uint32_t>(runs_.empty() ? 0 : runs_.size() - 1));
    }

    // `page` lies below the end of the last extent.
    PagePlace locate(std::uint64_t page) const {
        const std::size_t bucket = page / kBucketPages;
        std::size_t at = hints_[bucket];
        const std::size_t last = hints_[bucket + 1];
        if (at != last && runs_[at + 1].first_page <= page) at = run_before(page, at + 1, last + 1);
        return {runs_[at].device, runs_[at].shift + page * kPageBytes};
    }

    bool uses(std::uint32_t device) const {
        return std::any_of(runs_.begin(), runs_.end(),
                           [device](const Run& run) { return run.device == device; });
    }

  private:
    static constexpr std::uint64_t kBucketPages = 512;
    struct Run {
        std::uint64_t first_page;
        std::uint32_t device;
        std::uint64_t shift;  // device offset minus image offset, in bytes, modulo 2^64
    };

    // The last run of [begin, end) that starts at or before `page`.
    std::size_t run_before(std::uint64_t page, std::size_t begin, std::size_t end) const {
        const auto from = runs_.begin() + static_cast<std::ptrdiff_t>(begin);
        const auto to = runs_.begin() + static_cast<std::ptrdiff_t>(end);
        const auto after = std::upper_bound(
            from, to, page, [](std::uint64_t p, const Run& run) { return p < run.first_page; });
        return static_cast<std::size_t>(after - runs_.begin()) - 1;
    }

    std::vector<Run> runs_;
    std::vector<std::uint32_t> hints_;
};

}  // namespace tierd
