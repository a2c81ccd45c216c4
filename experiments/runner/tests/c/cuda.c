// A stand-in for the CUDA driver: memory is the host's, and work is done immediately. As many GPUs as GPUS says.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <stddef.h>
#include <sys/mman.h>
#include <time.h>
typedef int R; typedef unsigned long long P;
static int capturing; static uint64_t used; static long next = 16;
R cuInit(unsigned f) { return 0; }
R cuDriverGetVersion(int *v) { *v = 13000; return 0; }
R cuDeviceGetCount(int *n) { *n = getenv("GPUS") ? atoi(getenv("GPUS")) : 2; return 0; }
R cuDeviceGet(int *d, int o) { *d = o; return 0; }
R cuDeviceGetName(char *t, int n, int d) { strncpy(t, "Stand-in", n); return 0; }
R cuDeviceTotalMem_v2(size_t *b, int d) { *b = 4ull << 30; return 0; }
R cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : a == 76 ? 0 : a == 16 ? 132 : 1; return 0; }
R cuDeviceCanAccessPeer(int *v, int a, int b) { *v = 1; return 0; }
R cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)(long)(d + 1); return 0; }
R cuDevicePrimaryCtxRelease_v2(int d) { return 0; }
R cuCtxSetCurrent(void *c) { return 0; }
R cuCtxGetCurrent(void **c) { *c = (void *)1; return 0; }
R cuCtxSynchronize(void) { return 0; }
R cuStreamCreate(void **s, unsigned f) { *s = (void *)(next += 16); return 0; }
R cuStreamDestroy_v2(void *s) { return 0; }
R cuStreamSynchronize(void *s) { return 0; }
R cuStreamWaitEvent(void *s, void *e, unsigned f) { return 0; }
R cuEventCreate(void **e, unsigned f) { *e = calloc(1, 16); return 0; }
R cuEventDestroy_v2(void *e) { return 0; }
R cuEventRecord(void *e, void *s) { clock_gettime(CLOCK_MONOTONIC, e); return 0; }
R cuEventQuery(void *e) { return 0; }
R cuEventSynchronize(void *e) { return 0; }
R cuEventElapsedTime(float *ms, struct timespec *a, struct timespec *b) { *ms = (b->tv_sec - a->tv_sec) * 1e3 + (b->tv_nsec - a->tv_nsec) / 1e6; return 0; }
R cuMemGetInfo_v2(size_t *f, size_t *t) { *t = 4ull << 30; *f = *t - used; return 0; }
R cuMemAlloc_v2(P *p, size_t n) { used += n; *p = (P)mmap(0, n, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); return 0; }
R cuMemFree_v2(P p) { return 0; }
R cuMemHostAlloc(void **p, size_t n, unsigned f) { *p = calloc(1, n); return 0; }
R cuMemFreeHost(void *p) { free(p); return 0; }
R cuMemcpyHtoDAsync_v2(P d, const void *s, size_t n, void *st) { memcpy((void *)d, s, n); return 0; }
R cuMemcpyDtoHAsync_v2(void *d, P s, size_t n, void *st) { memcpy(d, (void *)s, n); return 0; }
R cuMemsetD8Async(P d, unsigned char v, size_t n, void *s) { memset((void *)d, v, n); return 0; }
R cuMemPoolCreate(void **p, const void *q) { *p = (void *)(next += 16); return 0; }
R cuMemPoolDestroy(void *p) { return 0; }
R cuMemPoolSetAttribute(void *p, int a, void *v) { return 0; }
R cuMemPoolGetAttribute(void *p, int a, void *v) { *(uint64_t *)v = 0; return 0; }
R cuMemPoolSetAccess(void *p, const void *d, size_t n) { return 0; }
R cuMemPoolTrimTo(void *p, size_t n) { return 0; }
R cuMemAllocFromPoolAsync(P *p, size_t n, void *pool, void *s) { return cuMemAlloc_v2(p, n); }
R cuMemFreeAsync(P p, void *s) { return 0; }
R cuMemGetAllocationGranularity(size_t *g, const void *p, int o) { *g = 2 << 20; return 0; }
R cuMemAddressReserve(P *p, size_t n, size_t a, P w, P f) { return cuMemAlloc_v2(p, n); }
R cuMemAddressFree(P p, size_t n) { return 0; }
R cuMemCreate(P *h, size_t n, const void *p, P f) { *h = next += 16; return 0; }
R cuMemMap(P p, size_t n, size_t o, P h, P f) { return 0; }
R cuMemSetAccess(P p, size_t n, const void *d, size_t c) { return 0; }
R cuMemUnmap(P p, size_t n) { return 0; }
R cuMemRelease(P h) { return 0; }
R cuStreamBeginCapture_v2(void *s, int m) { capturing = 1; return 0; }
R cuStreamEndCapture(void *s, void **g) { capturing = 0; *g = (void *)(next += 16); return 0; }
R cuStreamGetCaptureInfo_v3(void *s, unsigned *st, P *id, void **g, void ***deps, void **edges, size_t *n) {
  static void *dep[1]; dep[0] = (void *)77; *st = capturing; *id = 5; *deps = dep; *n = 1; return 0; }
R cuGraphNodeGetDependencies_v2(void *n, void **d, void *e, size_t *c) { *c = 0; return 0; }
R cuGraphNodeGetType(void *n, unsigned *t) { *t = 0; return 0; }
R cuGraphKernelNodeGetParams_v2(void *n, void *p) { struct { void *f; unsigned x, y, z; } *q = p; q->x = 24; q->y = q->z = 1; return 0; }
R cuGraphInstantiateWithFlags(void **e, void *g, P f) { *e = (void *)(next += 16); return 0; }
R cuGraphUpload(void *e, void *s) { return 0; }
R cuGraphDestroy(void *g) { return 0; }
R cuGraphExecDestroy(void *e) { return 0; }
R cuGraphLaunch(void *e, void *s) { return 0; }
R cuThreadExchangeStreamCaptureMode(int *m) { return 0; }
R cuStreamIsCapturing(void *s, int *c) { *c = capturing; return 0; }
