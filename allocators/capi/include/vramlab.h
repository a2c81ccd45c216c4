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
// In a child after fork() every call is VRAMLAB_STATUS_FORKED.

#ifndef VRAMLAB_H
#define VRAMLAB_H

#include <stdbool.h>
#include <stdint.h>

// Number of this interface. It changes when a program that was built with another header no longer works.
#define VRAMLAB_ABI 1

// No limit, for `vramlab_set_limit`.
#define VRAMLAB_NO_LIMIT UINT64_MAX

// The allocator has private pools.
#define VRAMLAB_CAN_POOLS 1

// Private pools can go back to a checkpoint.
#define VRAMLAB_CAN_CHECKPOINT 2

// The allocator sees its segments and blocks.
#define VRAMLAB_CAN_SNAPSHOT 4

// Segments are ranges of addresses that memory is mapped behind in parts.
#define VRAMLAB_CAN_EXPAND 8

// Every block lies where PyTorch's allocator would put it.
#define VRAMLAB_FOLLOWS_PYTORCH 16

// A page has a fabric handle in the place of a file descriptor.
#define VRAMLAB_FABRIC -2

// How a call went. `vramlab_error` has the text of the thread's last failure.
enum vramlab_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // As asked.
  VRAMLAB_STATUS_OK = 0,
  // Neither the allocator nor the device has the memory, or the limit does not allow it.
  VRAMLAB_STATUS_OUT_OF_MEMORY = 1,
  // An argument that can never be served: a null pointer, more than 4 EiB, a text that is not UTF-8.
  VRAMLAB_STATUS_INVALID = 2,
  // No allocator, setting, value, device or pool is called so; the text names the nearest.
  VRAMLAB_STATUS_UNKNOWN = 3,
  // That GPU is not there, or cannot be worked on.
  VRAMLAB_STATUS_NO_DEVICE = 4,
  // No live block of this allocator begins at the address: it is foreign, was freed before, or is another device's.
  VRAMLAB_STATUS_FOREIGN = 5,
  // The allocator or the device cannot do this.
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

// What a block is.
enum vramlab_block_state
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Held by the program.
  VRAMLAB_BLOCK_STATE_ALLOCATED = 0,
  // Freed, and still used by a stream.
  VRAMLAB_BLOCK_STATE_PENDING_FREE = 1,
  // Can be handed out.
  VRAMLAB_BLOCK_STATE_FREE = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum vramlab_block_state vramlab_block_state;
#else
typedef int32_t vramlab_block_state;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What happened to a segment, or to a part of one that memory was added to or taken from.
enum vramlab_segment_action
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // It came from the device.
  VRAMLAB_SEGMENT_ACTION_ALLOC = 0,
  // It went back.
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

// What a private pool was at a moment.
typedef struct vramlab_checkpoint vramlab_checkpoint;

// A quantity over time.
typedef struct vramlab_gauge {
  // Value now.
  uint64_t current;
  // Highest value since the start or the last `vramlab_reset_peaks`.
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
  // Blocks that the program holds.
  struct vramlab_pooled allocation;
  // Segments.
  struct vramlab_pooled segment;
  // Blocks that the program holds or a stream still uses.
  struct vramlab_pooled active;
  // Free blocks in segments that are partly in use.
  struct vramlab_pooled inactive_split;
  // Bytes of `allocation`.
  struct vramlab_pooled allocated_bytes;
  // Bytes held from the device.
  struct vramlab_pooled reserved_bytes;
  // Bytes of `active`.
  struct vramlab_pooled active_bytes;
  // Bytes of `inactive_split`.
  struct vramlab_pooled inactive_split_bytes;
  // Bytes that the program asked for, before rounding.
  struct vramlab_pooled requested_bytes;
  // Blocks of at least `max_split_size`.
  struct vramlab_gauge oversize_allocations;
  // Segments of at least `max_split_size`.
  struct vramlab_gauge oversize_segments;
  // Requests for which the cache was released and the device asked again.
  uint64_t num_alloc_retries;
  // Requests that were refused for lack of memory.
  uint64_t num_ooms;
  // Times that all pending frees were waited for.
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
  // Private pool that it is of; 0 for none.
  uint64_t pool;
  // Whether it is of the large pool.
  bool is_large;
  // Whether it is a part of a range of addresses that memory is added to.
  bool expandable;
  // Bytes in blocks that the program holds.
  uint64_t allocated_bytes;
  // Bytes in blocks that the program holds or a stream still uses.
  uint64_t active_bytes;
  // Bytes that were asked for in those.
  uint64_t requested_bytes;
} vramlab_segment;

// A block of a segment, for `vramlab_visit`.
typedef struct vramlab_block {
  // First address.
  uint64_t address;
  // Size in bytes.
  uint64_t bytes;
  // Bytes that were asked for; 0 for a free block.
  uint64_t requested;
  // What it is.
  vramlab_block_state state;
} vramlab_block;

// A segment that came or went.
typedef struct vramlab_segment_event {
  // What happened.
  vramlab_segment_action action;
  // First address.
  uint64_t address;
  // Size in bytes.
  uint64_t bytes;
  // The stream whose request took it.
  uint64_t stream;
} vramlab_segment_event;

// The pages around a block that was exported.
typedef struct vramlab_exported {
  // First address of the first page.
  uint64_t address;
  // Bytes of each page.
  uint64_t page_bytes;
  // How many there are.
  uint64_t pages;
} vramlab_exported;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The number of this interface: [`VRAMLAB_ABI`] of the header that the library was built with.
uint32_t vramlab_abi(void);

// The version of the library.
const char *vramlab_version(void);

// What this thread's last failing call says; empty before the first. It lives until the thread's next failing call or the thread's end.
// Of a text of more than 4095 bytes the front is kept.
const char *vramlab_error(void);

// A status in words. The text lives for ever.
const char *vramlab_status_name(int32_t status);

// Gives a text back that a call handed out. Null is fine.
//
// # Safety
// It came from this library and is given back once.
void vramlab_text_free(char *text);

// Opens an allocator: `NAME` or `NAME:key=value,key=value`, as the programs of this project take it. The device is `cuda`,
// `cuda:N`, `sim` (a simulated H200), `sim:N` (further ones) or `sim:FILE` (with a profile). A GPU's first one takes a good part of
// a second.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_open(const char *name,
                            const char *device,
                            struct vramlab **out);

// Whether `vramlab_open` would know an allocator and its settings. Opens nothing.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_check(const char *name);

// Closes an allocator: waits for the device, and gives everything back, also blocks that the program still holds. In a callback of
// `vramlab_on_segment` or `vramlab_on_free` the status is `VRAMLAB_STATUS_LIVE`, and nothing is closed: the call that it belongs to is
// not over.
//
// # Safety
// See the top of this file; no other thread uses the allocator or will.
vramlab_status vramlab_close(struct vramlab *vramlab);

// Every allocator with its settings and their defaults, as JSON.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_allocators_json(char **out);

// Allocates `bytes` for work on a stream. No bytes: the address is 0, which needs no free.
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

// Frees the block that begins at an address. Address 0 is fine. With `VRAMLAB_STATUS_DRIVER` the block is the program's no more, but its
// memory waits until the device was waited for, as in `vramlab_trim`; until then it counts as active and requested.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_free(struct vramlab *vramlab,
                            uint64_t address);

// Says that work queued so far on a stream, not the block's own, uses a block: its memory serves no other request before that work
// is done.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_record_stream(struct vramlab *vramlab,
                                     uint64_t address,
                                     uint64_t stream);

// Says that a stream is about to be destroyed. Waits for the device; then no block waits for the stream any more. This holds of every
// allocator of the process on that device, so one call is enough. Blocks of the stream can be freed as ever, before, meanwhile and after,
// and so can blocks that it was recorded for. When the call has returned nothing of this library names the stream any more.
//
// # Safety
// See the top of this file; the stream is still there, and no other thread's call names it.
vramlab_status vramlab_stream_gone(struct vramlab *vramlab,
                                   uint64_t stream);

// Says that the program began to capture a graph on the device, or that such a capture has ended. It is counted. While one is
// open nothing here waits for the device, and no event is recorded on a stream that is captured.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_capturing(struct vramlab *vramlab,
                                 bool open);

// Sets whether a block that is freed while the program captures a graph, after other streams used it there, may be reused within that
// capture, once its stream comes behind their work. Off at first: it waits for the end of the capture. The status is
// `VRAMLAB_STATUS_INCAPABLE` where the allocator cannot do that.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_reuse_in_captures(struct vramlab *vramlab,
                                         bool on);

// Makes a private pool. Its number is not 0 and is never used again.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_pool_create(struct vramlab *vramlab, uint64_t *out);

// Says that no more requests will come for a private pool. Its idle memory goes back when idle memory goes back the next time.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_pool_release(struct vramlab *vramlab,
                                    uint64_t pool);

// Gives back what is idle of a released private pool. `released` may be null.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_pool_trim(struct vramlab *vramlab, uint64_t pool, uint64_t *released);

// Takes down what a private pool is like now. The status is `VRAMLAB_STATUS_INCAPABLE` where the allocator cannot go back to it.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_pool_checkpoint(struct vramlab *vramlab,
                                       uint64_t pool,
                                       struct vramlab_checkpoint **out);

// Lets a private pool be as it was: every block of it that the program holds is freed, and passed to `freed`; then the blocks
// that were held at the checkpoint are held again at their addresses, and passed to `created`. Both may be null. They are called when no
// lock is held, once all of it is done.
//
// A restore that fails changes nothing: the program holds the blocks that it held. It fails with `VRAMLAB_STATUS_LIVE` or
// `VRAMLAB_STATUS_UNKNOWN` when the pool was released, when memory of the checkpoint went back to the device, and when a block there is
// freed or held and other streams still use it.
//
// # Safety
// See the top of this file; the callbacks may be called with `context`. No other thread allocates from the pool meanwhile.
vramlab_status vramlab_pool_restore(struct vramlab *vramlab,
                                    const struct vramlab_checkpoint *checkpoint,
                                    void *context,
                                    void (*freed)(void*, uint64_t),
                                    void (*created)(void*, uint64_t, uint64_t, uint64_t));

// Gives a checkpoint back. Null is fine.
//
// # Safety
// It came from this library and is given back once.
void vramlab_checkpoint_free(struct vramlab_checkpoint *checkpoint);

// Waits for pending frees, and gives idle memory back while more than `keep_bytes` are held. `released` may be null.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_trim(struct vramlab *vramlab, uint64_t keep_bytes, uint64_t *released);

// Sets the most bytes that may be held from the device, at any time. Nothing goes back at once: what is above a lower limit stays until a
// request meets it, and does not grow.
//
// The limit is held when a call has returned. `stream-ordered` may pass it inside a call, because the driver says only afterwards how much
// its pool took; and memory that a graph of CUDA allocates for itself is not counted. The setting `memory_limit` of `pytorch-expandable`
// and `pytorch` with expandable segments is PyTorch's, which can be passed by less than one handle of 20 MiB; this one is not.
// `rmm-arena` keeps the size that it began with.
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

// The statistics that are known as JSON: one object, under the keys of `torch.cuda.memory_stats` and the allocator's own.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_stats_json(struct vramlab *vramlab,
                                  char **out);

// Lets every peak start again from its current value.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_reset_peaks(struct vramlab *vramlab);

// Lets every sum and count start again from zero.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_reset_accumulated(struct vramlab *vramlab);

// Calls `segment` for each segment in address order, and after each `block` for its blocks in order. All is of one moment; no lock is
// held while the program looks. The callbacks may call the library, and be left by `longjmp` or an exception, which loses the copy's memory.
//
// # Safety
// See the top of this file; the callbacks may be called with `context`.
vramlab_status vramlab_visit(struct vramlab *vramlab,
                             void *context,
                             void (*segment)(void*, const struct vramlab_segment*),
                             void (*block)(void*, const struct vramlab_block*));

// Writes what is held to a file in PyTorch's layout: a pickle, or JSON for a name that ends in `.json`. The file is whole or not
// there.
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

// The segment around an address: where it begins, and its size in bytes. What is mapped in parts has none that another process
// could open.
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
// remain, only the status is lost. The callback counts as running until its thread's next call.
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

// Records every allocation and free from now on, or no longer: 64 bytes each until they are written.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_trace(struct vramlab *vramlab, bool on);

// Writes what was recorded since the last time to a file, a line of JSON each. The file is whole or not there.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_trace_write(struct vramlab *vramlab, const char *path);

// Times every allocation and free from now on, or no longer.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_latency(struct vramlab *vramlab, bool on);

// What was timed, as JSON: percentiles in nanoseconds by operation and path.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_latency_json(struct vramlab *vramlab, char **out);

// The driver calls that the allocator made, as JSON: number and time of each kind.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_calls_json(struct vramlab *vramlab, char **out);

// What the allocator can do: a sum of `VRAMLAB_CAN_*` and `VRAMLAB_FOLLOWS_PYTORCH`.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_can(struct vramlab *vramlab, uint32_t *out);

// The allocator's name and the settings in effect, as JSON.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_settings_json(struct vramlab *vramlab, char **out);

// Exports the memory around the live block that begins at an address, so that other processes can map it: calls `page` for each
// page in the order of their addresses, with a file descriptor, or with `VRAMLAB_FABRIC` and the 64 bytes of a fabric handle.
// Descriptors stay the library's: they are the same until the block is free, and are closed then. Until then the pages stay where
// they are. The status is `VRAMLAB_STATUS_INCAPABLE` where the block lies in an allocation of the driver, which has handles of its own
// (`vramlab_base`), or where memory of the device has no handles.
//
// # Safety
// See the top of this file; the callback may be called with `context`.
vramlab_status vramlab_export_block(struct vramlab *vramlab,
                                    uint64_t address,
                                    void *context,
                                    void (*page)(void*, int32_t, const uint8_t*),
                                    struct vramlab_exported *out);

// A copy of a file descriptor that `vramlab_export_block` gave, which the program closes. The status is `VRAMLAB_STATUS_UNKNOWN` where it
// is of no block that is still live: the number may be that of another file by now.
//
// # Safety
// See the top of this file.
vramlab_status vramlab_exported_descriptor(struct vramlab *vramlab,
                                           int32_t number,
                                           int32_t *out);

// Maps `pages` pages of another process side by side, and opens them to the allocator's device. `page` is called for each with its
// number, from 0 on, and room for 64 bytes. It returns a file descriptor, which the library closes; or writes a fabric handle and returns
// `VRAMLAB_FABRIC`. Any other number ends the call with `VRAMLAB_STATUS_INVALID`. Other GPUs need access of their own.
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

// Keeps the memory behind a range of addresses where it is (`on`), also while it is free, or no longer: its pages are neither moved nor
// unmapped. For memory that something else has registered by its address, as `ncclCommRegister` and network adapters do. It is
// counted. The status is `VRAMLAB_STATUS_INCAPABLE` where memory is not mapped in pages: then a segment stays while a block
// of it is live.
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
