// A thread that allocates while another one holds the GIL and waits for it.

#include <c10/cuda/CUDACachingAllocator.h>
#include <chrono>
#include <future>

namespace {

std::promise<void> told;
std::promise<void> done;

}  // namespace

// Called without the GIL.
extern "C" __attribute__((visibility("default"))) void allocate_when_told() {
    told.get_future().wait();
    c10::cuda::CUDACachingAllocator::raw_delete(c10::cuda::CUDACachingAllocator::raw_alloc(5000));
    done.set_value();
}

// Called with the GIL: returns whether the other thread finished within the given seconds.
extern "C" __attribute__((visibility("default"))) int tell_and_wait(int seconds) {
    told.set_value();
    return done.get_future().wait_for(std::chrono::seconds(seconds)) == std::future_status::ready;
}
