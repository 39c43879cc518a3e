// The tiles of AMX and what its instructions do to them: Intel's Software Developer's Manual, volume 2,
// under the instructions' names; volume 1, chapter 18, for the state.
#pragma once

#include <stdint.h>

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64, CONFIG_BYTES = 64 };

// The order of the counters, which Python's side knows too.
enum instruction {
    LDTILECFG, STTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILELOADDT1, TILESTORED,
    TDPBSSD, TDPBSUD, TDPBUSD, TDPBUUD, TDPBF16PS, INSTRUCTIONS,
};

enum fault { NONE, INVALID_OPCODE, GENERAL_PROTECTION };

// Each works on the calling thread's tiles, and changes nothing if it returns a fault.
enum fault load_config(const void *memory);
void store_config(void *memory);
void release(void);
enum fault zero(int tile);
enum fault load(int tile, const char *memory, int64_t stride);
enum fault store(int tile, char *memory, int64_t stride);
// `kind` is one of TDPBSSD to TDPBF16PS.
enum fault multiply(enum instruction kind, int sum, int left, int right);
