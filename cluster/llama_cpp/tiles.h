// Compiled into every C++ file of llama.cpp (`-include`), for its AMX kernels.
//
// GCC up to 13.2 says of _tile_loadconfig that it reads 8 bytes. It reads 64. So GCC drops the stores to the
// other 56, and the next instruction on a tile dies (ggml-org/llama.cpp issue 20824, pull request 26954).
// This one says 64, and changes nothing where there is no AMX. clang is right, and does not know %X0.
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define _tile_loadconfig(config) \
    __asm__ volatile("ldtilecfg\t%X0" : : "m"(*(const char(*)[64])(config)))
#endif
