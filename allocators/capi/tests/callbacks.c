// Callbacks may call the library, replace each other and leave by longjmp, but must not close the allocator. Arguments: names of
// allocators.
#include "check.h"

#include <setjmp.h>
#include <stdatomic.h>

static vramlab *v;
static int depth, deepest, calls;
static uint64_t taken[64];
static int taken_count;

// Events that a callback causes are told before its own call returns.
static void call_back(void *context, const vramlab_segment_event *event) {
  (void)context, (void)event;
  calls += 1;
  if (depth == 4) return;
  depth += 1;
  if (depth > deepest) deepest = depth;
  int before = calls;
  taken[taken_count++] = allocate(v, (uint64_t)(30 + 2 * calls) * MIB, (uint64_t)depth);
  CHECK(calls > before || stats_of(v).reserved_bytes.all.current > 200 * MIB);
  CHECK(stats_of(v).allocation.all.current > 0);
  OK(vramlab_trim(v, 0, NULL));
  FAILS(LIVE, "callback", vramlab_close(v));
  FAILS(FOREIGN, "0x1234", vramlab_free(v, 0x1234));
  depth -= 1;
}

static void free_back(void *context, uint64_t address) {
  (void)address;
  *(int *)context += 1;
  OK(vramlab_free(v, allocate(v, 100, 7)));
}

static void nested(const char *name) {
  v = open_on(name, "sim");
  int freed = 0;
  calls = deepest = taken_count = 0;
  OK(vramlab_on_segment(v, NULL, call_back));
  OK(vramlab_on_free(v, &freed, free_back));
  uint64_t block = allocate(v, 300 * MIB, 9);
  OK(vramlab_on_segment(v, NULL, NULL));
  // A driver's pool tells of nothing, and an arena comes once.
  if (strcmp(name, "stream-ordered") != 0) CHECK(deepest > 0 && taken_count > 0);
  OK(vramlab_record_stream(v, block, 2));
  OK(vramlab_free(v, block));
  OK(vramlab_trim(v, 0, NULL));
  CHECK(freed == 1);
  while (taken_count > 0) OK(vramlab_free(v, taken[--taken_count]));
  OK(vramlab_trim(v, 0, NULL));
  CHECK(stats_of(v).active.all.current == 0 && stats_of(v).reserved_bytes.all.current == 0);
  OK(vramlab_close(v));
}

// The text of a call that fails is its own, whatever a callback of it did.
static void fail_inside(void *context, const vramlab_segment_event *event) {
  (void)context, (void)event;
  CHECK(vramlab_check("cachng") == VRAMLAB_STATUS_UNKNOWN);
}

static void texts(void) {
  uint64_t address;
  v = open_on("caching", "sim");
  OK(vramlab_free(v, allocate(v, 30 * MIB, 0)));
  OK(vramlab_on_segment(v, NULL, fail_inside));
  FAILS(OUT_OF_MEMORY, "out of memory", vramlab_allocate(v, (uint64_t)1 << 50, 0, &address));
  OK(vramlab_close(v));
}

static void count_first(void *context, const vramlab_segment_event *event);
static void count_second(void *context, const vramlab_segment_event *event) {
  (void)event;
  *(int *)context += 1;
  OK(vramlab_on_segment(v, context, count_first));
}
static void count_first(void *context, const vramlab_segment_event *event) {
  (void)event;
  *(int *)context += 1;
  for (int i = 0; i < 100; i++) OK(vramlab_on_segment(v, context, i % 2 ? count_first : count_second));
  OK(vramlab_on_segment(v, context, count_second));
}

static void *churn(void *running) {
  while (atomic_load((_Atomic int *)running)) {
    OK(vramlab_free(v, allocate(v, 30 * MIB, 4)));
    OK(vramlab_trim(v, 0, NULL));
  }
  return NULL;
}

static void *nothing[1];
static void ignore(void *context, const vramlab_segment_event *event) { CHECK(context == nothing && event->bytes > 0); }

// 100,000 times, also while another thread's calls tell.
static void replaced(const char *name) {
  int told = 0;
  v = open_on(name, "sim");
  OK(vramlab_on_segment(v, &told, count_first));
  for (int i = 0; i < 1000; i++) {
    OK(vramlab_free(v, allocate(v, 30 * MIB, 0)));
    OK(vramlab_trim(v, 0, NULL));
  }
  CHECK(told >= 2 || strcmp(name, "stream-ordered") == 0);
  OK(vramlab_on_segment(v, nothing, ignore));
  _Atomic int running = 1;
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, churn, &running) == 0);
  for (int i = 0; i < 100000; i++) OK(vramlab_on_segment(v, nothing, i % 3 ? ignore : NULL));
  atomic_store(&running, 0);
  CHECK(pthread_join(thread, NULL) == 0);
  OK(vramlab_close(v));
}

static jmp_buf back;
static void leave(void *context, const vramlab_segment_event *event) {
  (void)context, (void)event;
  calls += 1;
  longjmp(back, 1);
}
static void leave_visit(void *context, const vramlab_segment *segment) {
  (void)context, (void)segment;
  longjmp(back, 1);
}
static void *allocate_there(void *unused) {
  (void)unused;
  OK(vramlab_free(v, allocate(v, 50 * MIB, 6)));
  return NULL;
}

// The effects of its call are complete and written.
static void left_by_longjmp(const char *name) {
  // Outside of the frames that `longjmp` leaves.
  static uint64_t block;
  v = open_on(name, "sim");
  for (volatile int round = 0; round < 50; round++) {
    calls = 0;
    block = 0;
    OK(vramlab_on_segment(v, NULL, leave));
    if (setjmp(back) == 0) {
      OK(vramlab_allocate(v, 30 * MIB, 1, &block));
      CHECK(calls == 0);
    }
    CHECK(block != 0);
    if (setjmp(back) == 0) CHECK(vramlab_visit(v, NULL, leave_visit, NULL) == VRAMLAB_STATUS_INCAPABLE);
    if (setjmp(back) == 0) vramlab_free(v, block);
    if (setjmp(back) == 0) vramlab_trim(v, 0, NULL);
    // The next call of this thread ends the callback; another thread is not held up.
    OK(vramlab_on_segment(v, nothing, ignore));
    OK(vramlab_free(v, allocate(v, 40 * MIB, 2)));
    OK(vramlab_trim(v, 0, NULL));
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, allocate_there, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(stats_of(v).allocation.all.current == 0);
  }
  OK(vramlab_close(v));
}

static int close_deeper(void) {
  volatile char room[4096];
  room[0] = room[4095] = 0;
  return vramlab_close(v) + room[0];
}

// No call comes between the callback that was left and the end of its allocator.
static void closed_after_a_callback_was_left(const char *name) {
  static uint64_t block;
  for (volatile int way = 0; way < 4; way++) {
    v = open_on(name, "sim");
    block = way % 2 ? allocate(v, 30 * MIB, 1) : 0;
    OK(vramlab_on_segment(v, NULL, leave));
    if (setjmp(back) == 0) {
      if (way % 2 == 0) OK(vramlab_allocate(v, 30 * MIB, 1, &block));
      if (way % 2 == 1) OK(vramlab_free(v, block));
      OK(vramlab_trim(v, 0, NULL));
    }
    if (way < 2) OK(vramlab_close(v));
    else OK(close_deeper());
  }
}

int main(int count, char **names) {
  texts();
  for (int i = 1; i < count; i++) {
    nested(names[i]);
    left_by_longjmp(names[i]);
    closed_after_a_callback_was_left(names[i]);
  }
  if (count > 1) replaced(names[1]);
  puts("callbacks did what they may");
  return 0;
}
