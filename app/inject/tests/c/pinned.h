// What `program.c`, which includes this, does with pinned memory of the host.

// Pinned memory: each answer as without an allocator.
static void pinned(void) {
    char *p, *q, own[64];
    unsigned flags = 99;
    P device = 0, first = 0, id = 0, id2 = 0;
    size_t size = 0;
    int type = 0;
    CHECK(cuMemHostAlloc((void**)&p, 0, 0) == 1);
    CHECK(cuMemAllocHost((void**)&p, 0) == 1);
    CHECK(cuMemHostAlloc((void**)&p, 100, 64) == 1);
    CHECK(cuMemHostAlloc(NULL, 100, 0) == 1);
    CHECK(cuMemHostAlloc((void**)&p, 1000, 2) == 0 && (uintptr_t)p % 512 == 0);
    CHECK(cuMemHostAlloc((void**)&q, 1000, 2) == 0 && q != p);
    memset(p, 1, 1000), memset(q, 2, 1000);
    CHECK(p[0] == 1 && p[999] == 1);
    CHECK(cuMemHostGetFlags(&flags, p + 999) == 0 && flags == 2);
    CHECK(cuMemHostGetDevicePointer(&device, p + 10, 0) == 0 && device == (P)(uintptr_t)p + 10);
    CHECK(cuMemHostGetDevicePointer(&device, p, 1) == 1);
    CHECK(cuPointerGetAttribute(&first, 11, (P)(uintptr_t)p + 5) == 0 && first == (P)(uintptr_t)p);
    CHECK(cuPointerGetAttribute(&size, 12, (P)(uintptr_t)q + 999) == 0 && size == 1000);
    CHECK(cuPointerGetAttribute(&type, 2, (P)(uintptr_t)p) == 0 && type == 1);
    CHECK(cuPointerGetAttribute(&id, 7, (P)(uintptr_t)p) == 0 && cuPointerGetAttribute(&id2, 7, (P)(uintptr_t)q) == 0);
    CHECK(id != id2 || getenv("PLAIN"));
    int what[] = {12, 11, 2};
    void* data[] = {&size, &first, &type};
    CHECK(cuPointerGetAttributes(3, what, data, (P)(uintptr_t)q + 1) == 0 && size == 1000 && first == (P)(uintptr_t)q && type == 1);
    // It is pinned already, and not registered.
    CHECK(cuMemHostRegister(p, 1000, 0) == 712);
    CHECK(cuMemHostUnregister(p) == 713);
    CHECK(cuMemHostRegister(own, 64, 0) == 0 && cuMemFreeHost(own) == 1 && cuMemHostUnregister(own) == 0);
    // An address inside a block, a second free, and memory that was not pinned.
    CHECK(cuMemFreeHost(p + 512) == 1);
    CHECK(cuMemFreeHost(p) == 0);
    CHECK(cuMemFreeHost(p) == 1);
    CHECK(cuMemFreeHost(own) == 1);
    CHECK(cuMemHostGetFlags(&flags, p) == 1);
    CHECK(cuMemHostGetDevicePointer(&device, p, 0) == 1);
    CHECK(cuPointerGetAttribute(&first, 11, (P)(uintptr_t)p) == 1);
    CHECK(cuPointerGetAttributes(3, what, data, (P)(uintptr_t)p) == 0 && size == 0 && first == 0 && type == 0);
    CHECK(q[0] == 2 && q[999] == 2 && cuMemFreeHost(q) == 0);
    // Flags do not mix.
    void* held[9] = {0};
    for (int round = 0; round < 3; round++) {
        for (unsigned f = 0; f < 8; f++) CHECK(cuMemHostAlloc(&held[f], 3000 + 100 * f, f) == 0);
        CHECK(cuMemAllocHost(&held[8], 3000) == 0);
        for (unsigned f = 0; f < 8; f++) CHECK(cuMemHostGetFlags(&flags, held[f]) == 0 && flags == f);
        for (unsigned f = 0; f < 9; f++) CHECK(cuMemFreeHost(held[f]) == 0);
    }
}

// Under DRIVER_HOST=256: what other flags have cached goes back before a request is refused.
static void pinned_out_of_memory(void) {
    void *p, *q;
    for (int round = 0; round < 3; round++) {
        CHECK(cuMemHostAlloc(&p, 200 << 20, 0) == 0 && cuMemFreeHost(p) == 0);
        CHECK(cuMemHostAlloc(&p, 100 << 20, 1) == 0 && cuMemFreeHost(p) == 0);
        CHECK(cuMemHostAlloc(&p, 150 << 20, 2) == 0);
        q = (void*)7;
        CHECK(cuMemHostAlloc(&q, 150 << 20, 0) == 2 && q == (void*)7);
        CHECK(cuMemHostAlloc(&q, (size_t)1 << 40, 0) == 2);
        CHECK(cuMemHostAlloc(&q, (size_t)-1, 0) == 2);
        CHECK(cuMemFreeHost(p) == 0);
    }
}

// Without the permission to pin: each request is refused with the driver's code, and pinning in place is none of its business.
static void pinned_forbidden(void) {
    char own[64];
    void* p = (void*)7;
    P device;
    for (int round = 0; round < 3; round++) {
        CHECK(cuMemHostAlloc(&p, 4096, 0) == 800 && p == (void*)7);
        CHECK(cuMemAllocHost(&p, 1 << 20) == 800 && p == (void*)7);
        CHECK(cuMemFreeHost(own) == 1);
        CHECK(cuMemHostRegister(own, 64, 0) == 0 && cuMemHostUnregister(own) == 0 && cuMemHostUnregister(own) == 713);
    }
    CHECK(cuMemAlloc(&device, 4096) == 0 && cuMemFree(device) == 0);
}

// A block whose copy has not run keeps its bytes.
static void slow(int steps) {
    S stream[2] = {0};
    P device;
    CHECK(cuStreamCreate(&stream[1], 1) == 0 && cuMemAlloc(&device, 4 << 20) == 0);
    for (int i = 0; i < steps; i++) {
        void* p;
        size_t bytes = i % 4 ? 5000 : 3 << 20;
        CHECK(cuMemHostAlloc(&p, bytes, 0) == 0);
        memset(p, i + 1, bytes);
        CHECK(cuMemcpyHtoDAsync(device, p, bytes, stream[i / 8 % 2]) == 0);
        CHECK(cuMemFreeHost(p) == 0);
    }
    // A stream that is destroyed finishes its work, and so does another device.
    uintptr_t context, second;
    S other;
    void* p;
    CHECK(cuMemHostAlloc(&p, 2 << 20, 1) == 0);
    memset(p, 1, 2 << 20);
    CHECK(cuMemcpyHtoDAsync(device, p, 2 << 20, stream[1]) == 0 && cuStreamDestroy(stream[1]) == 0 && cuMemFreeHost(p) == 0);
    CHECK(cuMemHostAlloc(&p, 2 << 20, 1) == 0);
    memset(p, 2, 2 << 20);
    CHECK(cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuDevicePrimaryCtxRetain(&second, 1) == 0 && cuCtxSetCurrent(second) == 0);
    CHECK(cuStreamCreate(&other, 1) == 0 && cuMemcpyHtoDAsync(device, p, 2 << 20, other) == 0);
    CHECK(cuCtxSetCurrent(context) == 0 && cuMemFreeHost(p) == 0);
    CHECK(cuMemHostAlloc(&p, 2 << 20, 1) == 0);
    memset(p, 3, 2 << 20);
    CHECK(cuMemFreeHost(p) == 0);
    CHECK(cuCtxSynchronize() == 0 && cuMemFree(device) == 0);
    CHECK(count_of("early") <= 0);
}

// Captures, contexts and a child.
static void pinned_state(void) {
    uintptr_t own, graph, second;
    S stream;
    void *p, *q;
    CHECK(cuMemHostAlloc(&p, 4096, 0) == 0 && cuStreamCreate(&stream, 1) == 0);
    CHECK(cuStreamBeginCapture(stream, 0) == 0);
    long before = count_of("cuEventRecord");
    CHECK(cuMemHostAlloc(&q, 4096, 0) == 0 && launch(stream) == 0 && cuMemFreeHost(p) == 0 && cuMemFreeHost(q) == 0);
    CHECK(cuMemHostAlloc(&q, 8 << 20, 0) == 0 && cuMemFreeHost(q) == 0);
    CHECK(count_of("cuEventRecord") == before);
    CHECK(cuStreamEndCapture(stream, &graph) == 0 && cuStreamDestroy(stream) == 0);
    CHECK(cuMemHostAlloc(&p, 4096, 0) == 0);
    CHECK(cuCtxCreate(&own, 0, 0) == 0);
    CHECK(cuMemHostAlloc(&q, 4096, 0) == 0 && q != p);
    CHECK(cuMemFreeHost(p) == 0);  // of another context
    CHECK(cuMemHostAlloc(&p, 4096, 0) == 0 && cuMemFreeHost(p) == 0);
    CHECK(cuCtxDestroy(own) == 0);
    CHECK(cuMemFreeHost(q) == 1);
    CHECK(cuMemHostAlloc(&p, 4096, 0) == 0 && cuMemHostAlloc(&q, 4096, 1) == 0 && cuMemFreeHost(q) == 0);
    // Nobody says when a green context ends: the driver serves it.
    uintptr_t green, first;
    CHECK(cuDevicePrimaryCtxRetain(&first, 0) == 0 && cuCtxFromGreenCtx(&green, 0x8000) == 0 && cuCtxSetCurrent(green) == 0);
    before = count_of("cuMemHostAlloc");
    CHECK(cuMemHostAlloc(&q, 4096, 1) == 0 && cuMemFreeHost(q) == 0 && cuMemHostAlloc(&q, 4096, 1) == 0 && cuMemFreeHost(q) == 0);
    CHECK(count_of("cuMemHostAlloc") == before + 2 && cuCtxSetCurrent(first) == 0);
    CHECK(cuDevicePrimaryCtxRetain(&second, 1) == 0 && cuDevicePrimaryCtxReset(1) == 0);
    CHECK(cuMemFreeHost(p) == 0 && cuMemHostAlloc(&p, 4096, 0) == 0);
    CHECK(cuDevicePrimaryCtxReset(0) == 0);
    CHECK(cuMemFreeHost(p) == 1);
    CHECK(cuMemHostAlloc(&p, 4096, 0) == 0);
    memset(p, 1, 4096);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        long calls = count_of("cuMemHostAlloc");
        CHECK(cuMemHostAlloc(&q, 4096, 0) == 0 && cuMemFreeHost(q) == 0);
        CHECK(count_of("cuMemHostAlloc") == calls + 1);
        fflush(stdout);
        _exit(failures != 0);
    }
    int status;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(cuMemFreeHost(p) == 0);
}

static void* pinned_work(void* number) {
    uintptr_t context;
    unsigned random = (unsigned)(uintptr_t)number * 2654435761u + 1;
    char* held[16] = {0};
    size_t sizes[16] = {0};
    S stream;
    CHECK(cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxSetCurrent(context) == 0);
    CHECK(cuStreamCreate(&stream, 1) == 0);
    const char mark = (char)((uintptr_t)number + 1);
    for (int i = 0; i < rounds; i++) {
        random = random * 1664525u + 1013904223u;
        unsigned at = random >> 28;
        if (held[at]) {
            CHECK(held[at][0] == mark && held[at][sizes[at] / 2] == mark && held[at][sizes[at] - 1] == mark);
            if (random & 64) CHECK(cuMemcpyHtoDAsync(0x700000000000, held[at], sizes[at], random & 128 ? stream : 0) == 0);
            CHECK(cuMemFreeHost(held[at]) == 0);
            held[at] = NULL;
        } else {
            unsigned flags = random >> 6 & 3;
            sizes[at] = 1 + (random >> 8) % (1 << (random % 20));
            CHECK(cuMemHostAlloc((void**)&held[at], sizes[at], flags) == 0);
            memset(held[at], mark, sizes[at]);
        }
    }
    for (int at = 0; at < 16; at++)
        if (held[at]) CHECK(cuMemFreeHost(held[at]) == 0);
    CHECK(cuStreamDestroy(stream) == 0);
    return NULL;
}

static void pinned_threads(void) {
    const char* text = getenv("ROUNDS");
    rounds = text ? atoi(text) : 500;
    pthread_t all[16];
    for (uintptr_t i = 0; i < 16; i++) pthread_create(&all[i], NULL, pinned_work, (void*)i);
    for (int i = 0; i < 16; i++) pthread_join(all[i], NULL);
    CHECK(cuCtxSynchronize() == 0 && count_of("early") <= 0);
}

// An allocator inside the program takes pinned memory over: from then on it is the driver's.
static void pinned_left(void) {
    void *served, *left[3];
    void (*leave)(void) = (void (*)(void))dlsym(RTLD_DEFAULT, "vramlab_inject_leave_host");
    CHECK(cuMemHostAlloc(&served, 4096, 0) == 0);
    CHECK((leave != NULL) == !getenv("PLAIN"));
    if (leave) leave();
    for (int i = 0; i < 3; i++) CHECK(cuMemHostAlloc(&left[i], 4096, 0) == 0);
    CHECK(cuMemFreeHost(served) == 0 && cuMemFreeHost(served) == 1);
    for (int i = 0; i < 3; i++) CHECK(cuMemFreeHost(left[i]) == 0);
}
