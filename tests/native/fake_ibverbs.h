// A libibverbs of one device without a wire, for tests: it keeps count of what is made of it and
// says what the test wants it to say.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <deque>
#include <vector>

struct FakeVerbs {
    int regions = 0;      // registered now
    int queue_pairs = 0;  // that exist now
    std::vector<std::uint64_t> posted;
    std::deque<ibv_wc> completions;  // what the next polls find
};

__attribute__((visibility("default"))) extern FakeVerbs fake_verbs;
