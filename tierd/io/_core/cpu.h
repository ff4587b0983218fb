// What this processor can do, asked once. Dispatch is a branch on a cached flag rather than an
// ifunc (target_clones): ifunc resolvers run before the sanitizers' runtimes are ready.
#pragma once

#if defined(__x86_64__)
#define TIERD_X86 1
#define TIERD_AVX2 __attribute__((target("avx2")))
#else
#define TIERD_X86 0
#define TIERD_AVX2
#endif

#define TIERD_ALWAYS_INLINE inline __attribute__((always_inline))

namespace tierd {

struct CpuFeatures {
    bool avx2 = false;
    bool crc32 = false;   // x86 SSE4.2 or Armv8 CRC
};

const CpuFeatures& cpu();

}  // namespace tierd
