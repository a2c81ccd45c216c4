// Pinned memory and events without a GPU: an event completes when the test says so. Preloaded in front of the stand-in for CUDA.

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <map>

#define CUDA extern "C" __attribute__((visibility("default")))

namespace {

std::map<void*, uint64_t> recorded;
std::map<uint64_t, bool> completed;
uint64_t count = 0, made = 0;
std::deque<void*> released;
uint64_t next_event = 0x1000;

}  // namespace

// Number of the event that was recorded last.
CUDA uint64_t twin_recorded() { return count; }
CUDA void twin_complete(uint64_t number) { completed[number] = true; }
CUDA uint64_t twin_made() { return made; }
// The next segment that was released; null when there is none.
CUDA void* twin_released() {
    if (released.empty()) return nullptr;
    void* segment = released.front();
    released.pop_front();
    return segment;
}

CUDA int cudaHostAlloc(void** to, size_t bytes, unsigned) {
    // Addresses are never used again, so that each names one segment.
    static uintptr_t next = uintptr_t{1} << 44;
    *to = reinterpret_cast<void*>(next);
    next += (bytes + 0x1fffff) & ~size_t{0x1fffff};
    return ++made, 0;
}
CUDA int cudaFreeHost(void* segment) { return released.push_back(segment), 0; }
CUDA int cudaEventCreateWithFlags(void** to, unsigned) {
    return *to = reinterpret_cast<void*>(next_event += 0x10), 0;
}
CUDA int cudaEventRecord(void* event, void*) { return recorded[event] = ++count, 0; }
CUDA int cudaEventRecordWithFlags(void* event, void*, unsigned) { return recorded[event] = ++count, 0; }
// 600: not ready.
CUDA int cudaEventQuery(void* event) { return completed[recorded[event]] ? 0 : 600; }
CUDA int cudaEventDestroy(void*) { return 0; }
