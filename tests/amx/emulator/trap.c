// AMX on processors without it, as a library for LD_PRELOAD.
//
// There, its instructions raise SIGILL. The handler carries them out and goes on behind them. What is not
// AMX, and what AMX faults at, goes to the program's own handler, or kills it. As Linux does, it refuses
// all until the program asks for permission.
//
// AMX_COUNTS may name a file: it gets how many instructions were carried out, 64 bits for each kind in the
// order of `enum instruction`. All processes add to it.
#define _GNU_SOURCE
#include "tiles.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

static int permitted;
static uint64_t unseen[INSTRUCTIONS], *counts = unseen;
static struct sigaction theirs;  // for SIGILL

static const uint8_t register_of[16] = {
    REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
    REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15,
};

// An instruction behind its prefix C4 (the manual's volume 2, chapters 2.1 and 2.3).
struct decoded {
    int opcode, prefix, mode, reg, rm, vvvv, has_sib;
    char *address;
    int64_t stride;
    const uint8_t *end;
};

static int64_t displacement(const uint8_t **at, int bytes) {
    int32_t number = 0;
    memcpy(&number, *at, bytes);
    *at += bytes;
    return bytes == 1 ? (int8_t)number : number;
}

static void decode_memory(struct decoded *one, int index_bit, int base_bit, const greg_t *registers) {
    int base = one->rm | base_bit, low = one->rm;
    one->has_sib = low == 4;
    if (one->has_sib) {
        int sib = *one->end++, index = (sib >> 3 & 7) | index_bit;
        low = sib & 7;
        base = low | base_bit;
        if (index != 4) one->stride = (int64_t)((uint64_t)registers[register_of[index]] << (sib >> 6));
    }
    int nowhere = one->mode == 0 && low == 5;
    int bytes = one->mode == 1 ? 1 : one->mode == 2 || nowhere ? 4 : 0;
    int64_t offset = displacement(&one->end, bytes);
    if (!nowhere) offset += registers[register_of[base]];
    else if (!one->has_sib) offset += (int64_t)one->end;  // relative to the next instruction
    one->address = (char *)offset;
}

// Returns 0 if it is none of AMX's.
static int decode(const uint8_t *at, const greg_t *registers, struct decoded *one) {
    if (at[0] != 0xC4 || (at[1] & 0x1F) != 2 || at[2] & 0x84) return 0;
    *one = (struct decoded){.opcode = at[3], .prefix = at[2] & 3, .vvvv = ~at[2] >> 3 & 15, .end = at + 5};
    if (one->opcode != 0x49 && one->opcode != 0x4B && one->opcode != 0x5C && one->opcode != 0x5E) return 0;
    one->mode = at[4] >> 6, one->reg = at[4] >> 3 & 7, one->rm = at[4] & 7;
    if (one->mode != 3) decode_memory(one, ~at[1] >> 3 & 8, ~at[1] >> 2 & 8, registers);
    if (one->opcode == 0x49) one->address += one->stride;  // an index is a stride only for tiles
    return 1;
}

// The prefixes: 0 is none, 1 is 66, 2 is F3, 3 is F2.
static enum instruction kind_of(const struct decoded *one) {
    static const uint8_t multiplications[] = {TDPBUUD, TDPBUSD, TDPBSUD, TDPBSSD};
    static const uint8_t moves[] = {INSTRUCTIONS, TILELOADDT1, TILESTORED, TILELOADD};
    int in_memory = one->mode != 3;
    if (one->vvvv >= TILES) return INSTRUCTIONS;
    if (one->opcode == 0x5E) return in_memory ? INSTRUCTIONS : multiplications[one->prefix];
    if (one->opcode == 0x5C) return in_memory || one->prefix != 2 ? INSTRUCTIONS : TDPBF16PS;
    if (one->vvvv) return INSTRUCTIONS;
    if (one->opcode == 0x4B) return in_memory && one->has_sib ? moves[one->prefix] : INSTRUCTIONS;
    if (one->prefix == 3) return in_memory || one->rm ? INSTRUCTIONS : TILEZERO;
    if (one->reg || one->prefix == 2) return INSTRUCTIONS;
    if (in_memory) return one->prefix ? STTILECFG : LDTILECFG;
    return one->prefix || one->rm ? INSTRUCTIONS : TILERELEASE;
}

static enum fault carry_out(enum instruction kind, const struct decoded *one) {
    switch (kind) {
    case LDTILECFG: return load_config(one->address);
    case STTILECFG: store_config(one->address); return NONE;
    case TILERELEASE: release(); return NONE;
    case TILEZERO: return zero(one->reg);
    case TILELOADD:
    case TILELOADDT1: return load(one->reg, one->address, one->stride);
    case TILESTORED: return store(one->reg, one->address, one->stride);
    case INSTRUCTIONS: return INVALID_OPCODE;
    default: return multiply(kind, one->reg, one->rm, one->vvvv);
    }
}

// Carries out the instruction at RIP, if it is one of AMX's.
static int step(greg_t *registers, enum fault *fault) {
    struct decoded one;
    *fault = INVALID_OPCODE;
    if (!decode((const uint8_t *)registers[REG_RIP], registers, &one)) return 0;
    enum instruction kind = kind_of(&one);
    *fault = permitted ? carry_out(kind, &one) : INVALID_OPCODE;
    if (*fault != NONE) return 0;
    __atomic_fetch_add(&counts[kind], 1, __ATOMIC_RELAXED);
    registers[REG_RIP] = (greg_t)one.end;
    return 1;
}

// The handler's return unblocks the signal, which then finds the program at the instruction, as a fault would.
static void raise_at_return(int number) {
    siginfo_t info = {.si_signo = number, .si_code = SI_KERNEL};
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, number);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    syscall(SYS_rt_tgsigqueueinfo, getpid(), gettid(), number, &info);
}

static int (*real_sigaction(void))(int, const struct sigaction *, struct sigaction *) {
    static int (*real)(int, const struct sigaction *, struct sigaction *);
    if (!real) real = dlsym(RTLD_NEXT, "sigaction");
    return real;
}

static void hand_on(int number, siginfo_t *info, void *context) {
    if (theirs.sa_flags & SA_SIGINFO) {
        theirs.sa_sigaction(number, info, context);
    } else if (theirs.sa_handler == SIG_DFL || theirs.sa_handler == SIG_IGN) {
        real_sigaction()(SIGILL, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);  // dies at the next try
    } else {
        theirs.sa_handler(number);
    }
}

static void trapped(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    int before = errno, n = 0;
    enum fault fault;
    while (step(registers, &fault)) n++;  // a signal is slow, and they come in runs
    if (fault == GENERAL_PROTECTION) raise_at_return(SIGSEGV);
    else if (!n) hand_on(number, info, context);
    errno = before;
}

int sigaction(int number, const struct sigaction *action, struct sigaction *old) {
    if (number != SIGILL) return real_sigaction()(number, action, old);
    struct sigaction previous = theirs;
    if (action) theirs = *action;
    if (old) *old = previous;
    return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
    struct sigaction old, action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    return sigaction(number, &action, &old) ? SIG_ERR : old.sa_handler;
}

long syscall(long number, ...) {
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_arch_prctl && a[0] == ARCH_REQ_XCOMP_PERM && a[1] == XFEATURE_XTILEDATA) {
        permitted = 1;
        return 0;
    }
    register long r10 __asm__("r10") = a[3], r8 __asm__("r8") = a[4], r9 __asm__("r9") = a[5];
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    if (result >= -4095 && result < 0) {
        errno = (int)-result;
        return -1;
    }
    return result;
}

static void map_counts(const char *path) {
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof unseen)) abort();
    void *memory = mmap(NULL, sizeof unseen, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) abort();
    counts = memory;
    close(file);
}

__attribute__((constructor)) static void begin(void) {
    if (getenv("AMX_COUNTS")) map_counts(getenv("AMX_COUNTS"));
    struct sigaction action = {.sa_sigaction = trapped, .sa_flags = SA_SIGINFO | SA_NODEFER};
    real_sigaction()(SIGILL, &action, &theirs);
    pthread_atfork(NULL, NULL, release);  // Linux gives a child no tiles
}
