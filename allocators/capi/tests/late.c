// Every function late in the life of a thread and of the process: in destructors of the thread's data and in handlers of atexit, after
// what the library keeps for the thread is gone. Arguments: thread, main or first; a folder; the name of an allocator.
#include "check.h"

#include <unistd.h>

static vramlab *v;
static uint64_t block;
static char path[512];
static pthread_key_t key;

// Each of these fails, and says why.
static void failures(void) {
  vramlab *none = NULL;
  vramlab_checkpoint *checkpoint = NULL;
  uint64_t number = 0;
  char *text = NULL;
  CHECK(vramlab_free(v, 12345) == VRAMLAB_STATUS_FOREIGN && strstr(vramlab_error(), "0x3039") != NULL);
  CHECK(vramlab_record_stream(v, 12345, 1) == VRAMLAB_STATUS_FOREIGN);
  CHECK(vramlab_block_at(v, 12345, &(vramlab_block){0}) == VRAMLAB_STATUS_FOREIGN);
  CHECK(vramlab_open("cachng", "sim", &none) == VRAMLAB_STATUS_UNKNOWN);
  CHECK(vramlab_check("cachng") == VRAMLAB_STATUS_UNKNOWN && strstr(vramlab_error(), "caching") != NULL);
  CHECK(vramlab_allocate(v, (uint64_t)1 << 50, 0, &number) == VRAMLAB_STATUS_OUT_OF_MEMORY);
  CHECK(vramlab_allocate_in(v, 99, 1, 0, &number) == VRAMLAB_STATUS_UNKNOWN);
  CHECK(vramlab_pool_release(v, 99) == VRAMLAB_STATUS_UNKNOWN);
  CHECK(vramlab_pool_trim(v, 99, NULL) == VRAMLAB_STATUS_UNKNOWN);
  CHECK(vramlab_pool_checkpoint(v, 99, &checkpoint) == VRAMLAB_STATUS_UNKNOWN);
  CHECK(vramlab_pool_restore(v, NULL, NULL, NULL, NULL) == VRAMLAB_STATUS_INVALID);
  CHECK(vramlab_snapshot(v, "/nowhere/at/all.pickle") == VRAMLAB_STATUS_IO);
  CHECK(vramlab_trace_write(v, NULL) == VRAMLAB_STATUS_INVALID);
  CHECK(vramlab_stats_json(NULL, &text) == VRAMLAB_STATUS_INVALID);
}

static void note(void *context, const vramlab_segment_event *event) { (void)event, ++*(int *)context; }
static void see(void *context, const vramlab_segment *segment) { (void)segment, ++*(int *)context; }

// Each of these succeeds.
static void successes(void) {
  uint64_t pool, number, one, two;
  char *text = NULL;
  int noted = 0;
  vramlab_checkpoint *checkpoint = NULL;
  OK(vramlab_on_segment(v, &noted, note));
  OK(vramlab_on_free(v, NULL, NULL));
  OK(vramlab_latency(v, true));
  OK(vramlab_trace(v, true));
  OK(vramlab_allocate(v, 30 * MIB, 1, &one));
  OK(vramlab_allocate(v, 40 * MIB, 2, &two));
  CHECK(noted >= 2);
  OK(vramlab_record_stream(v, one, 2));
  OK(vramlab_free(v, one));
  OK(vramlab_free(v, two));
  OK(vramlab_stream_gone(v, 2));
  OK(vramlab_capturing(v, true));
  OK(vramlab_capturing(v, false));
  OK(vramlab_reuse_in_captures(v, false));
  OK(vramlab_pool_create(v, &pool));
  OK(vramlab_allocate_in(v, pool, MIB, 1, &one));
  OK(vramlab_pool_checkpoint(v, pool, &checkpoint));
  OK(vramlab_pool_restore(v, checkpoint, NULL, NULL, NULL));
  vramlab_checkpoint_free(checkpoint);
  OK(vramlab_free(v, one));
  OK(vramlab_pool_release(v, pool));
  OK(vramlab_pool_trim(v, pool, &number));
  OK(vramlab_trim(v, 0, &number));
  OK(vramlab_set_limit(v, VRAMLAB_NO_LIMIT));
  OK(vramlab_memory(v, &number, &number));
  OK(vramlab_reset_peaks(v));
  OK(vramlab_reset_accumulated(v));
  OK(vramlab_visit(v, &noted, see, NULL));
  OK(vramlab_snapshot(v, path));
  OK(vramlab_trace_write(v, path));
  OK(vramlab_block_at(v, block, &(vramlab_block){0}));
  OK(vramlab_stats_json(v, &text));
  vramlab_text_free(text);
  OK(vramlab_latency_json(v, &text));
  CHECK(strstr(text, "allocate") != NULL);
  vramlab_text_free(text);
  OK(vramlab_calls_json(v, &text));
  vramlab_text_free(text);
  OK(vramlab_settings_json(v, &text));
  vramlab_text_free(text);
  OK(vramlab_allocators_json(&text));
  vramlab_text_free(text);
  OK(vramlab_latency(v, false));
  OK(vramlab_trace(v, false));
  OK(vramlab_on_segment(v, NULL, NULL));
  vramlab *other = open_on("caching", "sim");
  OK(vramlab_free(other, allocate(other, MIB, 0)));
  OK(vramlab_close(other));
  CHECK(stats_of(v).allocation.all.current == 1 && vramlab_abi() == VRAMLAB_ABI && vramlab_version()[0] != 0);
}

static void at_exit(void) {
  failures();
  successes();
  failures();
  OK(vramlab_free(v, block));
  OK(vramlab_close(v));
  puts("late calls were answered");
  fflush(stdout);
}

static void at_thread_end(void *unused) {
  (void)unused;
  // A text from before is there still.
  CHECK(strstr(vramlab_error(), "caching") != NULL);
  failures();
  successes();
}

static void *work(void *used) {
  CHECK(pthread_setspecific(key, &key) == 0);
  failures();
  if (used != NULL) successes();
  CHECK(vramlab_check("cachng") == VRAMLAB_STATUS_UNKNOWN);
  return NULL;
}

int main(int count, char **arguments) {
  CHECK(count == 4);
  snprintf(path, sizeof path, "%s/late.json", arguments[2]);
  v = open_on(arguments[3], "sim");
  block = allocate(v, MIB, 0);
  if (strcmp(arguments[1], "thread") == 0) {
    CHECK(pthread_key_create(&key, at_thread_end) == 0);
    for (uintptr_t used = 0; used < 2; used++) {
      pthread_t thread;
      CHECK(pthread_create(&thread, NULL, work, used ? &key : NULL) == 0);
      CHECK(pthread_join(thread, NULL) == 0);
    }
  }
  // With what the library keeps for a thread, or before there is any.
  if (strcmp(arguments[1], "first") != 0) {
    failures();
    successes();
  }
  CHECK(atexit(at_exit) == 0);
  return 0;
}
