// A block that a thread without Python frees, while the caller waits for that thread and holds Python's lock: so do threads of
// NCCL when a program ends.

#include <c10/cuda/CUDACachingAllocator.h>
#include <thread>

extern "C" __attribute__((visibility("default"))) void free_elsewhere(void* block) {
    std::thread([block] { c10::cuda::CUDACachingAllocator::raw_delete(block); }).join();
}
