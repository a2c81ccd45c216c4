// Allocation and free requests: the devices, their limits, and their memory histories.
#pragma once

#include "visits.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/core/impl/PyInterpreter.h>
#include <cstdlib>
#include <thread>

namespace vramlab_shim {

inline uint64_t number(const void* address) { return reinterpret_cast<uint64_t>(address); }
inline void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// Both handles of the legacy default stream denote one stream.
inline bool same_stream(const void* a, const void* b) { return a == b || (number(a) <= 1 && number(b) <= 1); }

// For tools that trace memory of Python programs.
inline void trace_allocation(const void* block) {
    const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace();
    if (C10_UNLIKELY(interpreter != nullptr)) (*interpreter)->trace_gpu_memory_allocation(c10::kCUDA, number(block));
}

inline void trace_free(const void* block) {
    const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace();
    if (C10_UNLIKELY(interpreter != nullptr)) (*interpreter)->trace_gpu_memory_deallocation(c10::kCUDA, number(block));
}

// Handles a segment event, on the thread whose request caused it.
inline void on_segment(void* context, const vramlab_segment_event* event) {
    const Owner& owner = *static_cast<Owner*>(context);
    Device& device = *owner.device;
    History& history = device.history;
    const bool came = event->action == VRAMLAB_SEGMENT_ACTION_ALLOC || event->action == VRAMLAB_SEGMENT_ACTION_MAP;
    device.note_segment(came, event->address, event->bytes);
    if (event->action == VRAMLAB_SEGMENT_ACTION_MAP) device.open_to_peers(event->address, event->bytes);
    constexpr TraceEntry::Action ACTIONS[] = {TraceEntry::SEGMENT_ALLOC, TraceEntry::SEGMENT_FREE,
                                              TraceEntry::SEGMENT_MAP, TraceEntry::SEGMENT_UNMAP};
    std::lock_guard<std::recursive_mutex> guard(history.lock);
    SegmentOrigin origin;
    if (came) {
        if (!history.wanted()) return;
        if (request != nullptr) origin = SegmentOrigin{request->pool, history.beyond_blocks(request->context)};
        history.segments[event->address] = origin;
    } else {
        auto known = history.segments.find(event->address);
        if (known != history.segments.end()) {
            origin = known->second;
            history.segments.erase(known);
        }
        if (request != nullptr && request->context != nullptr) origin.context = request->context;
    }
    history.add(ACTIONS[event->action], device.index, event->address, event->bytes, pointer(event->stream), origin.pool,
                origin.context);
}

// Handles the completion of a deferred free.
inline void on_free(void* context, uint64_t address) {
    Device& device = *static_cast<Owner*>(context)->device;
    History& history = device.history;
    if (!history.wanted()) return;
    std::lock_guard<std::recursive_mutex> guard(history.lock);
    auto at = history.pending.find(address);
    if (at == history.pending.end()) return;
    const Live block = std::move(at->second);
    history.pending.erase(at);
    history.add(TraceEntry::FREE_COMPLETED, device.index, address, block.requested, block.stream, block.pool,
                request != nullptr && request->context != nullptr ? request->context : block.context);
}

class Server {
  public:
    Server(CUDAAllocator* native, std::string spec, uint64_t limit, bool latency)
        : native(native), spec(std::move(spec)), limit_(limit), latency_(latency) {
        fractions_.fill(UNSET);
        limits_.fill(VRAMLAB_NO_LIMIT);
        given_.fill(VRAMLAB_NO_LIMIT);
    }

    // PyTorch's own allocator. It opens other processes' handles of cudaMalloc, and serves pools with an allocator provided by
    // the program.
    CUDAAllocator* const native;
    const std::string spec;
    // True if it serves any pool.
    std::atomic<bool> native_serves{false};
    // True if any memory here is mapped in pages rather than allocated by cudaMalloc.
    std::atomic<bool> maps_memory{false};

    // --- blocks ---

    // Returns a block of `bytes`, at least 1, or throws PyTorch's error.
    void* take(DeviceIndex index, size_t bytes, cudaStream_t stream) {
        constexpr size_t ONE_EXABYTE = size_t{1} << 60;
        TORCH_CHECK_WITH(OutOfMemoryError, bytes < ONE_EXABYTE,
                         "CUDA out of memory. Tried to allocate more than 1EB memory.");
        Device& from = device(index);
        uint64_t address = 0;
        if (C10_LIKELY(!from.is_slow() && !c10::memoryProfilingEnabled())) {
            const vramlab_status status = library.allocate(from.owner->handle, bytes, number(stream), &address);
            if (C10_UNLIKELY(status != VRAMLAB_STATUS_OK)) {
                address = take_after_failure(from, Asked{nullptr, bytes, stream, nullptr}, status);
            }
            owners.note(address, *from.owner);
        } else {
            address = take_slowly(from, bytes, stream);
        }
        trace_allocation(pointer(address));
        return pointer(address);
    }

    // Throws if the address is not a live block.
    void give_back(void* block) {
        if (block == nullptr) return;
        const uint64_t address = number(block);
        trace_free(block);
        Owner* guessed = owners.guess(address);
        vramlab_status status = guessed == nullptr ? VRAMLAB_STATUS_FOREIGN : free_in(*guessed, address);
        if (C10_LIKELY(status == VRAMLAB_STATUS_OK)) return;
        const bool found = status != VRAMLAB_STATUS_FOREIGN || owners.any([&](Owner& other) {
            if (&other == guessed) return false;
            status = free_in(other, address);
            return status != VRAMLAB_STATUS_FOREIGN;
        });
        if (C10_UNLIKELY(!found && native_serves)) {
            // PyTorch throws its own error if the block is unknown there too.
            native->raw_delete(block);
            return;
        }
        TORCH_CHECK(found, "vramlab: free of ", block,
                    ", where no live block begins: it was freed before, or another allocator made it");
        // A forked child frees inherited blocks, which belong to its parent.
        if (status != VRAMLAB_STATUS_FORKED) Device::check(status);
    }

    // True if the address is a live block of the library, or of a native pool.
    bool holds(void* block) {
        const uint64_t address = number(block);
        return owners.may_be_native(address) || owners.any([&](Owner& owner) {
            vramlab_block of{};
            return library.block_at(owner.handle, address, &of) == VRAMLAB_STATUS_OK;
        });
    }

    // False if the address is not a live block of the library.
    bool record_stream(void* block, cudaStream_t stream) {
        const uint64_t address = number(block);
        return ask_owners(address, [&](Owner& owner) {
            Device& device = *owner.device;
            if (C10_LIKELY(!device.is_slow())) return library.record_stream(owner.handle, address, number(stream));
            device.notice_captures();
            std::lock_guard<std::recursive_mutex> guard(device.history.lock);
            const vramlab_status status = library.record_stream(owner.handle, address, number(stream));
            auto at = device.history.live.find(address);
            if (status == VRAMLAB_STATUS_OK && at != device.history.live.end() &&
                !same_stream(at->second.stream, stream)) {
                at->second.used_elsewhere = true;
            }
            return status;
        });
    }

    template <typename Call>
    void ask_owner(uint64_t address, const char* what, Call&& call) {
        TORCH_CHECK(ask_owners(address, call), "vramlab: ", what, " of ", pointer(address),
                    ", where no live block is");
    }

    // Calls the likely owner of an address, then the others, until one knows it; false if none does.
    template <typename Call>
    bool ask_owners(uint64_t address, Call&& call) {
        Owner* guessed = owners.guess(address);
        vramlab_status status = guessed == nullptr ? VRAMLAB_STATUS_FOREIGN : call(*guessed);
        if (status == VRAMLAB_STATUS_FOREIGN) {
            owners.any([&](Owner& other) {
                if (&other != guessed) status = call(other);
                return status != VRAMLAB_STATUS_FOREIGN;
            });
        }
        if (status == VRAMLAB_STATUS_FOREIGN) return false;
        Device::check(status);
        return true;
    }

    // --- devices ---

    void init(int count) { device_count_ = std::min<int>(count, static_cast<int>(devices_.size())); }

    int device_count() const { return device_count_; }

    // The device, opened if necessary.
    Device& device(DeviceIndex index) {
        Device* known = opened(index);
        return C10_LIKELY(known != nullptr) ? *known : open(index);
    }

    // Null until memory is requested there: queries do not open a device.
    Device* opened(DeviceIndex index) const {
        TORCH_CHECK(index >= 0 && index < device_count_, "vramlab: there is no cuda:", int(index), " among ",
                    device_count(), " devices",
                    device_count_ == 0 ? ": CUDA is not initialised (torch.cuda.init())" : "");
        return devices_[static_cast<size_t>(index)].load(std::memory_order_acquire);
    }

    template <typename Act>
    void each_device(Act&& act) {
        for (auto& place : devices_) {
            if (Device* device = place.load(std::memory_order_acquire)) act(*device);
        }
    }

    Owner* open_owner(Device& device, const std::string& spec, MempoolId_t pool) {
        auto owner = std::make_unique<Owner>();
        // Tests replace GPUs by the library's simulated devices.
        const char* kind = std::getenv("VRAMLAB_SHIM_DEVICE");
        const std::string name = std::string(kind == nullptr ? "cuda" : kind) + ":" + std::to_string(int(device.index));
        Device::check(library.open(spec.c_str(), name.c_str(), &owner->handle));
        owner->device = &device;
        owner->spec = spec;
        owner->pool = pool;
        uint32_t can = 0;
        Device::check(library.can(owner->handle, &can));
        if ((can & VRAMLAB_CAN_EXPAND) != 0) maps_memory = true;
        Owner* added = owners.add(std::move(owner));
        Device::check(library.on_segment(added->handle, added, &on_segment));
        Device::check(library.on_free(added->handle, added, &on_free));
        Device::check(library.latency(added->handle, latency_));
        return added;
    }

    // --- settings of all devices, including those opened later ---

    void set_limit(uint64_t bytes) {
        std::lock_guard<std::mutex> guard(lock_);
        limit_ = bytes;
        each_device([&](Device& device) { apply_limit(device); });
    }

    void set_fraction(DeviceIndex index, double fraction) {
        Device& to = device(index);
        std::lock_guard<std::mutex> guard(lock_);
        fractions_[static_cast<size_t>(index)] = fraction;
        apply_limit(to);
    }

    // Divides the limit: each allocator gets the part that the other one leaves.
    void share_limit(Device& device) {
        std::lock_guard<std::mutex> guard(lock_);
        apply_limit(device);
        const uint64_t allowed = limits_[static_cast<size_t>(device.index)];
        bool& limited = native_limited_[static_cast<size_t>(device.index)];
        if (allowed == VRAMLAB_NO_LIMIT) {
            if (std::exchange(limited, false)) native->setMemoryFraction(1.0, device.index);
            return;
        }
        limited = true;
        uint64_t free = 0;
        uint64_t total = 0;
        Device::check(library.memory(device.owner->handle, &free, &total));
        uint64_t reserved = 0;
        owners.each_of(&device, [&](Owner& owner) {
            vramlab_stats stats{};
            Device::check(library.read_stats(owner.handle, &stats));
            reserved += stats.reserved_bytes.all.current;
        });
        const uint64_t left = std::min(allowed - std::min(allowed, reserved), total);
        native->setMemoryFraction(static_cast<double>(left) / static_cast<double>(total), device.index);
    }

    double fraction(DeviceIndex index) {
        opened(index);  // checks the number
        std::lock_guard<std::mutex> guard(lock_);
        const double set = fractions_[static_cast<size_t>(index)];
        return set == UNSET ? 1.0 : set;
    }

    void set_latency(bool on) {
        latency_ = on;
        owners.any([&](Owner& owner) {
            Device::check(library.latency(owner.handle, on));
            return false;
        });
    }

    void record(const Recording& recording, bool clear) {
        std::lock_guard<std::mutex> guard(lock_);
        recording_ = recording;
        is_recording = recording.on;
        each_device([&](Device& device) { change(device, [&](History& history) { history.set(recording, clear); }); });
    }

    std::atomic<bool> is_recording{false};

    void listen(AllocatorTraceTracker tracker) {
        std::lock_guard<std::mutex> guard(lock_);
        trackers_.push_back(tracker);
        each_device([&](Device& device) { change(device, [&](History& history) { history.listen(tracker); }); });
    }

    void observe(OutOfMemoryObserver observer) {
        std::lock_guard<std::mutex> guard(lock_);
        observers_.push_back(std::move(observer));
    }

  private:
    struct Asked {
        const Pool* pool;  // null: no pool
        size_t bytes;
        cudaStream_t stream;
        Context context;

        MempoolId_t id() const { return pool == nullptr ? NO_POOL : pool->id; }
    };

    C10_NOINLINE uint64_t take_slowly(Device& from, size_t bytes, cudaStream_t stream) {
        from.notice_captures();
        const std::shared_ptr<Pool> pool = from.pool_of(stream);
        if (pool != nullptr && pool->native) return take_from_native(from, bytes, stream);
        const Asked asked{pool.get(), bytes, stream, from.history.gather(RecordContext::STATE)};
        uint64_t address = 0;
        const vramlab_status status = ask(from, asked, &address);
        if (status != VRAMLAB_STATUS_OK) address = take_after_failure(from, asked, status);
        const Owner& owner = pool == nullptr ? *from.owner : *pool->owner;
        owners.note(address, owner);
        if (c10::memoryProfilingEnabled()) report_to_profiler(owner, address, size_of(owner, address));
        return address;
    }

    // A block of a native pool; PyTorch's own allocator selects the pool by its own route.
    uint64_t take_from_native(Device& from, size_t bytes, cudaStream_t stream) {
        share_limit(from);
        const uint64_t address = number(native->raw_alloc_with_stream(bytes, stream));
        owners.note_native(address);
        share_limit(from);
        return address;
    }

    // Sends this thread's requests to PyTorch's own allocator to one of its pools while this object lives.
    class NativeRoute {
      public:
        NativeRoute(CUDAAllocator& native, DeviceIndex device, MempoolId_t pool)
            : native_(native), device_(device), pool_(pool) {
            const std::thread::id self = std::this_thread::get_id();
            native_.beginAllocateToPool(device_, pool_,
                                        [self](cudaStream_t) { return std::this_thread::get_id() == self; });
        }
        ~NativeRoute() {
            native_.endAllocateToPool(device_, pool_);
            native_.releasePool(device_, pool_);
        }
        NativeRoute(const NativeRoute&) = delete;
        NativeRoute& operator=(const NativeRoute&) = delete;

      private:
        CUDAAllocator& native_;
        const DeviceIndex device_;
        const MempoolId_t pool_;
    };

    // The same for a pool that is not the request's; 0 if it has no memory either.
    uint64_t take_from_native_pool(Device& from, const Pool& pool, const Asked& asked) {
        const NativeRoute route(*native, from.index, pool.id);
        try {
            return take_from_native(from, asked.bytes, asked.stream);
        } catch (const c10::OutOfMemoryError&) {
            return 0;
        }
    }

    // Calls the library; the block is recorded in the same step.
    vramlab_status ask(Device& from, const Asked& asked, uint64_t* address) {
        std::unique_lock<std::recursive_mutex> guard(from.history.lock, std::defer_lock);
        if (from.history.wanted()) guard.lock();
        const Request now{asked.context, asked.id()};
        const RequestScope scope(now);
        const Owner& owner = asked.pool == nullptr ? *from.owner : *asked.pool->owner;
        const vramlab_status status =
            asked.pool == nullptr || asked.pool->number == 0
                ? library.allocate(owner.handle, asked.bytes, number(asked.stream), address)
                : library.allocate_in(owner.handle, asked.pool->number, asked.bytes, number(asked.stream), address);
        if (status == VRAMLAB_STATUS_OK && guard.owns_lock()) {
            from.history.live[*address] = Live{asked.bytes, asked.stream, asked.id(), asked.context, false};
            from.history.add(TraceEntry::ALLOC, from.index, *address, asked.bytes, asked.stream, asked.id(),
                             asked.context);
        }
        return status;
    }

    // Handles a lack of memory as PyTorch does: first the callbacks that can free memory, then pools of last resort, then the
    // observers.
    C10_NOINLINE uint64_t take_after_failure(Device& from, const Asked& asked, vramlab_status status) {
        std::string said = library.error();
        TORCH_CHECK(status == VRAMLAB_STATUS_OUT_OF_MEMORY, "vramlab: ", said);
        uint64_t address = 0;
        bool freed = false;
        for (const auto& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys()) {
            freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
        }
        if (freed) {
            if (ask(from, asked, &address) == VRAMLAB_STATUS_OK) return address;
            said = library.error();
        }
        if (asked.pool == nullptr) {
            for (const auto& pool : from.last_resorts()) {
                if (pool->native) {
                    address = take_from_native_pool(from, *pool, asked);
                    if (address != 0) return address;
                    continue;
                }
                const Asked instead{pool.get(), asked.bytes, asked.stream, asked.context};
                if (ask(from, instead, &address) == VRAMLAB_STATUS_OK) return address;
            }
        }
        fail_out_of_memory(from, asked, said);
    }

    [[noreturn]] void fail_out_of_memory(Device& from, const Asked& asked, const std::string& said) {
        uint64_t free = 0;
        uint64_t total = 0;
        Device::check(library.memory(from.owner->handle, &free, &total));
        vramlab_stats stats{};
        Device::check(library.read_stats(from.owner->handle, &stats));
        const uint64_t allocated = stats.allocated_bytes.all.current;
        const uint64_t reserved = stats.reserved_bytes.all.current;
        const size_t in_pools = Visit::allocated_in_pools(*from.owner);
        if (from.history.wanted()) {
            std::lock_guard<std::recursive_mutex> guard(from.history.lock);
            from.history.add(TraceEntry::OOM, from.index, free, asked.bytes, asked.stream, asked.id(), asked.context);
        }
        c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(asked.bytes), allocated, reserved,
                                         c10::Device(c10::DeviceType::CUDA, from.index));
        std::vector<OutOfMemoryObserver> observers;
        uint64_t allowed = VRAMLAB_NO_LIMIT;
        {
            std::lock_guard<std::mutex> guard(lock_);
            observers = observers_;
            allowed = limits_[static_cast<size_t>(from.index)];
        }
        // No lock is held: an observer may write a snapshot.
        for (const OutOfMemoryObserver& observer : observers)
            observer(from.index, asked.bytes, std::min(allowed, total), free);
        using c10::CachingAllocator::format_size;
        const std::string limit = allowed == VRAMLAB_NO_LIMIT ? "" : format_size(allowed) + " allowed; ";
        const std::string pools =
            in_pools == 0 ? "" : "with " + format_size(in_pools) + " allocated in private pools (e.g., CUDA Graphs), ";
        throw_out_of_memory(c10::str("CUDA out of memory. Tried to allocate ", format_size(asked.bytes), ". GPU ",
                                     int(from.index), " has a total capacity of ", format_size(total), " of which ",
                                     format_size(free), " is free. ", limit, "Of the allocated memory ",
                                     format_size(allocated), " is allocated by PyTorch, ", pools, "and ",
                                     format_size(reserved - std::min(reserved, allocated)),
                                     " is reserved by PyTorch but unallocated. vramlab: ", said));
    }

    [[noreturn]] static void throw_out_of_memory(const std::string& text) {
        throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
    }

    vramlab_status free_in(Owner& owner, uint64_t address) {
        const Device& device = *owner.device;
        if (C10_LIKELY(!device.is_slow() && !device.history.knows_blocks() && !c10::memoryProfilingEnabled()))
            return library.free(owner.handle, address);
        return free_slowly(owner, address);
    }

    C10_NOINLINE vramlab_status free_slowly(Owner& owner, uint64_t address) {
        owner.device->notice_captures();
        const Context context = owner.device->history.gather(RecordContext::ALL);
        if (!c10::memoryProfilingEnabled()) return free_recorded(owner, address, context);
        const int64_t size = size_of(owner, address);
        const vramlab_status status = free_recorded(owner, address, context);
        if (status == VRAMLAB_STATUS_OK && size > 0) report_to_profiler(owner, address, -size);
        return status;
    }

    // The entries precede the free: after it another thread may get the block.
    vramlab_status free_recorded(Owner& owner, uint64_t address, const Context& context) {
        Device& device = *owner.device;
        History& history = device.history;
        if (!history.knows_blocks()) return library.free(owner.handle, address);
        std::lock_guard<std::recursive_mutex> guard(history.lock);
        const Request now{context, NO_POOL};
        const RequestScope scope(now);
        Live block;
        if (!history.take(address, block) || !history.wanted()) return library.free(owner.handle, address);
        const Context& shown = context != nullptr ? context : block.context;
        history.add(TraceEntry::FREE_REQUESTED, device.index, address, block.requested, block.stream, block.pool,
                    shown);
        if (block.used_elsewhere) {
            history.pending[address] = block;
        } else {
            history.add(TraceEntry::FREE_COMPLETED, device.index, address, block.requested, block.stream, block.pool,
                        shown);
        }
        return library.free(owner.handle, address);
    }

    // The size of a live block; 0 if the address is not one.
    static int64_t size_of(const Owner& owner, uint64_t address) {
        vramlab_block block{};
        const vramlab_status status = library.block_at(owner.handle, address, &block);
        return status == VRAMLAB_STATUS_OK ? static_cast<int64_t>(block.bytes) : 0;
    }

    static void report_to_profiler(const Owner& owner, uint64_t address, int64_t bytes) {
        vramlab_stats stats{};
        Device::check(library.read_stats(owner.handle, &stats));
        c10::reportMemoryUsageToProfiler(pointer(address), bytes, stats.allocated_bytes.all.current,
                                         stats.reserved_bytes.all.current,
                                         c10::Device(c10::DeviceType::CUDA, owner.device->index));
    }

    // Adds blocks that exist when recording starts: their frees need a size and a stream.
    template <typename Change>
    static void change(Device& device, Change&& changed) {
        std::lock_guard<std::recursive_mutex> guard(device.history.lock);
        const bool before = device.history.wanted();
        changed(device.history);
        if (!before && device.history.wanted()) owners.each_of(&device, [](Owner& owner) { Visit::adopt(owner); });
        device.update();
    }

    C10_NOINLINE Device& open(DeviceIndex index) {
        std::lock_guard<std::mutex> guard(lock_);
        std::atomic<Device*>& place = devices_[static_cast<size_t>(index)];
        if (Device* known = place.load()) return *known;
        // The thread's current device is restored.
        const c10::cuda::CUDAGuard device_guard(index);
        // Never deleted: the library's callbacks refer to it.
        auto* device = new Device(index);
        device->owner = open_owner(*device, spec, NO_POOL);
#if VRAMLAB_TORCH >= 210
        const double configured = CUDAAllocatorConfig::per_process_memory_fraction();
        if (configured < 1.0 && fractions_[static_cast<size_t>(index)] == UNSET) {
            fractions_[static_cast<size_t>(index)] = configured;
        }
#endif
        apply_limit(*device);
        change(*device, [&](History& history) {
            history.set(recording_, true);
            for (const AllocatorTraceTracker& tracker : trackers_) history.listen(tracker);
        });
        place.store(device, std::memory_order_release);
        return *device;
    }

    // Applies the smaller of the user's and the program's limits, less the memory of native pools.
    void apply_limit(Device& device) {
        const auto index = static_cast<size_t>(device.index);
        uint64_t allowed = limit_;
        if (fractions_[index] != UNSET) {
            uint64_t free = 0;
            uint64_t total = 0;
            Device::check(library.memory(device.owner->handle, &free, &total));
            allowed = std::min(allowed, static_cast<uint64_t>(fractions_[index] * static_cast<double>(total)));
        }
        limits_[index] = allowed;
        if (allowed != VRAMLAB_NO_LIMIT && native_serves) {
            constexpr auto ALL = static_cast<size_t>(StatType::AGGREGATE);
            const int64_t elsewhere = native->getDeviceStats(device.index).reserved_bytes[ALL].current;
            allowed -= std::min(allowed, static_cast<uint64_t>(elsewhere));
        }
        // The limit in the allocator's settings stays in effect until another limit is requested.
        if (std::exchange(given_[index], allowed) != allowed) {
            Device::check(library.set_limit(device.owner->handle, allowed));
        }
    }

    static constexpr double UNSET = -1.0;

    std::atomic<int> device_count_{0};
    std::array<std::atomic<Device*>, C10_COMPILE_TIME_MAX_GPUS> devices_{};

    // Guards the members below and the opening of devices. Neither observers nor the allocation of a block run under it.
    std::mutex lock_;
    uint64_t limit_;
    std::array<double, C10_COMPILE_TIME_MAX_GPUS> fractions_{};
    std::array<uint64_t, C10_COMPILE_TIME_MAX_GPUS> limits_{};  // the program's limits
    std::array<uint64_t, C10_COMPILE_TIME_MAX_GPUS> given_{};   // the library's limits
    std::array<bool, C10_COMPILE_TIME_MAX_GPUS> native_limited_{};
    std::atomic<bool> latency_;
    Recording recording_;
    std::vector<AllocatorTraceTracker> trackers_;
    std::vector<OutOfMemoryObserver> observers_;
};

}  // namespace vramlab_shim
