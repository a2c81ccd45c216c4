// Pinned host memory of PyTorch: what the program requests, and a watch around PyTorch's own allocator of it.
#pragma once

#include "torch_versions.h"

#include <ATen/core/CachingHostAllocator.h>
#include <pthread.h>
#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace vramlab_shim {

using HostStream = c10::Stream;
using StreamFilter = std::function<bool(HostStream)>;

// Whether this process was forked from one that pins memory: CUDA does not work in it, and locks may be held for ever.
inline std::atomic<bool> is_forked{false};

inline void watch_forks() { pthread_atfork(nullptr, nullptr, [] { is_forked = true; }); }

// Bytes that the program holds, before rounding.
class Requested {
  public:
    void add(size_t bytes) {
        const uint64_t now = current_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
        uint64_t peak = peak_.load(std::memory_order_relaxed);
        while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {}
        count_.fetch_add(1, std::memory_order_relaxed);
    }

    void remove(size_t bytes) { current_.fetch_sub(bytes, std::memory_order_relaxed); }

    void reset_peak() { peak_ = current_.load(); }

    uint64_t current() const { return current_; }
    uint64_t peak() const { return peak_; }
    uint64_t count() const { return count_; }

  private:
    std::atomic<uint64_t> current_{0};
    std::atomic<uint64_t> peak_{0};
    std::atomic<uint64_t> count_{0};
};

// Hears of each request of pinned memory, from any thread and without a lock of the allocator. `of` is the allocator if each of its
// segments is one block, which its statistics count; else null.
class PinnedListener {
  public:
    virtual ~PinnedListener() = default;
    // A request, or emptying the cache, follows.
    virtual void before(at::HostAllocator* of) noexcept = 0;
    virtual void allocated(uint64_t address, size_t bytes, at::HostAllocator* of) noexcept = 0;
    // Work of a stream uses a block.
    virtual void used(uint64_t address, HostStream stream) noexcept = 0;
    // Before a free, after which `freed` has the returned number.
    virtual uint64_t freeing(uint64_t address) noexcept = 0;
    virtual void freed(uint64_t number) noexcept = 0;
    virtual void emptied(at::HostAllocator* of) noexcept = 0;
};

// PyTorch's own allocator, whose requests are counted. Its decisions do not change: every call is passed on.
class Watch final : public at::HostAllocator {
  public:
    // The listener, if any, is never destroyed.
    explicit Watch(at::HostAllocator* inner, PinnedListener* listener = nullptr) : inner_(inner), listener_(listener) {}

    Requested requested;

    c10::DataPtr allocate(size_t bytes) override {
        if (listener_ != nullptr) listener_->before(inner_);
        c10::DataPtr block = inner_->allocate(bytes);
        if (block.get() == nullptr) return block;
        void* address = block.get();
        const c10::Device device = block.device();
        if (listener_ != nullptr) listener_->allocated(number_of(address), bytes, inner_);
        auto* held = new Held{this, std::move(block), bytes};
        {
            std::unique_lock<std::shared_mutex> guard(lock_);
            held_[held] = held->block.get_context();
        }
        requested.add(bytes);
        return {address, held, &release, device};
    }

    // PyTorch's own has none either: its blocks need a context.
    c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }

    void copy_data(void* to, const void* from, size_t bytes) const override { inner_->copy_data(to, from, bytes); }

    bool record_event(void* address, void* context, HostStream stream) override {
        void* of_inner = context;
        {
            std::shared_lock<std::shared_mutex> guard(lock_);
            const auto at = held_.find(context);
            if (at != held_.end()) of_inner = at->second;
        }
        // A view that was made of an address has another context; PyTorch finds its block only by the first address.
        const void* block = of_inner == context ? address : static_cast<Held*>(context)->block.get();
        const bool is_recorded = inner_->record_event(address, of_inner, stream);
        if (is_recorded && listener_ != nullptr) listener_->used(number_of(block), stream);
        return is_recorded;
    }

    void empty_cache() override {
        if (listener_ != nullptr) listener_->before(inner_);
        inner_->empty_cache();
        if (listener_ != nullptr) listener_->emptied(inner_);
    }

    at::HostStats get_stats() override { return inner_->get_stats(); }

    void reset_accumulated_stats() override { inner_->reset_accumulated_stats(); }

    void reset_peak_stats() override {
        inner_->reset_peak_stats();
        requested.reset_peak();
    }

#if VRAMLAB_TORCH >= 211
    void begin_allocate_to_pool(c10::MempoolId_t id, StreamFilter filter) override {
        inner_->begin_allocate_to_pool(id, std::move(filter));
    }

    void end_allocate_to_pool(c10::MempoolId_t id) override { inner_->end_allocate_to_pool(id); }

    void release_pool(c10::MempoolId_t id) override { inner_->release_pool(id); }
#endif

#if VRAMLAB_TORCH >= 214
    void record_history(bool on, CreateContextFn recorder, size_t most, RecordContext when, bool clear) override {
        inner_->record_history(on, recorder, most, when, clear);
    }

    bool is_history_enabled() const override { return inner_->is_history_enabled(); }

    std::vector<HostSegmentInfo> get_segments() override { return inner_->get_segments(); }

    std::vector<TraceEntry> get_traces() override { return inner_->get_traces(); }

#endif
#if VRAMLAB_TORCH >= 215
    void record_external_register(void* address, size_t bytes) override {
        inner_->record_external_register(address, bytes);
    }

    void record_external_unregister(void* address) override { inner_->record_external_unregister(address); }
#endif

  private:
    struct Held {
        Watch* watch;
        c10::DataPtr block;
        size_t bytes;
    };

    static uint64_t number_of(const void* address) { return reinterpret_cast<uintptr_t>(address); }

    static void release(void* context) {
        std::unique_ptr<Held> held(static_cast<Held*>(context));
        if (is_forked) return;
        PinnedListener* const listener = held->watch->listener_;
        const uint64_t number = listener == nullptr ? 0 : listener->freeing(number_of(held->block.get()));
        {
            std::unique_lock<std::shared_mutex> guard(held->watch->lock_);
            held->watch->held_.erase(context);
        }
        held->watch->requested.remove(held->bytes);
        if (number == 0) return;
        held->block.clear();
        listener->freed(number);
    }

    at::HostAllocator* const inner_;
    PinnedListener* const listener_;
    // The program's blocks: PyTorch's context by the watch's.
    std::shared_mutex lock_;
    std::unordered_map<void*, void*> held_;
};

}  // namespace vramlab_shim
