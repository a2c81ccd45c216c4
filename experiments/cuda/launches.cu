// Launches of an empty kernel on the default stream and on a non-blocking one: nanoseconds a launch, the median of 200 series, and how
// much more a launch through the program's entry point costs than one through the driver's own. Series of the two take turns in this
// process, because launches of two processes differ by more than what is looked for. Without a library between the program and the
// driver the two entry points are the same.
#include <algorithm>
#include <cstring>
#include <vector>

#include <cuda.h>
#include <dlfcn.h>

#include "check.cuh"

using Launch = CUresult (*)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**);
using Lookup = CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);

const int VERSION = 12000;

__global__ void nothing() {}

// The file of the driver that this process has loaded.
void driver(char (&path)[4096]) {
    FILE* maps = fopen("/proc/self/maps", "r");
    char line[4400];
    while (maps && fgets(line, sizeof line, maps)) {
        char* at = strchr(line, '/');
        if (at && strstr(at, "/libcuda.so")) {
            at[strcspn(at, "\n")] = 0;
            snprintf(path, sizeof path, "%s", at);
            fclose(maps);
            return;
        }
    }
    printf("the driver's file was not found\n");
    exit(1);
}

double series(Launch launch, CUfunction kernel, CUstream stream) {
    OK(cudaDeviceSynchronize());
    Clock clock;
    for (int i = 0; i < 500; i++)
        if (launch(kernel, 1, 1, 1, 32, 1, 1, 0, stream, nullptr, nullptr) != CUDA_SUCCESS) exit(1);
    return clock.seconds() / 500 * 1e9;
}

double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
}

int main() {
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaFunction_t kernel;
    OK(cudaGetFuncBySymbol(&kernel, (const void*)nothing));

    void* seen = nullptr;
    cudaDriverEntryPointQueryResult found;
    OK(cudaGetDriverEntryPointByVersion("cuLaunchKernel", &seen, VERSION, cudaEnableDefault, &found));
    char path[4096];
    driver(path);
    void* file = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    auto lookup = file ? (Lookup)dlsym(file, "cuGetProcAddress_v2") : nullptr;
    void* own = nullptr;
    if (!lookup || lookup("cuLaunchKernel", &own, VERSION, 0, nullptr) != CUDA_SUCCESS) {
        printf("%s: no cuLaunchKernel\n", path);
        return 1;
    }

    printf("entry points %s; ", seen == own ? "equal" : "differ");
    for (CUstream on : {(CUstream) nullptr, (CUstream)stream}) {
        std::vector<double> through, direct, more;
        for (int i = 0; i < 200; i++) {
            // Each is the first as often as the other.
            double second = i % 2 ? series((Launch)own, kernel, on) : 0;
            through.push_back(series((Launch)seen, kernel, on));
            direct.push_back(i % 2 ? second : series((Launch)own, kernel, on));
            more.push_back(through.back() - direct.back());
        }
        printf("%.1f ns a launch (%s), %.1f more than the driver's; ", median(through), on ? "non-blocking" : "default", median(more));
    }
    printf("\n");
}
