//! Names of calls of both APIs and all versions.

use vramlab_nsight::names::{Scope, base, kind, scope};

#[test]
fn names_of_both_apis_have_one_kind() {
    for (name, expected_base, expected_kind, expected_scope) in [
        ("cuMemFree_v2", "cuMemFree", "mem_free", Scope::Device),
        ("cudaFree_v3020", "cudaFree", "mem_free", Scope::Device),
        ("cudaFreeHost_v3020", "cudaFreeHost", "host_free", Scope::Device),
        ("cudaFreeArray_v3020", "cudaFreeArray", "mem_free", Scope::Device),
        ("cuMemAlloc_v2", "cuMemAlloc", "mem_alloc", Scope::Nothing),
        ("cudaMalloc_v3020", "cudaMalloc", "mem_alloc", Scope::Nothing),
        ("cuMemAllocFromPoolAsync_ptsz", "cuMemAllocFromPoolAsync", "mem_alloc_async", Scope::Nothing),
        ("cudaMallocAsync_ptsz_v11020", "cudaMallocAsync", "mem_alloc_async", Scope::Nothing),
        ("cudaFreeAsync_v11020", "cudaFreeAsync", "mem_free_async", Scope::Nothing),
        ("cuLaunchKernel_ptsz", "cuLaunchKernel", "kernel_launch", Scope::Room),
        ("cudaLaunchKernelExC_v11060", "cudaLaunchKernelExC", "kernel_launch", Scope::Room),
        ("cuLaunchCooperativeKernel", "cuLaunchCooperativeKernel", "kernel_launch", Scope::Room),
        ("cudaStreamSynchronize_v3020", "cudaStreamSynchronize", "stream_synchronize", Scope::Stream),
        ("cuCtxSynchronize", "cuCtxSynchronize", "device_synchronize", Scope::Device),
        ("cudaDeviceSynchronize_v3020", "cudaDeviceSynchronize", "device_synchronize", Scope::Device),
        ("cuMemcpyDtoH_v2", "cuMemcpyDtoH", "copy_to_host", Scope::Own),
        ("cuMemcpyDtoHAsync_v2_ptsz", "cuMemcpyDtoHAsync", "copy_to_host", Scope::Nothing),
        ("cudaMemcpy_v3020", "cudaMemcpy", "copy", Scope::Own),
        ("cuMemUnmap", "cuMemUnmap", "mem_unmap", Scope::Device),
        ("cuFuncGetAttribute", "cuFuncGetAttribute", "cuFuncGetAttribute", Scope::Nothing),
        ("malloc", "malloc", "malloc", Scope::Nothing),
        ("cublasCreate_v2", "cublasCreate", "cublasCreate", Scope::Nothing),
    ] {
        let base = base(name);
        assert_eq!((base, kind(base), scope(base)), (expected_base, expected_kind, expected_scope), "{name}");
    }
}
