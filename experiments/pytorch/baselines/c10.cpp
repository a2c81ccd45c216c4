// PyTorch's caching allocator through its own interface, without Python in the loop.
#include <c10/cuda/CUDACachingAllocator.h>

#include "workload.hpp"

struct C10 {
  c10::cuda::CUDACachingAllocator::CUDAAllocator* allocator = c10::cuda::CUDACachingAllocator::get();

  ~C10() { allocator->emptyCache(); }
  void* allocate(size_t bytes, cudaStream_t stream) { return allocator->raw_alloc_with_stream(bytes, stream); }
  void free(void* block, size_t, cudaStream_t) { allocator->raw_delete(block); }
};

int main(int argc, char** argv) {
  workload::check(cudaSetDevice(0), "cudaSetDevice");
  c10::cuda::CUDACachingAllocator::init(1);
  workload::Program program;
  program.add<C10>("pytorch-c10");
  return program.run(argc, argv);
}
