// The functions of libvramlab, resolved at run time: the shim is compiled on the user's machine, independently of the
// library's location.
#pragma once

#include <dlfcn.h>
#include <cstdint>
#include <string>

extern "C" {
#include "vramlab.h"
}

namespace vramlab_shim {

// Each function is named once; its type comes from the header.
// clang-format off
#define VRAMLAB_SHIM_NEEDS(X) \
    X(abi) X(version) X(error) X(text_free) X(open) X(close) X(allocate) X(allocate_in) X(free) X(record_stream) \
    X(capturing) X(reuse_in_captures) X(pool_create) X(pool_release) X(pool_trim) X(pool_checkpoint) X(pool_restore) \
    X(checkpoint_free) X(trim) X(set_limit) X(memory) X(read_stats) X(reset_peaks) X(reset_accumulated) X(visit) \
    X(base) X(block_at) X(on_segment) X(on_free) X(latency) X(can) X(export_block) X(exported_descriptor) \
    X(import_pages) X(import_close) X(has_pages) X(record_stream_on) X(read_pinning)
// clang-format on

struct Library {
#define VRAMLAB_SHIM_POINTER(name) decltype(&::vramlab_##name) name = nullptr;
    VRAMLAB_SHIM_NEEDS(VRAMLAB_SHIM_POINTER)
#undef VRAMLAB_SHIM_POINTER
    // Returns an empty text, or why the library cannot be used. It is never unloaded: its blocks live as long as the process.
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
        return {};
    }
};

// Filled by the installation, before the allocator is PyTorch's, and constant afterwards.
inline Library library;

}  // namespace vramlab_shim
