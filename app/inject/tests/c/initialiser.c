// A library whose initialiser calls CUDA, and so does a thread that it starts. The dynamic linker is locked meanwhile.

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <unistd.h>

typedef unsigned long long P;
static int (*init)(unsigned), (*retain)(uintptr_t*, int), (*use)(uintptr_t), (*alloc)(P*, size_t), (*release)(P);

static void* call(void* unused) {
    init(0);
#ifdef ALLOCATES
    uintptr_t context;
    P p;
    if (retain(&context, 0) == 0 && use(context) == 0 && alloc(&p, 4096) == 0) release(p);
#endif
    return unused;
}

__attribute__((constructor)) static void start(void) {
    void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
    pthread_t thread;
    if (!cuda || !(*(void**)&init = dlsym(cuda, "cuInit"))) return;
    *(void**)&retain = dlsym(cuda, "cuDevicePrimaryCtxRetain");
    *(void**)&use = dlsym(cuda, "cuCtxSetCurrent");
    *(void**)&alloc = dlsym(cuda, "cuMemAlloc_v2");
    *(void**)&release = dlsym(cuda, "cuMemFree_v2");
    pthread_create(&thread, NULL, call, NULL);
    // The other thread's call comes first.
    usleep(200000);
    call(NULL);
}
