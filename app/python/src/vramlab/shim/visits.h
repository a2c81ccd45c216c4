// Iterates over an allocator's segments and blocks.
#pragma once

#include "device.h"

namespace vramlab_shim {

// PyTorch 2.10 and newer do not register a segment without a number.
template <typename Segment>
auto number_segment(Segment& to, int32_t order, int) -> decltype(void(to.registration_counter)) {
    to.registration_counter = order;
}

template <typename Segment>
void number_segment(Segment&, int32_t, long) {}

class Visit {
  public:
    template <typename Segment, typename Block>
    static void both(const Owner& owner, Segment&& segment, Block&& block) {
        std::pair<Segment&, Block&> callbacks(segment, block);
        using Callbacks = decltype(callbacks);
        const vramlab_status status = library.visit(
            owner.handle, &callbacks,
            [](void* context, const vramlab_segment* of) { static_cast<Callbacks*>(context)->first(*of); },
            [](void* context, const vramlab_block* of) { static_cast<Callbacks*>(context)->second(*of); });
        // An allocator that cannot list its segments has none to show.
        if (status != VRAMLAB_STATUS_INCAPABLE) {
            Device::check(status);
        }
    }

    template <typename Segment>
    static void segments(const Owner& owner, Segment&& segment) {
        both(owner, segment, [](const vramlab_block&) {});
    }

    static size_t largest_free(const Owner& owner) {
        size_t out = 0;
        both(
            owner, [](const vramlab_segment&) {},
            [&](const vramlab_block& block) {
                if (block.state == VRAMLAB_BLOCK_STATE_FREE) {
                    out = std::max<size_t>(out, block.bytes);
                }
            });
        return out;
    }

    // The live blocks of a pool.
    static std::unordered_set<void*> live(const Owner& owner, uint64_t pool) {
        std::unordered_set<void*> out;
        bool inside = false;
        both(
            owner, [&](const vramlab_segment& segment) { inside = segment.pool == pool; },
            [&](const vramlab_block& block) {
                if (inside && block.state == VRAMLAB_BLOCK_STATE_ALLOCATED) {
                    out.insert(reinterpret_cast<void*>(block.address));
                }
            });
        return out;
    }

    static size_t allocated_in_pools(const Owner& owner) {
        size_t out = 0;
        segments(owner,
                 [&](const vramlab_segment& segment) { out += segment.pool == 0 ? 0 : segment.allocated_bytes; });
        return out;
    }

    // Appends segments in PyTorch's format: of one pool, or all. Needs the history's lock.
    static void describe(const Owner& owner, MempoolId_t id, std::vector<SegmentInfo>& out) {
        Device& device = *owner.device;
        History& history = device.history;
        bool wanted = false;
        both(
            owner,
            [&](const vramlab_segment& segment) {
                const MempoolId_t pool = device.name_of(owner, segment.pool);
                wanted = id == NO_POOL || pool == id;
                if (!wanted) {
                    return;
                }
                SegmentInfo& to = out.emplace_back();
                to.device = device.index;
                to.address = segment.address;
                to.total_size = segment.bytes;
                number_segment(to, device.order_of(segment.address, segment.bytes), 0);
                to.requested_size = segment.requested_bytes;
                to.allocated_size = segment.allocated_bytes;
                to.active_size = segment.active_bytes;
                to.stream = reinterpret_cast<cudaStream_t>(segment.stream);
                to.is_large = segment.is_large;
                to.is_expandable = segment.expandable;
                to.owner_private_pool_id = pool;
                auto origin = history.segments.find(segment.address);
                if (origin != history.segments.end()) {
                    to.context_when_allocated = origin->second.context;
                }
            },
            [&](const vramlab_block& block) {
                if (!wanted) {
                    return;
                }
                BlockInfo& to = out.back().blocks.emplace_back();
                to.size = block.bytes;
                to.requested_size = block.requested;
                to.allocated = block.state == VRAMLAB_BLOCK_STATE_ALLOCATED;
                to.active = block.state != VRAMLAB_BLOCK_STATE_FREE;
                if (to.active) {
                    auto& known = to.allocated ? history.live : history.pending;
                    auto at = known.find(block.address);
                    if (at != known.end()) {
                        to.context_when_allocated = at->second.context;
                    }
                }
            });
    }

    // Records blocks that were allocated before the history was on: their frees need a size and a stream. Needs the history's
    // lock.
    static void adopt(const Owner& owner) {
        Device& device = *owner.device;
        History& history = device.history;
        void* stream = nullptr;
        MempoolId_t pool = NO_POOL;
        both(
            owner,
            [&](const vramlab_segment& segment) {
                stream = reinterpret_cast<void*>(segment.stream);
                pool = device.name_of(owner, segment.pool);
                history.segments.emplace(segment.address, SegmentOrigin{pool, nullptr});
            },
            [&](const vramlab_block& block) {
                if (block.state == VRAMLAB_BLOCK_STATE_ALLOCATED) {
                    history.live.emplace(block.address, Live{block.requested, stream, pool, nullptr, false});
                }
            });
    }
};

}  // namespace vramlab_shim
