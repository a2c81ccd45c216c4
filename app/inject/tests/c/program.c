// A program that uses CUDA's driver in the ways in which programs do. program WAY [TEST]
// WAY is how it finds the functions: link, dlsym, unversioned, address1, address2, ptsz.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long P;
typedef uintptr_t S;
typedef int R;

#define FUNCTIONS(F) \
    F(cuInit, R, (unsigned)) \
    F(cuDevicePrimaryCtxRetain, R, (uintptr_t*, int)) \
    F(cuCtxSetCurrent, R, (uintptr_t)) \
    F(cuMemAlloc, R, (P*, size_t)) \
    F(cuMemAllocPitch, R, (P*, size_t*, size_t, size_t, unsigned)) \
    F(cuMemFree, R, (P)) \
    F(cuMemAllocAsync, R, (P*, size_t, S)) \
    F(cuMemFreeAsync, R, (P, S)) \
    F(cuMemAllocManaged, R, (P*, size_t, unsigned)) \
    F(cuModuleGetFunction, R, (void**, void*, const char*)) \
    F(cuMemAdvise, R, (P, size_t, int, int)) \
    F(cuMemHostAlloc, R, (void**, size_t, unsigned)) \
    F(cuMemFreeHost, R, (void*)) \
    F(cuMemAllocHost, R, (void**, size_t)) \
    F(cuMemHostGetFlags, R, (unsigned*, void*)) \
    F(cuMemHostGetDevicePointer, R, (P*, void*, unsigned)) \
    F(cuMemHostRegister, R, (void*, size_t, unsigned)) \
    F(cuMemHostUnregister, R, (void*)) \
    F(cuMemcpyHtoDAsync, R, (P, const void*, size_t, S)) \
    F(cuPointerGetAttributes, R, (unsigned, int*, void**, P)) \
    F(cuCtxDestroy, R, (uintptr_t)) \
    F(cuCtxFromGreenCtx, R, (uintptr_t*, uintptr_t)) \
    F(cuCtxSynchronize, R, (void)) \
    F(cuMemGetAddressRange, R, (P*, size_t*, P)) \
    F(cuPointerGetAttribute, R, (void*, int, P)) \
    F(cuIpcGetMemHandle, R, (void*, P)) \
    F(cuMemGetInfo, R, (size_t*, size_t*)) \
    F(cuStreamCreate, R, (S*, unsigned)) \
    F(cuStreamDestroy, R, (S)) \
    F(cuStreamBeginCapture, R, (S, int)) \
    F(cuStreamEndCapture, R, (S, uintptr_t*)) \
    F(cuCtxCreate, R, (uintptr_t*, unsigned, int)) \
    F(cuCtxPopCurrent, R, (uintptr_t*)) \
    F(cuDevicePrimaryCtxReset, R, (int)) \
    F(cuLaunchKernel, R, (void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, S, void**, void**))

#define DECLARE(name, result, arguments) static result(*name) arguments;
FUNCTIONS(DECLARE)

// Symbols of names that have a newer ABI.
static const char* symbol(const char* name) {
    static const char* v2[] = {"cuMemAlloc", "cuMemAllocPitch", "cuMemFree", "cuMemGetAddressRange", "cuMemGetInfo", "cuStreamDestroy",
                               "cuStreamBeginCapture", "cuCtxCreate", "cuCtxPopCurrent", "cuDevicePrimaryCtxReset",
                               "cuMemAllocHost", "cuMemHostGetDevicePointer", "cuMemHostRegister", "cuMemcpyHtoDAsync", "cuCtxDestroy"};
    static char text[64];
    for (size_t i = 0; i < sizeof v2 / sizeof *v2; i++)
        if (!strcmp(name, v2[i])) return snprintf(text, sizeof text, "%s_v2", name), text;
    return name;
}

#ifdef LINKED
extern R cuGetProcAddress_v2(const char*, void**, int, unsigned long long, int*);
#endif

static void* find(const char* way, const char* name) {
    static void* library;
    void* out = NULL;
    if (!strcmp(way, "link")) return dlsym(RTLD_DEFAULT, symbol(name));
    if (!library) library = dlopen(!strcmp(way, "unversioned") ? "libcuda.so" : "libcuda.so.1", RTLD_NOW);
    if (!library) return printf("%s\n", dlerror()), NULL;
    if (!strcmp(way, "dlsym") || !strcmp(way, "unversioned")) return dlsym(library, symbol(name));
    // As the runtime: ask for the function that answers, and then that one.
    R (*get1)(const char*, void**, int, unsigned long long) = dlsym(library, "cuGetProcAddress");
    R (*get2)(const char*, void**, int, unsigned long long, int*) = dlsym(library, "cuGetProcAddress_v2");
    if (!strcmp(way, "address1")) return get1(name, &out, 12000, 0) ? NULL : out;
    int status;
    void* again = NULL;
    if (get2("cuGetProcAddress", &again, 12000, 0, &status) || !again) return NULL;
    *(void**)&get2 = again;
    return get2(name, &out, 12000, !strcmp(way, "ptsz") ? 2 : 0, &status) ? NULL : out;
}

static int failures;
#define CHECK(what) ((what) ? (void)0 : (void)(failures++, printf("line %d: %s\n", __LINE__, #what)))

static R launch(S stream) { return cuLaunchKernel((void*)0xf00000, 1, 2, 3, 4, 5, 6, 7, stream, (void**)8, (void**)9); }

// Walks of the stack, which the library asks libgcc for. The jump leaves no frame.
long walks;
#ifdef __x86_64__
void* real_walk;
__attribute__((constructor)) static void find_real_walk(void) { real_walk = dlsym(RTLD_NEXT, "_Unwind_Backtrace"); }
__asm__(".text\n.globl _Unwind_Backtrace\n.type _Unwind_Backtrace, @function\n"
        "_Unwind_Backtrace: lock incq walks(%rip)\n jmp *real_walk(%rip)\n"
        ".size _Unwind_Backtrace, . - _Unwind_Backtrace\n");
#endif

// As if a signal came at every other call, which file systems in memory are interrupted by.
int fallocate(int file, int mode, off_t at, off_t bytes) {
    static int calls;
    if (getenv("INTERRUPTED") && calls++ % 2 == 0) return errno = EINTR, -1;
    return (int)syscall(SYS_fallocate, file, mode, at, bytes);
}

// An allocation and its free at a depth of the stack.
static __attribute__((noinline)) void deep(int depth) {
    volatile char frame[64];
    frame[0] = (char)depth;
    if (depth > 0) return deep(depth - 1), (void)frame[0];
    P p = 0;
    CHECK(cuMemAlloc(&p, 4096) == 0);
    CHECK(cuMemFree(p) == 0);
}

// The same from 512 places: each bit is a turn.
static void turn(int turns, int left);
static __attribute__((noinline)) void turn_one_way(int turns, int left) { turn(turns, left); __asm__ volatile(""); }
static __attribute__((noinline)) void turn_the_other(int turns, int left) { turn(turns, left); __asm__ volatile(""); }
static __attribute__((noinline)) void turn(int turns, int left) {
    if (left == 0) deep(0);
    else if (turns & 1) turn_one_way(turns >> 1, left - 1);
    else turn_the_other(turns >> 1, left - 1);
    __asm__ volatile("");
}

static void start(void) {
    uintptr_t context;
    CHECK(cuInit(0) == 0);
    CHECK(cuDevicePrimaryCtxRetain(&context, 0) == 0);
    CHECK(cuCtxSetCurrent(context) == 0);
    void* kernel;
    CHECK(cuModuleGetFunction(&kernel, (void*)1, "_Z4gemmPfi") == 0 && kernel == (void*)0xf00000);
}

static void loop(int steps) {
    for (int i = 0; i < steps; i++) {
        P y = 0, z = 0;
        CHECK(cuMemAlloc(&y, 1 << 20) == 0);
        CHECK(launch(0) == 0);
        CHECK(cuMemAlloc(&z, 3000) == 0);
        CHECK(y && z && y != z && y % 512 == 0 && z % 512 == 0);
        CHECK(launch(0) == 0);
        CHECK(cuMemFree(y) == 0);
        CHECK(cuMemFree(z) == 0);
    }
}

static void errors(void) {
    P p = 7, base;
    size_t bytes, free1, free2, total;
    CHECK(cuMemAlloc(&p, 0) == 1);
    CHECK(cuMemFree(0) == 0);
    CHECK(cuMemAlloc(&p, 1000) == 0);
    CHECK(cuMemGetAddressRange(&base, &bytes, p + 999) == 0 && base == p && bytes == 1000);
    CHECK(cuMemGetAddressRange(&base, NULL, p) == 0 && base == p);
    P first, id1 = 0, id2 = 0;
    size_t size = 0;
    CHECK(cuPointerGetAttribute(&first, 11, p + 5) == 0 && first == p);
    CHECK(cuPointerGetAttribute(&size, 12, p + 5) == 0 && size == 1000);
    CHECK(cuPointerGetAttribute(&id1, 7, p) == 0);
    CHECK(cuMemFree(p + 512) == 1);  // inside an allocation
    CHECK(cuMemFree(p) == 0);
    CHECK(cuMemFree(p) == 1);           // twice
    CHECK(cuMemFree(0xdead0000) == 1);  // foreign
    CHECK(cuMemFreeAsync(p, 0) == 1);
    CHECK(cuMemAlloc(&p, 1000) == 0);
    CHECK(cuPointerGetAttribute(&id2, 7, p) == 0 && (id2 != id1 || getenv("PLAIN")));
    CHECK(cuMemFree(p) == 0);
    P pitched;
    size_t pitch = 0;
    CHECK(cuMemAllocPitch(&pitched, &pitch, 1000, 10, 4) == 0 && pitch == 1024);
    CHECK(cuMemFree(pitched) == 0);
    CHECK(cuMemAllocPitch(&pitched, &pitch, 1000, 10, 3) == 1);
    // Cached memory is free memory.
    CHECK(cuMemGetInfo(&free1, &total) == 0 && free1 <= total);
    CHECK(cuMemAlloc(&p, 100 << 20) == 0 && cuMemFree(p) == 0);
    CHECK(cuMemGetInfo(&free2, &total) == 0 && free2 == free1);
    // More than there is, then most of it: caches give way.
    CHECK(cuMemAlloc(&p, (size_t)1 << 40) == 2);
    CHECK(cuMemAlloc(&p, (size_t)63 << 30) == 0 && cuMemFree(p) == 0);
    CHECK(cuMemAllocManaged(&p, (size_t)60 << 30, 1) == 0 && cuMemFree(p) == 0);
    void* host;
    CHECK(cuMemHostAlloc(&host, 100, 0) == 0 && cuMemFreeHost(host) == 0);
    // Any free takes any kind.
    S stream;
    CHECK(cuStreamCreate(&stream, 1) == 0);
    CHECK(cuMemAllocAsync(&p, 5000, stream) == 0 && cuMemFree(p) == 0);
    CHECK(cuMemAlloc(&p, 5000) == 0 && cuMemFreeAsync(p, stream) == 0);
    CHECK(cuMemAllocAsync(&p, 5000, stream) == 0 && launch(stream) == 0 && cuMemFreeAsync(p, stream) == 0);
    CHECK(cuStreamDestroy(stream) == 0);
}

// A stream whose work is captured: memory is the driver's. `own` is the thread's default stream.
static void capture(S own) {
    S stream;
    uintptr_t graph;
    P before, p, q;
    CHECK(cuMemAlloc(&before, 4096) == 0);
    CHECK(cuStreamCreate(&stream, 1) == 0);
    CHECK(cuStreamBeginCapture(stream, 0) == 0);
    CHECK(cuMemAllocAsync(&p, 4096, stream) == 0 && launch(stream) == 0 && cuMemFreeAsync(p, stream) == 0);
    // Memory runs out: nothing that waits may be tried inside a capture.
    CHECK(cuMemAllocAsync(&q, (size_t)1 << 40, stream) == 2);
    CHECK(cuMemFreeAsync(before, stream) == 1 || getenv("PLAIN"));
    CHECK(cuMemFree(before) == 0 || getenv("PLAIN"));
    CHECK(cuStreamEndCapture(stream, &graph) == 0 && graph);
    CHECK(cuMemAlloc(&q, 4096) == 0 && cuStreamBeginCapture(own, 0) == 0);
    CHECK(cuMemFreeAsync(q, own) == 1 || getenv("PLAIN"));
    CHECK(cuStreamEndCapture(own, &graph) == 0 && (cuMemFree(q) == 0 || getenv("PLAIN")));
    CHECK(cuMemAlloc(&q, 4096) == 0 && cuMemFree(q) == 0);
    CHECK(cuStreamDestroy(stream) == 0);
}

// A context of the program's own, and a reset.
static void contexts(void) {
    uintptr_t own, popped;
    P p, q;
    CHECK(cuMemAlloc(&p, 4096) == 0);
    CHECK(cuCtxCreate(&own, 0, 0) == 0);
    CHECK(cuMemAlloc(&q, 4096) == 0 && cuMemFree(q) == 0);
    CHECK(cuMemFree(p) == 0);
    CHECK(cuCtxPopCurrent(&popped) == 0 && popped == own);
    CHECK(cuMemAlloc(&p, 4096) == 0);
    CHECK(cuDevicePrimaryCtxReset(0) == 0);
    CHECK(cuMemFree(p) == 1);
    CHECK(cuMemAlloc(&p, 4096) == 0 && cuMemFree(p) == 0);
}

// Managed and pinned memory: kept for the next request of the same size where that is asked for.
static void kinds(int steps) {
    for (int i = 0; i < steps; i++) {
        P managed, array[4];
        void *pinned, *mapped;
        CHECK(cuMemAllocManaged(&managed, 1 << 16, 1) == 0 && cuMemHostAlloc(&pinned, 4096, 0) == 0);
        CHECK(cuMemHostAlloc(&mapped, 4096, 2) == 0 && mapped != pinned);
        CHECK(launch(0) == 0);
        CHECK(cuMemFreeHost(pinned) == 0 && cuMemFreeHost(mapped) == 0);
        CHECK(cuMemFree(managed) == 0);
        for (int at = 0; at < 4; at++) CHECK(cuMemAlloc(&array[at], 100) == 0);
        // Each of another kind than its neighbours; any free takes any kind, once.
        CHECK(cuMemAllocManaged(&managed, 1 << 16, 1) == 0);
        for (int at = 0; at < 4; at++) CHECK(cuMemFree(array[at]) == 0 && cuMemFree(array[at]) == 1);
        CHECK((i ? cuMemFree(managed) : cuMemFreeAsync(managed, 0)) == 0);
    }
}

// Memory whose placement was advised is not given to another request.
static void advised(void) {
    P one, two;
    CHECK(cuMemAllocManaged(&one, 1 << 16, 1) == 0);
    CHECK(cuMemAdvise(one + 8, 16, 1, 0) == 0);
    CHECK(cuMemFree(one) == 0);
    CHECK(cuMemAllocManaged(&two, 1 << 16, 1) == 0 && two != one && cuMemFree(two) == 0);
    CHECK(cuMemAllocManaged(&one, 1 << 16, 1) == 0 && (one == two || !getenv("POOLED")) && cuMemFree(one) == 0);
}

// Under a limit of its own: only memory of the program's may be exported.
static void exports(void) {
    P p, q;
    char handle[64];
    CHECK(cuMemAlloc(&p, 4096) == 0 && cuMemAlloc(&q, 4096) == 0);
    printf("export %d\n", cuIpcGetMemHandle(handle, q));
    CHECK(cuMemFree(p) == 0 && cuMemFree(q) == 0);
}

static int rounds;
static void* work(void* number) {
    uintptr_t context;
    unsigned random = (unsigned)(uintptr_t)number * 2654435761u + 1;
    P held[32] = {0};
    size_t sizes[32] = {0};
    S stream;
    CHECK(cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxSetCurrent(context) == 0);
    CHECK(cuStreamCreate(&stream, 1) == 0);
    for (int i = 0; i < rounds; i++) {
        random = random * 1664525u + 1013904223u;
        unsigned at = random >> 27;
        if (held[at]) {
            P base;
            size_t bytes;
            if (random & 64) CHECK(cuMemGetAddressRange(&base, &bytes, held[at]) == 0 && base == held[at] && bytes == sizes[at]);
            R code = random & 128 ? cuMemFree(held[at]) : cuMemFreeAsync(held[at], stream);
            CHECK(code == 0);
            held[at] = 0;
        } else {
            sizes[at] = 1 + (random >> 8) % (1 << (random % 20));
            R code = random & 128 ? cuMemAlloc(&held[at], sizes[at]) : cuMemAllocAsync(&held[at], sizes[at], stream);
            CHECK(code == 0);
        }
        if ((random & 0x700) == 0) CHECK(launch(random & 1 ? stream : 0) == 0);
    }
    for (int at = 0; at < 32; at++)
        if (held[at]) CHECK(cuMemFree(held[at]) == 0);
    CHECK(cuStreamDestroy(stream) == 0);
    return NULL;
}

static void threads(void) {
    const char* text = getenv("ROUNDS");
    rounds = text ? atoi(text) : 2000;
    pthread_t all[16];
    for (uintptr_t i = 0; i < 16; i++) pthread_create(&all[i], NULL, work, (void*)i);
    for (int i = 0; i < 16; i++) pthread_join(all[i], NULL);
}

// How often the driver was called, if the program can know.
static long count_of(const char* name) {
    long (*calls)(const char*) = dlsym(RTLD_DEFAULT, "driver_count");
    void* driver = getenv("VRAMLAB_CUDA") ? dlopen(getenv("VRAMLAB_CUDA"), RTLD_NOW | RTLD_NOLOAD) : NULL;
    if (!calls && driver) calls = dlsym(driver, "driver_count");
    return calls ? calls(name) : -1;
}

#include "pinned.h"

// CUDA does not work in a child of a process in which it started: what the driver answers there is the answer.
static void late_fork(void) {
    P p, q = 0;
    CHECK(cuMemAlloc(&p, 4096) == 0 && cuMemAlloc(&p, 4096) == 0);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        long made = count_of("cuMemAlloc_v2"), freed = count_of("cuMemFree_v2");
        cuMemFree(p);
        cuMemAlloc(&q, 4096);
        CHECK(count_of("cuMemAlloc_v2") == made + 1 && count_of("cuMemFree_v2") == freed + 1);
        fflush(stdout);
        _exit(failures != 0);
    }
    int status;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(cuMemFree(p) == 0);
}

static P late;
static void* late_pinned;
static void at_exit(void) {
    R code = late_pinned ? cuMemFreeHost(late_pinned) : cuMemFree(late);
    if (code != 0 && code != 4) printf("line %d: free at exit: %d\n", __LINE__, code);
}

int main(int count, char** words) {
    const char* way = count > 1 ? words[1] : "dlsym";
    const char* test = count > 2 ? words[2] : "loop";
    if (!strcmp(test, "fork") || !strcmp(test, "fork-used")) {
        // A call that is refused, and recorded.
        if (!strcmp(test, "fork-used")) *(void**)&cuMemFree = find(way, "cuMemFree"), CHECK(cuMemFree(1) != 0);
        // Before CUDA starts: both may use it.
        if (fork() == 0) {
#define FIND(name, result, arguments) *(void**)&name = find(way, #name);
            FUNCTIONS(FIND)
            start();
            loop(5);
            return failures != 0;
        }
        int status;
        wait(&status);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    if (!strcmp(test, "initialiser") && !dlopen(getenv("INITIALISER"), RTLD_NOW)) return printf("%s\n", dlerror()), 1;
    FUNCTIONS(FIND)
    // A driver before 11.2 has no stream-ordered memory.
#define FOUND(name, result, arguments) CHECK(name != NULL || (getenv("OLD_DRIVER") && strstr(#name, "Async")));
    FUNCTIONS(FOUND)
    if (failures) return 1;
    start();
    if (!strcmp(test, "loop") || !strncmp(test, "fork", 4)) loop(100);
    if (!strcmp(test, "depths"))
        for (int i = 0; i < 2000; i++) deep(i % 100);
    if (!strcmp(test, "places"))
        for (int i = 0; i < 512; i++) turn(i, 9);
    if (!strcmp(test, "errors")) errors();
    if (!strcmp(test, "late-fork")) late_fork();
    if (!strcmp(test, "capture")) capture(strcmp(way, "ptsz") ? 2 : 0);
    if (!strcmp(test, "contexts")) contexts();
    if (!strcmp(test, "exports")) exports();
    if (!strcmp(test, "kinds")) kinds(50);
    if (!strcmp(test, "advised")) advised();
    if (!strcmp(test, "threads")) threads();
    if (!strcmp(test, "pinned")) pinned();
    if (!strcmp(test, "pinned-memory")) pinned_out_of_memory();
    if (!strcmp(test, "pinned-forbidden")) pinned_forbidden();
    if (!strcmp(test, "pinned-state")) pinned_state();
    if (!strcmp(test, "pinned-threads")) pinned_threads();
    if (!strcmp(test, "pinned-left")) pinned_left();
    if (!strcmp(test, "slow")) slow(64);
    if (!strcmp(test, "pinned-exit")) {
        void* left;
        CHECK(cuMemHostAlloc(&left, 4096, 0) == 0 && cuMemHostAlloc(&late_pinned, 4096, 0) == 0);
        atexit(at_exit);
    }
    if (!strcmp(test, "exit")) CHECK(cuMemAlloc(&late, 4096) == 0), atexit(at_exit);
    if (!strcmp(test, "crash")) loop(10), abort();
    if (!strcmp(test, "streams")) {
        S stream, idle;
        loop(10);
        for (int i = 0; i < 32; i++) CHECK(cuStreamCreate(&idle, i % 2) == 0);
        CHECK(cuStreamCreate(&stream, 1) == 0 && launch(stream) == 0);
        loop(100);
        // Handles that are near each other, with work in turn.
        S near[6];
        for (int i = 0; i < 6; i++) CHECK(cuStreamCreate(&near[i], 1) == 0);
        for (int i = 0; i < 60; i++) CHECK(launch(near[i % 6]) == 0);
        for (int i = 0; i < 6; i++) CHECK(cuStreamDestroy(near[i]) == 0);
        for (int i = 0; i < 6; i++) CHECK(cuStreamCreate(&near[i], 0) == 0);
        loop(100);
    }
    if (count_of("idle") >= 0 && !getenv("QUIET"))
        printf("driver: alloc %ld free %ld async %ld record %ld synchronize %ld managed %ld pinned %ld unpinned %ld idle %ld elsewhere %ld device %ld walks %ld\n",
               count_of("cuMemAlloc_v2"), count_of("cuMemFree_v2"), count_of("cuMemAllocAsync"), count_of("cuEventRecord"),
               count_of("cuCtxSynchronize"), count_of("cuMemAllocManaged"), count_of("cuMemHostAlloc"), count_of("cuMemFreeHost"),
               count_of("idle"), count_of("elsewhere"), count_of("cuCtxGetDevice"), walks);
    printf("%s\n", failures ? "failed" : "equal");
    return failures != 0;
}
