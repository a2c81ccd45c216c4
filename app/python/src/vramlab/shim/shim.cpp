// PyTorch's CUDA allocator over libvramlab: every tensor, graph, MemPool and statistic of PyTorch uses this class.
//
// Compiled on the user's machine against the installed PyTorch (`_build.py`), installed by `vramlab_shim_install`
// (exports.h), and never removed or destroyed: its blocks live until the process exits.

#include "ipc.h"

#include <c10/util/env.h>
#include <c10/util/irange.h>
#include <limits>
#include <sstream>

namespace vramlab_shim {

namespace {

class Shim;
Shim* installed = nullptr;

void delete_block(void* address);
void* take_uncached(size_t bytes);
void delete_uncached(void* address);

struct Checkpoint : AllocatorState {
    Owner* owner;
    MempoolId_t id;
    vramlab_checkpoint* value = nullptr;

    Checkpoint(Owner* owner, MempoolId_t id) : owner(owner), id(id) {}
    ~Checkpoint() override { library.checkpoint_free(value); }
};

// The library's statistics have the same field names as PyTorch's.
template <typename Gauge>
void add(Stat& to, const Gauge& from) {
    to.current += static_cast<int64_t>(from.current);
    to.peak += static_cast<int64_t>(from.peak);
    to.allocated += static_cast<int64_t>(from.allocated);
    to.freed += static_cast<int64_t>(from.freed);
}

void add(StatArray& to, const vramlab_pooled& from) {
    add(to[static_cast<size_t>(StatType::AGGREGATE)], from.all);
    add(to[static_cast<size_t>(StatType::SMALL_POOL)], from.small_pool);
    add(to[static_cast<size_t>(StatType::LARGE_POOL)], from.large_pool);
}

void add(StatArray& to, const StatArray& from) {
    for (const size_t kind : c10::irange(to.size())) add(to[kind], from[kind]);
}

template <typename Stats>
void add(DeviceStats& to, const Stats& from) {
    add(to.allocation, from.allocation);
    add(to.segment, from.segment);
    add(to.active, from.active);
    add(to.inactive_split, from.inactive_split);
    add(to.allocated_bytes, from.allocated_bytes);
    add(to.reserved_bytes, from.reserved_bytes);
    add(to.active_bytes, from.active_bytes);
    add(to.inactive_split_bytes, from.inactive_split_bytes);
    add(to.requested_bytes, from.requested_bytes);
    add(to.oversize_allocations, from.oversize_allocations);
    add(to.oversize_segments, from.oversize_segments);
    to.num_alloc_retries += static_cast<int64_t>(from.num_alloc_retries);
    to.num_ooms += static_cast<int64_t>(from.num_ooms);
    to.num_sync_all_streams += static_cast<int64_t>(from.num_sync_all_streams);
    to.num_device_alloc += static_cast<int64_t>(from.num_device_alloc);
    to.num_device_free += static_cast<int64_t>(from.num_device_free);
}

DeviceIndex current_device() {
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return device;
}

class Shim final : public CUDAAllocator {
  public:
    Shim(CUDAAllocator* native, std::string spec, uint64_t limit, bool latency)
        : server(native, std::move(spec), limit, latency) {
        never_caches_ = c10::utils::check_env("PYTORCH_NO_CUDA_MEMORY_CACHING") == true;
    }

    Server server;
    Ipc ipc{server};

    // --- blocks ---

    c10::DataPtr allocate(size_t bytes) override {
        const DeviceIndex device = current_device();
        void* address = nullptr;
        if (C10_UNLIKELY(!caches())) {
            address = take_uncached(bytes);
            return {address, address, &delete_uncached, c10::Device(c10::DeviceType::CUDA, device)};
        }
        if (bytes != 0) address = server.take(device, bytes, c10::cuda::getCurrentCUDAStream(device).stream());
        return {address, address, &delete_block, c10::Device(c10::DeviceType::CUDA, device)};
    }

    void* raw_alloc(size_t bytes) override {
        return raw_alloc_with_stream(bytes, c10::cuda::getCurrentCUDAStream(current_device()).stream());
    }

    void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
        if (bytes == 0) return nullptr;
        return C10_LIKELY(caches()) ? server.take(current_device(), bytes, stream) : take_uncached(bytes);
    }

    void raw_delete(void* address) override {
        // A block allocated before `enable(false)` still belongs to the library: cudaFree would free its whole segment.
        if (C10_UNLIKELY(!caches()) && !server.holds(address)) {
            delete_uncached(address);
        } else {
            server.give_back(address);
        }
    }

    c10::DeleterFnPtr raw_deleter() const override { return caches() ? &delete_block : &delete_uncached; }

    void copy_data(void* to, const void* from, size_t bytes) const override {
        C10_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyKind::cudaMemcpyDeviceToDevice));
    }

    void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override {
        if (block.get() == nullptr) return;
        if (block.get_deleter() != &delete_block) {
            // PyTorch's own allocator also ignores unknown blocks.
            server.native->recordStream(block, stream);
        } else if (!server.record_stream(block.get(), stream.stream())) {
            TORCH_CHECK(server.native_serves, "vramlab: record_stream of ", block.get(), ", where no live block is");
            // PyTorch's allocator checks for its own deleter.
            c10::DataPtr alias(block.get(), block.get(), server.native->raw_deleter(), block.device());
            server.native->recordStream(alias, stream);
            alias.release_context();
        }
    }

    // --- start ---

    void init(int device_count) override {
        server.native->init(device_count);
        server.init(device_count);
    }

    bool initialized() override { return server.device_count() > 0; }

    void enable(bool value) override { enabled_ = value; }

    bool isEnabled() const override { return enabled_; }

    std::string name() override { return "vramlab:" + server.spec; }

    // --- sizes and statistics ---

    double getMemoryFraction(DeviceIndex index) override { return server.fraction(index); }

    void setMemoryFraction(double value, DeviceIndex index) override {
        TORCH_CHECK(0 <= value && value <= 1, "invalid fraction: ", value, ". Please set within [0, 1].");
        server.set_fraction(index, value);
    }

    void cacheInfo(DeviceIndex index, size_t* largest) override {
        Device& of = server.device(index);
        if (*largest == 0) {
            uint64_t free = 0;
            uint64_t total = 0;
            Device::check(library.memory(of.owner->handle, &free, &total));
            *largest = free;
        }
        *largest = std::max(*largest, Visit::largest_free(*of.owner));
    }

#if VRAMLAB_TORCH >= 210
    std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex index) override {
        std::vector<StreamSegmentSize> out;
        if (Device* of = server.opened(index)) {
            Visit::segments(*of->owner, [&](const vramlab_segment& segment) {
                if (segment.expandable) {
                    out.emplace_back(reinterpret_cast<cudaStream_t>(segment.stream), !segment.is_large, segment.bytes);
                }
            });
        }
        return out;
    }
#endif

    void emptyCache(MempoolId_t id) override {
        if (server.native_serves) server.native->emptyCache(id);
        server.each_device([&](Device& device) {
            for (Owner* done : empty_cache(device, id)) owners.close(done);
            if (server.native_serves) server.share_limit(device);
        });
    }

    DeviceStats getDeviceStats(DeviceIndex index) override {
        DeviceStats out;
        // Includes pools with their own allocator. The peak of a sum is at most the sum of the peaks, which is reported.
        owners.each_of(server.opened(index), [&](Owner& owner) {
            vramlab_stats stats{};
            Device::check(library.read_stats(owner.handle, &stats));
            add(out, stats);
            // An unlimited size is the maximum number in the library and -1 here, as in PyTorch's own allocator.
            out.max_split_size = static_cast<int64_t>(stats.max_split_size);
        });
        if (server.native_serves) add(out, server.native->getDeviceStats(index));
        return out;
    }

    void resetAccumulatedStats(DeviceIndex index) override {
        if (server.native_serves) server.native->resetAccumulatedStats(index);
        owners.each_of(server.opened(index),
                       [](Owner& owner) { Device::check(library.reset_accumulated(owner.handle)); });
    }

    void resetPeakStats(DeviceIndex index) override {
        if (server.native_serves) server.native->resetPeakStats(index);
        owners.each_of(server.opened(index), [](Owner& owner) { Device::check(library.reset_peaks(owner.handle)); });
    }

    // --- history ---

    bool isHistoryEnabled() override { return server.is_recording; }

#if VRAMLAB_TORCH >= 211
    void recordHistory(bool on, CreateContextFn recorder, size_t most, RecordContext when, bool clear,
                       const std::vector<std::string>& skip_actions) override {
        record_history({on, recorder, most, when, Recording::bits(skip_actions)}, clear);
    }
#else
    void recordHistory(bool on, CreateContextFn recorder, size_t most, RecordContext when, bool clear) override {
        record_history({on, recorder, most, when, 0}, clear);
    }
#endif

    void record_history(const Recording& recording, bool clear) {
        TORCH_CHECK(recording.when == RecordContext::NEVER || recording.recorder != nullptr,
                    "vramlab: contexts need what gathers them");
        {
            std::lock_guard<std::mutex> guard(annotations_lock_);
            annotations_.clear();
            annotations_.resize(recording.most);
        }
        server.record(recording, clear);
    }

    void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override { server.listen(std::move(tracker)); }

    void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override { server.observe(std::move(observer)); }

    void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& pairs) override {
        if (!server.is_recording) return;
        AnnotationEntry entry(current_device(), c10::getApproximateTime());
        for (const auto& [key, value] : pairs) entry.recordUserMetadata(key, value);
        std::lock_guard<std::mutex> guard(annotations_lock_);
        annotations_.push(std::move(entry));
    }

    void pushCompileContext(std::string& context) override { compile_contexts.push_back(context); }

    void popCompileContext() override {
        if (!compile_contexts.empty()) compile_contexts.pop_back();
    }

#if VRAMLAB_TORCH >= 210
    void setUserMetadata(const std::string& metadata) override { user_metadata = metadata; }

    std::string getUserMetadata() override { return user_metadata; }
#endif

#if VRAMLAB_TORCH >= 211
    SnapshotInfo snapshot(MempoolId_t id, bool with_traces) override {
#else
    SnapshotInfo snapshot(MempoolId_t id) override {
        constexpr bool with_traces = true;
#endif
        const auto unix_nanoseconds = clock_.makeConverter();
        const auto in_microseconds = [&](trace_time_& time) { time.t_ = unix_nanoseconds(time.approx_t_) / 1000; };
        SnapshotInfo out;
        if (with_traces) {
            std::lock_guard<std::mutex> guard(annotations_lock_);
            out.external_annotations = annotations_.read();
        }
        for (AnnotationEntry& entry : out.external_annotations) in_microseconds(entry.time_);
        for (const int index : c10::irange(server.device_count())) {
            if (with_traces) out.device_traces.emplace_back();
            Device* device = server.opened(static_cast<DeviceIndex>(index));
            if (device == nullptr) continue;
            std::lock_guard<std::recursive_mutex> guard(device->history.lock);
            if (with_traces) out.device_traces.back() = device->history.entries();
            std::vector<SegmentInfo> segments;
            owners.each_of(device, [&](Owner& owner) { Visit::describe(owner, id, segments); });
            std::sort(segments.begin(), segments.end(),
                      [](const SegmentInfo& a, const SegmentInfo& b) { return a.address < b.address; });
            size_t active = 0;
            for (const SegmentInfo& segment : segments) active += segment.active_size;
            out.segments.insert(out.segments.end(), segments.begin(), segments.end());
            // It follows the copy: a later snapshot shows when this one was taken.
            device->history.add(TraceEntry::SNAPSHOT, device->index, 0, active, nullptr, id, nullptr);
        }
        for (auto& trace : out.device_traces) {
            for (TraceEntry& entry : trace) in_microseconds(entry.time_);
        }
        if (server.native_serves) {
#if VRAMLAB_TORCH >= 211
            const SnapshotInfo others = server.native->snapshot(id, false);
#else
            const SnapshotInfo others = server.native->snapshot(id);
#endif
            out.segments.insert(out.segments.end(), others.segments.begin(), others.segments.end());
        }
        describe_settings(out.config_metadata);
        return out;
    }

    // --- private pools ---

    void beginAllocateToPool(DeviceIndex index, MempoolId_t id, std::function<bool(cudaStream_t)> filter) override {
        Device& of = server.device(index);
        std::shared_ptr<Pool> pool = of.use(id, false);
        if (pool->native) server.native->beginAllocateToPool(index, id, filter);
        const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(index).stream();
        of.open_route(Route{std::move(pool), std::move(filter), stream, false});
    }

    void endAllocateToPool(DeviceIndex index, MempoolId_t id) override {
        if (server.device(index).close_route(id)->native) server.native->endAllocateToPool(index, id);
    }

    void releasePool(DeviceIndex index, MempoolId_t id) override {
        if (server.device(index).release(id)->native) server.native->releasePool(index, id);
    }

    int getPoolUseCount(DeviceIndex index, MempoolId_t id) override {
        Device* of = server.opened(index);
        return of == nullptr ? 0 : of->uses(id);
    }

    void createOrIncrefPool(DeviceIndex index, MempoolId_t id, SharedAllocator allocator) override {
        // A pool with an allocator provided by the program stays with PyTorch, which can request segments from it.
        const bool native = allocator != nullptr && &*allocator != this;
        if (native) {
            server.native_serves = true;
            server.native->createOrIncrefPool(index, id, std::move(allocator));
        }
        server.device(index).use(id, native);
    }

#if VRAMLAB_TORCH >= 211
    void setUseOnOOM(DeviceIndex index, MempoolId_t id, bool value) override {
        const std::shared_ptr<Pool> pool = server.device(index).at(id, "setUseOnOOM");
        if (pool->native) server.native->setUseOnOOM(index, id, value);
        pool->last_resort = value;
    }
#else
    void setUseOnOOM(DeviceIndex index, MempoolId_t id) override {
        const std::shared_ptr<Pool> pool = server.device(index).at(id, "setUseOnOOM");
        if (pool->native) server.native->setUseOnOOM(index, id);
        pool->last_resort = true;
    }
#endif

#if VRAMLAB_TORCH >= 210
    // Gives each request of the pool its own CUDA allocation, whatever the other requests' allocator: libraries that
    // register memory, such as NCCL and symmetric memory, see one tensor per allocation.
    void setNoSplit(DeviceIndex index, MempoolId_t id) override {
        const std::shared_ptr<Pool> pool = server.device(index).at(id, "setNoSplit");
        if (pool->native) {
            server.native->setNoSplit(index, id);
        } else if (!pool->owner->is_of_pool()) {
            give_pool_allocator(index, id, "lab:split=never");
        }
    }
#endif

    // Gives an empty pool of `torch.cuda.MemPool` its own allocator.
    Owner* give_pool_allocator(DeviceIndex index, MempoolId_t id, const std::string& spec) {
        Device& of = server.device(index);
        Owner* own = server.open_owner(of, spec, id);
        of.give_allocator(id, own);
        return own;
    }

    bool checkPoolLiveAllocations(DeviceIndex index, MempoolId_t id,
                                  const std::unordered_set<void*>& expected) override {
        const std::shared_ptr<Pool> pool = server.device(index).at(id, "checkPoolLiveAllocations");
        if (pool->native) return server.native->checkPoolLiveAllocations(index, id, expected);
        return Visit::live(*pool->owner, pool->number) == expected;
    }

    std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex index, MempoolId_t id) override {
        const std::shared_ptr<Pool> pool = server.device(index).at(id, "getCheckpointState");
        if (pool->native) return server.native->getCheckpointState(index, id);
        auto out = std::make_shared<Checkpoint>(pool->owner, id);
        Device::check(library.pool_checkpoint(pool->owner->handle, pool->number, &out->value));
        return out;
    }

    CheckpointDelta setCheckpointPoolState(DeviceIndex index, std::shared_ptr<AllocatorState> state) override {
        const auto checkpoint = std::dynamic_pointer_cast<Checkpoint>(state);
        if (checkpoint == nullptr) return server.native->setCheckpointPoolState(index, std::move(state));
        struct Changes {
            CheckpointDelta delta;
            Device& device;
            MempoolId_t id;
        } changes{{}, server.device(index), checkpoint->id};
        const auto freed = [](void* context, uint64_t address) {
            auto& to = *static_cast<Changes*>(context);
            to.delta.ptrs_freed.push_back(pointer(address));
            History& history = to.device.history;
            Live block;
            if (!history.take(address, block)) return;
            for (const auto action : {TraceEntry::FREE_REQUESTED, TraceEntry::FREE_COMPLETED}) {
                history.add(action, to.device.index, address, block.requested, block.stream, block.pool, block.context);
            }
        };
        const auto created = [](void* context, uint64_t address, uint64_t bytes, uint64_t stream) {
            auto& to = *static_cast<Changes*>(context);
            to.delta.dataptrs_allocd.emplace_back(pointer(address), pointer(address), &delete_block,
                                                  c10::Device(c10::DeviceType::CUDA, to.device.index));
            owners.note(address, *to.device.owner);
            History& history = to.device.history;
            if (!history.wanted()) return;
            history.live[address] = Live{bytes, pointer(stream), to.id, nullptr, false};
            history.add(TraceEntry::ALLOC, to.device.index, address, bytes, pointer(stream), to.id, nullptr);
        };
        std::lock_guard<std::recursive_mutex> guard(changes.device.history.lock);
        Device::check(library.pool_restore(checkpoint->owner->handle, checkpoint->value, &changes, freed, created));
        return std::move(changes.delta);
    }

    // --- other processes and devices ---

    void* getBaseAllocation(void* address, size_t* bytes) override {
        uint64_t base = 0;
        uint64_t size = 0;
        server.ask_owner(number(address), "the base",
                         [&](Owner& owner) { return library.base(owner.handle, number(address), &base, &size); });
        if (bytes != nullptr) *bytes = size;
        return pointer(base);
    }

    ShareableHandle shareIpcHandle(void* address) override {
        if (owners.may_be_native(number(address))) return server.native->shareIpcHandle(address);
        std::string no_pages;
        if (std::optional<ShareableHandle> pages = ipc.share(address, no_pages)) return std::move(*pages);
        char* base = nullptr;
        cudaIpcMemHandle_t handle;
        std::string why;
        try {
            base = static_cast<char*>(getBaseAllocation(address, nullptr));
            const cudaError_t error = cudaIpcGetMemHandle(&handle, base);
            if (error != cudaSuccess) why = cudaGetErrorString(error);
        } catch (const c10::Error& error) {
            why = c10::str(error.what_without_backtrace(), "; ", no_pages);
        }
        if (!why.empty()) {
            (void)cudaGetLastError();
            TORCH_CHECK(false, "the tensor at ", address, " cannot be shared with another process (", why,
                        "). Run programs that send CUDA tensors to other processes under 'caching', or send copies on "
                        "the CPU");
        }
        // PyTorch's format, for processes with and without this shim: version, kind, the driver's handle.
        std::string text{'\x02', 'c'};
        text.append(reinterpret_cast<const char*>(&handle), sizeof(handle));
        return ShareableHandle{static_cast<char*>(address) - base, std::move(text)};
    }

    std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
        return ipc.open(handle, current_device());
    }

    cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                            cudaStream_t stream, bool peers) override {
        // The other device may lack access to memory mapped here; this copy does not need it.
        const bool mapped = server.maps_memory || ipc.ever_opened();
        if (to_device == from_device || (peers && !mapped)) {
            return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
        }
        return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);
    }

    void enablePeerAccess(DeviceIndex from, DeviceIndex to) override {
        server.native->enablePeerAccess(from, to);
        server.device(to).add_peer(from);
        ipc.open_to_peers(to);
    }

#if VRAMLAB_TORCH >= 212
    void attachOomRejectionObserver(OomRejectionObserver) override {
        // Nothing is rejected before the device was tried.
    }

    std::shared_ptr<GatheredContext> getContextForPointer(const void* address) override {
        Context out;
        with_live(address, [&](Device&, const Live& block) { out = block.context; });
        return out;
    }
#endif

#if VRAMLAB_TORCH >= 213
    void markCaptureBegin(DeviceIndex index) override { server.device(index).mark_capture(true); }

    void markCaptureEnd(DeviceIndex index) override { server.device(index).mark_capture(false); }
#endif

#if VRAMLAB_TORCH >= 214
    bool supportsUserMetadata() override { return true; }

    void annotateMemory(const void* address, const std::string& metadata) override {
        with_live(address, [&](Device& device, const Live& block) {
            device.history.add(TraceEntry::ANNOTATE, device.index, number(address), block.requested, block.stream,
                               block.pool, nullptr, &metadata);
        });
    }
#endif

  private:
    // True if requests are served by the library, and not by a cudaMalloc each.
    bool caches() const { return enabled_ && !never_caches_; }

    // Returns allocators that no pool needs any more; the caller closes them without locks.
    static std::vector<Owner*> empty_cache(Device& device, MempoolId_t id) {
        device.notice_captures();
        const Request now{device.history.gather(RecordContext::ALL), NO_POOL};
        std::unique_lock<std::recursive_mutex> guard(device.history.lock, std::defer_lock);
        if (device.history.wanted()) guard.lock();
        const RequestScope scope(now);
        // Trimming waits for frees, which a capture does not allow.
        if (id == NO_POOL && !device.in_capture()) {
            uint64_t bytes = 0;
            Device::check(library.trim(device.owner->handle, 0, &bytes));
        }
        return device.trim_released(id);
    }

    // Calls `look` with the record of a live block, if there is one.
    template <typename Look>
    void with_live(const void* address, Look&& look) {
        owners.any([&](Owner& owner) {
            History& history = owner.device->history;
            std::lock_guard<std::recursive_mutex> guard(history.lock);
            auto at = history.live.find(number(address));
            if (at == history.live.end()) return false;
            look(*owner.device, at->second);
            return true;
        });
    }

    void describe_settings(AllocatorConfigInfo& to) {
#if VRAMLAB_TORCH >= 210
        using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
#else
        using Config = CUDAAllocatorConfig;
#endif
        to.garbage_collection_threshold = Config::garbage_collection_threshold();
        to.pinned_num_register_threads = CUDAAllocatorConfig::pinned_num_register_threads();
        to.release_lock_on_malloc = CUDAAllocatorConfig::release_lock_on_cudamalloc();
        to.pinned_use_host_register = CUDAAllocatorConfig::pinned_use_cuda_host_register();
        to.graph_capture_record_stream_reuse = CUDAAllocatorConfig::graph_capture_record_stream_reuse();
        to.last_allocator_settings = Config::last_allocator_settings();
        to.roundup_power2_divisions = Config::roundup_power2_divisions();
        // The allocator's actual mode.
        to.expandable_segments = server.maps_memory;
        to.max_split_size = std::numeric_limits<size_t>::max();
        server.each_device([&](Device& device) {
            vramlab_stats stats{};
            Device::check(library.read_stats(device.owner->handle, &stats));
            to.max_split_size = stats.max_split_size;
        });
    }

    std::atomic<bool> enabled_{true};
    bool never_caches_ = false;
    c10::ApproximateClockToUnixTimeConverter clock_;
    std::mutex annotations_lock_;
    Ring<AnnotationEntry> annotations_;
};

void delete_block(void* address) {
    try {
        installed->server.give_back(address);
    } catch (const c10::Error& error) {
        // At exit the driver may be unloaded before the last tensor is destroyed, and nothing remains to be freed.
        int device = 0;
        if (cudaGetDevice(&device) == cudaErrorCudartUnloading) return;
        // A destructor runs this: an exception would end the program without a message.
        std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    }
}

// During a capture cudaMalloc fails, as in PyTorch.
void* take_uncached(size_t bytes) {
    void* address = nullptr;
    C10_CUDA_CHECK(cudaMalloc(&address, bytes));
    trace_allocation(address);
    return address;
}

void delete_uncached(void* address) {
    trace_free(address);
    C10_CUDA_CHECK_WARN(cudaFree(address));
}

}  // namespace

}  // namespace vramlab_shim

#include "exports.h"
