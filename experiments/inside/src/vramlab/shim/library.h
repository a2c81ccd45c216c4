// The functions of libvramlab, looked up at run time: the shim is compiled on the user's machine and must not care
// where the library lies.
#pragma once

#include <dlfcn.h>
#include <cstdint>
#include <string>

extern "C" {
#include "vramlab.h"
}

namespace vramlab_shim {

// Each is named once; its type is what the header declares.
#define VRAMLAB_SHIM_NEEDS(X)                                                                                          \
    X(abi)                                                                                                             \
    X(version) X(error) X(text_free) X(open) X(close) X(allocate) X(allocate_in) X(free) X(record_stream) X(capturing) \
        X(pool_create) X(pool_release) X(pool_trim) X(pool_checkpoint) X(pool_restore) X(checkpoint_free) X(trim)      \
            X(set_limit) X(memory) X(read_stats) X(reset_peaks) X(reset_accumulated) X(visit) X(base) X(on_segment)    \
                X(latency) X(can)

struct Library {
#define VRAMLAB_SHIM_POINTER(name) decltype(&::vramlab_##name) name = nullptr;
    VRAMLAB_SHIM_NEEDS(VRAMLAB_SHIM_POINTER)
#undef VRAMLAB_SHIM_POINTER
    // What an older library may lack.
    vramlab_status (*on_free)(vramlab*, void*, void (*)(void*, uint64_t)) = nullptr;
    vramlab_status (*block_at)(vramlab*, uint64_t, vramlab_block*) = nullptr;
    vramlab_status (*pool_no_split)(vramlab*, uint64_t) = nullptr;
    vramlab_status (*peer)(vramlab*, int32_t) = nullptr;

    // Empty, or why the library cannot be used. It is never unloaded: blocks of it live as long as the process.
    std::string load(const char* path) {
        void* file = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (file == nullptr) {
            return std::string("libvramlab could not be loaded: ") + dlerror();
        }
        const char* missing = nullptr;
#define VRAMLAB_SHIM_FIND(name)                                             \
    name = reinterpret_cast<decltype(name)>(dlsym(file, "vramlab_" #name)); \
    missing = name == nullptr ? "vramlab_" #name : missing;
        VRAMLAB_SHIM_NEEDS(VRAMLAB_SHIM_FIND)
#undef VRAMLAB_SHIM_FIND
        if (missing != nullptr) {
            return std::string(path) + " has no function " + missing +
                   "; library and package are of different versions, reinstall vramlab";
        }
        if (abi() != VRAMLAB_ABI) {
            return std::string(path) + " has interface " + std::to_string(abi()) + ", this shim was built for " +
                   std::to_string(VRAMLAB_ABI) + "; reinstall vramlab";
        }
        on_free = reinterpret_cast<decltype(on_free)>(dlsym(file, "vramlab_on_free"));
        block_at = reinterpret_cast<decltype(block_at)>(dlsym(file, "vramlab_block_at"));
        pool_no_split = reinterpret_cast<decltype(pool_no_split)>(dlsym(file, "vramlab_pool_no_split"));
        peer = reinterpret_cast<decltype(peer)>(dlsym(file, "vramlab_peer"));
        return {};
    }
};

// Filled by the install, before the allocator is PyTorch's, and never changed after.
inline Library library;

}  // namespace vramlab_shim
