// The C functions that Python calls. Part of shim.cpp.

#include "guarded.h"

namespace {

// The number after `key=` in `key=value,key=value`, or `otherwise`.
uint64_t option(const std::string& options, const std::string& key, uint64_t otherwise) {
    std::istringstream parts(options);
    std::string part;
    while (std::getline(parts, part, ',')) {
        if (part.rfind(key + "=", 0) == 0) {
            return std::stoull(part.substr(key.size() + 1));
        }
    }
    return otherwise;
}

}  // namespace

extern "C" {

// The error message of the last failed call below.
__attribute__((visibility("default"))) const char* vramlab_shim_error() { return last_error.c_str(); }

// The version of PyTorch that this shim was compiled for.
__attribute__((visibility("default"))) const char* vramlab_shim_torch() { return TORCH_VERSION; }

#ifdef VRAMLAB_SHIM_SOURCE
// The digest of the sources: `_build.py` searches the file for it.
__attribute__((visibility("default"))) extern const char vramlab_shim_source[];
const char vramlab_shim_source[] = VRAMLAB_SHIM_SOURCE;
#endif

// Installs the allocator `spec` (NAME:key=value,…) of the library `file` as PyTorch's. `options`: `limit=BYTES,latency=1`.
// Returns 0 on success, also if the same spec is already installed; on failure returns 1 and changes nothing.
__attribute__((visibility("default"))) int vramlab_shim_install(const char* file, const char* spec,
                                                                const char* options) {
    using namespace vramlab_shim;
    return guarded(1, [&] {
        if (installed != nullptr) {
            TORCH_CHECK(
                installed->server.spec == spec, "PyTorch runs under vramlab:", installed->server.spec,
                " already, and cannot change to ", spec,
                ": blocks of both would mix. Use one allocator a process, or vramlab.torch.MemPool for a part of it");
            return 0;
        }
        auto* native = c10::cuda::CUDACachingAllocator::allocator.load();
        TORCH_CHECK(!native->initialized(),
                    "CUDA is in use already, under PyTorch's own allocator. Call vramlab.torch.use() before the "
                    "first use of CUDA, or start the program with VRAMLAB_ALLOC=",
                    spec);
        if (library.open == nullptr) {
            const std::string why = library.load(file);
            TORCH_CHECK(why.empty(), why);
        }
        keep_pages_from_nccl(spec);
        const std::string wanted = options == nullptr ? "" : options;
        installed =
            new Shim(native, spec, option(wanted, "limit", VRAMLAB_NO_LIMIT), option(wanted, "latency", 0) != 0);
        c10::cuda::CUDACachingAllocator::allocator.store(installed);
        c10::SetAllocator(c10::DeviceType::CUDA, installed);
        return 0;
    });
}

// Sets the limit on reserved bytes per device; VRAMLAB_NO_LIMIT removes it.
__attribute__((visibility("default"))) int vramlab_shim_set_limit(uint64_t bytes) {
    using namespace vramlab_shim;
    return guarded(1, [&] {
        TORCH_CHECK(installed != nullptr, "PyTorch runs under its own allocator; call vramlab.torch.use() first");
        installed->server.set_limit(bytes);
        return 0;
    });
}

// Starts or stops timing every call.
__attribute__((visibility("default"))) int vramlab_shim_latency(bool on) {
    using namespace vramlab_shim;
    return guarded(1, [&] {
        TORCH_CHECK(installed != nullptr, "PyTorch runs under its own allocator; call vramlab.torch.use() first");
        installed->server.set_latency(on);
        return 0;
    });
}

// A device's allocator, for the library's other functions; null if no memory was requested there yet.
__attribute__((visibility("default"))) vramlab* vramlab_shim_allocator(int device) {
    using namespace vramlab_shim;
    return guarded<vramlab*>(nullptr, [&]() -> vramlab* {
        TORCH_CHECK(installed != nullptr, "PyTorch runs under its own allocator; call vramlab.torch.use() first");
        Device* of =
            installed->initialized() ? installed->server.opened(static_cast<c10::DeviceIndex>(device)) : nullptr;
        return of == nullptr ? nullptr : of->owner->handle;
    });
}

// Serves an empty pool of torch.cuda.MemPool from its own allocator; null on failure.
__attribute__((visibility("default"))) vramlab* vramlab_shim_pool(int device, uint64_t first, uint64_t second,
                                                                  const char* spec) {
    using namespace vramlab_shim;
    return guarded<vramlab*>(nullptr, [&] {
        TORCH_CHECK(installed != nullptr, "PyTorch runs under its own allocator; call vramlab.torch.use() first");
        return installed->give_pool_allocator(static_cast<c10::DeviceIndex>(device), {first, second}, spec)->handle;
    });
}

// For scripts that check an allocator under PyTorch: VRAMLAB_ALLOC names it, VRAMLAB_LIBRARY the library's file.
__attribute__((visibility("default"))) int shim_install() {
    const char* spec = std::getenv("VRAMLAB_ALLOC");
    const char* file = std::getenv("VRAMLAB_LIBRARY");
    const int failed =
        vramlab_shim_install(file == nullptr ? "libvramlab.so" : file, spec == nullptr ? "caching" : spec, "");
    if (failed != 0) {
        std::fprintf(stderr, "vramlab: %s\n", vramlab_shim_error());
    }
    return failed;
}

// Each device's allocations, frees and peak reserved bytes, in a line.
__attribute__((visibility("default"))) const char* shim_counts() {
    using namespace vramlab_shim;
    static std::string text;
    return guarded<const char*>("", [&] {
        std::ostringstream out;
        if (installed != nullptr) {
            out << installed->server.spec;
            installed->server.each_device([&](Device& device) {
                vramlab_stats stats{};
                Device::check(library.read_stats(device.owner->handle, &stats));
                out << "; cuda:" << int(device.index) << " allocations " << stats.allocation.all.allocated << ", frees "
                    << stats.allocation.all.freed << ", peak reserved " << stats.reserved_bytes.all.peak
                    << ", device allocations " << stats.num_device_alloc;
            });
        }
        text = out.str();
        return text.c_str();
    });
}

}  // extern "C"
