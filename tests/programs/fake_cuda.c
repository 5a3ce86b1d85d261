/* A driver without a device: launches spin as a real one's do, waits sleep. */
#define _GNU_SOURCE
#include <sched.h>
#include <time.h>

static long turns_per_us = 1000;

static long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void turn(long turns) {
    for (volatile long i = 0; i < turns; i++) {}
}

/* Counted and not timed: a stack cannot be followed out of the kernel's clock page. */
__attribute__((constructor)) static void measure(void) {
    long began = now_ns();
    turn(5000000);
    long took = now_ns() - began;
    turns_per_us = 1 + 5000000L * 1000 / (took > 0 ? took : 1);
}

static void spin_us(long us) { turn(us * turns_per_us); }

static void sleep_us(long us) {
    struct timespec t = {us / 1000000, 1000 * (us % 1000000)};
    while (nanosleep(&t, &t)) {}
}

int cuLaunchKernel(void) { spin_us(20); return 0; }
int cuStreamSynchronize(void) { sleep_us(2000); return 0; }
int cuCtxSynchronize(void) { sleep_us(2000); return 0; }
int cuMemcpyDtoH_v2(void) { sleep_us(500); return 0; }
int cuMemcpyHtoDAsync_v2(void) { spin_us(20); return 0; }
int cuMemAlloc_v2(void) { spin_us(100); return 0; }
int cuMemFree_v2(void) { cuCtxSynchronize(); return 0; } /* freeing waits for the device */

/* A launch into a full queue: the driver yields until there is room. */
int cuLaunchKernelEx(void) {
    for (int i = 0; i < 2000; i++) sched_yield();
    return 0;
}
