// Does this processor run the library's code, and from which sources was it built?
#include "pairs.hpp"

EXPORT const char source_digest[] = SOURCE_DIGEST;

#if defined(__x86_64__)
#define BASELINE [[gnu::target("arch=x86-64")]]
#else
#define BASELINE
#endif

int64_t pair_instruction = 0;

[[gnu::constructor]] BASELINE static void find_instructions() {
#if defined(__AVX512F__)
    __builtin_cpu_init();
    pair_instruction = __builtin_cpu_supports("avx512bf16") != 0;
#endif
}

EXPORT BASELINE int runs_here() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                __builtin_cpu_supports("bmi2");
#if defined(__AVX512F__)
    return avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#else
    return avx2;
#endif
#else
    return 1;
#endif
}
