// Every function of libvramlab on a simulated device, as a C program uses it. Prints what fails and exits with 1.
#include "check.h"

#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#define HAS(call, word)                                                                                  \
  do {                                                                                                   \
    OK(call);                                                                                            \
    CHECK(strstr(text, word) != NULL);                                                                   \
    vramlab_text_free(text);                                                                             \
  } while (0)

static void names_and_null(void) {
  vramlab *v = NULL;
  char *text = NULL;
  CHECK(vramlab_abi() == VRAMLAB_ABI && strlen(vramlab_version()) >= 5 && vramlab_error()[0] == 0);
  CHECK(strcmp(vramlab_status_name(VRAMLAB_STATUS_FOREIGN), "foreign address") == 0);
  CHECK(strcmp(vramlab_status_name(99), "no such status") == 0);
  OK(vramlab_check("caching:max_split_size=32M"));
  FAILS(UNKNOWN, "caching", vramlab_check("cachng"));
  FAILS(UNKNOWN, "max_split_size", vramlab_check("caching:max_split_size=much"));
  FAILS(UNKNOWN, "caching", vramlab_open("cachng", "sim", &v));
  FAILS(UNKNOWN, "memory_limit", vramlab_open("caching:memory_limt=1G", "sim", &v));
  FAILS(UNKNOWN, "cuda", vramlab_open("caching", "tpu", &v));
  FAILS(UNKNOWN, "nowhere.json", vramlab_open("caching", "sim:nowhere.json", &v));
  FAILS(UNKNOWN, "/no/plan", vramlab_open("plan:file=/no/plan", "sim", &v));
  // A text is one line, whatever the program writes.
  FAILS(UNKNOWN, "'cach ng'", vramlab_open("cach\nng", "sim", &v));
  FAILS(UNKNOWN, "'cu da'", vramlab_open("caching", "cu\nda", &v));
  FAILS(INVALID, "null", vramlab_open(NULL, "sim", &v));
  FAILS(INVALID, "null", vramlab_open("caching", "sim", NULL));
  FAILS(INVALID, "UTF-8", vramlab_open("\xff", "sim", &v));
  FAILS(INVALID, "null", vramlab_allocate(NULL, 1, 0, &(uint64_t){0}));
  FAILS(INVALID, "null", vramlab_close(NULL));
  CHECK(v == NULL);
  HAS(vramlab_allocators_json(&text), "\"name\":\"remap\"");
  const char *conf = "max_split_size_mb:64,garbage_collection_threshold:0.8,throw_on_cudamalloc_oom:True";
  HAS(vramlab_torch_conf_json("caching", conf, 1000, &text), "\"max_split_size\":\"64M\"");
  HAS(vramlab_torch_conf_json("caching", conf, 1000, &text), "\"ignored\":[\"throw_on_cudamalloc_oom\"]");
  HAS(vramlab_torch_conf_json("caching", conf, VRAMLAB_NO_LIMIT, &text), "(needs a limit)");
  FAILS(UNKNOWN, "20 or more", vramlab_torch_conf_json("caching", "max_split_size_mb:1", 0, &text));
  FAILS(UNKNOWN, "caching", vramlab_torch_conf_json("cachng", "", 0, &text));
  FAILS(INVALID, "null", vramlab_torch_conf_json("caching", NULL, 0, &text));
  vramlab_text_free(NULL);
  vramlab_checkpoint_free(NULL);
}

static void blocks_and_streams(const char *name) {
  vramlab *v = open_on(name, "sim");
  uint64_t address = 7, released = 0, base = 0, bytes = 0;
  OK(vramlab_allocate(v, 0, 0, &address));
  CHECK(address == 0);
  OK(vramlab_free(v, 0));
  OK(vramlab_record_stream(v, 0, 5));
  FAILS(INVALID, "4 EiB", vramlab_allocate(v, UINT64_MAX, 0, &address));
  FAILS(OUT_OF_MEMORY, name, vramlab_allocate(v, (uint64_t)1 << 50, 0, &address));
  uint64_t a = allocate(v, 3 * MIB, 0), b = allocate(v, 100, 0xfeed0000), c = allocate(v, 100, 2);
  CHECK(allocate(v, 100, 1) != c);
  vramlab_stats stats = stats_of(v);
  CHECK(stats.allocation.all.current == 4 && stats.requested_bytes.all.current == 3 * MIB + 300);
  CHECK(stats.reserved_bytes.all.current >= stats.active_bytes.all.current);
  OK(vramlab_record_stream(v, b, 0));
  OK(vramlab_free(v, b));
  FAILS(FOREIGN, "freed before", vramlab_free(v, b));
  FAILS(FOREIGN, "holds no block", vramlab_free(v, a + 512));
  FAILS(FOREIGN, "0x1234", vramlab_record_stream(v, 0x1234, 0));
  vramlab *other = open_on(name, "sim:1");
  FAILS(FOREIGN, "holds no block", vramlab_free(other, a));
  OK(vramlab_close(other));
  OK(vramlab_stream_gone(v, 0xfeed0000));
  OK(vramlab_base(v, a + 5, &base, &bytes));
  CHECK(base <= a && a + 3 * MIB <= base + bytes);
  OK(vramlab_free(v, a));
  uint64_t before = stats_of(v).reserved_bytes.all.current;
  OK(vramlab_trim(v, 0, &released));
  CHECK(stats_of(v).reserved_bytes.all.current == before - released);
  OK(vramlab_reset_peaks(v));
  OK(vramlab_reset_accumulated(v));
  stats = stats_of(v);
  CHECK(stats.allocation.all.allocated == 0 && stats.num_device_alloc == 0 && stats.num_ooms == 0);
  CHECK(stats.allocated_bytes.all.peak == stats.allocated_bytes.all.current);
  // Live blocks are released with the allocator.
  OK(vramlab_close(v));
}

static void see_completed(void *context, uint64_t address);

static void frees_that_wait(const char *name) {
  vramlab *v = open_on(name, "sim");
  uint64_t sum = 0, a = allocate(v, MIB, 4), b = allocate(v, MIB, 4), c = allocate(v, MIB, 4);
  vramlab_block block;
  OK(vramlab_on_free(v, &sum, see_completed));
  OK(vramlab_block_at(v, a, &block));
  CHECK(block.address == a && block.bytes >= MIB && block.requested == MIB);
  FAILS(FOREIGN, "holds no block", vramlab_block_at(v, a + 1, &block));
  OK(vramlab_record_stream(v, a, 5));
  OK(vramlab_record_stream(v, b, 4));
  OK(vramlab_record_stream(v, c, 5));
  OK(vramlab_free(v, a));
  OK(vramlab_free(v, b));
  OK(vramlab_free(v, c));
  OK(vramlab_trim(v, 0, NULL));
  CHECK(sum == a + c);
  // A stream that is gone is waited for no more, also by what is freed later.
  uint64_t d = allocate(v, MIB, 4);
  OK(vramlab_record_stream(v, d, 7));
  OK(vramlab_stream_gone(v, 7));
  OK(vramlab_free(v, d));
  OK(vramlab_trim(v, 0, NULL));
  CHECK(stats_of(v).active.all.current == 0 && sum == a + c + d);
  OK(vramlab_on_free(v, NULL, NULL));
  OK(vramlab_close(v));
}

static void limits(const char *name) {
  vramlab *v = open_on(name, "sim:3");
  uint64_t address = 0, free_bytes = 0, total = 0;
  OK(vramlab_memory(v, &free_bytes, &total));
  CHECK(free_bytes <= total && total > ((uint64_t)100 << 30));
  OK(vramlab_set_limit(v, 64 * MIB));
  FAILS(OUT_OF_MEMORY, "64", vramlab_allocate(v, 100 * MIB, 0, &address));
  CHECK(strstr(vramlab_error(), "limit") != NULL);
  OK(vramlab_set_limit(v, VRAMLAB_NO_LIMIT));
  OK(vramlab_free(v, allocate(v, 100 * MIB, 0)));
  OK(vramlab_close(v));
}

typedef struct seen {
  vramlab *v;
  uint64_t segments, blocks, bytes, pool_bytes, pool, events[4], freed, created;
} seen;

static void see_segment(void *context, const vramlab_segment *segment) {
  seen *all = context;
  all->segments += 1;
  all->bytes += segment->bytes;
  all->pool_bytes += segment->pool == all->pool ? segment->bytes : 0;
}

static void see_block(void *context, const vramlab_block *block) {
  ((seen *)context)->blocks += block->state == VRAMLAB_BLOCK_STATE_ALLOCATED;
}

static void see_event(void *context, const vramlab_segment_event *event) {
  seen *all = context;
  all->events[event->action] += event->bytes;
  // No lock is held, so the allocator can be asked.
  CHECK(stats_of(all->v).reserved_bytes.all.current <= all->events[0] + all->events[2]);
}

static void see_completed(void *context, uint64_t address) { *(uint64_t *)context += address; }

static void see_freed(void *context, uint64_t address) { ((seen *)context)->freed += address != 0; }

static void see_created(void *context, uint64_t address, uint64_t bytes, uint64_t stream) {
  ((seen *)context)->created += address != 0 && bytes >= MIB && stream == 4;
}

static void pools(const char *name) {
  vramlab *v = open_on(name, "sim:2");
  seen all = {.v = v};
  vramlab_checkpoint *checkpoint = NULL;
  uint32_t can = 0;
  uint64_t inside[3], released = 0;
  OK(vramlab_can(v, &can));
  CHECK((can & (VRAMLAB_CAN_POOLS | VRAMLAB_CAN_CHECKPOINT)) && (can & VRAMLAB_CAN_SNAPSHOT));
  OK(vramlab_on_segment(v, &all, see_event));
  OK(vramlab_pool_create(v, &all.pool));
  FAILS(UNKNOWN, "pool", vramlab_allocate_in(v, 0, 1, 0, &released));
  FAILS(UNKNOWN, "pool 99999", vramlab_allocate_in(v, 99999, 1, 0, &released));
  for (int i = 0; i < 3; i++) OK(vramlab_allocate_in(v, all.pool, (i + 1) * MIB, 4, &inside[i]));
  uint64_t outside = allocate(v, MIB, 4);
  OK(vramlab_pool_checkpoint(v, all.pool, &checkpoint));
  OK(vramlab_free(v, inside[1]));
  OK(vramlab_pool_restore(v, checkpoint, &all, see_freed, see_created));
  CHECK(all.freed == 2 && all.created == 3);
  FAILS(INVALID, "null", vramlab_pool_restore(v, NULL, NULL, NULL, NULL));
  OK(vramlab_visit(v, &all, see_segment, see_block));
  CHECK(all.blocks == 4 && all.segments >= 2 && all.pool_bytes >= 6 * MIB && all.pool_bytes < all.bytes);
  CHECK(all.bytes == all.events[VRAMLAB_SEGMENT_ACTION_ALLOC] + all.events[VRAMLAB_SEGMENT_ACTION_MAP]);
  vramlab_checkpoint_free(checkpoint);
  for (int i = 0; i < 3; i++) OK(vramlab_free(v, inside[i]));
  OK(vramlab_reuse_in_captures(v, true));
  OK(vramlab_capturing(v, true));
  OK(vramlab_capturing(v, false));
  OK(vramlab_pool_release(v, all.pool));
  OK(vramlab_pool_trim(v, all.pool, &released));
  CHECK(released == all.events[VRAMLAB_SEGMENT_ACTION_FREE] + all.events[VRAMLAB_SEGMENT_ACTION_UNMAP]);
  CHECK(released >= 6 * MIB);
  OK(vramlab_free(v, outside));
  OK(vramlab_on_segment(v, NULL, NULL));
  OK(vramlab_close(v));
}

static void files_and_instruments(const char *folder) {
  char path[512], *text = NULL;
  vramlab *v = open_on("caching:max_split_size=32M", "sim");
  OK(vramlab_latency(v, true));
  OK(vramlab_trace(v, true));
  uint64_t a = allocate(v, MIB, 0);
  OK(vramlab_free(v, allocate(v, 5 * MIB, 0)));
  OK(vramlab_latency(v, false));
  OK(vramlab_trace(v, false));
  CHECK(stats_of(v).max_split_size == 32 * MIB);
  HAS(vramlab_stats_json(v, &text), "\"reserved_bytes.all.current\":");
  HAS(vramlab_latency_json(v, &text), "\"driver_alloc\"");
  HAS(vramlab_calls_json(v, &text), "\"mem_alloc\"");
  HAS(vramlab_settings_json(v, &text), "\"max_split_size\":33554432");
  for (int i = 0; i < 3; i++) {
    snprintf(path, sizeof path, "%s/%s", folder, (const char *[]){"a.pickle", "a.json", "a.jsonl"}[i]);
    OK(i < 2 ? vramlab_snapshot(v, path) : vramlab_trace_write(v, path));
    CHECK(access(path, R_OK) == 0);
  }
  FAILS(IO, "nowhere", vramlab_snapshot(v, "/nowhere/at/all.pickle"));
  OK(vramlab_free(v, a));
  OK(vramlab_close(v));
  // An allocator without pools of its own says so.
  v = open_on("naive", "sim");
  FAILS(INCAPABLE, "private pools", vramlab_pool_create(v, &a));
  OK(vramlab_close(v));
}

static void *churn(void *argument) {
  vramlab *v = ((void **)argument)[0];
  uint64_t stream = (uint64_t)(uintptr_t)((void **)argument)[1], held[32] = {0}, next = stream;
  for (int i = 0; i < 20000; i++) {
    next = next * 6364136223846793005u + 1442695040888963407u;
    uint64_t *at = &held[next >> 59];
    OK(vramlab_free(v, *at));
    *at = allocate(v, 1 + (next >> 44), stream);
    if (i % 16 == 0) OK(vramlab_record_stream(v, *at, stream + 1));
  }
  for (int i = 0; i < 32; i++) OK(vramlab_free(v, held[i]));
  return NULL;
}

static void threads(const char *name) {
  vramlab *v = open_on(name, "sim");
  pthread_t running[4];
  void *arguments[4][2];
  for (int i = 0; i < 4; i++) {
    arguments[i][0] = v;
    arguments[i][1] = (void *)(uintptr_t)(16 + i / 2);
    CHECK(pthread_create(&running[i], NULL, churn, arguments[i]) == 0);
  }
  for (int i = 0; i < 4; i++) CHECK(pthread_join(running[i], NULL) == 0);
  OK(vramlab_trim(v, 0, NULL));
  vramlab_stats stats = stats_of(v);
  CHECK(stats.allocation.all.current == 0 && stats.active.all.current == 0 && stats.reserved_bytes.all.current == 0);
  OK(vramlab_close(v));
}

typedef struct {
  vramlab *v;
  int32_t descriptors[64];
  int count;
} pages;

static void see_page(void *context, int32_t descriptor, const uint8_t *fabric) {
  pages *to = context;
  CHECK(descriptor >= 0 && fabric == NULL && to->count < 64);
  to->descriptors[to->count++] = descriptor;
}

// As another process: a copy of each descriptor, which the library closes.
static int32_t give_page(void *context, uint64_t number, uint8_t *fabric) {
  pages *from = context;
  int32_t copy = -1;
  CHECK(fabric != NULL && number < (uint64_t)from->count);
  OK(vramlab_exported_descriptor(from->v, from->descriptors[number], &copy));
  return copy;
}

static int32_t give_none(void *context, uint64_t number, uint8_t *fabric) {
  (void)context, (void)number, (void)fabric;
  return -1;
}

static void sharing(const char *name) {
  char *text = NULL;
  bool has_pages = false;
  int32_t copy = -1;
  vramlab *v = open_on(name, "sim");
  OK(vramlab_has_pages(name, &has_pages));
  uint64_t address = allocate(v, 30 * MIB, 0), there = 0;
  pages all = {v, {0}, 0};
  vramlab_exported about;
  if (!has_pages) {
    FAILS(INCAPABLE, "pages", vramlab_export_block(v, address, &all, see_page, &about));
    FAILS(INCAPABLE, "pages", vramlab_pin(v, address, MIB, true));
    HAS(vramlab_sharing_json(v, &text), "{\"pages\":null}");
  } else {
    HAS(vramlab_sharing_json(v, &text), "\"file_descriptors\":true");
    OK(vramlab_export_block(v, address, &all, see_page, &about));
    CHECK(about.address <= address && about.pages == (uint64_t)all.count);
    CHECK(about.address + about.pages * about.page_bytes >= address + 30 * MIB);
    OK(vramlab_import_pages(v, about.page_bytes, about.pages, &all, give_page, &there));
    CHECK(there != 0 && there != about.address);
    OK(vramlab_import_close(there));
    FAILS(FOREIGN, "imported", vramlab_import_close(there));
    FAILS(INVALID, "page 0", vramlab_import_pages(v, about.page_bytes, about.pages, &all, give_none, &there));
    FAILS(INVALID, "pages of 1000", vramlab_import_pages(v, 1000, 1, &all, give_page, &there));
    FAILS(FOREIGN, "no live block", vramlab_export_block(v, address + 1, &all, see_page, &about));
    OK(vramlab_pin(v, address, 30 * MIB, true));
  }
  OK(vramlab_free(v, address));
  FAILS(UNKNOWN, "descriptor", vramlab_exported_descriptor(v, has_pages ? all.descriptors[0] : 0, &copy));
  OK(vramlab_trim(v, 0, NULL));
  CHECK((stats_of(v).reserved_bytes.all.current >= 30 * MIB) == has_pages);
  if (has_pages) {
    OK(vramlab_pin(v, address, 30 * MIB, false));
    OK(vramlab_trim(v, 0, NULL));
    CHECK(stats_of(v).reserved_bytes.all.current == 0);
  }
  OK(vramlab_close(v));
}

static void pinned(const char *name) {
  FAILS(UNKNOWN, "pinned host memory", vramlab_open(name, "sim", &(vramlab *){NULL}));
  FAILS(UNKNOWN, "host:cuda", vramlab_open(name, "sim", &(vramlab *){NULL}));
  FAILS(UNKNOWN, "open it on cuda", vramlab_open("caching", "host:sim", &(vramlab *){NULL}));
  FAILS(UNKNOWN, "'host:' is not a device", vramlab_open(name, "host:", &(vramlab *){NULL}));
  FAILS(UNKNOWN, "'host:null' is not a device", vramlab_open(name, "host:null", &(vramlab *){NULL}));
  FAILS(UNKNOWN, "number of a GPU", vramlab_open(name, "host:sim:first", &(vramlab *){NULL}));
  OK(vramlab_check_on(name, "host:cuda"));
  OK(vramlab_check_on("caching", "cuda"));
  FAILS(UNKNOWN, "pinned host memory", vramlab_check_on(name, "cuda"));
  FAILS(UNKNOWN, "caching", vramlab_check_on("caching", "host:cuda"));
  FAILS(UNKNOWN, "one allocator", vramlab_check_on("host-exact,host-pytorch", "host:cuda"));

  vramlab *v = open_on(name, "host:sim:1");
  uint64_t a = allocate(v, 3 * MIB + 1, 0), b = allocate(v, 5 * MIB, 9), zero = 1;
  OK(vramlab_allocate(v, 0, 0, &zero));
  CHECK(zero == 0);
  OK(vramlab_record_stream_on(v, 0, 0, 7));
  // It is memory of the host.
  memset((void *)(uintptr_t)a, 7, 3 * MIB + 1);
  CHECK(*(const unsigned char *)(uintptr_t)(a + 3 * MIB) == 7);
  vramlab_pinning pinning;
  OK(vramlab_read_pinning(v, &pinning));
  CHECK(pinning.alloc.count == stats_of(v).num_device_alloc && pinning.alloc.count >= 1 && pinning.free.count == 0);
  CHECK(pinning.alloc.max_ns >= pinning.alloc.min_ns && pinning.alloc.total_ns >= pinning.alloc.max_ns);

  // A free waits for streams that were announced, whichever GPU's they are, also for that of the request; others do not.
  OK(vramlab_record_stream_on(v, a, 0, 7));
  OK(vramlab_record_stream_on(v, a, 1, 7));
  OK(vramlab_record_stream(v, b, 9));
  FAILS(FOREIGN, "holds no block", vramlab_record_stream_on(v, a + 256, 0, 7));
  OK(vramlab_free(v, a));
  CHECK(stats_of(v).allocation.all.current == 1 && stats_of(v).active.all.current == 2);
  FAILS(FOREIGN, "holds no block", vramlab_free(v, a));
  OK(vramlab_free(v, b));
  OK(vramlab_trim(v, 0, NULL));
  CHECK(stats_of(v).active.all.current == 0 && stats_of(v).reserved_bytes.all.current == 0);
  uint64_t c = allocate(v, MIB, 0);
  OK(vramlab_free(v, c));
  CHECK(stats_of(v).active.all.current == 0);

  // Streams that are destroyed.
  c = allocate(v, MIB, 0);
  uint64_t d = allocate(v, MIB, 0);
  OK(vramlab_record_stream_on(v, c, 0, 7));
  OK(vramlab_record_stream_on(v, d, 1, 9));
  OK(vramlab_stream_gone_on(v, 0, 7));
  OK(vramlab_stream_gone(v, 9));
  OK(vramlab_free(v, c));
  OK(vramlab_free(v, d));
  CHECK(stats_of(v).active.all.current == 0);

  // An open capture: nothing waits for a GPU.
  c = allocate(v, MIB, 0);
  OK(vramlab_capturing(v, true));
  OK(vramlab_record_stream_on(v, c, 2, 5));
  OK(vramlab_free(v, c));
  OK(vramlab_capturing(v, false));
  OK(vramlab_trim(v, 0, NULL));
  OK(vramlab_read_pinning(v, &pinning));
  CHECK(pinning.free.count == stats_of(v).num_device_free && pinning.free.count >= 1);
  OK(vramlab_reset_peaks(v));
  OK(vramlab_reset_accumulated(v));
  OK(vramlab_read_pinning(v, &pinning));
  CHECK(pinning.alloc.count == 0 && pinning.alloc.max_ns == 0 && pinning.free.total_ns == 0);
  a = allocate(v, MIB, 0);
  OK(vramlab_close(v));

  v = open_on("caching", "sim");
  FAILS(INCAPABLE, "pinned", vramlab_record_stream_on(v, 0, 0, 7));
  FAILS(INCAPABLE, "pinned", vramlab_stream_gone_on(v, 0, 7));
  FAILS(INCAPABLE, "pinned", vramlab_read_pinning(v, &pinning));
  OK(vramlab_close(v));
}

// Pinned memory forgets a destroyed stream of a GPU, too, whichever allocator is notified.
static void pinned_beside_a_gpu(void) {
  vramlab *host = open_on("host-exact", "host:sim:3"), *gpu = open_on("caching", "sim:3");
  uint64_t a = allocate(host, MIB, 0), b = allocate(host, MIB, 0);
  OK(vramlab_record_stream(host, a, 5));
  OK(vramlab_record_stream_on(host, b, 3, 6));
  OK(vramlab_stream_gone(gpu, 5));
  OK(vramlab_free(host, a));
  CHECK(stats_of(host).active.all.current == 1);
  OK(vramlab_free(host, b));
  CHECK(stats_of(host).active.all.current == 1);
  OK(vramlab_close(gpu));
  OK(vramlab_close(host));
}

static void forks(void) {
  vramlab *v = open_on("caching", "sim");
  uint64_t address = allocate(v, MIB, 0);
  pid_t child = fork();
  if (child == 0) {
    FAILS(FORKED, "forked", vramlab_free(v, address));
    FAILS(FORKED, "spawn", vramlab_open("caching", "sim", &v));
    _exit(0);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  OK(vramlab_free(v, address));
  // The program ends with the allocator open.
}

static char profile[512];
static atomic_bool opening = true;

static void *open_in_vain(void *unused) {
  vramlab *v = NULL;
  while (opening) CHECK(vramlab_open("caching", profile, &v) == VRAMLAB_STATUS_UNKNOWN);
  return unused;
}

// The sanitizers' own allocators keep their locks in a child, which waits for them when it allocates.
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
static const int sanitized = 1;
#else
static const int sanitized = 0;
#endif

// Another thread opens allocators, and none can be opened, while this one forks. Nothing was opened before.
static void forks_while_opening(const char *folder) {
  pthread_t thread;
  snprintf(profile, sizeof profile, "sim:%s/profile.json", folder);
  FILE *file = fopen(profile + 4, "w");
  CHECK(file != NULL && fputs("no profile", file) >= 0 && fclose(file) == 0);
  CHECK(pthread_create(&thread, NULL, open_in_vain, NULL) == 0);
  usleep(10000);
  for (int turn = 0; turn < 100; turn++) {
    opening = turn < 99;
    if (!opening) CHECK(pthread_join(thread, NULL) == 0);
    pid_t child = fork();
    if (child == 0) {
      vramlab *v = NULL;
      alarm(30);
      int status = vramlab_open("caching", "sim", &v);
      if (status != VRAMLAB_STATUS_FORKED || !opening) CHECK(status == VRAMLAB_STATUS_OK && vramlab_close(v) == VRAMLAB_STATUS_OK);
      _exit(0);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
  }
}

int main(int count, char **arguments) {
  if (!sanitized) forks_while_opening(count > 1 ? arguments[1] : "/tmp");
  names_and_null();
  const char *names[] = {"caching", "pytorch", "pytorch-expandable", "remap", "rmm-pool", "bfc", "tlsf", "lab"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    if (i != 2 && i != 3) blocks_and_streams(names[i]);
    frees_that_wait(names[i]);
    limits(names[i]);
    pools(names[i]);
    threads(names[i]);
  }
  limits("naive");
  limits("stream-ordered");
  threads("stream-ordered");
  files_and_instruments(count > 1 ? arguments[1] : "/tmp");
  for (size_t i = 0; i < 4; i++) sharing(names[i]);
  pinned("host-exact");
  pinned("host-pytorch");
  pinned_beside_a_gpu();
  forks();
  puts("every function of libvramlab was called");
  return 0;
}
