// Differences between the supported versions of PyTorch.
#pragma once

#if __has_include(<torch/headeronly/version.h>)
#include <torch/headeronly/version.h>
#else
#include <torch/csrc/api/include/torch/version.h>
#endif
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>

// 211 for 2.11; the layout of PyTorch's classes changes with the minor version.
#define VRAMLAB_TORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)

#if VRAMLAB_TORCH < 209
#error "vramlab's shim needs PyTorch 2.9 or newer"
#endif

namespace vramlab_shim {

using c10::DeviceIndex;
using c10::GatheredContext;
using c10::MempoolId_t;
// Some of these names are in one or the other namespace, depending on the version.
using namespace c10::CachingDeviceAllocator;
using namespace c10::cuda::CUDACachingAllocator;
using Context = std::shared_ptr<GatheredContext>;

constexpr MempoolId_t NO_POOL = {0, 0};

#if VRAMLAB_TORCH >= 211
using StreamOfEntry = void*;
using SharedAllocator = std::shared_ptr<CUDAAllocator>;
#else
using StreamOfEntry = cudaStream_t;
using SharedAllocator = CUDAAllocator*;
#endif

}  // namespace vramlab_shim
