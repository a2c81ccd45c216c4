// A program that does what disturbs a library in it: hostile TEST. `equal` is printed if CUDA answered as it does without the library.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef unsigned long long P;
extern char** environ;

static int (*init)(unsigned), (*retain)(uintptr_t*, int), (*use)(uintptr_t), (*alloc)(P*, size_t), (*release)(P), (*export)(void*, P);
static int failures;
#define CHECK(what) ((what) ? (void)0 : (void)(failures++, printf("line %d: %s\n", __LINE__, #what)))

static void find(void) {
    void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
    struct { const char* name; void* to; } all[] = {{"cuInit", &init}, {"cuDevicePrimaryCtxRetain", &retain}, {"cuCtxSetCurrent", &use},
        {"cuMemAlloc_v2", &alloc}, {"cuMemFree_v2", &release}, {"cuIpcGetMemHandle", &export}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) CHECK(cuda && (*(void**)all[i].to = dlsym(cuda, all[i].name)));
}

static void current(void) {
    uintptr_t context;
    CHECK(init(0) == 0 && retain(&context, 0) == 0 && use(context) == 0);
}

static void pair(void) {
    P p = 0;
    CHECK(alloc(&p, 4096) == 0);
    CHECK(release(p) == 0);
}

// Pairs of calls from 256 places: each bit is a turn.
static void turn(int turns, int left);
static __attribute__((noinline)) void left(int turns, int more) { turn(turns, more); __asm__ volatile(""); }
static __attribute__((noinline)) void right(int turns, int more) { turn(turns, more); __asm__ volatile(""); }
static __attribute__((noinline)) void turn(int turns, int more) {
    if (!more) pair();
    else if (turns & 1) left(turns >> 1, more - 1);
    else right(turns >> 1, more - 1);
    __asm__ volatile("");
}
static void places(int from, int to) { for (int i = from; i < to; i++) turn(i, 8); }
static void pairs(int count) { while (count-- > 0) pair(); }

// Kernels before 5.14 do not take pages on request, and some file systems make no room.
int madvise(void* at, size_t bytes, int advice) {
    const char* kernel = getenv("KERNEL");
    if (advice == 23 && kernel && strcmp(kernel, "new")) return errno = EINVAL, -1;
    return (int)syscall(SYS_madvise, at, bytes, advice);
}
int fallocate(int file, int mode, off_t at, off_t bytes) {
    const char* kernel = getenv("KERNEL");
    if (kernel && strcmp(kernel, "old")) return errno = EOPNOTSUPP, -1;
    return (int)syscall(SYS_fallocate, file, mode, at, bytes);
}

// A call that the library refuses in words.
static void refused(void) {
    P p, q;
    char handle[64];
    CHECK(alloc(&p, 4096) == 0 && alloc(&q, 4096) == 0);
    CHECK(export(handle, q) == (getenv("REFUSED") ? 801 : 0));
    CHECK(release(p) == 0 && release(q) == 0);
}

// All descriptors are closed, and other files get their numbers.
static void descriptors(void) {
    enum { FILES = 40 };
    int files[FILES];
    places(0, 64);
    int lowest = dup(0);
    printf("lowest %d\n", lowest);
    close(lowest);
    closefrom(3);
    for (int i = 0; i < FILES; i++) {
        char name[32];
        snprintf(name, sizeof name, "data-%d", i);
        CHECK((files[i] = open(name, O_RDWR | O_CREAT | O_EXCL, 0600)) == 3 + i);
    }
    places(64, 256);
    pairs(20000);
    for (int i = 0; i < FILES; i++) {
        struct stat file;
        CHECK(fstat(files[i], &file) == 0 && file.st_size == 0 && file.st_blocks == 0);
    }
}

// Standard error is closed, and a file gets its number.
static void reused(void) {
    close(2);
    CHECK(open("data", O_RDWR | O_CREAT | O_EXCL, 0600) == 2);
    refused();
    struct stat file;
    CHECK(fstat(2, &file) == 0 && file.st_size == 0);
}

static void* cancels_itself(void* place) {
    current();
    pthread_cancel(pthread_self());
    // Each from places that are new, so that a note is written.
    turn((int)(intptr_t)place, 8);
    pthread_testcancel();
    CHECK(!"cancelled");
    return NULL;
}

static void cancelled(void) {
    pthread_t thread;
    void* result;
    for (intptr_t i = 0; i < 64; i++) {
        CHECK(pthread_create(&thread, NULL, cancels_itself, (void*)i) == 0);
        CHECK(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    }
    pairs(100);
}

// All memory is locked from here on, of which little may be.
static void locked(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    if (!getenv("MAY_LOCK")) {
        struct rlimit few = {8 << 20, 8 << 20};
        CHECK(syscall(SYS_capget, &header, data) == 0);
        data[0].effective &= ~(1u << CAP_IPC_LOCK);
        data[0].permitted &= ~(1u << CAP_IPC_LOCK);
        CHECK(syscall(SYS_capset, &header, data) == 0 && setrlimit(RLIMIT_MEMLOCK, &few) == 0);
    }
    CHECK(mlockall(MCL_FUTURE) == 0);
}

// Half of the addresses that are allowed are still there for the program.
static void addresses(void) {
    struct rlimit limit = {(rlim_t)6 << 30, (rlim_t)6 << 30};
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
}

int main(int count, char** words) {
    const char* test = count > 1 ? words[1] : "";
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!strcmp(test, "clearenv")) clearenv();
    if (!strcmp(test, "environ")) environ = NULL;
    if (!strcmp(test, "locked")) locked();
    if (!strcmp(test, "addresses")) addresses();
    find();
    if (failures) return 1;
    current();
    // The library that this opens calls CUDA, and so does a thread that it starts.
    if (!strcmp(test, "constructor")) CHECK(dlopen(getenv("INITIALISER"), RTLD_NOW));
    if (!strcmp(test, "descriptors")) descriptors();
    if (!strcmp(test, "refused")) refused();
    if (!strcmp(test, "reused")) reused();
    if (!strcmp(test, "cancelled")) cancelled();
    if (!strcmp(test, "many")) pairs(50000);
    if (!strcmp(test, "exec")) {
        places(0, 10);
        execl("/proc/self/exe", "hostile", "places", NULL);
        CHECK(!"executed");
    }
    if (!strcmp(test, "places")) places(0, 100);
    pairs(100);
    if (!strcmp(test, "addresses")) CHECK(mmap(NULL, (size_t)5 << 30, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) != MAP_FAILED);
    printf("%s\n", failures ? "failed" : "equal");
    return failures != 0;
}
