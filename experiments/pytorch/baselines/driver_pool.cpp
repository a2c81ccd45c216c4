// The CUDA memory pool (cudaMallocFromPoolAsync) with a release threshold that never releases memory.
#include "workload.hpp"

struct DriverPool {
  cudaMemPool_t pool;

  DriverPool() {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, {0}};
    workload::check(cudaMemPoolCreate(&pool, &properties), "cudaMemPoolCreate");
    uint64_t keep = UINT64_MAX;
    workload::check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
  }
  ~DriverPool() {
    workload::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    workload::check(cudaMemPoolDestroy(pool), "cudaMemPoolDestroy");
  }
  void* allocate(size_t bytes, cudaStream_t stream) {
    void* block;
    workload::check(cudaMallocFromPoolAsync(&block, bytes, pool, stream), "cudaMallocFromPoolAsync");
    return block;
  }
  void free(void* block, size_t, cudaStream_t stream) { workload::check(cudaFreeAsync(block, stream), "cudaFreeAsync"); }
};

int main(int argc, char** argv) {
  workload::check(cudaSetDevice(0), "cudaSetDevice");
  workload::Program program;
  program.add<DriverPool>("cuda-malloc-async");
  return program.run(argc, argv);
}
