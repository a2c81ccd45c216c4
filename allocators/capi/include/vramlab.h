// libvramlab: GPU memory allocators as a C library. Made from allocators/capi/src: change it there.
//
// The program promises of every function:
// - a vramlab pointer came from vramlab_open and was not closed, a checkpoint was not given back. Null is an error, no crash.
// - other pointers are null or point to memory of their type that no other thread uses during the call.
// - a stream is the handle of a live CUDA stream of the device until vramlab_stream_gone (0: the legacy default stream, 2: the
//   thread's own); on a simulated device it is any number.
//   No thread ends a capture of a stream while the call of another one names it.
// - work that uses a block is queued before its free, on the block's stream or on streams that were recorded for it.
// Any thread may call, at any time of its life and the process's: also in handlers of atexit() and destructors of thread-specific data.
// Not in handlers of signals, because calls take locks.
// In a child after fork() every call is VRAMLAB_STATUS_FORKED.

#ifndef VRAMLAB_H
#define VRAMLAB_H

#include <stdbool.h>
#include <stdint.h>

// Number of this interface. It changes when a program that was built with an older header no longer works.
#define VRAMLAB_ABI 1

// No limit, for `vramlab_set_limit`.
#define VRAMLAB_NO_LIMIT UINT64_MAX

// The allocator has private pools.
#define VRAMLAB_CAN_POOLS 1

// Private pools can be restored to a checkpoint.
#define VRAMLAB_CAN_CHECKPOINT 2

// The allocator knows its segments and blocks.
#define VRAMLAB_CAN_SNAPSHOT 4

// Segments are ranges of addresses that are mapped in parts.
#define VRAMLAB_CAN_EXPAND 8

// Every block has the address that PyTorch's allocator would return.
#define VRAMLAB_FOLLOWS_PYTORCH 16

// A page has a fabric handle instead of a file descriptor.
#define VRAMLAB_FABRIC -2

// The result of a call. `vramlab_error` has the text of the thread's last failure.
enum vramlab_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Success.
  VRAMLAB_STATUS_OK = 0,
  // Neither the allocator nor the device has the memory, or the limit does not allow it.
  VRAMLAB_STATUS_OUT_OF_MEMORY = 1,
  // An argument that is never valid: a null pointer, more than 4 EiB, a text that is not UTF-8.
  VRAMLAB_STATUS_INVALID = 2,
  // There is no allocator, setting, value, device or pool of this name; the text contains the most similar name.
  VRAMLAB_STATUS_UNKNOWN = 3,
  // That GPU does not exist, or cannot be used.
  VRAMLAB_STATUS_NO_DEVICE = 4,
  // No live block of this allocator begins at the address: it is foreign, was freed before, or belongs to another device.
  VRAMLAB_STATUS_FOREIGN = 5,
  // The allocator or the device does not support this.
  VRAMLAB_STATUS_INCAPABLE = 6,
  // A call of the driver failed.
  VRAMLAB_STATUS_DRIVER = 7,
  // Something is still in use.
  VRAMLAB_STATUS_LIVE = 8,
  // The process was forked from the one that opened the allocator.
  VRAMLAB_STATUS_FORKED = 9,
  // A file could not be written.
  VRAMLAB_STATUS_IO = 10,
  // A bug of this library.
  VRAMLAB_STATUS_INTERNAL = 11,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum vramlab_status vramlab_status;
#else
typedef int32_t vramlab_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// The state of a block.
enum vramlab_block_state
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Live.
  VRAMLAB_BLOCK_STATE_ALLOCATED = 0,
  // Freed, and still used by a stream.
  VRAMLAB_BLOCK_STATE_PENDING_FREE = 1,
  // Reusable.
  VRAMLAB_BLOCK_STATE_FREE = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum vramlab_block_state vramlab_block_state;
#else
typedef int32_t vramlab_block_state;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// An event of a segment, or of a mapped range of one.
enum vramlab_segment_action
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // The device allocated it.
  VRAMLAB_SEGMENT_ACTION_ALLOC = 0,
  // It was released to the device.
  VRAMLAB_SEGMENT_ACTION_FREE = 1,
  // Memory was mapped behind its addresses.
  VRAMLAB_SEGMENT_ACTION_MAP = 2,
  // Memory behind its addresses was unmapped.
  VRAMLAB_SEGMENT_ACTION_UNMAP = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum vramlab_segment_action vramlab_segment_action;
#else
typedef int32_t vramlab_segment_action;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// An allocator on one device.
typedef struct vramlab vramlab;

// The state of a private pool at one moment.
typedef struct vramlab_checkpoint vramlab_checkpoint;

// A quantity over time.
typedef struct vramlab_gauge {
  // Value now.
  uint64_t current;
  // Highest value since the start or the last `vramlab_reset_peaks`. With several threads that use several streams at a time,
  // that of `caching` is an upper bound: it adds up the peaks of the streams.
  uint64_t peak;
  // Sum of all increases.
  uint64_t allocated;
  // Sum of all decreases.
  uint64_t freed;
} vramlab_gauge;

// A quantity for all memory and for PyTorch's two pools; zero where an allocator does not have them.
typedef struct vramlab_pooled {
  // All memory.
  struct vramlab_gauge all;
  // The small pool.
  struct vramlab_gauge small_pool;
  // The large pool.
  struct vramlab_gauge large_pool;
} vramlab_pooled;

// PyTorch's statistics, in bytes and numbers.
typedef struct vramlab_stats {
  // Live blocks.
  struct vramlab_pooled allocation;
  // Segments.
  struct vramlab_pooled segment;
  // Live blocks and deferred frees.
  struct vramlab_pooled active;
  // Free blocks in segments that are partly in use.
  struct vramlab_pooled inactive_split;
  // Bytes of `allocation`.
  struct vramlab_pooled allocated_bytes;
  // Reserved bytes. Of `stream-ordered` the sums are 0, because its driver does not report them.
  struct vramlab_pooled reserved_bytes;
  // Bytes of `active`.
  struct vramlab_pooled active_bytes;
  // Bytes of `inactive_split`.
  struct vramlab_pooled inactive_split_bytes;
  // Requested bytes, before rounding.
  struct vramlab_pooled requested_bytes;
  // Blocks of at least `max_split_size`.
  struct vramlab_gauge oversize_allocations;
  // Segments of at least `max_split_size`.
  struct vramlab_gauge oversize_segments;
  // Requests that were repeated after a cache flush.
  uint64_t num_alloc_retries;
  // Requests that were refused for lack of memory.
  uint64_t num_ooms;
  // Number of waits for all deferred frees.
  uint64_t num_sync_all_streams;
  // Allocation calls of the driver.
  uint64_t num_device_alloc;
  // Free calls of the driver.
  uint64_t num_device_free;
  // The setting of that name, `UINT64_MAX` for none.
  uint64_t max_split_size;
} vramlab_stats;

// A segment, for `vramlab_visit`.
typedef struct vramlab_segment {
  // First address.
  uint64_t address;
  // Size in bytes.
  uint64_t bytes;
  // Stream that its free blocks serve.
  uint64_t stream;
  // Private pool that it belongs to; 0 for none.
  uint64_t pool;
  // Whether it belongs to the large pool.
  bool is_large;
  // Whether it is a mapped range of an expandable segment.
  bool expandable;
  // Bytes in live blocks.
  uint64_t allocated_bytes;
  // Bytes in live blocks and deferred frees.
  uint64_t active_bytes;
  // Requested bytes in those.
  uint64_t requested_bytes;
} vramlab_segment;

// A block of a segment, for `vramlab_visit`.
typedef struct vramlab_block {
  // First address.
  uint64_t address;
  // Size in bytes.
  uint64_t bytes;
  // Requested bytes; 0 for a free block.
  uint64_t requested;
  // Its state.
  vramlab_block_state state;
} vramlab_block;

// An event of a segment.
typedef struct vramlab_segment_event {
  // Its kind.
  vramlab_segment_action action;
  // First address.
  uint64_t address;
  // Size in bytes.
  uint64_t bytes;
  // The stream whose request allocated it.
  uint64_t stream;
} vramlab_segment_event;

// Times of calls that pin host memory, or release it, in nanoseconds.
typedef struct vramlab_durations {
  // Number of calls since the last `vramlab_reset_accumulated`.
  uint64_t count;
  // Their sum.
  uint64_t total_ns;
  // The longest since the last `vramlab_reset_peaks`.
  uint64_t max_ns;
  // The shortest since then; 0 where there was none.
  uint64_t min_ns;
} vramlab_durations;

// Calls that pin host memory and release it.
typedef struct vramlab_pinning {
  // Calls that pin.
  struct vramlab_durations alloc;
  // Calls that release.
  struct vramlab_durations free;
} vramlab_pinning;

// The pages around an exported block.
typedef struct vramlab_exported {
  // First address of the first page.
  uint64_t address;
  // Bytes of each page.
  uint64_t page_bytes;
  // Number of pages.
  uint64_t pages;
} vramlab_exported;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The number of this interface: [`VRAMLAB_ABI`] of the header that the library was built with.
uint32_t vramlab_abi(void);

// The version of the library.
const char *vramlab_version(void);

// The text of this thread's last failing call; empty before the first. It lives until the thread's next failing call or the
// thread's end. A text of more than 4095 bytes is truncated.
const char *vramlab_error(void);

// The name of a status. The text lives forever.
const char *vramlab_status_name(int32_t status);

// Frees a text that a call returned. Null is fine.
//
// # Safety
// It came from this library and is freed once.
void vramlab_text_free(char *text);

// Opens an allocator: `NAME` or `NAME:key=value,key=value`, as in the programs of this project. The device is `cuda`, `cuda:N`,
// `sim` (a simulated H200), `sim:N` (further ones) or `sim:FILE` (with a profile), or `host:` before one of the first four: pinned
// memory of the host, for allocators such as `host-exact`, see `vramlab_record_stream_on`. Opening the first allocator on a GPU
// takes about a second.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_open(const char *name,
                            const char *device,
                            struct vramlab **out);

// Whether `vramlab_open` would accept an allocator of a GPU's memory and its settings. Opens nothing. It also refuses a setting that
// has no effect beside the others, such as `garbage_collection_threshold` without `memory_limit`: `vramlab_open` accepts it, because
// `vramlab_set_limit` may set the limit later.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_check(const char *name);

// Closes an allocator: waits for the device, and releases everything, also live blocks. In a callback of `vramlab_on_segment` or
// `vramlab_on_free` the status is `VRAMLAB_STATUS_LIVE`, and nothing is closed: its call has not returned.
//
// # Safety
// See the top of this file; no other thread uses the allocator or will.
vramlab_status vramlab_close(struct vramlab *vramlab);

// Every allocator of a GPU's memory with its settings and their defaults, as JSON.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_allocators_json(char **out);

// The settings that an allocator follows of PyTorch's, as JSON. `name` is as for `vramlab_open`, `conf` is the text of
// `PYTORCH_CUDA_ALLOC_CONF`, and `limit` is the memory limit in bytes or `VRAMLAB_NO_LIMIT`. Opens nothing. The result is an
// object:
//
// - `settings`: names and values, to append to `name`. A setting that `name` gives is not among them.
// - `ignored`: keys that the allocator does not have, each with a hint in brackets where there is one.
// - `fixed`: keys that count only when the allocator is opened. PyTorch itself follows the others.
//
// `VRAMLAB_STATUS_UNKNOWN` where the name is unknown or PyTorch would refuse the text. The text may have keys of a newer PyTorch.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_torch_conf_json(const char *name,
                                       const char *conf,
                                       uint64_t limit,
                                       char **out);

// Allocates `bytes` for work on a stream. For 0 bytes the address is 0, which needs no free.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_allocate(struct vramlab *vramlab, uint64_t bytes, uint64_t stream, uint64_t *out);

// Allocates from the memory of a private pool.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_allocate_in(struct vramlab *vramlab,
                                   uint64_t pool,
                                   uint64_t bytes,
                                   uint64_t stream,
                                   uint64_t *out);

// Frees the block that begins at an address. Address 0 is fine. With `VRAMLAB_STATUS_DRIVER` the program no longer owns the block,
// but its memory is reusable only after a wait for the device, as in `vramlab_trim`; until then it counts as active and requested.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_free(struct vramlab *vramlab,
                            uint64_t address);

// Announces that work queued so far on a stream, not the block's own, uses a block: its memory serves no other request before that
// work has completed.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_record_stream(struct vramlab *vramlab,
                                     uint64_t address,
                                     uint64_t stream);

// Announces that a stream is about to be destroyed. Waits for the device; then no block waits for the stream any more. This covers
// every allocator of the process on that device, so one call is enough. Blocks of the stream can be freed as usual, before, during
// and after the call, and so can blocks that it was recorded for. After the call nothing of this library names the stream any
// more.
//
// # Safety
// See the top of this file; the stream is still there, and no other thread's call names it.
vramlab_status vramlab_stream_gone(struct vramlab *vramlab,
                                   uint64_t stream);

// Announces that the program began to capture a graph on the device, or that such a capture has ended. Calls are counted. While a
// capture is open the library does not wait for the device, and records no event on a stream that is captured.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_capturing(struct vramlab *vramlab,
                                 bool open);

// Sets whether a block that is freed while the program captures a graph, after other streams used it there, may be reused within
// that capture, once its stream follows their work. Off by default: it is reusable after the capture. The status is
// `VRAMLAB_STATUS_INCAPABLE` where the allocator does not support this.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_reuse_in_captures(struct vramlab *vramlab,
                                         bool on);

// Creates a private pool. Its number is not 0 and is never reused.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_pool_create(struct vramlab *vramlab, uint64_t *out);

// Announces that a private pool gets no more requests. Its free segments are released when free segments are released the next
// time.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_pool_release(struct vramlab *vramlab,
                                    uint64_t pool);

// Releases the free segments of a released private pool. `released` may be null.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_pool_trim(struct vramlab *vramlab, uint64_t pool, uint64_t *released);

// Records the current state of a private pool. The status is `VRAMLAB_STATUS_INCAPABLE` where the allocator cannot restore it.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_pool_checkpoint(struct vramlab *vramlab,
                                       uint64_t pool,
                                       struct vramlab_checkpoint **out);

// Restores a private pool to a checkpoint: every live block of it is freed, and passed to `freed`; then the blocks that were live
// at the checkpoint are live again at their addresses, and passed to `created`. Both may be null. They are called after the
// restore, while no lock is held.
//
// A restore that fails changes nothing: the live blocks stay live. It fails with `VRAMLAB_STATUS_LIVE` or `VRAMLAB_STATUS_UNKNOWN`
// when the pool was released, when memory of the checkpoint was released to the device, and when a block there is freed or live
// and other streams still use it.
//
// # Safety
// See the top of this file; the callbacks may be called with `context`. No other thread allocates from the pool meanwhile.
vramlab_status vramlab_pool_restore(struct vramlab *vramlab,
                                    const struct vramlab_checkpoint *checkpoint,
                                    void *context,
                                    void (*freed)(void*, uint64_t),
                                    void (*created)(void*, uint64_t, uint64_t, uint64_t));

// Frees a checkpoint. Null is fine.
//
// # Safety
// It came from this library and is freed once.
void vramlab_checkpoint_free(struct vramlab_checkpoint *checkpoint);

// Waits for deferred frees, and releases free segments while more than `keep_bytes` are reserved. `released` may be null.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_trim(struct vramlab *vramlab,
                            uint64_t keep_bytes,
                            uint64_t *released);

// Sets the maximum of reserved bytes, at any time. Nothing is released immediately: memory above a lower limit stays until a
// request meets it, and does not grow.
//
// The limit is respected when a call has returned. `stream-ordered` may exceed it inside a call, because the driver reports only
// afterwards how much its pool allocated; and memory that a CUDA graph allocates for itself is not counted. The setting
// `memory_limit` of `pytorch-expandable` and `pytorch` with expandable segments is PyTorch's, which can be exceeded by less than
// one handle of 20 MiB; this one is not. `rmm-arena` keeps its initial size.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_set_limit(struct vramlab *vramlab,
                                 uint64_t bytes);

// Free and total memory of the device in bytes.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_memory(struct vramlab *vramlab, uint64_t *free, uint64_t *total);

// The statistics. Takes the allocator's lock.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_read_stats(struct vramlab *vramlab, struct vramlab_stats *out);

// The known statistics as JSON: one object, under the keys of `torch.cuda.memory_stats` and the allocator's own.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_stats_json(struct vramlab *vramlab, char **out);

// Restarts every peak from its current value.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_reset_peaks(struct vramlab *vramlab);

// Restarts every sum and count from zero.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_reset_accumulated(struct vramlab *vramlab);

// Calls `segment` for each segment in address order, and after each `block` for its blocks in order. All values are from one
// moment; no lock is held during the callbacks. The callbacks may call the library, and may be left by `longjmp` or an exception,
// which leaks the copy's memory.
//
// # Safety
// See the top of this file; the callbacks may be called with `context`.
vramlab_status vramlab_visit(struct vramlab *vramlab,
                             void *context,
                             void (*segment)(void*, const struct vramlab_segment*),
                             void (*block)(void*, const struct vramlab_block*));

// Writes segments and blocks to a file in PyTorch's layout: a pickle, or JSON for a name that ends in `.json`. The file is written
// atomically.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_snapshot(struct vramlab *vramlab,
                                const char *path);

// The live block that begins at an address.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_block_at(struct vramlab *vramlab, uint64_t address, struct vramlab_block *out);

// The segment around an address: its begin, and its size in bytes. Expandable segments have none that another process could open.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_base(struct vramlab *vramlab,
                            uint64_t address,
                            uint64_t *base,
                            uint64_t *bytes);

// Sets the function that is called when a segment is allocated, freed, mapped or unmapped; null sets none. It may be replaced at any
// time, also in a callback.
//
// The callback runs on the thread whose call caused the event, before that call returns, while no lock is held. An allocator's events are
// delivered one at a time, in the order of the driver's calls: the free of an address is delivered before its next allocation. No call
// returns a block in memory whose event was not delivered.
//
// So a call may wait for a callback that runs on another thread. A callback must not take a lock that a thread holds while it calls this
// library: that thread then waits for five seconds. After that, and when a callback calls the library while another thread's callback
// runs, that other thread delivers the events as soon as its callback has returned, in the same order. A call inside a
// callback never waits for another callback, and may deliver events that precede its own.
//
// A callback may call every function but `vramlab_close`. It may be left by `longjmp` or by a C++ exception: the effects of its call
// remain, only the status is lost. The callback counts as running until its thread's next call that is made no more than 8 KiB deeper
// on the stack.
//
// # Safety
// See the top of this file; the callback may be called with `context` from any thread, until another one was set and every call
// that was under way has returned.
vramlab_status vramlab_on_segment(struct vramlab *vramlab,
                                  void *context,
                                  void (*callback)(void*, const struct vramlab_segment_event*));

// Sets the function that is called, with its address, when a block that other streams used has been freed and is reusable: in its free, or
// in a later call that finds that those streams have completed their use. Null sets none. The rules of `vramlab_on_segment` hold, and
// events of both kinds are delivered one at a time. A block's event is delivered before its segment is freed, and that of a
// deferred free before the memory serves another request. Memory that is reusable immediately may serve another thread's request before
// its event is delivered.
//
// # Safety
// As of `vramlab_on_segment`.
vramlab_status vramlab_on_free(struct vramlab *vramlab,
                               void *context,
                               void (*callback)(void*, uint64_t));

// Starts or stops recording every allocation and free: 64 bytes each until they are written.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_trace(struct vramlab *vramlab, bool on);

// Writes the records since the last call that succeeded to a file, one line of JSON each. The file is written atomically.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_trace_write(struct vramlab *vramlab,
                                   const char *path);

// Starts or stops timing every allocation and free.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_latency(struct vramlab *vramlab, bool on);

// The measured times, as JSON: percentiles in nanoseconds by operation and path.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_latency_json(struct vramlab *vramlab, char **out);

// The driver calls that the allocator made, as JSON: number and time of each kind.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_calls_json(struct vramlab *vramlab, char **out);

// The capabilities of the allocator: a sum of `VRAMLAB_CAN_*` and `VRAMLAB_FOLLOWS_PYTORCH`.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_can(struct vramlab *vramlab, uint32_t *out);

// The allocator's name and the effective settings, as JSON.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_settings_json(struct vramlab *vramlab, char **out);

// Whether `vramlab_open` would accept an allocator and its settings on a device such as `host:cuda`. Opens nothing.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_check_on(const char *name, const char *device);

// Announces that work queued so far on a stream of a GPU, such as a copy, uses a block of pinned memory: it serves no other request
// before that work has completed. An allocator of pinned memory ignores the stream of a request, because the host uses a block at
// once, so every stream that uses a block has to be announced. `vramlab_record_stream` announces a stream of the GPU in the name of
// the device. The status is `VRAMLAB_STATUS_INCAPABLE` for an allocator of a GPU's memory.
//
// # Safety
// See the top of this file; the stream is of the GPU with this number.
vramlab_status vramlab_record_stream_on(struct vramlab *vramlab,
                                        uint64_t address,
                                        uint32_t device,
                                        uint64_t stream);

// Announces that a stream of a GPU is about to be destroyed, as `vramlab_stream_gone` does for the GPU in the name of the device.
//
// # Safety
// As of `vramlab_stream_gone`; the stream is of the GPU with this number.
vramlab_status vramlab_stream_gone_on(struct vramlab *vramlab,
                                      uint32_t device,
                                      uint64_t stream);

// The times of calls that pinned memory and released it. The status is `VRAMLAB_STATUS_INCAPABLE` for an allocator of a GPU's memory.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_read_pinning(struct vramlab *vramlab,
                                    struct vramlab_pinning *out);

// Exports the memory around the live block that begins at an address, so that other processes can map it: calls `page` for each
// page in the order of their addresses, with a file descriptor, or with `VRAMLAB_FABRIC` and the 64 bytes of a fabric handle.
// Descriptors belong to the library: they stay the same until the block is free, and are closed then. Until then the pages stay
// mapped where they are. The status is `VRAMLAB_STATUS_INCAPABLE` where the block is in an allocation of the driver, which has
// handles of its own (`vramlab_base`), or where memory of the device has no handles.
//
// # Safety
// See the top of this file; the callback may be called with `context`.
vramlab_status vramlab_export_block(struct vramlab *vramlab,
                                    uint64_t address,
                                    void *context,
                                    void (*page)(void*, int32_t, const uint8_t*),
                                    struct vramlab_exported *out);

// A copy of a file descriptor that `vramlab_export_block` returned, which the program closes. The status is
// `VRAMLAB_STATUS_UNKNOWN` where it does not belong to a live block: the number may be that of another file by now.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_exported_descriptor(struct vramlab *vramlab, int32_t number, int32_t *out);

// Maps `pages` pages of another process next to each other, and gives the allocator's device access. `page` is called for each
// with its number, from 0 on, and room for 64 bytes. It returns a file descriptor, which the library closes; or writes a fabric
// handle and returns `VRAMLAB_FABRIC`. Any other number ends the call with `VRAMLAB_STATUS_INVALID`. Other GPUs need access of
// their own.
//
// # Safety
// See the top of this file; the callback may be called with `context`.
vramlab_status vramlab_import_pages(struct vramlab *vramlab,
                                    uint64_t page_bytes,
                                    uint64_t pages,
                                    void *context,
                                    int32_t (*page)(void*, uint64_t, uint8_t*),
                                    uint64_t *out);

// Closes memory that was imported at an address: waits for the device, then unmaps it. While the program captures a graph it stays
// mapped until a later call of this function or of `vramlab_import_pages`. The allocator may be closed by then.
vramlab_status vramlab_import_close(uint64_t address);

// Pins (`on`) or unpins the memory of a range of addresses, also while it is free: its pages are neither moved nor unmapped. For
// memory that a library has registered by its address, as `ncclCommRegister` and network adapters do. Calls are counted. The
// status is `VRAMLAB_STATUS_INCAPABLE` where memory is not mapped in pages: then a segment stays reserved while a block of it is
// live.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_pin(struct vramlab *vramlab,
                           uint64_t address,
                           uint64_t bytes,
                           bool on);

// The properties of the allocator's memory, as JSON: under `pages`, null where memory is not mapped in pages, whether other
// processes can map it by `file_descriptors` or `fabric` handles, whether network adapters can use it (`rdma`), and its
// `granularity` in bytes.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_sharing_json(struct vramlab *vramlab,
                                    char **out);

// Whether an allocator of this name and settings maps its memory in pages. Opens nothing.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_has_pages(const char *name, bool *out);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VRAMLAB_H */
