#include "tiles.h"

#include <string.h>
#include <xmmintrin.h>

// As it lies in memory: the manual's table under LDTILECFG.
struct config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

struct state {
    struct config config;  // all 0: not configured
    _Alignas(64) uint8_t tile[TILES][ROWS][ROW_BYTES];
};

// The model of a preloaded library: such a variable can be used in a signal's handler.
static _Thread_local struct state state __attribute__((tls_model("initial-exec")));

static int is_zero(const void *bytes, int n) {
    for (int i = 0; i < n; i++)
        if (((const uint8_t *)bytes)[i]) return 0;
    return 1;
}

static int is_valid(const struct config *config) {
    if (config->palette > 1) return 0;
    if (config->palette == 0) return 1;
    for (int i = 0; i < TILES; i++) {
        if (config->row_bytes[i] > ROW_BYTES || config->rows[i] > ROWS) return 0;
        if (!config->row_bytes[i] != !config->rows[i]) return 0;
    }
    return is_zero(config->reserved, sizeof config->reserved)
        && is_zero(config->row_bytes + TILES, sizeof config->row_bytes / 2)
        && is_zero(config->rows + TILES, sizeof config->rows / 2);
}

enum fault load_config(const void *memory) {
    struct config config;
    memcpy(&config, memory, sizeof config);
    if (!is_valid(&config)) return GENERAL_PROTECTION;
    release();
    if (config.palette) state.config = config;
    return NONE;
}

void store_config(void *memory) { memcpy(memory, &state.config, sizeof state.config); }

void release(void) { memset(&state, 0, sizeof state); }

static int is_configured(int tile) { return state.config.palette && state.config.rows[tile]; }

enum fault zero(int tile) {
    if (!is_configured(tile)) return INVALID_OPCODE;
    memset(state.tile[tile], 0, sizeof state.tile[tile]);
    state.config.start_row = 0;
    return NONE;
}

static int can_move(int tile) {
    return is_configured(tile) && state.config.row_bytes[tile] % 4 == 0
        && state.config.start_row < state.config.rows[tile];
}

enum fault load(int tile, const char *memory, int64_t stride) {
    if (!can_move(tile)) return INVALID_OPCODE;
    int bytes = state.config.row_bytes[tile];
    for (int row = state.config.start_row; row < ROWS; row++) {
        uint8_t *to = state.tile[tile][row];
        memset(to, 0, ROW_BYTES);
        if (row < state.config.rows[tile]) memcpy(to, memory + row * stride, bytes);
    }
    state.config.start_row = 0;
    return NONE;
}

enum fault store(int tile, char *memory, int64_t stride) {
    if (!can_move(tile)) return INVALID_OPCODE;
    int bytes = state.config.row_bytes[tile];
    for (int row = state.config.start_row; row < state.config.rows[tile]; row++)
        memcpy(memory + row * stride, state.tile[tile][row], bytes);
    state.config.start_row = 0;
    return NONE;
}

// The shapes must fit: (m x k) times (k x n) in units of 4 bytes, and all three tiles differ.
static int fit(int sum, int left, int right) {
    const struct config *of = &state.config;
    if (sum == left || sum == right || left == right) return 0;
    if (!is_configured(sum) || !is_configured(left) || !is_configured(right)) return 0;
    if (of->row_bytes[sum] % 4 || of->row_bytes[left] % 4 || of->row_bytes[right] % 4) return 0;
    return of->rows[sum] == of->rows[left] && of->row_bytes[sum] == of->row_bytes[right]
        && of->row_bytes[left] / 4 == of->rows[right];
}

// One of the four bytes of each number, with or without its sign. Vectorised, as are the loops below.
static void spread(const uint8_t *row, int byte, int is_signed, int32_t *out) {
    uint32_t numbers[ROW_BYTES / 4];
    memcpy(numbers, row, sizeof numbers);
    for (int i = 0; i < ROW_BYTES / 4; i++) {
        uint32_t top = numbers[i] << (24 - 8 * byte);
        out[i] = is_signed ? (int32_t)top >> 24 : (int32_t)(top >> 24);
    }
}

static void multiply_bytes(int left_signed, int right_signed, int sum, int left, int right) {
    uint32_t(*out)[ROW_BYTES / 4] = (void *)state.tile[sum];
    for (int k = 0; k < state.config.rows[right]; k++)
        for (int byte = 0; byte < 4; byte++) {
            int32_t column[ROW_BYTES / 4];
            spread(state.tile[right][k], byte, right_signed, column);
            for (int row = 0; row < state.config.rows[sum]; row++) {
                uint8_t raw = state.tile[left][row][4 * k + byte];
                int32_t factor = left_signed ? (int8_t)raw : raw;
                for (int i = 0; i < ROW_BYTES / 4; i++) out[row][i] += (uint32_t)(factor * column[i]);
            }
        }
}

static float bf16(const uint8_t *bytes) {
    uint32_t bits = (uint32_t)bytes[0] << 16 | (uint32_t)bytes[1] << 24;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

// Even and odd products are summed apart, and tiny numbers are 0, as the manual says.
static void multiply_bf16(int sum, int left, int right) {
    float(*out)[ROW_BYTES / 4] = (void *)state.tile[sum];
    unsigned mode = _mm_getcsr();
    _mm_setcsr(0x9FC0);  // flush to zero, denormals are zero, all exceptions masked, nearest
    for (int row = 0; row < state.config.rows[sum]; row++)
        for (int i = 0; i < state.config.row_bytes[sum] / 4; i++) {
            float even = 0, odd = 0;
            for (int k = 0; k < state.config.rows[right]; k++) {
                const uint8_t *a = state.tile[left][row] + 4 * k, *b = state.tile[right][k] + 4 * i;
                even = __builtin_fmaf(bf16(a), bf16(b), even);
                odd = __builtin_fmaf(bf16(a + 2), bf16(b + 2), odd);
            }
            out[row][i] += even + odd;
        }
    _mm_setcsr(mode);
}

enum fault multiply(enum instruction kind, int sum, int left, int right) {
    if (!fit(sum, left, right)) return INVALID_OPCODE;
    if (kind == TDPBF16PS) {
        multiply_bf16(sum, left, right);
    } else {
        int left_signed = kind == TDPBSSD || kind == TDPBSUD;
        int right_signed = kind == TDPBSSD || kind == TDPBUSD;
        multiply_bytes(left_signed, right_signed, sum, left, right);
    }
    state.config.start_row = 0;
    return NONE;
}
