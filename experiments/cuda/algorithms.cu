// Thrust's algorithms, which allocate temporary memory: algorithms
#include <thrust/device_vector.h>
#include <thrust/reduce.h>
#include <thrust/scan.h>
#include <thrust/sequence.h>
#include <thrust/sort.h>
#include <thrust/transform.h>

#include <cstdio>

struct Mix {
    __device__ unsigned operator()(unsigned value) const { return value * 2654435761u; }
};

int main() {
    unsigned long long sum = 0;
    for (int round = 0; round < 20; round++) {
        thrust::device_vector<unsigned> numbers(1 << 18), mixed(1 << 18);
        thrust::sequence(numbers.begin(), numbers.end(), round);
        thrust::transform(numbers.begin(), numbers.end(), mixed.begin(), Mix());
        thrust::sort(mixed.begin(), mixed.end());
        thrust::inclusive_scan(mixed.begin(), mixed.end(), numbers.begin());
        sum += thrust::reduce(numbers.begin(), numbers.end(), 0ull);
    }
    printf("thrust %llu\n", sum);
}
