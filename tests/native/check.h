// The native tests' only tool: a check that stays in release builds and says where it failed.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                 \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                                \
        }                                                                                \
    } while (false)

#define RUN(test)              \
    do {                       \
        std::puts(#test);      \
        std::fflush(stdout);   \
        test();                \
    } while (false)
