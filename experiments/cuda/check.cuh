// Ends the program where a call of CUDA fails, and measures time on the host.
#pragma once
#include <chrono>
#include <cstdio>
#include <cstdlib>

#define OK(call)                                                                  \
    do {                                                                          \
        cudaError_t code = (call);                                                \
        if (code != cudaSuccess) {                                                \
            printf("%s: %s\n", #call, cudaGetErrorString(code));                  \
            exit(1);                                                              \
        }                                                                         \
    } while (0)

// Seconds since it was made.
struct Clock {
    std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
    double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); }
};
