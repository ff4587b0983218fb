// A binary heap of rings, the most urgent first. A ring knows its place in it, so that its key can
// change and it can be taken out without a search. Nothing is allocated after reserve().
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace tierd {

inline constexpr std::size_t kNotInHeap = ~std::size_t{0};

// Item has `std::uint64_t key` (smaller is sooner), `std::uint64_t order` (breaks ties, unique) and
// `std::size_t heap_at`, which starts as kNotInHeap.
template <typename Item>
class DeadlineHeap {
  public:
    void reserve(std::size_t items) { items_.reserve(items); }
    bool empty() const { return items_.empty(); }
    Item* top() const { return items_.front(); }

    // Adds the item, or moves it to where its key now belongs.
    void put(Item* item) {
        if (item->heap_at == kNotInHeap) {
            item->heap_at = items_.size();
            items_.push_back(item);
        }
        settle(item->heap_at);
    }

    void remove(Item* item) {
        const std::size_t at = item->heap_at;
        if (at == kNotInHeap) return;
        item->heap_at = kNotInHeap;
        Item* last = items_.back();
        items_.pop_back();
        if (last == item) return;
        items_[at] = last;
        last->heap_at = at;
        settle(at);
    }

  private:
    static bool sooner(const Item* a, const Item* b) {
        return a->key != b->key ? a->key < b->key : a->order < b->order;
    }

    void swap(std::size_t a, std::size_t b) {
        std::swap(items_[a], items_[b]);
        items_[a]->heap_at = a;
        items_[b]->heap_at = b;
    }

    void settle(std::size_t at) {
        while (at != 0 && sooner(items_[at], items_[(at - 1) / 2])) {
            swap(at, (at - 1) / 2);
            at = (at - 1) / 2;
        }
        while (true) {
            std::size_t best = at;
            for (std::size_t child = 2 * at + 1; child <= 2 * at + 2; ++child)
                if (child < items_.size() && sooner(items_[child], items_[best])) best = child;
            if (best == at) return;
            swap(at, best);
            at = best;
        }
    }

    std::vector<Item*> items_;
};

}  // namespace tierd
