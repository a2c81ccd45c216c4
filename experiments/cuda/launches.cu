// Launches of an empty kernel on the default stream and on a non-blocking one: nanoseconds a launch, the least of 40 series.
#include <algorithm>

#include "check.cuh"

__global__ void nothing() {}

int main() {
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (bool own : {false, true}) {
        double least = 1e9;
        for (int series = 0; series < 40; series++) {
            OK(cudaDeviceSynchronize());
            Clock clock;
            for (int i = 0; i < 500; i++) nothing<<<1, 32, 0, own ? stream : nullptr>>>();
            least = std::min(least, clock.seconds() / 500 * 1e9);
        }
        printf("%.1f ns a launch (%s) ", least, own ? "non-blocking" : "default");
    }
    printf("\n");
}
