// Random requests, uses, frees and completions of pinned memory through PyTorch's own host allocator, written as a trace.

#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <map>
#include <random>
#include <vector>

extern "C" {
uint64_t twin_recorded();
void twin_complete(uint64_t);
uint64_t twin_made();
void* twin_released();
}

namespace {

struct Live {
    at::DataPtr data;
    size_t bytes;
    int uses = 0;
};

// A freed block with the numbers of its events.
struct Waiting {
    uint64_t addr;
    size_t bytes;
    std::vector<uint64_t> events;
};

}  // namespace

extern "C" int twin_run(unsigned seed, int steps, int late, const char* path) {
    std::FILE* out = std::fopen(path, "w");
    if (out == nullptr) return 1;
    auto* allocator = at::getHostAllocator(at::DeviceType::CUDA);
    std::mt19937_64 random(seed);
    auto below = [&](uint64_t bound) { return random() % bound; };
    uint64_t time = 0;
    auto line = [&](const char* action, uint64_t addr, uint64_t bytes, uint64_t stream, const char* more = "") {
        std::fprintf(out,
                     "{\"time_ns\":%llu,\"action\":\"%s\",\"addr\":%llu,\"size\":%llu,\"stream\":%llu%s}\n",
                     (unsigned long long)++time, action, (unsigned long long)addr, (unsigned long long)bytes,
                     (unsigned long long)stream, more);
    };
    std::vector<Live> live;
    std::deque<Waiting> waiting;
    std::map<uint64_t, uint64_t> segments;
    for (int step = 0; step < steps; ++step) {
        uint64_t kind = below(100);
        if (kind < 45 || live.empty()) {
            size_t bytes = 1 + below(uint64_t{1} << (6 + below(16)));
            uint64_t before = twin_made();
            at::DataPtr data = allocator->allocate(bytes);
            uint64_t addr = reinterpret_cast<uintptr_t>(data.get());
            if (twin_made() != before) {
                size_t rounded = 1;
                while (rounded < bytes) rounded *= 2;
                segments[addr] = rounded;
                line("segment_alloc", addr, rounded, 0);
            }
            line("alloc", addr, bytes, 0);
            live.push_back({std::move(data), bytes});
        } else if (kind < 60) {
            Live& block = live[below(live.size())];
            if (block.uses >= 3) continue;
            uint64_t handle = 0x100 * (1 + below(3));
            auto stream = c10::cuda::getStreamFromExternal(reinterpret_cast<cudaStream_t>(handle), 0).unwrap();
            if (!allocator->record_event(block.data.get(), block.data.get_context(), stream)) return 2;
            ++block.uses;
            line("record_use", reinterpret_cast<uintptr_t>(block.data.get()), 0, handle);
        } else if (kind < 92) {
            size_t at = below(live.size());
            Live block = std::move(live[at]);
            live.erase(live.begin() + at);
            Waiting freed{reinterpret_cast<uintptr_t>(block.data.get()), block.bytes, {}};
            uint64_t before = twin_recorded();
            block.data.clear();
            for (uint64_t event = before + 1; event <= twin_recorded(); ++event) freed.events.push_back(event);
            bool deferred = !freed.events.empty();
            line("free_requested", freed.addr, freed.bytes, 0, deferred ? ",\"deferred\":true" : "");
            if (deferred) waiting.push_back(freed);
        } else if (kind < 99 && !waiting.empty()) {
            // Mostly in order, sometimes late: a stuck event is in front of completed ones.
            size_t at = below(100) < (uint64_t)late ? below(waiting.size()) : 0;
            for (uint64_t event : waiting[at].events) twin_complete(event);
            line("free_completed", waiting[at].addr, waiting[at].bytes, 0);
            waiting.erase(waiting.begin() + at);
        } else if (kind == 99 && below(8) == 0) {
            allocator->empty_cache();
            while (void* segment = twin_released()) {
                uint64_t addr = reinterpret_cast<uintptr_t>(segment);
                line("segment_free", addr, segments[addr], 0);
            }
        }
    }
    std::fclose(out);
    return 0;
}
