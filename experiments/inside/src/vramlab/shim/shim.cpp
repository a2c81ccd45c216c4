// PyTorch's CUDA allocator over libvramlab: every tensor, graph, MemPool and statistic of PyTorch goes through this class.
//
// Compiled on the user's machine against the installed PyTorch (`_build.py`), put in by `vramlab_shim_install` and never taken out or
// destroyed: blocks of it live until the process ends.

#include "device.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/util/irange.h>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <sstream>

namespace vramlab_shim {

namespace {

constexpr size_t ONE_EXABYTE = 1152921504606846976ULL;

class Shim;
Shim* installed = nullptr;
Owners owners;

void delete_block(void* address);

void delete_uncached(void* address) {
  const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace();
  if (C10_UNLIKELY(interpreter != nullptr)) {
    (*interpreter)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(address));
  }
  C10_CUDA_CHECK(cudaFree(address));
}

uint64_t number(const void* address) {
  return reinterpret_cast<uint64_t>(address);
}

void* pointer(uint64_t address) {
  return reinterpret_cast<void*>(address);
}

uint64_t stream_number(cudaStream_t stream) {
  return reinterpret_cast<uint64_t>(stream);
}

// What a live block takes, for the profiler; the library may be too old to say.
size_t rounded(const Owner& owner, uint64_t address, size_t requested) {
  vramlab_block block{};
  if (library.block_at != nullptr && library.block_at(owner.handle, address, &block) == VRAMLAB_STATUS_OK) {
    return block.bytes;
  }
  return (requested + 511) / 512 * 512;
}

void report_to_profiler(const Owner& owner, void* address, int64_t bytes) {
  vramlab_stats stats{};
  if (library.read_stats(owner.handle, &stats) == VRAMLAB_STATUS_OK) {
    c10::reportMemoryUsageToProfiler(address, bytes, stats.allocated_bytes.all.current, stats.reserved_bytes.all.current,
        c10::Device(c10::DeviceType::CUDA, owner.device->index));
  }
}

void on_segment(void* context, const vramlab_segment_event* event) {
  const Owner& owner = *static_cast<Owner*>(context);
  Device& device = *owner.device;
  if (!device.history.wanted()) {
    return;
  }
  constexpr TraceEntry::Action ACTIONS[] = {
      TraceEntry::SEGMENT_ALLOC, TraceEntry::SEGMENT_FREE, TraceEntry::SEGMENT_MAP, TraceEntry::SEGMENT_UNMAP};
  std::lock_guard<std::recursive_mutex> guard(device.history.lock);
  const bool taken = event->action == VRAMLAB_SEGMENT_ACTION_ALLOC || event->action == VRAMLAB_SEGMENT_ACTION_MAP;
  SegmentOrigin origin;
  auto known = device.history.segments.find(event->address);
  if (taken) {
    if (request != nullptr) {
      origin = SegmentOrigin{request->pool, request->context};
    }
    device.history.segments[event->address] = origin;
  } else {
    if (known != device.history.segments.end()) {
      origin = known->second;
      device.history.segments.erase(known);
    }
    if (request != nullptr && request->context != nullptr) {
      origin.context = request->context;
    }
  }
  device.history.add(ACTIONS[event->action], device.index, event->address, event->bytes, pointer(event->stream), origin.pool,
      origin.context);
}

// A free that had to wait for other streams is done.
void on_free(void* context, uint64_t address) {
  Device& device = *static_cast<Owner*>(context)->device;
  if (!device.history.wanted()) {
    return;
  }
  std::lock_guard<std::recursive_mutex> guard(device.history.lock);
  auto at = device.history.pending.find(address);
  if (at != device.history.pending.end()) {
    const Live block = std::move(at->second);
    device.history.pending.erase(at);
    device.history.add(TraceEntry::FREE_COMPLETED, device.index, address, block.requested, block.stream, block.pool,
        request != nullptr && request->context != nullptr ? request->context : block.context);
  }
}

struct Checkpoint : AllocatorState {
  Owner* owner;
  MempoolId_t id;
  vramlab_checkpoint* value = nullptr;

  Checkpoint(Owner* owner, MempoolId_t id) : owner(owner), id(id) {}
  ~Checkpoint() override {
    library.checkpoint_free(value);
  }
};

void add_stat(Stat& to, const vramlab_gauge& from) {
  to.current += static_cast<int64_t>(from.current);
  to.peak += static_cast<int64_t>(from.peak);
  to.allocated += static_cast<int64_t>(from.allocated);
  to.freed += static_cast<int64_t>(from.freed);
}

void add_stats(StatArray& to, const vramlab_pooled& from) {
  add_stat(to[static_cast<size_t>(StatType::AGGREGATE)], from.all);
  add_stat(to[static_cast<size_t>(StatType::SMALL_POOL)], from.small_pool);
  add_stat(to[static_cast<size_t>(StatType::LARGE_POOL)], from.large_pool);
}

void add_stats(DeviceStats& to, const vramlab_stats& from) {
  add_stats(to.allocation, from.allocation);
  add_stats(to.segment, from.segment);
  add_stats(to.active, from.active);
  add_stats(to.inactive_split, from.inactive_split);
  add_stats(to.allocated_bytes, from.allocated_bytes);
  add_stats(to.reserved_bytes, from.reserved_bytes);
  add_stats(to.active_bytes, from.active_bytes);
  add_stats(to.inactive_split_bytes, from.inactive_split_bytes);
  add_stats(to.requested_bytes, from.requested_bytes);
  add_stat(to.oversize_allocations, from.oversize_allocations);
  add_stat(to.oversize_segments, from.oversize_segments);
  to.num_alloc_retries += static_cast<int64_t>(from.num_alloc_retries);
  to.num_ooms += static_cast<int64_t>(from.num_ooms);
  to.num_sync_all_streams += static_cast<int64_t>(from.num_sync_all_streams);
  to.num_device_alloc += static_cast<int64_t>(from.num_device_alloc);
  to.num_device_free += static_cast<int64_t>(from.num_device_free);
  // No bound is the largest number there and -1 here, as PyTorch's own allocator says it.
  to.max_split_size = static_cast<int64_t>(from.max_split_size);
}

#include "visits.h"

class Shim final : public CUDAAllocator {
 public:
  Shim(CUDAAllocator* native, std::string spec, uint64_t limit, bool latency)
      : native_(native), spec_(std::move(spec)), limit_(limit), latency_(latency) {
    const char* uncached = std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING");
    enabled_ = uncached == nullptr || *uncached == '\0' || std::strcmp(uncached, "0") == 0;
  }

  const std::string& spec() const {
    return spec_;
  }

  // --- blocks ---

  c10::DataPtr allocate(size_t bytes) override {
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    void* address = nullptr;
    c10::DeleterFnPtr deleter = &delete_block;
    if (C10_UNLIKELY(!enabled_)) {
      address = allocate_uncached(bytes);
      deleter = &delete_uncached;
    } else if (bytes != 0) {
      address = take(device, bytes, c10::cuda::getCurrentCUDAStream(device).stream());
    }
    return {address, address, deleter, c10::Device(c10::DeviceType::CUDA, device)};
  }

  void* raw_alloc(size_t bytes) override {
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return bytes == 0 ? nullptr : raw_alloc_with_stream(bytes, c10::cuda::getCurrentCUDAStream(device).stream());
  }

  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    if (bytes == 0) {
      return nullptr;
    }
    if (C10_UNLIKELY(!enabled_)) {
      return allocate_uncached(bytes);
    }
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return take(device, bytes, stream);
  }

  void raw_delete(void* address) override {
    if (C10_UNLIKELY(!enabled_)) {
      delete_uncached(address);
      return;
    }
    give_back(address);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return enabled_ ? &delete_block : &delete_uncached;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    C10_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyKind::cudaMemcpyDeviceToDevice));
  }

  // Throws where the address is of no live block.
  void give_back(void* address) {
    if (address == nullptr) {
      return;
    }
    const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace();
    if (C10_UNLIKELY(interpreter != nullptr)) {
      (*interpreter)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(address));
    }
    Owner* guessed = owners.guess(number(address));
    if (C10_LIKELY(guessed != nullptr)) {
      const vramlab_status status = free_in(*guessed, address);
      if (C10_LIKELY(status == VRAMLAB_STATUS_OK)) {
        return;
      }
      if (status != VRAMLAB_STATUS_FOREIGN) {
        fail_free(status, address);
        return;
      }
    }
    for (const size_t index : c10::irange(owners.count())) {
      Owner* other = owners.at(index);
      if (other == nullptr || other == guessed) {
        continue;
      }
      const vramlab_status status = free_in(*other, address);
      if (status == VRAMLAB_STATUS_OK) {
        return;
      }
      if (status != VRAMLAB_STATUS_FOREIGN) {
        fail_free(status, address);
        return;
      }
    }
    if (native_serves_) {
      native_->raw_delete(address);
      return;
    }
    TORCH_CHECK(false, "vramlab: free of ", address, ", which is not the address of a live block: it was freed before, or another allocator made it");
  }

  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override {
    if (block.get() == nullptr) {
      return;
    }
    if (block.get_deleter() != &delete_block) {
      // PyTorch's allocator ignores what is not its own.
      native_->recordStream(block, stream);
      return;
    }
    const uint64_t address = number(block.get());
    if (C10_UNLIKELY(native_serves_) && !is_ours(address)) {
      // It asks for its own deleter.
      c10::DataPtr alias(block.get(), block.get(), native_->raw_deleter(), block.device());
      native_->recordStream(alias, stream);
      alias.release_context();
      return;
    }
    each_owner(address, "record_stream", [&](Owner& owner) {
      Device& device = *owner.device;
      if (C10_LIKELY(!device.is_slow())) {
        return library.record_stream(owner.handle, address, stream_number(stream.stream()));
      }
      device.notice_captures();
      std::lock_guard<std::recursive_mutex> guard(device.history.lock);
      const vramlab_status status = library.record_stream(owner.handle, address, stream_number(stream.stream()));
      auto at = device.history.live.find(address);
      if (status == VRAMLAB_STATUS_OK && at != device.history.live.end() && at->second.stream != stream.stream()) {
        at->second.used_elsewhere = true;
      }
      return status;
    });
  }

  // --- start ---

  void init(int device_count) override {
    // It opens IPC handles, keeps pools that bring an allocator of their own, and frees what it gave out before.
    native_->init(device_count);
    device_count_ = std::min<int>(device_count, static_cast<int>(devices_.size()));
  }

  bool initialized() override {
    return device_count_ > 0;
  }

  void enable(bool value) override {
    enabled_ = value;
  }

  bool isEnabled() const override {
    return enabled_;
  }

  std::string name() override {
    return "vramlab:" + spec_;
  }

  Device& device(DeviceIndex index) {
    TORCH_CHECK(index >= 0 && index < device_count_, "vramlab: there is no cuda:", int(index), ": CUDA has ", device_count_.load(),
        " devices", device_count_ == 0 ? " (torch.cuda.init() did not run)" : "");
    Device* known = devices_[static_cast<size_t>(index)].load(std::memory_order_acquire);
    return C10_LIKELY(known != nullptr) ? *known : open(index);
  }

  // Null until memory is asked for there: a question opens no device.
  Device* opened(DeviceIndex index) const {
    TORCH_CHECK(index >= 0 && index < device_count_, "vramlab: there is no cuda:", int(index), ": CUDA has ", device_count_.load(), " devices");
    return devices_[static_cast<size_t>(index)].load(std::memory_order_acquire);
  }

  // --- limits and sizes ---

  double getMemoryFraction(DeviceIndex index) override {
    std::lock_guard<std::mutex> guard(open_lock_);
    return fraction(index);
  }

  void setMemoryFraction(double value, DeviceIndex index) override {
    TORCH_CHECK(0 <= value && value <= 1, "invalid fraction: ", value, ". Please set within [0, 1].");
    Device& to = device(index);
    std::lock_guard<std::mutex> guard(open_lock_);
    fractions_[static_cast<size_t>(index)] = value;
    apply_limit(to);
  }

  void set_limit(uint64_t bytes) {
    std::lock_guard<std::mutex> guard(open_lock_);
    limit_ = bytes;
    each_device([&](Device& device) { apply_limit(device); });
  }

  void set_latency(bool on) {
    std::lock_guard<std::mutex> guard(open_lock_);
    latency_ = on;
    each_device([&](Device& device) { Device::check(library.latency(device.owner->handle, on)); });
  }

  void cacheInfo(DeviceIndex index, size_t* largest) override {
    Device& of = device(index);
    if (*largest == 0) {
      uint64_t free = 0;
      uint64_t total = 0;
      Device::check(library.memory(of.owner->handle, &free, &total));
      *largest = free;
    }
    *largest = std::max(*largest, Visit::largest_free(*of.owner));
  }

  std::vector<StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex index) override {
    std::vector<StreamSegmentSize> out;
    if (Device* of = opened(index)) {
      Visit::segments(*of->owner, [&](const vramlab_segment& segment) {
        if (segment.expandable) {
          out.emplace_back(reinterpret_cast<cudaStream_t>(segment.stream), !segment.is_large, segment.bytes);
        }
      });
    }
    return out;
  }

  void emptyCache(MempoolId_t id) override {
    native_->emptyCache(id);
    each_device([&](Device& device) {
      device.notice_captures();
      const Request now{device.history.gather(RecordContext::ALL), NO_POOL};
      std::unique_lock<std::recursive_mutex> guard(device.history.lock, std::defer_lock);
      if (device.history.wanted()) {
        guard.lock();
      }
      const RequestScope scope(now);
      // A capture must not wait for the device.
      if (id == NO_POOL && !device.in_capture()) {
        uint64_t bytes = 0;
        Device::check(library.trim(device.owner->handle, 0, &bytes));
      }
      for (Owner* done : device.trim_released(id)) {
        Device::check(library.close(done->handle));
        owners.remove(done);
      }
    });
  }

  DeviceStats getDeviceStats(DeviceIndex index) override {
    DeviceStats out;
    Device* of = opened(index);
    if (of == nullptr) {
      return out;
    }
    // With pools that have an allocator of their own. The peak of a sum is at most the sum of the peaks, which is said here.
    each_owner_of(of, [&](Owner& owner) {
      vramlab_stats stats{};
      Device::check(library.read_stats(owner.handle, &stats));
      add_stats(out, stats);
    });
    return out;
  }

  void resetAccumulatedStats(DeviceIndex index) override {
    each_owner_of(opened(index), [](Owner& owner) { Device::check(library.reset_accumulated(owner.handle)); });
  }

  void resetPeakStats(DeviceIndex index) override {
    each_owner_of(opened(index), [](Owner& owner) { Device::check(library.reset_peaks(owner.handle)); });
  }

  // --- history ---

  bool isHistoryEnabled() override {
    return recording_on_;
  }

  void recordHistory(bool on, CreateContextFn recorder, size_t most, RecordContext when, bool clear,
      const std::vector<std::string>& skip_actions) override {
    TORCH_CHECK(when == RecordContext::NEVER || recorder != nullptr, "vramlab: a history with contexts needs what gathers them");
    std::lock_guard<std::mutex> guard(open_lock_);
    recording_on_ = on;
    recording_ = Recording{on, recorder, most, when, Recording::bits(skip_actions)};
    {
      std::lock_guard<std::mutex> notes(annotations_lock_);
      annotations_.resize(most);
      annotations_.clear();
    }
    each_device([&](Device& device) { change(device, [&](History& history) { history.set(recording_, clear); }); });
  }

  void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
    std::lock_guard<std::mutex> guard(open_lock_);
    trackers_.push_back(tracker);
    each_device([&](Device& device) { change(device, [&](History& history) { history.listen(tracker); }); });
  }

  void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
    std::lock_guard<std::mutex> guard(open_lock_);
    observers_.push_back(std::move(observer));
  }

  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& pairs) override {
    if (!recording_on_) {
      return;
    }
    DeviceIndex device = 0;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    AnnotationEntry entry(device, c10::getApproximateTime());
    for (const auto& [key, value] : pairs) {
      entry.recordUserMetadata(key, value);
    }
    std::lock_guard<std::mutex> guard(annotations_lock_);
    annotations_.push(std::move(entry));
  }

  void pushCompileContext(std::string& context) override {
    compile_contexts.push_back(context);
  }

  void popCompileContext() override {
    if (!compile_contexts.empty()) {
      compile_contexts.pop_back();
    }
  }

  void setUserMetadata(const std::string& metadata) override {
    user_metadata = metadata;
  }

  std::string getUserMetadata() override {
    return user_metadata;
  }

  SnapshotInfo snapshot(MempoolId_t id, bool with_traces) override {
    const auto unix_nanoseconds = clock_.makeConverter();
    const auto in_microseconds = [&](trace_time_& time) { time.t_ = unix_nanoseconds(time.approx_t_) / 1000; };
    SnapshotInfo out;
    if (with_traces) {
      std::lock_guard<std::mutex> guard(annotations_lock_);
      out.external_annotations = annotations_.read();
    }
    for (AnnotationEntry& entry : out.external_annotations) {
      in_microseconds(entry.time_);
    }
    for (const int index : c10::irange(device_count_.load())) {
      Device* device = devices_[static_cast<size_t>(index)].load(std::memory_order_acquire);
      if (with_traces) {
        out.device_traces.emplace_back();
      }
      if (device == nullptr) {
        continue;
      }
      std::lock_guard<std::recursive_mutex> guard(device->history.lock);
      if (with_traces) {
        out.device_traces.back() = device->history.entries();
        for (TraceEntry& entry : out.device_traces.back()) {
          in_microseconds(entry.time_);
        }
      }
      const size_t first = out.segments.size();
      each_owner_of(device, [&](Owner& owner) { Visit::describe(owner, id, out.segments); });
      std::sort(out.segments.begin() + static_cast<ptrdiff_t>(first), out.segments.end(),
          [](const SegmentInfo& a, const SegmentInfo& b) { return a.address < b.address; });
      size_t active = 0;
      for (const size_t at : c10::irange(first, out.segments.size())) {
        active += out.segments[at].active_size;
      }
      device->history.add(TraceEntry::SNAPSHOT, device->index, 0, active, nullptr, id, nullptr);
    }
    if (native_serves_) {
      SnapshotInfo others = native_->snapshot(id, false);
      out.segments.insert(out.segments.end(), others.segments.begin(), others.segments.end());
    }
    describe_settings(out.config_metadata);
    return out;
  }

  // --- private pools ---

  void beginAllocateToPool(DeviceIndex index, MempoolId_t id, std::function<bool(cudaStream_t)> filter) override {
    Device& of = device(index);
    std::shared_ptr<Pool> pool = of.use(id, false);
    if (pool->native) {
      native_->beginAllocateToPool(index, id, filter);
    }
    of.open_route(Route{std::move(pool), std::move(filter), c10::cuda::getCurrentCUDAStream(index).stream(), false});
  }

  void endAllocateToPool(DeviceIndex index, MempoolId_t id) override {
    Device& of = device(index);
    std::shared_ptr<Pool> pool = of.find(id);
    if (pool != nullptr && pool->native) {
      native_->endAllocateToPool(index, id);
    }
    of.close_route(id);
  }

  void releasePool(DeviceIndex index, MempoolId_t id) override {
    Device& of = device(index);
    std::shared_ptr<Pool> pool = of.find(id);
    if (pool != nullptr && pool->native) {
      native_->releasePool(index, id);
    }
    of.release(id);
  }

  int getPoolUseCount(DeviceIndex index, MempoolId_t id) override {
    Device* of = opened(index);
    std::shared_ptr<Pool> pool = of == nullptr ? nullptr : of->find(id);
    return pool == nullptr ? 0 : pool->uses;
  }

  void createOrIncrefPool(DeviceIndex index, MempoolId_t id, std::shared_ptr<CUDAAllocator> allocator) override {
    const bool native = allocator != nullptr && allocator.get() != this;
    if (native) {
      native_serves_ = true;
      native_->createOrIncrefPool(index, id, std::move(allocator));
    }
    device(index).use(id, native);
  }

  void setUseOnOOM(DeviceIndex index, MempoolId_t id, bool value) override {
    pool_at(index, id, "setUseOnOOM").last_resort = value;
  }

  void setNoSplit(DeviceIndex index, MempoolId_t id) override {
    Pool& pool = pool_at(index, id, "setNoSplit");
    if (library.pool_no_split != nullptr && pool.number != 0) {
      Device::check(library.pool_no_split(pool.owner->handle, pool.number));
    } else {
      TORCH_WARN_ONCE("vramlab: no_split of torch.cuda.MemPool says nothing to allocator ", spec_, "; blocks of the pool may be split");
    }
  }

  // Gives a pool of `torch.cuda.MemPool` that is still empty an allocator of its own.
  Owner* give_pool_allocator(DeviceIndex index, MempoolId_t id, const std::string& spec) {
    Device& of = device(index);
    Owner* own = open_owner(of, spec, id);
    of.give_allocator(id, own);
    return own;
  }

  bool checkPoolLiveAllocations(DeviceIndex index, MempoolId_t id, const std::unordered_set<void*>& expected) override {
    Pool& pool = pool_at(index, id, "checkPoolLiveAllocations");
    return Visit::live(*pool.owner, pool.number) == expected;
  }

  std::shared_ptr<AllocatorState> getCheckpointState(DeviceIndex index, MempoolId_t id) override {
    Pool& pool = pool_at(index, id, "getCheckpointState");
    auto out = std::make_shared<Checkpoint>(pool.owner, id);
    Device::check(library.pool_checkpoint(pool.owner->handle, pool.number, &out->value));
    return out;
  }

  CheckpointDelta setCheckpointPoolState(DeviceIndex index, std::shared_ptr<AllocatorState> state) override {
    auto checkpoint = std::dynamic_pointer_cast<Checkpoint>(state);
    TORCH_CHECK(checkpoint != nullptr, "vramlab: that state of a pool is not from this allocator");
    Device& of = device(index);
    struct Changes {
      CheckpointDelta delta;
      Device& device;
      MempoolId_t id;
    } changes{{}, of, checkpoint->id};
    const auto freed = [](void* context, uint64_t address) {
      auto& to = *static_cast<Changes*>(context);
      to.delta.ptrs_freed.push_back(pointer(address));
      History& history = to.device.history;
      auto at = history.live.find(address);
      if (at != history.live.end()) {
        const Live block = std::move(at->second);
        history.live.erase(at);
        for (const auto action : {TraceEntry::FREE_REQUESTED, TraceEntry::FREE_COMPLETED}) {
          history.add(action, to.device.index, address, block.requested, block.stream, block.pool, block.context);
        }
      }
    };
    const auto created = [](void* context, uint64_t address, uint64_t bytes, uint64_t stream) {
      auto& to = *static_cast<Changes*>(context);
      to.delta.dataptrs_allocd.emplace_back(pointer(address), pointer(address), &delete_block, c10::Device(c10::DeviceType::CUDA, to.device.index));
      History& history = to.device.history;
      if (history.wanted()) {
        history.live[address] = Live{bytes, pointer(stream), to.id, nullptr, false};
        history.add(TraceEntry::ALLOC, to.device.index, address, bytes, pointer(stream), to.id, nullptr);
      }
    };
    std::lock_guard<std::recursive_mutex> guard(of.history.lock);
    Device::check(library.pool_restore(checkpoint->owner->handle, checkpoint->value, &changes, freed, created));
    return std::move(changes.delta);
  }

  // --- other processes and devices ---

  void* getBaseAllocation(void* address, size_t* bytes) override {
    uint64_t base = 0;
    uint64_t size = 0;
    each_owner(number(address), "the base of a segment was asked",
        [&](Owner& owner) { return library.base(owner.handle, number(address), &base, &size); });
    if (bytes != nullptr) {
      *bytes = size;
    }
    return pointer(base);
  }

  ShareableHandle shareIpcHandle(void* address) override {
    void* base = getBaseAllocation(address, nullptr);
    cudaIpcMemHandle_t handle;
    const cudaError_t error = cudaIpcGetMemHandle(&handle, base);
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      TORCH_CHECK(false, "vramlab: the segment at ", base, " cannot be shared with another process (", cudaGetErrorString(error),
          "). CUDA shares memory of cudaMalloc alone, and ", spec_,
          " maps its segments; run programs that send CUDA tensors to other processes under 'caching', or send copies on the CPU");
    }
    // As PyTorch writes it, for processes with and without this shim: version, kind, the driver's handle.
    std::string text{'\x02', 'c'};
    text.append(reinterpret_cast<const char*>(&handle), sizeof(handle));
    return ShareableHandle{static_cast<char*>(address) - static_cast<char*>(base), std::move(text)};
  }

  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    // PyTorch's own keeps what it opened until the last use is gone, and knows the handles of its own segments too.
    return native_->getIpcDevPtr(std::move(handle));
  }

  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t bytes, cudaStream_t stream,
      bool peers) override {
    // Mapped memory is another device's only where the library was told of it; this copy needs no access.
    if (to_device == from_device || (peers && !maps_memory_)) {
      return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
    }
    return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);
  }

  void enablePeerAccess(DeviceIndex from, DeviceIndex to) override {
    native_->enablePeerAccess(from, to);
    if (library.peer != nullptr) {
      if (Device* of = opened(to)) {
        Device::check(library.peer(of->owner->handle, from));
      }
    }
  }

#if VRAMLAB_TORCH >= 212
  void attachOomRejectionObserver(OomRejectionObserver) override {
    // Nothing is rejected before the device was asked.
  }

  std::shared_ptr<GatheredContext> getContextForPointer(const void* address) override {
    Owner* owner = owners.guess(number(address));
    if (owner == nullptr) {
      return nullptr;
    }
    History& history = owner->device->history;
    std::lock_guard<std::recursive_mutex> guard(history.lock);
    auto at = history.live.find(number(address));
    return at == history.live.end() ? nullptr : at->second.context;
  }
#endif

#if VRAMLAB_TORCH >= 213
  void markCaptureBegin(DeviceIndex index) override {
    device(index).mark_capture(true);
  }

  void markCaptureEnd(DeviceIndex index) override {
    device(index).mark_capture(false);
  }
#endif

#if VRAMLAB_TORCH >= 214
  bool supportsUserMetadata() override {
    return true;
  }

  void annotateMemory(const void* address, const std::string& metadata) override {
    Owner* owner = owners.guess(number(address));
    if (owner == nullptr || !owner->device->history.wanted()) {
      return;
    }
    Device& of = *owner->device;
    std::lock_guard<std::recursive_mutex> guard(of.history.lock);
    auto at = of.history.live.find(number(address));
    if (at != of.history.live.end()) {
      of.history.add(TraceEntry::ANNOTATE, of.index, number(address), at->second.requested, at->second.stream, at->second.pool,
          nullptr, &metadata);
    }
  }
#endif

  // What each open device's allocator holds, in a line.
  std::string counts() {
    std::ostringstream out;
    out << spec_;
    each_device([&](Device& device) {
      vramlab_stats stats{};
      if (library.read_stats(device.owner->handle, &stats) == VRAMLAB_STATUS_OK) {
        out << "; cuda:" << int(device.index) << " allocations " << stats.allocation.all.allocated << ", frees " << stats.allocation.all.freed
            << ", peak reserved " << stats.reserved_bytes.all.peak << ", device allocations " << stats.num_device_alloc;
      }
    });
    return out.str();
  }

 private:
#include "request.h"
};

void delete_block(void* address) {
  try {
    installed->give_back(address);
  } catch (const c10::Error& error) {
    // A destructor runs this: an exception would end the program without a word.
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  }
}

} // namespace

} // namespace vramlab_shim

#include "exports.h"
