// One device: its allocator, PyTorch's private pools on it, and its memory history.
#pragma once

#include "history.h"
#include "library.h"

#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <array>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <shared_mutex>

namespace vramlab_shim {

class Device;

// An allocator of libvramlab, on one device. Never closed while it has live blocks.
struct Owner {
    vramlab* handle = nullptr;
    Device* device = nullptr;
    uint8_t index = 0;
    std::string spec;
    MempoolId_t pool = NO_POOL;  // set if the allocator serves only this pool

    bool is_of_pool() const { return pool != NO_POOL; }
};

// A deleter gets only the address of a block, not its allocator. One byte per 2 MiB of addresses holds the allocator that
// last allocated there. It is a guess, which is wrong only if small CUDA allocations share 2 MiB; the library knows its
// blocks, so a wrong guess costs a second call.
class Owners {
  public:
    static constexpr size_t MOST = 250;

    Owner* add(std::unique_ptr<Owner> owner) {
        std::unique_lock<std::shared_mutex> guard(lock_);
        size_t index = 0;
        while (index < MOST && all_[index].load() != nullptr) {
            index += 1;
        }
        TORCH_CHECK(index < MOST, "vramlab: more than ", MOST, " allocators at once; share a MemPool between its uses");
        owner->index = static_cast<uint8_t>(index);
        Owner* added = owner.release();
        all_[index].store(added);
        if (index >= count()) count_.store(index + 1, std::memory_order_release);
        // The first allocator needs no bytes: they are 0 initially.
        several_ = index > 0 || several_;
        return added;
    }

    // Closes an allocator without live blocks. Its bytes may stay: they are guesses.
    void close(Owner* owner) {
        std::unique_lock<std::shared_mutex> guard(lock_);
        all_[owner->index].store(nullptr);
        guard.unlock();
        const vramlab_status status = library.close(owner->handle);
        delete owner;
        TORCH_CHECK(status == VRAMLAB_STATUS_OK, "vramlab: ", library.error());
    }

    // Calls `act` for each allocator until it returns true; none is closed meanwhile.
    template <typename Act>
    bool any(Act&& act) {
        std::shared_lock<std::shared_mutex> guard(lock_);
        for (size_t index = 0; index < count(); index++) {
            Owner* owner = at(index);
            if (owner != nullptr && act(*owner)) {
                return true;
            }
        }
        return false;
    }

    // Calls `act` for the allocators of a device: its own, and its pools' allocators.
    template <typename Act>
    void each_of(const Device* device, Act&& act) {
        any([&](Owner& owner) {
            if (owner.device == device) {
                act(owner);
            }
            return false;
        });
    }

    void note(uint64_t address, const Owner& owner) {
        if (C10_UNLIKELY(several_)) note_index(address, owner.index);
    }

    // Null if no allocator of the library is known there.
    Owner* guess(uint64_t address) {
        return at(C10_LIKELY(!several_) ? 0 : byte_of(address).load(std::memory_order_relaxed));
    }

    // Notes that PyTorch's own allocator allocated the address, for one of its native pools.
    void note_native(uint64_t address) {
        several_ = true;
        note_index(address, NATIVE);
    }

    bool may_be_native(uint64_t address) {
        return C10_UNLIKELY(several_) && byte_of(address).load(std::memory_order_relaxed) == NATIVE;
    }

  private:
    static constexpr uint8_t NATIVE = 255;

    void note_index(uint64_t address, uint8_t index) {
        std::atomic<uint8_t>& byte = byte_of(address);
        if (byte.load(std::memory_order_relaxed) != index) byte.store(index, std::memory_order_relaxed);
    }

    std::atomic<uint8_t>& byte_of(uint64_t address) { return bytes_[(address >> 21) % bytes_.size()]; }

    // Upper bound on the used slots; some may be empty.
    size_t count() const { return count_.load(std::memory_order_acquire); }

    Owner* at(size_t index) const { return all_[index].load(std::memory_order_acquire); }

    std::shared_mutex lock_;
    std::atomic<size_t> count_{0};
    std::atomic<bool> several_{false};
    std::array<std::atomic<Owner*>, 256> all_{};
    std::array<std::atomic<uint8_t>, 1 << 20> bytes_{};
};

inline Owners owners;

// A private pool: of a CUDA graph, or a `torch.cuda.MemPool`.
struct Pool {
    MempoolId_t id = NO_POOL;
    int uses = 1;
    Owner* owner = nullptr;  // the device's allocator, or the pool's own
    uint64_t number = 0;     // the pool's number in the library; 0: the whole owner
    bool last_resort = false;
    bool native = false;  // served by PyTorch, because the program provides its allocator
};

// Sends the requests that its filter accepts to a pool.
struct Route {
    std::shared_ptr<Pool> pool;
    std::function<bool(cudaStream_t)> filter;
    cudaStream_t stream = nullptr;
    bool told = false;  // the library was notified of a capture on this stream
};

// The request behind a library call, for events on this thread.
struct Request {
    Context context;
    MempoolId_t pool = NO_POOL;
};
inline thread_local const Request* request = nullptr;

class RequestScope {
  public:
    explicit RequestScope(const Request& now) : before_(request) { request = &now; }
    ~RequestScope() { request = before_; }
    RequestScope(const RequestScope&) = delete;
    RequestScope& operator=(const RequestScope&) = delete;

  private:
    const Request* before_;
};

class Device {
  public:
    explicit Device(DeviceIndex index) : index(index) {}

    const DeviceIndex index;
    History history;
    Owner* owner = nullptr;

    // True if the fast path is not sufficient: the history is on, or requests may belong to pools.
    bool is_slow() const { return slow_.load(std::memory_order_relaxed); }

    void update() { slow_.store(history.wanted() || routes_open_.load() > 0); }

    // --- pools ---

    std::shared_ptr<Pool> pool_of(cudaStream_t stream) {
        if (routes_open_.load(std::memory_order_acquire) == 0) {
            return nullptr;
        }
        std::shared_lock<std::shared_mutex> guard(pools_lock_);
        for (const Route& route : routes_) {
            if (route.filter(stream)) {
                return route.pool;
            }
        }
        return nullptr;
    }

    std::shared_ptr<Pool> find(MempoolId_t id) {
        std::shared_lock<std::shared_mutex> guard(pools_lock_);
        auto at = pools_.find(id);
        return at == pools_.end() ? nullptr : at->second;
    }

    std::shared_ptr<Pool> at(MempoolId_t id, const char* what) {
        std::shared_ptr<Pool> pool = find(id);
        TORCH_CHECK(pool != nullptr, "vramlab: ", what, ": there is no pool (", id.first, ", ", id.second,
                    ") on cuda:", int(index));
        return pool;
    }

    // The pool's number of uses; 0 if there is no such pool.
    int uses(MempoolId_t id) {
        std::shared_lock<std::shared_mutex> guard(pools_lock_);
        auto at = pools_.find(id);
        return at == pools_.end() ? 0 : at->second->uses;
    }

    // The pool, created if necessary, with one more use.
    std::shared_ptr<Pool> use(MempoolId_t id, bool native) {
        {
            std::unique_lock<std::shared_mutex> guard(pools_lock_);
            auto at = pools_.find(id);
            if (at != pools_.end()) {
                at->second->uses += 1;
                return at->second;
            }
        }
        auto pool = std::make_shared<Pool>();
        pool->id = id;
        pool->native = native;
        if (!native) {
            pool->owner = owner;
            check(library.pool_create(owner->handle, &pool->number));
        }
        std::unique_lock<std::shared_mutex> guard(pools_lock_);
        if (!native) {
            names_[pool->number] = id;
        }
        return pools_.emplace(id, pool).first->second;
    }

    // Gives an empty pool its own allocator.
    void give_allocator(MempoolId_t id, Owner* own) {
        std::unique_lock<std::shared_mutex> guard(pools_lock_);
        auto at = pools_.find(id);
        TORCH_CHECK(at != pools_.end(), "vramlab: there is no pool (", id.first, ", ", id.second,
                    ") on cuda:", int(index));
        const uint64_t number = at->second->number;
        at->second->owner = own;
        at->second->number = 0;
        guard.unlock();
        if (number != 0) {
            check(library.pool_release(owner->handle, number));
        }
    }

    // Removes one use; the last one releases the pool.
    std::shared_ptr<Pool> release(MempoolId_t id) {
        std::shared_ptr<Pool> pool;
        {
            std::unique_lock<std::shared_mutex> guard(pools_lock_);
            auto at = pools_.find(id);
            TORCH_CHECK(at != pools_.end(), "vramlab: releasePool of (", id.first, ", ", id.second,
                        "), which is no pool of cuda:", int(index));
            if (--at->second->uses > 0) {
                return at->second;
            }
            pool = at->second;
            released_.push_back(pool);
            pools_.erase(at);
        }
        if (!pool->native && pool->number != 0) {
            check(library.pool_release(pool->owner->handle, pool->number));
        }
        return pool;
    }

    // Releases free segments of released pools, of one or of all; returns the allocators that no pool needs any more.
    std::vector<Owner*> trim_released(MempoolId_t id) {
        std::vector<std::shared_ptr<Pool>> pools;
        {
            std::shared_lock<std::shared_mutex> guard(pools_lock_);
            std::copy_if(released_.begin(), released_.end(), std::back_inserter(pools),
                         [&](const auto& pool) { return !pool->native && (id == NO_POOL || pool->id == id); });
        }
        std::vector<Owner*> done;
        for (const auto& pool : pools) {
            uint64_t bytes = 0;
            bool gone = false;
            if (pool->number != 0) {
                check(library.pool_trim(pool->owner->handle, pool->number, &bytes));
                // Checking each pool for segments is too slow when all are trimmed.
                gone = id != NO_POOL && !holds_segments(*pool);
            } else {
                check(library.trim(pool->owner->handle, 0, &bytes));
                vramlab_stats stats{};
                check(library.read_stats(pool->owner->handle, &stats));
                gone = stats.active.all.current == 0;
                if (gone) {
                    done.push_back(pool->owner);
                }
            }
            if (gone) {
                std::unique_lock<std::shared_mutex> guard(pools_lock_);
                released_.erase(std::remove(released_.begin(), released_.end(), pool), released_.end());
                names_.erase(pool->number);
            }
        }
        return done;
    }

    void open_route(Route route) {
        std::unique_lock<std::shared_mutex> guard(pools_lock_);
        for (const Route& other : routes_) {
            TORCH_CHECK(other.pool->id != route.pool->id, "vramlab: requests go to pool (", route.pool->id.first, ", ",
                        route.pool->id.second, ") already");
        }
        routes_.push_back(std::move(route));
        routes_open_ += 1;
        guard.unlock();
        update();
    }

    std::shared_ptr<Pool> close_route(MempoolId_t id) {
        std::unique_lock<std::shared_mutex> guard(pools_lock_);
        auto at =
            std::find_if(routes_.begin(), routes_.end(), [&](const Route& route) { return route.pool->id == id; });
        TORCH_CHECK(at != routes_.end(), "vramlab: no requests go to pool (", id.first, ", ", id.second, ")");
        const Route route = std::move(*at);
        routes_.erase(at);
        routes_open_ -= 1;
        guard.unlock();
        update();
        if (route.told) tell_capture(false);
        return route.pool;
    }

    bool has_routes() const { return routes_open_.load() > 0; }

    std::vector<std::shared_ptr<Pool>> last_resorts() {
        std::vector<std::shared_ptr<Pool>> out;
        std::shared_lock<std::shared_mutex> guard(pools_lock_);
        for (const auto& [id, pool] : pools_) {
            // PyTorch's own allocator does not accept a second route to a pool.
            const bool open = std::any_of(routes_.begin(), routes_.end(),
                                          [&](const Route& route) { return route.pool == pool; });
            if (pool->last_resort && !(pool->native && open)) {
                out.push_back(pool);
            }
        }
        return out;
    }

    MempoolId_t name_of(const Owner& of, uint64_t number) {
        if (of.is_of_pool()) {
            return of.pool;
        }
        if (number == 0) {
            return NO_POOL;
        }
        std::shared_lock<std::shared_mutex> guard(pools_lock_);
        auto at = names_.find(number);
        return at == names_.end() ? NO_POOL : at->second;
    }

    // Notifies the library of captures that started after a route was opened. Before PyTorch 2.13 the allocator cannot
    // distinguish a capture from a MemPool's region, and the capture starts after the route: so each request checks the
    // stream.
    void notice_captures() {
#if VRAMLAB_TORCH < 213
        if (C10_LIKELY(!has_routes())) {
            return;
        }
        size_t begun = 0;
        {
            std::unique_lock<std::shared_mutex> guard(pools_lock_);
            for (Route& route : routes_) {
                if (!route.told && is_capturing(route.stream)) {
                    route.told = true;
                    begun += 1;
                }
            }
        }
        for (; begun > 0; begun--) {
            tell_capture(true);
        }
#endif
    }

    // Allocators on one device share the state of its captures. PyTorch's setting is read when a capture starts.
    void tell_capture(bool open) {
        if (open) {
            const bool reuse = CUDAAllocatorConfig::graph_capture_record_stream_reuse();
            owners.each_of(this, [&](Owner& each) {
                const vramlab_status set = library.reuse_in_captures(each.handle, reuse);
                if (set == VRAMLAB_STATUS_INCAPABLE && reuse) {
                    TORCH_WARN_ONCE("vramlab: ", library.error(), "; graph_capture_record_stream_reuse does nothing");
                } else if (set != VRAMLAB_STATUS_INCAPABLE) {
                    check(set);
                }
            });
        }
        check(library.capturing(owner->handle, open));
    }

    bool in_capture() {
        std::shared_lock<std::shared_mutex> guard(pools_lock_);
        return marked_captures_ > 0 ||
               std::any_of(routes_.begin(), routes_.end(), [](const Route& route) { return route.told; });
    }

    void mark_capture(bool open) {
        {
            std::unique_lock<std::shared_mutex> guard(pools_lock_);
            marked_captures_ += open ? 1 : -1;
        }
        tell_capture(open);
    }

    // --- segments ---

    // Numbers segments, or mapped ranges, in the order of their creation. Unlike addresses, the order is the same in all
    // ranks of a job, so PyTorch registers a pool's segments with NCCL in this order.
    void note_segment(bool came, uint64_t address, uint64_t bytes) {
        std::lock_guard<std::mutex> guard(order_lock_);
        const uint64_t end = address + bytes;
        if (came) {
            order_[address] = Part{end, next_in_order_++};
            return;
        }
        auto at = first_part(address);
        while (at != order_.end() && at->first < end) {
            const auto [start, part] = *at;
            at = order_.erase(at);
            if (start < address) order_[start] = Part{address, part.order};
            if (part.end > end) order_[end] = Part{part.end, part.order};
        }
    }

    // The lowest number of the range's parts.
    int32_t order_of(uint64_t address, uint64_t bytes) {
        std::lock_guard<std::mutex> guard(order_lock_);
        int32_t out = std::numeric_limits<int32_t>::max();
        for (auto at = first_part(address); at != order_.end() && at->first < address + bytes; ++at) {
            out = std::min(out, at->second.order);
        }
        return out;
    }

    // --- peers ---

    // Gives kernels of another GPU access to current and future mapped memory. Memory of cudaMalloc is accessible to peers
    // without it.
    void add_peer(DeviceIndex peer) {
        {
            std::unique_lock<std::shared_mutex> guard(peers_lock_);
            if (std::find(peers_.begin(), peers_.end(), peer) != peers_.end()) return;
            peers_.push_back(peer);
            has_peers_ = true;
        }
        std::vector<std::pair<uint64_t, uint64_t>> mapped;
        check(library.visit(
            owner->handle, &mapped,
            [](void* context, const vramlab_segment* segment) {
                auto& to = *static_cast<std::vector<std::pair<uint64_t, uint64_t>>*>(context);
                if (segment->expandable) to.emplace_back(segment->address, segment->bytes);
            },
            [](void*, const vramlab_block*) {}));
        for (const auto& [address, bytes] : mapped) open_to_peers(address, bytes);
    }

    void open_to_peers(uint64_t address, uint64_t bytes) {
        if (C10_LIKELY(!has_peers_)) return;
        std::vector<CUmemAccessDesc> access;
        {
            std::shared_lock<std::shared_mutex> guard(peers_lock_);
            for (const DeviceIndex peer : peers_) {
                access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, {peer}}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
            }
        }
        using SetAccess = CUresult (*)(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t);
        static const auto set_access =
            reinterpret_cast<SetAccess>(dlsym(dlopen("libcuda.so.1", RTLD_LAZY), "cuMemSetAccess"));
        const CUresult result =
            set_access == nullptr ? CUDA_ERROR_NOT_FOUND : set_access(address, bytes, access.data(), access.size());
        if (result != CUDA_SUCCESS) {
            TORCH_WARN("vramlab: ", bytes, " bytes at ", reinterpret_cast<void*>(address), " on cuda:", int(index),
                       " stay closed to other GPUs (cuMemSetAccess: error ", int(result), ")");
        }
    }

    // --- errors ---

    // Throws the error message of a failed library call.
    static void check(vramlab_status status) { TORCH_CHECK(status == VRAMLAB_STATUS_OK, "vramlab: ", library.error()); }

  private:
    struct Part {
        uint64_t end = 0;
        int32_t order = 0;
    };

    // The first part that ends after an address.
    std::map<uint64_t, Part>::iterator first_part(uint64_t address) {
        auto at = order_.upper_bound(address);
        if (at != order_.begin() && std::prev(at)->second.end > address) --at;
        return at;
    }

    static bool holds_segments(const Pool& pool) {
        std::pair<uint64_t, bool> sought(pool.number, false);
        check(library.visit(
            pool.owner->handle, &sought,
            [](void* context, const vramlab_segment* segment) {
                auto& to = *static_cast<std::pair<uint64_t, bool>*>(context);
                to.second |= segment->pool == to.first;
            },
            [](void*, const vramlab_block*) {}));
        return sought.second;
    }

    static bool is_capturing(cudaStream_t stream) {
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        const cudaError_t error = cudaStreamIsCapturing(stream, &status);
        if (error != cudaSuccess) {
            // The legacy default stream returns this error while a blocking stream is being captured.
            (void)cudaGetLastError();
            return error == cudaErrorStreamCaptureImplicit;
        }
        return status != cudaStreamCaptureStatusNone;
    }

    std::atomic<bool> slow_{false};
    std::shared_mutex pools_lock_;
    std::map<MempoolId_t, std::shared_ptr<Pool>> pools_;
    std::deque<std::shared_ptr<Pool>> released_;
    std::unordered_map<uint64_t, MempoolId_t> names_;
    std::vector<Route> routes_;
    std::atomic<int> routes_open_{0};
    std::mutex order_lock_;
    std::map<uint64_t, Part> order_;
    int32_t next_in_order_ = 0;
    std::shared_mutex peers_lock_;
    std::vector<DeviceIndex> peers_;
    std::atomic<bool> has_peers_{false};
    int marked_captures_ = 0;
};

}  // namespace vramlab_shim
