// PyTorch's pinned host memory over libvramlab: `torch.empty(pin_memory=True)`, `.pin_memory()` and the loaders' pin threads.
//
// PyTorch's hook is `at::setHostAllocator` (2.8 and newer). Compiled on the user's machine against the installed PyTorch
// (`_build.py`), and never removed or destroyed: its blocks live until the process exits. Blocks that PyTorch's own
// allocator pinned before stay its blocks.

#include "../shim/guarded.h"
#include "../shim/library.h"
#include "../shim/pinned.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

namespace vramlab_shim {
namespace {

void free_block(void* address);

uint64_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }
void* pointer(uint64_t address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
    // The legacy stream cannot be asked during a capture of another one. PyTorch takes the last error for one of its own.
    (void)cudaGetLastError();
    return false;
}

// The library's statistics as PyTorch's.
void add(c10::CachingAllocator::Stat& to, const vramlab_gauge& from) {
    to.current += static_cast<int64_t>(from.current);
    to.peak += static_cast<int64_t>(from.peak);
    to.allocated += static_cast<int64_t>(from.allocated);
    to.freed += static_cast<int64_t>(from.freed);
}

// Microseconds.
void add(c10::CachingAllocator::DurationStat& to, const vramlab_durations& from) {
    const auto us = [](uint64_t ns) { return static_cast<int64_t>(ns / 1000); };
    to.total += us(from.total_ns);
    to.count += static_cast<int64_t>(from.count);
    to.max = std::max(to.max, us(from.max_ns));
    if (from.max_ns != 0) to.min = to.min == 0 ? us(from.min_ns) : std::min(to.min, us(from.min_ns));
}

// Graphs that use pinned blocks. A graph's launches use its blocks' addresses, so such a block serves no other request before
// PyTorch has released the pools of all its graphs, and launches that were queued before have completed.
class Captures {
  public:
    // A pool in which PyTorch lets no memory be reused; one that is not known is never released.
    using Pools = std::vector<MempoolId_t>;

    void begin(MempoolId_t id, StreamFilter filter) {
        std::lock_guard<std::mutex> guard(lock_);
        for (const auto& [open, _] : open_)
            TORCH_CHECK(open != id, "beginAllocateToPool: already recording to mempool_id");
        uses_[id] += 1;
        open_.emplace_back(id, std::move(filter));
        is_open_ = true;
    }

    void end(MempoolId_t id) {
        std::lock_guard<std::mutex> guard(lock_);
        const auto at = std::find_if(open_.begin(), open_.end(), [&](const auto& open) { return open.first == id; });
        TORCH_CHECK(at != open_.end(), "endAllocatePool: not currently recording to mempool_id");
        open_.erase(at);
        is_open_ = !open_.empty();
    }

    // Moves the blocks that no graph needs any more to those that `take_retired` returns.
    void release(MempoolId_t id) {
        std::lock_guard<std::mutex> guard(lock_);
        const auto at = uses_.find(id);
        TORCH_CHECK(at != uses_.end(), "vramlab: no capture has used the pool (", id.first, ", ", id.second, ")");
        if (--at->second > 0) return;
        uses_.erase(at);
        const auto first = std::partition(parked_.begin(), parked_.end(),
                                          [&](const auto& parked) { return is_needed(parked.second); });
        for (auto parked = first; parked != parked_.end(); ++parked) retired_.push_back(parked->first);
        parked_.erase(first, parked_.end());
        has_retired_ = !retired_.empty();
    }

    bool is_open() const { return is_open_.load(std::memory_order_relaxed); }

    // The pools of the captures that a stream is in.
    Pools of(HostStream stream) {
        std::lock_guard<std::mutex> guard(lock_);
        Pools out;
        for (const auto& [id, filter] : open_) {
            if (filter(stream)) out.push_back(id);
        }
        return out;
    }

    // Takes a freed block that graphs have used.
    void park(uint64_t address, Pools pools) {
        std::lock_guard<std::mutex> guard(lock_);
        if (is_needed(pools)) {
            parked_.emplace_back(address, std::move(pools));
        } else {
            retired_.push_back(address);
            has_retired_ = true;
        }
    }

    // Blocks to free after a wait for every GPU. None during a capture, which such a wait would end.
    std::vector<uint64_t> take_retired() {
        if (!has_retired_.load(std::memory_order_relaxed)) return {};
        std::lock_guard<std::mutex> guard(lock_);
        if (!open_.empty()) return {};
        has_retired_ = false;
        return std::exchange(retired_, {});
    }

  private:
    bool is_needed(const Pools& pools) const {
        return std::any_of(pools.begin(), pools.end(),
                           [&](const MempoolId_t& id) { return id == NO_POOL || uses_.count(id) > 0; });
    }

    std::mutex lock_;
    std::vector<std::pair<MempoolId_t, StreamFilter>> open_;
    std::map<MempoolId_t, int> uses_;
    std::vector<std::pair<uint64_t, Pools>> parked_;
    std::vector<uint64_t> retired_;
    std::atomic<bool> is_open_{false};
    std::atomic<bool> has_retired_{false};
};

class Host final : public at::HostAllocator {
  public:
    Host(at::HostAllocator* native, std::string spec) : spec(std::move(spec)), native_(native) {}

    const std::string spec;
    Requested requested;
    // What hears of requests, if anything; never destroyed.
    std::atomic<PinnedListener*> listener{nullptr};

    c10::DataPtr allocate(size_t bytes) override {
        TORCH_CHECK(!is_forked, "vramlab: pinned memory: this process was forked from one that had pinned memory; start it "
                    "by spawn");
        const c10::Device cpu(c10::DeviceType::CPU);
        if (bytes == 0) return {nullptr, nullptr, &free_block, cpu};
        vramlab* handle = open();
        free_retired(handle);
        PinnedListener* const hears = listener;
        if (hears != nullptr) hears->before(nullptr);
        uint64_t address = 0;
        {
            const CaptureScope scope(handle);
            const vramlab_status status = library.allocate(handle, bytes, 0, &address);
            TORCH_CHECK(status == VRAMLAB_STATUS_OK, "vramlab: pinned memory: ", library.error());
        }
        Captures::Pools pools;
        if (C10_UNLIKELY(captures_.is_open())) pools = captures_.of(c10::cuda::getCurrentCUDAStream().unwrap());
        {
            std::unique_lock<std::shared_mutex> guard(lock_);
            blocks_[address] = Block{bytes, std::move(pools)};
        }
        requested.add(bytes);
        if (hears != nullptr) hears->allocated(address, bytes, nullptr);
        return {pointer(address), pointer(address), &free_block, cpu};
    }

    c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

    void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

    bool record_event(void* address, void* context, HostStream stream) override {
        if (is_forked) return false;
        const uint64_t block = block_of(address, context);
        if (block == 0) return native_->record_event(address, context, stream);
        if (PinnedListener* const hears = listener) hears->used(block, stream);
        const c10::cuda::CUDAStream of(c10::cuda::CUDAStream::UNCHECKED, stream);
        if (captures_may_run() && is_capturing(of.stream())) {
            Captures::Pools pools = captures_.of(stream);
            // Before PyTorch 2.11 the host's allocator is not notified of captures.
            if (pools.empty()) pools.push_back(NO_POOL);
            std::unique_lock<std::shared_mutex> guard(lock_);
            Captures::Pools& all = blocks_[block].pools;
            all.insert(all.end(), pools.begin(), pools.end());
            return true;
        }
        const auto gpu = static_cast<uint32_t>(stream.device_index());
        const vramlab_status status = library.record_stream_on(handle_.load(), block, gpu, number(of.stream()));
        TORCH_CHECK(status == VRAMLAB_STATUS_OK, "vramlab: pinned memory: ", library.error());
        return true;
    }

    void give_back(uint64_t address) {
        if (address == 0 || is_forked) return;
        Block block;
        {
            std::unique_lock<std::shared_mutex> guard(lock_);
            const auto at = blocks_.find(address);
            if (at == blocks_.end()) return say("no pinned block begins at", address, "; it was freed before");
            block = std::move(at->second);
            blocks_.erase(at);
        }
        requested.remove(block.bytes);
        PinnedListener* const hears = listener;
        const uint64_t number = hears == nullptr ? 0 : hears->freeing(address);
        if (C10_UNLIKELY(!block.pools.empty())) {
            captures_.park(address, std::move(block.pools));
        } else {
            free_in_library(address);
        }
        if (number != 0) hears->freed(number);
    }

    void empty_cache() override {
        native_->empty_cache();
        vramlab* handle = handle_;
        if (handle == nullptr) return;
        if (PinnedListener* const hears = listener) {
            hears->before(nullptr);
            hears->emptied(nullptr);
        }
        free_retired(handle);
        const CaptureScope scope(handle);
        const vramlab_status status = library.trim(handle, 0, nullptr);
        TORCH_CHECK(status == VRAMLAB_STATUS_OK, "vramlab: pinned memory: ", library.error());
    }

    // Of blocks of PyTorch's own allocator, too.
    at::HostStats get_stats() override {
        at::HostStats out = native_->get_stats();
        vramlab* handle = handle_;
        if (handle == nullptr) return out;
        vramlab_stats stats{};
        vramlab_pinning times{};
        if (library.read_stats(handle, &stats) != VRAMLAB_STATUS_OK) return out;
        if (library.read_pinning(handle, &times) != VRAMLAB_STATUS_OK) return out;
#if VRAMLAB_TORCH >= 210
        add(out.active_requests, stats.active.all);
        add(out.active_bytes, stats.active_bytes.all);
        add(out.allocations, stats.segment.all);
        add(out.allocated_bytes, stats.reserved_bytes.all);
#else
        add(out.allocation, stats.active.all);
        add(out.allocated_bytes, stats.active_bytes.all);
        add(out.segment, stats.segment.all);
        add(out.reserved_bytes, stats.reserved_bytes.all);
#endif
        add(out.host_alloc_time, times.alloc);
        add(out.host_free_time, times.free);
        out.num_host_alloc += static_cast<int64_t>(stats.segment.all.allocated);
        out.num_host_free += static_cast<int64_t>(stats.segment.all.freed);
        return out;
    }

    void reset_accumulated_stats() override {
        native_->reset_accumulated_stats();
        if (vramlab* handle = handle_) library.reset_accumulated(handle);
    }

    void reset_peak_stats() override {
        native_->reset_peak_stats();
        if (vramlab* handle = handle_) library.reset_peaks(handle);
        requested.reset_peak();
    }

#if VRAMLAB_TORCH >= 211
    void begin_allocate_to_pool(MempoolId_t id, StreamFilter filter) override {
        captures_.begin(id, std::move(filter));
        library.capturing(open(), true);
    }

    void end_allocate_to_pool(MempoolId_t id) override {
        captures_.end(id);
        library.capturing(open(), false);
    }

    void release_pool(MempoolId_t id) override { captures_.release(id); }
#endif

    // Null before the first request.
    vramlab* handle() const { return handle_; }

  private:
    struct Block {
        size_t bytes;
        Captures::Pools pools;
    };

    // Before PyTorch 2.11: the library's calls spare a capture of this thread's stream.
    class CaptureScope {
      public:
        explicit CaptureScope(vramlab* handle) {
#if VRAMLAB_TORCH < 211
            if (is_capturing(c10::cuda::getCurrentCUDAStream().stream())) {
                handle_ = handle;
                library.capturing(handle_, true);
            }
#else
            (void)handle;
#endif
        }
        ~CaptureScope() {
            if (handle_ != nullptr) library.capturing(handle_, false);
        }
        CaptureScope(const CaptureScope&) = delete;
        CaptureScope& operator=(const CaptureScope&) = delete;

      private:
        vramlab* handle_ = nullptr;
    };

    bool captures_may_run() const { return VRAMLAB_TORCH < 211 || captures_.is_open(); }

    vramlab* open() {
        vramlab* handle = handle_;
        if (C10_LIKELY(handle != nullptr)) return handle;
        std::lock_guard<std::mutex> guard(opening_);
        if (handle_ == nullptr) {
            // As PyTorch: the current GPU, or the first one in use, so that no other GPU gets a context.
            const int gpu = c10::cuda::getDeviceIndexWithPrimaryContext().value_or(c10::cuda::current_device());
            // Tests replace GPUs by the library's simulated devices.
            const char* kind = std::getenv("VRAMLAB_SHIM_DEVICE");
            const std::string name = std::string("host:") + (kind == nullptr ? "cuda" : kind) + ":" + std::to_string(gpu);
            vramlab* opened = nullptr;
            const vramlab_status status = library.open(spec.c_str(), name.c_str(), &opened);
            TORCH_CHECK(status == VRAMLAB_STATUS_OK, "vramlab: pinned memory: ", library.error());
            handle_ = opened;
            watch_forks();
        }
        return handle_;
    }

    // The block that a context or an address is of; 0 for memory of others. PyTorch names a block by its context, and a view
    // that was made of an address has another one.
    uint64_t block_of(void* address, void* context) {
        std::shared_lock<std::shared_mutex> guard(lock_);
        if (blocks_.count(number(context)) > 0) return number(context);
        auto after = blocks_.upper_bound(number(address));
        if (after == blocks_.begin()) return 0;
        const auto& [first, block] = *--after;
        return number(address) - first < block.bytes ? first : 0;
    }

    void free_retired(vramlab* handle) {
        const std::vector<uint64_t> retired = captures_.take_retired();
        if (retired.empty()) return;
        int count = 0;
        C10_CUDA_CHECK(cudaGetDeviceCount(&count));
        for (int gpu = 0; gpu < count; gpu++) {
            if (!c10::cuda::hasPrimaryContext(static_cast<DeviceIndex>(gpu))) continue;
            const c10::cuda::CUDAGuard guard(static_cast<DeviceIndex>(gpu));
            C10_CUDA_CHECK(cudaDeviceSynchronize());
        }
        for (const uint64_t address : retired) library.free(handle, address);
    }

    // A free has no way to return an error. The driver ends before the process does, and a forked child has no blocks.
    void free_in_library(uint64_t address) {
        const CaptureScope scope(handle_);
        const vramlab_status status = library.free(handle_, address);
        if (status != VRAMLAB_STATUS_OK && status != VRAMLAB_STATUS_DRIVER && status != VRAMLAB_STATUS_FORKED) {
            say(library.error(), address, "");
        }
    }

    static void say(const char* what, uint64_t address, const char* more) {
        std::fprintf(stderr, "vramlab: %s %#llx%s\n", what, static_cast<unsigned long long>(address), more);
    }

    at::HostAllocator* const native_;
    std::atomic<vramlab*> handle_{nullptr};
    std::mutex opening_;
    Captures captures_;
    // The program's blocks, by their addresses.
    std::shared_mutex lock_;
    std::map<uint64_t, Block> blocks_;
};

Host* host = nullptr;
Watch* watch = nullptr;

void free_block(void* address) { host->give_back(number(address)); }

// The library between this program and the driver serves pinned memory, too; it leaves it to this allocator.
void leave_to_host() {
    if (void* leave = dlsym(RTLD_DEFAULT, "vramlab_inject_leave_host")) reinterpret_cast<void (*)()>(leave)();
}

}  // namespace
}  // namespace vramlab_shim

#define VRAMLAB_EXPORT extern "C" __attribute__((visibility("default")))

#ifdef VRAMLAB_SHIM_SOURCE
// The digest of the sources: `_build.py` searches the file for it.
VRAMLAB_EXPORT const char vramlab_host_source[];
const char vramlab_host_source[] = VRAMLAB_SHIM_SOURCE;
#endif

// The error message of the last failed call below.
VRAMLAB_EXPORT const char* vramlab_host_error() { return last_error.c_str(); }

// Serves PyTorch's pinned memory from the allocator `spec` of the library `file`. Returns 0 on success; on failure returns 1
// and changes nothing.
VRAMLAB_EXPORT int vramlab_host_install(const char* file, const char* spec) {
    using namespace vramlab_shim;
    return guarded(1, [&] {
        TORCH_CHECK(host == nullptr, "PyTorch's pinned memory is served by ", host == nullptr ? "" : host->spec);
        if (library.open == nullptr) {
            const std::string why = library.load(file);
            TORCH_CHECK(why.empty(), why);
        }
        auto* installed = new Host(at::getHostAllocator(at::kCUDA), spec);
        host = installed;
        at::setHostAllocator(at::kCUDA, installed);
        TORCH_CHECK(at::getHostAllocator(at::kCUDA) == installed, "PyTorch did not take the allocator");
        leave_to_host();
        return 0;
    });
}

// Counts what is requested of PyTorch's own allocator from now on.
VRAMLAB_EXPORT int vramlab_host_watch() {
    using namespace vramlab_shim;
    return guarded(1, [&] {
        if (host != nullptr || watch != nullptr) return 0;
        watch = new Watch(at::getHostAllocator(at::kCUDA));
        at::setHostAllocator(at::kCUDA, watch);
        watch_forks();
        return 0;
    });
}

// Lets a listener, `vramlab_recorder_pinned_listener`, hear of requests from now on. Returns 1 without an allocator.
VRAMLAB_EXPORT int vramlab_host_listen(void* listener) {
    using namespace vramlab_shim;
    return guarded(1, [&] {
        TORCH_CHECK(host != nullptr, "no allocator of VramLab's serves PyTorch's pinned memory");
        host->listener = static_cast<PinnedListener*>(listener);
        return 0;
    });
}

// The requested bytes: now, at most, and the number of requests. Returns 1 where nothing counts them.
VRAMLAB_EXPORT int vramlab_host_requested(uint64_t* out) {
    using namespace vramlab_shim;
    if (host == nullptr && watch == nullptr) return 1;
    const Requested& requested = host != nullptr ? host->requested : watch->requested;
    out[0] = requested.current();
    out[1] = requested.peak();
    out[2] = requested.count();
    return 0;
}

// The allocator, for the library's other functions; null if no memory was requested yet.
VRAMLAB_EXPORT vramlab* vramlab_host_handle() {
    using namespace vramlab_shim;
    return host == nullptr ? nullptr : host->handle();
}
