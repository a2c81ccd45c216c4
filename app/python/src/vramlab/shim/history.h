// PyTorch's memory history: a ring buffer of events, the context of every live block and segment, and the listeners.
#pragma once

#include "torch_versions.h"

#include <c10/util/ApproximateClock.h>
#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace vramlab_shim {

// The last `most` entries, read oldest first.
template <typename Entry>
class Ring {
  public:
    void resize(size_t most) {
        std::vector<Entry> kept = read();
        most_ = std::max<size_t>(most, 1);
        next_ = 0;
        if (kept.size() > most_) {
            kept.erase(kept.begin(), kept.end() - static_cast<ptrdiff_t>(most_));
        }
        entries_ = std::move(kept);
    }

    void push(Entry entry) {
        if (entries_.size() < most_) {
            entries_.push_back(std::move(entry));
            return;
        }
        entries_[next_] = std::move(entry);
        next_ = (next_ + 1) % most_;
    }

    void clear() {
        entries_.clear();
        next_ = 0;
    }

    std::vector<Entry> read() const {
        std::vector<Entry> out;
        out.reserve(entries_.size());
        out.insert(out.end(), entries_.begin() + static_cast<ptrdiff_t>(next_), entries_.end());
        out.insert(out.end(), entries_.begin(), entries_.begin() + static_cast<ptrdiff_t>(next_));
        return out;
    }

  private:
    size_t most_ = 1;
    size_t next_ = 0;
    std::vector<Entry> entries_;
};

// The program's compile contexts, by thread, as in PyTorch.
inline thread_local std::vector<std::string> compile_contexts;
inline thread_local std::string user_metadata;

// The arguments of `recordHistory`.
struct Recording {
    bool on = false;
    CreateContextFn recorder = nullptr;
    size_t most = 1;
    RecordContext when = RecordContext::NEVER;
    uint32_t skipped = 0;  // a bit per action

#if VRAMLAB_TORCH >= 211
    static uint32_t bits(const std::vector<std::string>& actions) {
        uint32_t out = 0;
        for (const std::string& action : actions) {
            out |= 1U << static_cast<uint32_t>(parseTraceEntryAction(action));
        }
        return out;
    }
#endif
};

struct Live {
    size_t requested = 0;
    void* stream = nullptr;
    MempoolId_t pool = NO_POOL;
    Context context;
    bool used_elsewhere = false;  // by another stream: its free may be deferred
};

struct SegmentOrigin {
    MempoolId_t pool = NO_POOL;
    Context context;
};

// The history of one device. All methods but `gather` need the lock.
//
// While the history is on, an operation of the allocator and its entries are one step under `lock`: otherwise another
// thread's entry for the same memory could precede this thread's, and the history would show two owners of one block.
// PyTorch's own lock does the same. Callbacks of the library run on the thread that holds the lock, so it is recursive.
// Code under it never waits for another lock that a caller of the allocator may hold: contexts, which need the GIL, are
// gathered before, and observers run after.
class History {
  public:
    std::recursive_mutex lock;

    // True if the ring or a listener needs entries.
    bool wanted() const { return wanted_.load(std::memory_order_relaxed); }

    // True if `live` may contain blocks: while entries are needed, and afterwards until recorded blocks are freed.
    bool knows_blocks() const { return knows_blocks_.load(std::memory_order_relaxed); }

    bool recording() const { return recording_.load(std::memory_order_relaxed); }

    // Acquires the GIL: never call it under a lock of the shim.
    Context gather(RecordContext level) const {
        if (when_.load(std::memory_order_relaxed) < level) {
            return nullptr;
        }
        CreateContextFn recorder = recorder_.load(std::memory_order_relaxed);
        return recorder == nullptr ? nullptr : recorder();
    }

    // A context for an entry or a segment. With context="state" only live blocks have one. (PyTorch's own segments then have
    // one too, until their first block is split.)
    Context beyond_blocks(const Context& context) const {
        return when_.load(std::memory_order_relaxed) >= RecordContext::ALLOC ? context : nullptr;
    }

    void set(const Recording& recording, bool clear) {
        recording_.store(recording.on);
        recorder_.store(recording.on ? recording.recorder : nullptr);
        when_.store(recording.on ? recording.when : RecordContext::NEVER);
        skipped_ = recording.skipped;
        ring_.resize(recording.most);
        if (!recording.on || clear) {
            ring_.clear();
        }
        update();
    }

    void listen(AllocatorTraceTracker listener) {
        listeners_.push_back(std::move(listener));
        update();
    }

    void add(TraceEntry::Action action, DeviceIndex device, size_t address, size_t bytes, void* stream,
             MempoolId_t pool, const Context& context, const std::string* metadata = nullptr) {
        if (!wanted()) {
            return;
        }
        TraceEntry entry(action, device, address, bytes, static_cast<StreamOfEntry>(stream), pool,
                         c10::getApproximateTime(), beyond_blocks(context),
                         compile_contexts.empty() ? std::string("N/A") : compile_contexts.back());
#if VRAMLAB_TORCH >= 210
        entry.user_metadata_ = metadata == nullptr ? user_metadata : *metadata;
#else
        (void)metadata;
#endif
        for (const AllocatorTraceTracker& listener : listeners_) {
            listener(entry);
        }
        if (recording() && (skipped_ >> static_cast<uint32_t>(action) & 1U) == 0) {
            ring_.push(std::move(entry));
        }
    }

    std::vector<TraceEntry> entries() const { return ring_.read(); }

    // Removes and returns the entry of a freed block; false if there is none.
    bool take(uint64_t address, Live& out) {
        auto at = live.find(address);
        if (at == live.end()) {
            return false;
        }
        out = std::move(at->second);
        live.erase(at);
        if (!wanted() && live.empty()) {
            knows_blocks_.store(false);
        }
        return true;
    }

    // Every live block while entries are needed; afterwards only the blocks with recorded frames, which snapshots show until
    // they are freed, as in PyTorch. A free searches it until it is empty.
    std::unordered_map<uint64_t, Live> live;
    std::unordered_map<uint64_t, SegmentOrigin> segments;
    // Blocks whose frees are deferred until other streams finish.
    std::unordered_map<uint64_t, Live> pending;

  private:
    void update() {
        wanted_.store(recording_.load() || !listeners_.empty());
        if (!wanted()) {
            forget_without_context(live);
            forget_without_context(segments);
            pending.clear();
        }
        knows_blocks_.store(wanted() || !live.empty());
    }

    template <typename Known>
    static void forget_without_context(std::unordered_map<uint64_t, Known>& known) {
        for (auto at = known.begin(); at != known.end();) {
            at = at->second.context == nullptr ? known.erase(at) : std::next(at);
        }
    }

    std::atomic<bool> wanted_{false};
    std::atomic<bool> knows_blocks_{false};
    std::atomic<bool> recording_{false};
    std::atomic<CreateContextFn> recorder_{nullptr};
    std::atomic<RecordContext> when_{RecordContext::NEVER};
    uint32_t skipped_ = 0;
    Ring<TraceEntry> ring_;
    std::vector<AllocatorTraceTracker> listeners_;
};

}  // namespace vramlab_shim
