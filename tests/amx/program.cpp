// Instructions of AMX for test_emulator.py: `program NAME`. Compiled with Corral's tiles.h.
#include <immintrin.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>
#include <thread>

struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void shape(int tile, int n_rows, int n_bytes) {
        rows[tile] = n_rows;
        row_bytes[tile] = n_bytes;
    }
};

static void ask() {
    if (syscall(SYS_arch_prctl, 0x1023, 18)) _exit(3);
}

// 5 x 7 numbers, plus 5 x 9 times 9 x 7, in units of 4 bytes; all rows in memory are 80 bytes apart.
static void configure() {
    Config config;
    config.shape(1, 5, 28);
    config.shape(2, 5, 36);
    config.shape(3, 9, 28);
    _tile_loadconfig(&config);
}

static char sum[5][80], left[5][80], right[9][80];

static void read_input() {
    if (fread(sum, sizeof sum, 1, stdin) + fread(left, sizeof left, 1, stdin) + fread(right, sizeof right, 1, stdin) != 3)
        _exit(4);
}

static void multiply(const std::string &kind) {
    _tile_loadd(1, sum, 80);
    _tile_loadd(2, left, 80);
    _tile_stream_loadd(3, right, 80);
    if (kind == "tdpbssd") _tile_dpbssd(1, 2, 3);
    if (kind == "tdpbsud") _tile_dpbsud(1, 2, 3);
    if (kind == "tdpbusd") _tile_dpbusd(1, 2, 3);
    if (kind == "tdpbuud") _tile_dpbuud(1, 2, 3);
    if (kind == "tdpbf16ps") _tile_dpbf16ps(1, 2, 3);
    _tile_stored(1, sum, 80);
}

static void print(const void *bytes, size_t n) { fwrite(bytes, n, 1, stdout); }

// Relative to the instruction, with an index, and with the registers that are encoded unlike others.
static void addresses() {
    static Config config, second;
    static char rows[2][16] = {"the first row..", "and the second."};
    char copied[2][32] = {}, stored[64];
    config.shape(1, 2, 16);
    second.shape(1, 2, 4);
    register char *base __asm__("r13") = rows[0] + 100, *from __asm__("r12") = copied[0] - 0x400;
    register long index __asm__("r14") = 8;
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
    __asm__ volatile("tileloadd -100(%0,%1,2), %%tmm1" : : "r"(base), "r"(index) : "memory");
    __asm__ volatile("tilestored %%tmm1, 0x400(%0,%1,4)" : : "r"(from), "r"(index) : "memory");
    base = (char *)&second - 32;
    __asm__ volatile("ldtilecfg (%0,%1,4)" : : "r"(base), "r"(index) : "memory");
    from = stored;
    __asm__ volatile("sttilecfg (%0)" : : "r"(from) : "memory");
    print(copied, sizeof copied), print(stored, sizeof stored);
}

static void own_handler(int) {
    print("own handler", 11);
    fflush(stdout);
    _exit(0);
}

static void fault(const std::string &name) {
    Config config;
    config.shape(0, 4, 16);
    config.shape(1, 4, 16);
    if (name == "too many rows") config.rows[5] = 17;
    if (name == "no columns") config.rows[5] = 1;
    if (name == "reserved") config.reserved[13] = 1;
    if (name == "ninth tile") config.shape(8, 1, 4);
    if (name == "unknown palette") config.palette = 2;
    if (name != "not configured") _tile_loadconfig(&config);
    if (name == "released") _tile_release();
    if (name == "unused tile") _tile_zero(7);
    if (name == "shapes") {
        config.shape(2, 3, 16);
        _tile_loadconfig(&config);
        _tile_dpbssd(0, 1, 2);
    }
    if (name == "another instruction") __builtin_trap();
    _tile_zero(0);
}

int main(int, char **arguments) {
    std::string name = arguments[1];
    if (name != "not permitted") ask();
    if (name.rfind("tdp", 0) == 0) {
        read_input();
        // On a thread of its own: this one's tiles stay as they are.
        std::thread([&] { configure(), multiply(name); }).join();
        print(sum, sizeof sum);
    } else if (name == "state") {
        configure();
        _tile_zero(1);
        char config[64], zeros[5][28];
        memset(zeros, 1, sizeof zeros);
        _tile_storeconfig(config);
        _tile_stored(1, zeros, 28);
        print(config, sizeof config), print(zeros, sizeof zeros);
        _tile_release();
        _tile_storeconfig(config);
        print(config, sizeof config);
    } else if (name == "addresses") {
        addresses();
    } else if (name == "own handler") {
        signal(SIGILL, own_handler);
        configure();
        __builtin_trap();
    } else {
        fault(name);
    }
}
