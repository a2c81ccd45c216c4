// CUDA's driver without a GPU, for tests: two devices whose memory nothing reads, and streams whose work is a number.
//
// Work on a stream takes as many queries or waits to complete as DRIVER_WORK says (default 0: it is done at once). Memory is checked:
// freeing what is not allocated is CUDA_ERROR_INVALID_VALUE. What was called is counted, and `driver_count(NAME)` says how often.
// Pinned memory is real, DRIVER_HOST MiB at most; without the permission to pin, DRIVER_FORBIDS=1, it is refused. A copy from it reads when its work is done; `early` counts those that found other
// bytes than were there when they were queued.
// DRIVER is its version, 13000 if it is not given. One before 11.2 has no stream-ordered memory, one before 11.3 no cuGetProcAddress, and
// one before 12.0 only its first ABI. Attributes that came later are refused.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int R;
typedef unsigned long long P;
typedef uintptr_t S;

#define SHOWN __attribute__((visibility("default")))
enum { OK = 0, INVALID = 1, MEMORY = 2, NOT_INITIALIZED = 3, NO_CONTEXT = 201, NOT_FOUND = 500, NOT_READY = 600, FORBIDDEN = 800, SUPPORT = 801 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int started;
static const size_t TOTAL = (size_t)64 << 30;

// Counts by name.
static struct { const char* name; long count; } counts[256];
static long* counter(const char* name) {
    for (int i = 0; i < 256; i++) {
        if (!counts[i].name) counts[i].name = name;
        if (!strcmp(counts[i].name, name)) return &counts[i].count;
    }
    return &counts[255].count;
}
static void called(const char* name) {
    pthread_mutex_lock(&lock);
    ++*counter(name);
    pthread_mutex_unlock(&lock);
}
SHOWN long driver_count(const char* name) {
    pthread_mutex_lock(&lock);
    long count = *counter(name);
    pthread_mutex_unlock(&lock);
    return count;
}
#define CALLED called(__func__)

// Contexts: the primary ones are 0x1000 and 0x2000.
static __thread uintptr_t stack[16];
static __thread int depth;
static int retained[2];
static uintptr_t current(void) { return depth ? stack[depth - 1] : 0; }
static int device_of(uintptr_t context) { return context == 0x2000; }

SHOWN R cuInit(unsigned flags) { CALLED; started = 1; return flags ? INVALID : OK; }
#ifndef DRIVER
#define DRIVER 13000
#endif
SHOWN R cuDriverGetVersion(int* v) { *v = DRIVER; return OK; }
SHOWN R cuDeviceGetCount(int* n) { if (!started) return NOT_INITIALIZED; *n = 2; return OK; }
SHOWN R cuDeviceGet(int* d, int n) { if (!started) return NOT_INITIALIZED; *d = n; return n < 2 ? OK : 101; }
SHOWN R cuDeviceGetName(char* s, int n, int d) { (void)d; snprintf(s, n, "no GPU"); return OK; }
SHOWN R cuDeviceTotalMem_v2(size_t* b, int d) { (void)d; *b = TOTAL; return OK; }
SHOWN R cuDeviceGetAttribute(int* v, int a, int d) { (void)d; if (a > (DRIVER < 11030 ? 119 : DRIVER < 12030 ? 127 : 999)) return INVALID; *v = a == 75 ? 9 : a == 76 ? 0 : a == 16 ? 132 : 0; return OK; }
SHOWN R cuDevicePrimaryCtxRetain(uintptr_t* c, int d) { CALLED; retained[d]++; *c = 0x1000 * (d + 1); return OK; }
SHOWN R cuDevicePrimaryCtxRelease_v2(int d) { CALLED; if (retained[d] > 0) retained[d]--; return OK; }
SHOWN R cuDevicePrimaryCtxGetState(int d, unsigned* f, int* a) { *f = 0; *a = retained[d] > 0; return OK; }
SHOWN R cuCtxCreate_v2(uintptr_t* c, unsigned f, int d) { (void)f; static uintptr_t next = 0x100000; *c = next += 0x1000; stack[depth++] = *c; (void)d; return OK; }
SHOWN R cuCtxDestroy_v2(uintptr_t c);
SHOWN R cuCtxSetCurrent(uintptr_t c) { if (!depth) depth = 1; stack[depth - 1] = c; if (!c) depth--; return OK; }
SHOWN R cuCtxGetCurrent(uintptr_t* c) { *c = current(); return OK; }
SHOWN R cuCtxPushCurrent_v2(uintptr_t c) { stack[depth++] = c; return OK; }
SHOWN R cuCtxPopCurrent_v2(uintptr_t* c) { if (!depth) return NO_CONTEXT; *c = stack[--depth]; return OK; }
SHOWN R cuCtxGetDevice(int* d) { CALLED; if (!depth) return NO_CONTEXT; *d = device_of(current()); return OK; }

// Work: each stream has a number of waits to go.
static long work;  // of all streams, since a test needs no more
static long each(void) { const char* text = getenv("DRIVER_WORK"); return text ? atol(text) : 0; }
static long done;
// Queued copies from pinned memory. Callers hold the lock.
static struct copy { const void* from; size_t bytes; void* was; long target; struct copy* next; } *copies;
static void complete_copies(void) {
    for (struct copy** c = &copies; *c;) {
        struct copy* one = *c;
        if (one->target > done) {
            c = &one->next;
            continue;
        }
        if (memcmp(one->from, one->was, one->bytes)) ++*counter("early");
        *c = one->next;
        free(one->was);
        free(one);
    }
}
// Waiting for work takes DRIVER_NAP microseconds, if that is set.
static void drain(void) {
    pthread_mutex_lock(&lock);
    long waited = work;
    done += work;
    work = 0;
    complete_copies();
    pthread_mutex_unlock(&lock);
    const char* nap = getenv("DRIVER_NAP");
    if (waited && nap) usleep(atoi(nap));
}
static void queue(void) { pthread_mutex_lock(&lock); work += each(); pthread_mutex_unlock(&lock); }
SHOWN long driver_work(void) { pthread_mutex_lock(&lock); long w = work; pthread_mutex_unlock(&lock); return w; }

SHOWN R cuCtxSynchronize(void) { CALLED; drain(); return depth ? OK : NO_CONTEXT; }
// Streams of the program that had work.
static char busy[1 << 12];
static char* of_stream(S s) { return s > 0x5000 ? &busy[(s - 0x5000) / 0x10 % (1 << 12)] : &busy[0]; }
SHOWN R cuStreamQuery(S s) { CALLED; if (s > 2 && !*of_stream(s)) called("idle"); return *of_stream(s) && driver_work() ? NOT_READY : OK; }
SHOWN R cuStreamSynchronize(S s) { CALLED; (void)s; drain(); return OK; }
SHOWN R cuStreamCreate(S* s, unsigned f) { CALLED; (void)f; static S next = 0x5000; pthread_mutex_lock(&lock); *s = next += 0x10; pthread_mutex_unlock(&lock); return OK; }
SHOWN R cuStreamCreateWithPriority(S* s, unsigned f, int p) { (void)p; return cuStreamCreate(s, f); }
SHOWN R cuStreamDestroy_v2(S s) { CALLED; (void)s; return OK; }
SHOWN R cuStreamWaitEvent(S s, uintptr_t e, unsigned f) { (void)s; (void)e; (void)f; return OK; }
static __thread S captured;
SHOWN R cuStreamBeginCapture_v2(S s, int m) { CALLED; (void)m; captured = s; return OK; }
SHOWN R cuStreamBeginCapture_v2_ptsz(S s, int m) { return cuStreamBeginCapture_v2(s ? s : 2, m); }
SHOWN R cuStreamEndCapture(S s, uintptr_t* g) { CALLED; (void)s; captured = 0; *g = 0x77; return OK; }
SHOWN R cuStreamIsCapturing(S s, int* v) { *v = captured && s == captured; return OK; }
SHOWN R cuThreadExchangeStreamCaptureMode(int* m) { *m = 0; return OK; }

// An event completes when the work before it is done; asking for it does some.
static struct { long target; } events[1 << 16];
SHOWN R cuEventCreate(uintptr_t* e, unsigned f) { CALLED; (void)f; static uintptr_t next; pthread_mutex_lock(&lock); *e = ++next % (1 << 16); pthread_mutex_unlock(&lock); return OK; }
SHOWN R cuEventRecord(uintptr_t e, S s) { CALLED; if (current() == 0x2000) called("elsewhere"); if (s > 2 && !*of_stream(s)) called("idle"); pthread_mutex_lock(&lock); events[e].target = done + work; pthread_mutex_unlock(&lock); return OK; }
SHOWN R cuEventQuery(uintptr_t e) {
    CALLED;
    pthread_mutex_lock(&lock);
    if (work > 0) { work--; done++; } else if (done < events[e].target) done = events[e].target;
    complete_copies();
    R code = done >= events[e].target ? OK : NOT_READY;
    pthread_mutex_unlock(&lock);
    return code;
}
SHOWN R cuEventSynchronize(uintptr_t e) { CALLED; pthread_mutex_lock(&lock); long left = events[e].target - done; if (left > 0) { done += left; work -= left < work ? left : work; complete_copies(); } pthread_mutex_unlock(&lock); return OK; }
SHOWN R cuEventDestroy_v2(uintptr_t e) { (void)e; return OK; }
SHOWN R cuEventElapsedTime(float* m, uintptr_t a, uintptr_t b) { (void)a; (void)b; *m = 0; return OK; }

SHOWN R cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, S stream, void** p, void** extra) {
    CALLED; queue();
    // All arguments have to arrive.
    if (f != (void*)0xf00000 || gx != 1 || gy != 2 || gz != 3 || bx != 4 || by != 5 || bz != 6 || shared != 7 || p != (void**)8 || extra != (void**)9) return INVALID;
    *of_stream(stream) = 1;
    return OK;
}
SHOWN R cuLaunchKernel_ptsz(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, S stream, void** p, void** extra) {
    CALLED;
    return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, p, extra);
}
SHOWN R cuModuleGetFunction(void** f, void* m, const char* name) { CALLED; (void)m; (void)name; *f = (void*)0xf00000; return OK; }
SHOWN R cuModuleUnload(void* m) { CALLED; (void)m; return OK; }
SHOWN R cuMemsetD8_v2(P p, unsigned char v, size_t n) { CALLED; (void)p; (void)v; (void)n; queue(); return OK; }
SHOWN R cuMemsetD8Async(P p, unsigned char v, size_t n, S s) { CALLED; (void)p; (void)v; (void)n; (void)s; return OK; }

// Memory: addresses from a range that nothing is behind.
static struct block { P at; size_t bytes; int kind; struct block* next; } *blocks;
static size_t used;
static P place = 0x700000000000ull;
static R take(P* out, size_t bytes, int kind) {
    if (!started) return NOT_INITIALIZED;
    if (!current()) return NO_CONTEXT;
    if (!out || !bytes) return INVALID;
    pthread_mutex_lock(&lock);
    if (used + bytes > TOTAL) { pthread_mutex_unlock(&lock); return MEMORY; }
    struct block* b = malloc(sizeof *b);
    *b = (struct block){place, bytes, kind, blocks};
    place += (bytes + 0x1fffff) & ~(size_t)0x1fffff;
    used += bytes;
    blocks = b;
    *out = b->at;
    pthread_mutex_unlock(&lock);
    return OK;
}
static R drop(P at) {
    if (!at) return OK;
    pthread_mutex_lock(&lock);
    for (struct block** b = &blocks; *b; b = &(*b)->next) {
        if ((*b)->at != at) continue;
        struct block* gone = *b;
        *b = gone->next;
        used -= gone->bytes;
        free(gone);
        pthread_mutex_unlock(&lock);
        return OK;
    }
    pthread_mutex_unlock(&lock);
    return INVALID;
}
static struct block* find(P at) {
    for (struct block* b = blocks; b; b = b->next)
        if (at >= b->at && at - b->at < b->bytes) return b;
    return NULL;
}
SHOWN R cuMemAlloc_v2(P* p, size_t n) { CALLED; return take(p, n, 0); }
SHOWN R cuMemAlloc(unsigned* p, unsigned n) { CALLED; (void)p; (void)n; return SUPPORT; }  // 32-bit addresses
SHOWN R cuMemAllocPitch_v2(P* p, size_t* pitch, size_t w, size_t h, unsigned e) { CALLED; if (e != 4 && e != 8 && e != 16) return INVALID; *pitch = (w + 511) & ~(size_t)511; return take(p, *pitch * h, 0); }
SHOWN R cuMemAllocManaged(P* p, size_t n, unsigned f) { CALLED; (void)f; return take(p, n, 1); }
SHOWN R cuMemAdvise(P p, size_t n, int a, int d) { CALLED; (void)p; (void)n; (void)a; (void)d; return OK; }
SHOWN R cuMemCreate(P* handle, size_t n, const void* properties, P flags) { CALLED; (void)properties; (void)flags; return take(handle, n, 3); }
SHOWN R cuMemRelease(P handle) { CALLED; return drop(handle); }
SHOWN R cuMemMap(P at, size_t n, size_t offset, P handle, P flags) { CALLED; (void)at; (void)n; (void)offset; (void)handle; (void)flags; return OK; }
SHOWN R cuMemUnmap(P at, size_t n) { CALLED; (void)at; (void)n; return OK; }
SHOWN R cuMemFree_v2(P p) { CALLED; drain(); return drop(p); }
#if DRIVER >= 11020
SHOWN R cuMemAllocAsync(P* p, size_t n, S s) { CALLED; (void)s; return take(p, n, 2); }
SHOWN R cuMemAllocAsync_ptsz(P* p, size_t n, S s) { CALLED; (void)s; return take(p, n, 2); }
SHOWN R cuMemFreeAsync(P p, S s) { CALLED; (void)s; return drop(p); }
SHOWN R cuMemFreeAsync_ptsz(P p, S s) { CALLED; (void)s; return drop(p); }
SHOWN R cuDeviceGetDefaultMemPool(uintptr_t* p, int d) { *p = 0x9000 + d; return OK; }
SHOWN R cuDeviceGetMemPool(uintptr_t* p, int d) { *p = 0x9000 + d; return OK; }
SHOWN R cuMemAllocFromPoolAsync(P* p, size_t n, uintptr_t pool, S s) { CALLED; (void)s; (void)pool; return take(p, n, 2); }
#endif
// Pinned memory. What is registered is the program's.
static struct pinned { char* at; size_t bytes; unsigned flags; int registered; uintptr_t context; struct pinned* next; } *pinned;
static size_t pinned_bytes;
static size_t pinned_total(void) { const char* text = getenv("DRIVER_HOST"); return (text ? atol(text) : 1L << 14) << 20; }
static struct pinned* pinned_at(const void* at) {
    for (struct pinned* one = pinned; one; one = one->next)
        if ((const char*)at >= one->at && (size_t)((const char*)at - one->at) < one->bytes) return one;
    return NULL;
}
static R pin(void** p, size_t n, unsigned flags) {
    if (!started) return NOT_INITIALIZED;
    if (!current()) return NO_CONTEXT;
    if (!p || !n || flags > 7) return INVALID;
    if (getenv("DRIVER_FORBIDS")) return FORBIDDEN;
    pthread_mutex_lock(&lock);
    char* at = n <= pinned_total() && pinned_bytes + n <= pinned_total() ? aligned_alloc(4096, (n + 4095) & ~(size_t)4095) : NULL;
    if (at) {
        struct pinned* one = malloc(sizeof *one);
        *one = (struct pinned){at, n, flags, 0, current(), pinned};
        pinned = one;
        pinned_bytes += n;
        *p = at;
    }
    pthread_mutex_unlock(&lock);
    return at ? OK : MEMORY;
}
static R unpin(void* p, int registered, R unknown) {
    drain();
    pthread_mutex_lock(&lock);
    for (struct pinned** one = &pinned; *one; one = &(*one)->next) {
        struct pinned* gone = *one;
        if (gone->at != p || gone->registered != registered) continue;
        *one = gone->next;
        if (!registered) pinned_bytes -= gone->bytes, free(gone->at);
        free(gone);
        pthread_mutex_unlock(&lock);
        return OK;
    }
    pthread_mutex_unlock(&lock);
    return unknown;
}
// A context is gone, and its pinned memory with it.
static void unpin_all(uintptr_t context) {
    drain();
    pthread_mutex_lock(&lock);
    for (struct pinned** one = &pinned; *one;) {
        struct pinned* gone = *one;
        if (gone->context != context) {
            one = &gone->next;
            continue;
        }
        *one = gone->next;
        if (!gone->registered) pinned_bytes -= gone->bytes, free(gone->at);
        free(gone);
    }
    pthread_mutex_unlock(&lock);
}
SHOWN R cuMemHostAlloc(void** p, size_t n, unsigned f) { CALLED; return pin(p, n, f); }
SHOWN R cuMemAllocHost_v2(void** p, size_t n) { CALLED; return pin(p, n, 0); }
SHOWN R cuMemFreeHost(void* p) { CALLED; return unpin(p, 0, INVALID); }
SHOWN R cuMemHostRegister_v2(void* p, size_t n, unsigned f) {
    CALLED;
    pthread_mutex_lock(&lock);
    R code = !p || !n ? INVALID : pinned_at(p) ? 712 : OK;
    if (code == OK) {
        struct pinned* one = malloc(sizeof *one);
        *one = (struct pinned){p, n, f, 1, current(), pinned};
        pinned = one;
    }
    pthread_mutex_unlock(&lock);
    return code;
}
SHOWN R cuMemHostUnregister(void* p) { CALLED; return unpin(p, 1, 713); }
SHOWN R cuMemHostGetFlags(unsigned* f, void* p) {
    CALLED;
    pthread_mutex_lock(&lock);
    struct pinned* one = pinned_at(p);
    if (one) *f = one->flags;
    pthread_mutex_unlock(&lock);
    return one ? OK : INVALID;
}
SHOWN R cuMemHostGetDevicePointer_v2(P* d, void* p, unsigned f) {
    CALLED;
    pthread_mutex_lock(&lock);
    struct pinned* one = f ? NULL : pinned_at(p);
    if (one) *d = (P)(uintptr_t)p;
    pthread_mutex_unlock(&lock);
    return one ? OK : INVALID;
}
SHOWN R cuMemcpyHtoDAsync_v2(P to, const void* from, size_t n, S s) {
    CALLED; (void)to;
    queue();
    *of_stream(s) = 1;
    pthread_mutex_lock(&lock);
    struct copy* one = malloc(sizeof *one);
    *one = (struct copy){from, n, malloc(n), done + work, copies};
    memcpy(one->was, from, n);
    copies = one;
    complete_copies();
    pthread_mutex_unlock(&lock);
    return OK;
}
SHOWN R cuCtxFromGreenCtx(uintptr_t* c, uintptr_t green) { CALLED; *c = green + 1; return OK; }
SHOWN R cuCtxDestroy_v2(uintptr_t c) { CALLED; unpin_all(c); if (current() == c) depth--; return OK; }
SHOWN R cuMemGetInfo_v2(size_t* f, size_t* t) { pthread_mutex_lock(&lock); if (f) *f = TOTAL - used; if (t) *t = TOTAL; pthread_mutex_unlock(&lock); return OK; }
SHOWN R cuMemGetAddressRange_v2(P* base, size_t* n, P at) {
    pthread_mutex_lock(&lock);
    struct block* b = find(at);
    if (b && base) *base = b->at;
    if (b && n) *n = b->bytes;
    pthread_mutex_unlock(&lock);
    return b ? OK : NOT_FOUND;
}
SHOWN R cuPointerGetAttribute(void* data, int what, P at) {
    pthread_mutex_lock(&lock);
    struct block* b = find(at);
    if (b && what == 7) *(P*)data = 1;
    if (b && what == 11) *(P*)data = b->at;
    if (b && what == 12) *(size_t*)data = b->bytes;
    if (b && what == 2) *(int*)data = 2;
    struct pinned* one = b ? NULL : pinned_at((void*)(uintptr_t)at);
    if (one && what == 7) *(P*)data = 1;
    if (one && what == 11) *(P*)data = (P)(uintptr_t)one->at;
    if (one && what == 12) *(size_t*)data = one->bytes;
    if (one && what == 2) *(int*)data = 1;
    pthread_mutex_unlock(&lock);
    return b || one ? OK : INVALID;
}
SHOWN R cuPointerGetAttributes(unsigned n, const int* what, void** data, P at) {
    R code = OK;
    // Of memory that it does not know it says so attribute by attribute, and succeeds.
    for (unsigned i = 0; i < n; i++)
        if (cuPointerGetAttribute(data[i], what[i], at)) memset(data[i], 0, what[i] == 2 ? 4 : 8);
    return code;
}
SHOWN R cuIpcGetMemHandle(void* h, P at) { CALLED; memset(h, 0, 64); memcpy(h, &at, 8); return OK; }
SHOWN R cuDevicePrimaryCtxReset_v2(int d) { CALLED; unpin_all(0x1000 * (d + 1)); pthread_mutex_lock(&lock); blocks = NULL; used = 0; pthread_mutex_unlock(&lock); return OK; }

#if DRIVER >= 11030
static void* self(const char* name) {
    static void* here;
    if (!here) {
        Dl_info info;
        dladdr((void*)cuInit, &info);
        here = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }
    return dlsym(here, name);
}
// As the driver: the newest ABI of a name, and its twin for per-thread streams.
static R look_up(const char* name, void** out, int version, unsigned long long flags) {
    char text[128];
    *out = NULL;
    const char* abi[] = {"_v2", ""};
    const char* twin[] = {flags & 2 ? "_ptsz" : "", ""};
    for (int t = 0; t < 2 && !*out; t++)
        for (int a = version < 3020; a < 2 && !*out; a++) {
            snprintf(text, sizeof text, "%s%s%s", name, abi[a], twin[t]);
            *out = self(text);
        }
    return *out ? OK : NOT_FOUND;
}
SHOWN R cuGetProcAddress(const char* name, void** out, int version, unsigned long long flags) { CALLED; return look_up(name, out, version, flags); }
#if DRIVER >= 12000
SHOWN R cuGetProcAddress_v2(const char* name, void** out, int version, unsigned long long flags, int* status) {
    CALLED;
    R code = look_up(name, out, version, flags);
    if (status) *status = code != OK;
    return OK;
}
#endif
#endif
