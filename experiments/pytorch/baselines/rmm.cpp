// RMM's pool, arena and stream-ordered resources.
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

#include "workload.hpp"

// Large enough that no pool grows during the measurement.
constexpr size_t kPoolBytes = size_t{32} << 30;

template <class Resource>
struct Rmm {
  Resource resource;

  template <class... Arguments>
  explicit Rmm(Arguments&&... arguments) : resource(std::forward<Arguments>(arguments)...) {}
  void* allocate(size_t bytes, cudaStream_t stream) { return resource.allocate(cuda::stream_ref{stream}, bytes, 256); }
  void free(void* block, size_t bytes, cudaStream_t stream) {
    resource.deallocate(cuda::stream_ref{stream}, block, bytes, 256);
  }
};

struct Pool : Rmm<rmm::mr::pool_memory_resource> {
  Pool() : Rmm(rmm::mr::cuda_memory_resource{}, kPoolBytes) {}
};
struct Arena : Rmm<rmm::mr::arena_memory_resource> {
  Arena() : Rmm(rmm::mr::cuda_memory_resource{}, kPoolBytes) {}
};
struct CudaAsync : Rmm<rmm::mr::cuda_async_memory_resource> {};

int main(int argc, char** argv) {
  workload::check(cudaSetDevice(0), "cudaSetDevice");
  workload::Program program;
  program.add<Pool>("rmm-pool");
  program.add<Arena>("rmm-arena");
  program.add<CudaAsync>("rmm-cuda-async");
  return program.run(argc, argv);
}
