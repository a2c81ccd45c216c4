// How a request is served and a block given back, and the state of the allocator. Private part of `class Shim` in shim.cpp.

  // A block of `bytes`, at least 1, or an error of PyTorch's.
  void* take(DeviceIndex index, size_t bytes, cudaStream_t stream) {
    TORCH_CHECK_WITH(OutOfMemoryError, bytes < ONE_EXABYTE, "CUDA out of memory. Tried to allocate more than 1EB memory.");
    Device& from = device(index);
    void* out = nullptr;
    if (C10_LIKELY(!from.is_slow() && !c10::memoryProfilingEnabled())) {
      uint64_t address = 0;
      const vramlab_status status = library.allocate(from.owner->handle, bytes, stream_number(stream), &address);
      if (C10_UNLIKELY(status != VRAMLAB_STATUS_OK)) {
        address = take_after_failure(from, Asked{nullptr, bytes, stream, nullptr}, status);
      }
      owners.note(address, *from.owner);
      out = pointer(address);
    } else {
      out = take_slowly(from, bytes, stream);
    }
    const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace();
    if (C10_UNLIKELY(interpreter != nullptr)) {
      (*interpreter)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(out));
    }
    return out;
  }

  struct Asked {
    const Pool* pool; // null: the device's cache
    size_t bytes;
    cudaStream_t stream;
    Context context;

    MempoolId_t id() const {
      return pool == nullptr ? NO_POOL : pool->id;
    }
  };

  C10_NOINLINE void* take_slowly(Device& from, size_t bytes, cudaStream_t stream) {
    from.notice_captures();
    const std::shared_ptr<Pool> pool = from.pool_of(stream);
    if (pool != nullptr && pool->native) {
      return native_->raw_alloc_with_stream(bytes, stream);
    }
    const Asked asked{pool.get(), bytes, stream, from.history.gather(RecordContext::STATE)};
    uint64_t address = 0;
    const vramlab_status status = ask(from, asked, &address);
    if (status != VRAMLAB_STATUS_OK) {
      address = take_after_failure(from, asked, status);
    }
    const Owner& owner = pool == nullptr ? *from.owner : *pool->owner;
    owners.note(address, owner);
    if (c10::memoryProfilingEnabled()) {
      const auto size = static_cast<int64_t>(rounded(owner, address, bytes));
      {
        std::lock_guard<std::mutex> guard(profiled_lock_);
        profiled_[address] = size;
      }
      report_to_profiler(owner, pointer(address), size);
    }
    return pointer(address);
  }

  // The library's answer; a block is recorded in the same step.
  vramlab_status ask(Device& from, const Asked& asked, uint64_t* address) {
    std::unique_lock<std::recursive_mutex> guard(from.history.lock, std::defer_lock);
    if (from.history.wanted()) {
      guard.lock();
    }
    const Request now{asked.context, asked.id()};
    const RequestScope scope(now);
    const Owner& owner = asked.pool == nullptr ? *from.owner : *asked.pool->owner;
    const uint64_t stream = stream_number(asked.stream);
    const vramlab_status status = asked.pool == nullptr || asked.pool->number == 0
        ? library.allocate(owner.handle, asked.bytes, stream, address)
        : library.allocate_in(owner.handle, asked.pool->number, asked.bytes, stream, address);
    if (status == VRAMLAB_STATUS_OK && guard.owns_lock()) {
      from.history.live[*address] = Live{asked.bytes, asked.stream, asked.id(), asked.context, false};
      from.history.add(TraceEntry::ALLOC, from.index, *address, asked.bytes, asked.stream, asked.id(), asked.context);
    }
    return status;
  }

  // Out of memory is answered as PyTorch answers it: those who can free memory are asked, then pools of last resort, then observers are told.
  C10_NOINLINE uint64_t take_after_failure(Device& from, Asked asked, vramlab_status status) {
    std::string said = library.error();
    TORCH_CHECK(status == VRAMLAB_STATUS_OUT_OF_MEMORY, "vramlab: ", said);
    uint64_t address = 0;
    bool freed = false;
    for (const auto& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys()) {
      freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
    }
    if (freed) {
      if (ask(from, asked, &address) == VRAMLAB_STATUS_OK) {
        return address;
      }
      said = library.error();
    }
    if (asked.pool == nullptr) {
      for (const auto& pool : from.last_resorts()) {
        if (ask(from, Asked{pool.get(), asked.bytes, asked.stream, asked.context}, &address) == VRAMLAB_STATUS_OK) {
          return address;
        }
      }
    }
    fail_out_of_memory(from, asked, said);
  }

  [[noreturn]] void fail_out_of_memory(Device& from, const Asked& asked, const std::string& said) {
    size_t free = 0;
    size_t total = 0;
    {
      const c10::cuda::CUDAGuard guard(from.index);
      C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    }
    vramlab_stats stats{};
    Device::check(library.read_stats(from.owner->handle, &stats));
    const size_t allocated = stats.allocated_bytes.all.current;
    const size_t reserved = stats.reserved_bytes.all.current;
    const size_t in_pools = Visit::allocated_in_pools(*from.owner);
    if (from.history.wanted()) {
      std::lock_guard<std::recursive_mutex> guard(from.history.lock);
      from.history.add(TraceEntry::OOM, from.index, free, asked.bytes, asked.stream, asked.id(), asked.context);
    }
    c10::reportOutOfMemoryToProfiler(
        static_cast<int64_t>(asked.bytes), allocated, reserved, c10::Device(c10::DeviceType::CUDA, from.index));
    std::vector<OutOfMemoryObserver> observers;
    uint64_t allowed = VRAMLAB_NO_LIMIT;
    {
      std::lock_guard<std::mutex> guard(open_lock_);
      observers = observers_;
      allowed = limits_[static_cast<size_t>(from.index)];
    }
    const bool limited = allowed != VRAMLAB_NO_LIMIT;
    // No lock is held: an observer may dump a snapshot.
    for (const OutOfMemoryObserver& observer : observers) {
      observer(from.index, static_cast<int64_t>(asked.bytes), static_cast<int64_t>(limited ? allowed : total), static_cast<int64_t>(free));
    }
    using c10::CachingAllocator::format_size;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", format_size(asked.bytes), ". GPU ", int(from.index),
        " has a total capacity of ", format_size(total), " of which ", format_size(free), " is free. ",
        limited ? format_size(allowed) + " allowed; " : std::string(), "Of the allocated memory ", format_size(allocated),
        " is allocated by PyTorch, ",
        in_pools > 0 ? "with " + format_size(in_pools) + " allocated in private pools (e.g., CUDA Graphs), " : std::string(), "and ",
        format_size(reserved - std::min(reserved, allocated)), " is reserved by PyTorch but unallocated. Allocator vramlab:", from.owner->spec,
        " says: ", said);
    std::abort(); // never reached: the line above throws
  }

  vramlab_status free_in(Owner& owner, void* address) {
    if (C10_LIKELY(!owner.device->is_slow() && !c10::memoryProfilingEnabled())) {
      return library.free(owner.handle, number(address));
    }
    return free_slowly(owner, address);
  }

  C10_NOINLINE vramlab_status free_slowly(Owner& owner, void* address) {
    Device& device = *owner.device;
    device.notice_captures();
    const Context context = device.history.gather(RecordContext::ALL);
    int64_t profiled = 0;
    if (c10::memoryProfilingEnabled()) {
      vramlab_block block{};
      if (library.block_at != nullptr && library.block_at(owner.handle, number(address), &block) == VRAMLAB_STATUS_OK) {
        profiled = static_cast<int64_t>(block.bytes);
      } else {
        std::lock_guard<std::mutex> guard(profiled_lock_);
        auto at = profiled_.find(number(address));
        profiled = at == profiled_.end() ? 0 : at->second;
      }
    }
    const vramlab_status status = free_recorded(owner, address, context);
    if (profiled > 0 && status == VRAMLAB_STATUS_OK) {
      {
        std::lock_guard<std::mutex> guard(profiled_lock_);
        profiled_.erase(number(address));
      }
      report_to_profiler(owner, address, -profiled);
    }
    return status;
  }

  // The entries come before the block goes back: after that it is another thread's.
  vramlab_status free_recorded(Owner& owner, void* address, const Context& context) {
    Device& device = *owner.device;
    History& history = device.history;
    if (!history.wanted()) {
      return library.free(owner.handle, number(address));
    }
    std::lock_guard<std::recursive_mutex> guard(history.lock);
    const Request now{context, NO_POOL};
    const RequestScope scope(now);
    auto at = history.live.find(number(address));
    if (at == history.live.end()) {
      return library.free(owner.handle, number(address));
    }
    Live block = std::move(at->second);
    history.live.erase(at);
    const Context& shown = context != nullptr ? context : block.context;
    history.add(TraceEntry::FREE_REQUESTED, device.index, number(address), block.requested, block.stream, block.pool, shown);
    if (block.used_elsewhere && library.on_free != nullptr) {
      history.pending[number(address)] = block;
    } else {
      history.add(TraceEntry::FREE_COMPLETED, device.index, number(address), block.requested, block.stream, block.pool, shown);
    }
    return library.free(owner.handle, number(address));
  }

  static void fail_free(vramlab_status status, void* address) {
    // A child after fork() frees what it inherited; the parent's memory is not its own.
    TORCH_CHECK(status == VRAMLAB_STATUS_FORKED, "vramlab: free of ", address, ": ", library.error());
  }

  // Asks the likely owner of an address, then the others.
  template <typename Call>
  void each_owner(uint64_t address, const char* what, Call&& call) {
    Owner* guessed = owners.guess(address);
    vramlab_status status = guessed == nullptr ? VRAMLAB_STATUS_FOREIGN : call(*guessed);
    for (size_t index = 0; status == VRAMLAB_STATUS_FOREIGN && index < owners.count(); index++) {
      Owner* other = owners.at(index);
      if (other != nullptr && other != guessed) {
        status = call(*other);
      }
    }
    TORCH_CHECK(status != VRAMLAB_STATUS_FOREIGN, "vramlab: ", what, " for ", pointer(address), ", which is not the address of a live block");
    Device::check(status);
  }

  static void* allocate_uncached(size_t bytes) {
    void* out = nullptr;
    C10_CUDA_CHECK(cudaMalloc(&out, bytes));
    const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace();
    if (C10_UNLIKELY(interpreter != nullptr)) {
      (*interpreter)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(out));
    }
    return out;
  }

  Pool& pool_at(DeviceIndex index, MempoolId_t id, const char* what) {
    std::shared_ptr<Pool> pool = device(index).find(id);
    TORCH_CHECK(pool != nullptr, "vramlab: ", what, ": there is no pool (", id.first, ", ", id.second, ") on cuda:", int(index));
    TORCH_CHECK(!pool->native, "vramlab: ", what, " of a pool whose memory comes from an allocator of the program's");
    // The map and its users keep it: PyTorch calls these for pools that it holds.
    return *pool;
  }

  template <typename Change>
  void change(Device& device, Change&& changed) {
    std::lock_guard<std::recursive_mutex> guard(device.history.lock);
    const bool before = device.history.wanted();
    changed(device.history);
    if (!before && device.history.wanted()) {
      each_owner_of(&device, [](Owner& owner) { Visit::adopt(owner); });
    }
    device.update();
  }

  template <typename Act>
  void each_device(Act&& act) {
    for (auto& place : devices_) {
      if (Device* device = place.load(std::memory_order_acquire)) {
        act(*device);
      }
    }
  }

  // The device's own allocator and those of its pools.
  template <typename Act>
  static void each_owner_of(const Device* device, Act&& act) {
    for (const size_t index : c10::irange(owners.count())) {
      Owner* owner = owners.at(index);
      if (owner != nullptr && device != nullptr && owner->device == device) {
        act(*owner);
      }
    }
  }

  // Whether a live block of ours holds that address.
  static bool is_ours(uint64_t address) {
    uint64_t base = 0;
    uint64_t bytes = 0;
    for (const size_t index : c10::irange(owners.count())) {
      Owner* owner = owners.at(index);
      if (owner != nullptr && library.base(owner->handle, address, &base, &bytes) == VRAMLAB_STATUS_OK) {
        return true;
      }
    }
    return false;
  }

  C10_NOINLINE Device& open(DeviceIndex index) {
    std::lock_guard<std::mutex> guard(open_lock_);
    std::atomic<Device*>& place = devices_[static_cast<size_t>(index)];
    if (Device* known = place.load()) {
      return *known;
    }
    // The device as the thread has it stays the thread's.
    const c10::cuda::CUDAGuard device_guard(index);
    // Never freed: the library's callbacks name it.
    auto* device = new Device(index);
    device->owner = open_owner(*device, spec_, NO_POOL);
    const double configured = c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig::per_process_memory_fraction();
    if (configured < 1.0 && fractions_[static_cast<size_t>(index)] < 0) {
      fractions_[static_cast<size_t>(index)] = configured;
    }
    apply_limit(*device);
    Device::check(library.latency(device->owner->handle, latency_));
    change(*device, [&](History& history) {
      history.set(recording_, true);
      for (const AllocatorTraceTracker& tracker : trackers_) {
        history.listen(tracker);
      }
    });
    place.store(device, std::memory_order_release);
    return *device;
  }

  Owner* open_owner(Device& device, const std::string& spec, MempoolId_t pool) {
    auto owner = std::make_unique<Owner>();
    const std::string name = "cuda:" + std::to_string(int(device.index));
    TORCH_CHECK(library.open(spec.c_str(), name.c_str(), &owner->handle) == VRAMLAB_STATUS_OK, "vramlab: ", library.error());
    owner->device = &device;
    owner->spec = spec;
    owner->pool = pool;
    uint32_t can = 0;
    Device::check(library.can(owner->handle, &can));
    if ((can & VRAMLAB_CAN_EXPAND) != 0) {
      maps_memory_ = true;
    }
    Owner* added = owners.add(std::move(owner));
    Device::check(library.on_segment(added->handle, added, &on_segment));
    if (library.on_free != nullptr) {
      Device::check(library.on_free(added->handle, added, &on_free));
    }
    return added;
  }

  double fraction(DeviceIndex index) const {
    const double set = fractions_.at(static_cast<size_t>(index));
    return set < 0 ? 1.0 : set;
  }

  // The smaller of what the user of vramlab and the program allow. Needs `open_lock_`.
  void apply_limit(Device& device) {
    const auto index = static_cast<size_t>(device.index);
    uint64_t allowed = limit_;
    if (fractions_[index] >= 0) {
      const c10::cuda::CUDAGuard guard(device.index);
      size_t free = 0;
      size_t total = 0;
      C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
      allowed = std::min<uint64_t>(allowed, static_cast<uint64_t>(fractions_[index] * static_cast<double>(total)));
    }
    limits_[index] = allowed;
    Device::check(library.set_limit(device.owner->handle, allowed));
  }

  void describe_settings(AllocatorConfigInfo& to) const {
    using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
    to.garbage_collection_threshold = Config::garbage_collection_threshold();
    // As the policy has it.
    to.max_split_size = std::numeric_limits<size_t>::max();
    for (const auto& place : devices_) {
      vramlab_stats stats{};
      const Device* device = place.load();
      if (device != nullptr && library.read_stats(device->owner->handle, &stats) == VRAMLAB_STATUS_OK) {
        to.max_split_size = stats.max_split_size;
      }
    }
    to.pinned_num_register_threads = CUDAAllocatorConfig::pinned_num_register_threads();
    to.expandable_segments = maps_memory_;
    to.release_lock_on_malloc = CUDAAllocatorConfig::release_lock_on_cudamalloc();
    to.pinned_use_host_register = CUDAAllocatorConfig::pinned_use_cuda_host_register();
    to.graph_capture_record_stream_reuse = CUDAAllocatorConfig::graph_capture_record_stream_reuse();
    to.last_allocator_settings = c10::CachingAllocator::getAllocatorSettings();
    to.roundup_power2_divisions = Config::roundup_power2_divisions();
  }

  CUDAAllocator* const native_;
  const std::string spec_;
  std::atomic<bool> enabled_{true};
  std::atomic<bool> maps_memory_{false};
  std::atomic<bool> native_serves_{false};
  std::atomic<int> device_count_{0};
  std::array<std::atomic<Device*>, C10_COMPILE_TIME_MAX_GPUS> devices_{};
  c10::ApproximateClockToUnixTimeConverter clock_;

  // Guards what follows, and the opening of devices. Observers and trackers run without it.
  mutable std::mutex open_lock_;
  uint64_t limit_;
  bool latency_;
  std::array<double, C10_COMPILE_TIME_MAX_GPUS> fractions_ = all_unset();
  std::array<uint64_t, C10_COMPILE_TIME_MAX_GPUS> limits_{};
  Recording recording_;
  std::atomic<bool> recording_on_{false};
  std::vector<AllocatorTraceTracker> trackers_;
  std::vector<OutOfMemoryObserver> observers_;

  std::mutex annotations_lock_;
  Ring<AnnotationEntry> annotations_;

  std::mutex profiled_lock_;
  std::unordered_map<uint64_t, int64_t> profiled_;

  static std::array<double, C10_COMPILE_TIME_MAX_GPUS> all_unset() {
    std::array<double, C10_COMPILE_TIME_MAX_GPUS> out{};
    out.fill(-1.0);
    return out;
  }
