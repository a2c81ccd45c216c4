// A library whose initialiser calls CUDA, and so does a thread that it starts. The dynamic linker is locked meanwhile.

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

static int (*init)(unsigned);

static void* call(void* unused) {
    init(0);
    return unused;
}

__attribute__((constructor)) static void start(void) {
    void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
    pthread_t thread;
    if (!cuda || !(*(void**)&init = dlsym(cuda, "cuInit"))) return;
    pthread_create(&thread, NULL, call, NULL);
    // The other thread's call comes first.
    usleep(200000);
    init(0);
}
