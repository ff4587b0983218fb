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

// A look-up is one load where 512 pages in a row lie in one run, as they do in extents of 2 MiB that
// staging makes; elsewhere it is a binary search.
class ExtentMap {
  public:
    ExtentMap() = default;
    // `rows` is sorted and without holes (checked by the caller, who can say what is wrong).
    explicit ExtentMap(const std::vector<ExtentRow>& rows) {
        for (const ExtentRow& row : rows) {
            const Run run{row.first_page, (row.device_page - row.first_page) * kPageBytes,
                          static_cast<std::uint32_t>(row.device)};
            if (runs_.empty() || runs_.back().shift != run.shift || runs_.back().device != run.device)
                runs_.push_back(run);
        }
        const std::uint64_t end = rows.empty() ? 0 : rows.back().first_page + rows.back().pages;
        for (std::uint64_t page = 0; page < end; page += kBucketPages) {
            const std::size_t first = run_at(page);
            const bool whole = run_at(std::min(page + kBucketPages, end) - 1) == first;
            buckets_.push_back({runs_[first].shift, runs_[first].device, whole});
        }
    }

    // `page` lies below the end of the last extent.
    PagePlace locate(std::uint64_t page) const {
        const Bucket& bucket = buckets_[page / kBucketPages];
        if (bucket.whole) return {bucket.device, bucket.shift + page * kPageBytes};
        const Run& run = runs_[run_at(page)];
        return {run.device, run.shift + page * kPageBytes};
    }
    void prefetch(std::uint64_t page) const { __builtin_prefetch(&buckets_[page / kBucketPages]); }

    std::uint32_t first_device() const { return runs_.front().device; }
    bool uses(std::uint32_t device) const {
        return std::any_of(runs_.begin(), runs_.end(),
                           [device](const Run& run) { return run.device == device; });
    }

  private:
    static constexpr std::uint64_t kBucketPages = 512;
    // `shift` is the byte offset on the device minus that in the image, modulo 2^64.
    struct Run {
        std::uint64_t first_page;
        std::uint64_t shift;
        std::uint32_t device;
    };
    struct Bucket {
        std::uint64_t shift;
        std::uint32_t device;
        bool whole;  // one run holds all its pages
    };

    // The last run that starts at or before `page`.
    std::size_t run_at(std::uint64_t page) const {
        const auto after = std::upper_bound(
            runs_.begin(), runs_.end(), page,
            [](std::uint64_t p, const Run& run) { return p < run.first_page; });
        return static_cast<std::size_t>(after - runs_.begin()) - 1;
    }

    std::vector<Run> runs_;
    std::vector<Bucket> buckets_;
};

}  // namespace tierd
