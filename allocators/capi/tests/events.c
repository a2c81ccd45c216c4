// Segment events with threads: each comes on the thread that caused it, before its call returns, and in the order of the driver's
// calls. Arguments: names of allocators.
#include "check.h"

#include <stdatomic.h>
#include <unistd.h>

enum { THREADS = 6, ROUNDS = 120, MOST = 1 << 12 };

static vramlab *v;
static _Thread_local int in_call;
static _Thread_local uint64_t own_stream;
static _Atomic int inside;
static int is_slow;
// Memory that the program was told of. A segment that expands is told page by page.
static struct {
  uint64_t start, end;
} known[MOST];
static int known_count;

static int find(uint64_t address) {
  for (int i = 0; i < known_count; i++)
    if (known[i].start <= address && address < known[i].end) return i;
  return -1;
}

// No lock: callbacks come one after another, which the first line checks.
static void follow(void *context, const vramlab_segment_event *event) {
  CHECK(atomic_fetch_add(&inside, 1) == 0);
  CHECK(context == &known_count && in_call);
  int adds = event->action == VRAMLAB_SEGMENT_ACTION_ALLOC || event->action == VRAMLAB_SEGMENT_ACTION_MAP;
  if (adds) CHECK(event->stream == own_stream);
  if (is_slow) usleep(50);
  int at = find(event->address);
  if (adds) {
    CHECK(at < 0 && known_count < MOST);
    known[known_count].start = event->address;
    known[known_count++].end = event->address + event->bytes;
  } else {
    uint64_t start = event->address, end = start + event->bytes;
    // A released range may be a part of one entry, or several.
    while (start < end) {
      at = find(start);
      CHECK(at >= 0);
      uint64_t before = known[at].start, behind = known[at].end, until = behind < end ? behind : end;
      known[at] = known[--known_count];
      if (before < start) {
        known[known_count].start = before;
        known[known_count++].end = start;
      }
      if (until < behind) {
        known[known_count].start = until;
        known[known_count++].end = behind;
      }
      start = until;
    }
  }
  atomic_fetch_sub(&inside, 1);
}

static pthread_mutex_t looking = PTHREAD_MUTEX_INITIALIZER;
static int copy_count;

static void *work(void *stream) {
  own_stream = (uint64_t)(uintptr_t)stream;
  uint64_t random = own_stream, address;
  for (int round = 0; round < ROUNDS; round++) {
    in_call = 1;
    vramlab_status status = vramlab_allocate(v, (20 + next_random(&random) % 8) * MIB, own_stream, &address);
    in_call = 0;
    OK(status);
    in_call = 1;
    OK(vramlab_free(v, address));
    if (round % 4 == 3) OK(vramlab_trim(v, 0, NULL));
    in_call = 0;
  }
  return NULL;
}

static void run(int streams) {
  pthread_t threads[THREADS];
  for (uintptr_t i = 0; i < THREADS; i++)
    CHECK(pthread_create(&threads[i], NULL, work, (void *)(i % streams + 3)) == 0);
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

// A block is not handed out before the program was told of its memory, also by another thread's call.
static uint64_t told_end;
static void note_end(void *context, const vramlab_segment_event *event) {
  (void)context;
  usleep(2000);
  pthread_mutex_lock(&looking);
  if (event->address + event->bytes > told_end) told_end = event->address + event->bytes;
  copy_count += 1;
  pthread_mutex_unlock(&looking);
}

static void *share(void *unused) {
  (void)unused;
  uint64_t address = allocate(v, MIB, 5);
  pthread_mutex_lock(&looking);
  CHECK(told_end >= address + MIB && copy_count > 0);
  pthread_mutex_unlock(&looking);
  return NULL;
}

// A callback that wants a lock which another thread holds over its call: that call goes on after a while, and the order is kept.
static pthread_mutex_t outer = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int entered;
static uint64_t order[8];
static int order_count;

static void want_lock(void *context, const vramlab_segment_event *event) {
  (void)context;
  CHECK(order_count < 8);
  order[order_count++] = event->stream;
  if (event->stream == 3) {
    atomic_store(&entered, 1);
    pthread_mutex_lock(&outer);
    pthread_mutex_unlock(&outer);
  }
}

static void *enter(void *unused) {
  (void)unused;
  allocate(v, 30 * MIB, 3);
  return NULL;
}

static void a_lock_over_a_call(void) {
  v = open_on("caching", "sim");
  OK(vramlab_on_segment(v, NULL, want_lock));
  pthread_mutex_lock(&outer);
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, enter, NULL) == 0);
  for (int i = 0; i < 100000 && !atomic_load(&entered); i++) usleep(100);
  CHECK(atomic_load(&entered));
  allocate(v, 30 * MIB, 4);
  pthread_mutex_unlock(&outer);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(order_count == 2 && order[0] == 3 && order[1] == 4);
  OK(vramlab_close(v));
}

int main(int count, char **names) {
  for (int i = 1; i < count; i++) {
    for (is_slow = 0; is_slow < 2; is_slow++) {
      for (int streams = 1; streams <= THREADS; streams += THREADS - 1) {
        v = open_on(names[i], "sim");
        known_count = 0;
        OK(vramlab_on_segment(v, &known_count, follow));
        run(streams);
        in_call = 1;
        OK(vramlab_trim(v, 0, NULL));
        in_call = 0;
        // A driver's pool tells of nothing.
        CHECK(known_count == 0);
        OK(vramlab_close(v));
      }
    }
    if (strcmp(names[i], "stream-ordered") == 0) continue;
    v = open_on(names[i], "sim");
    told_end = copy_count = 0;
    OK(vramlab_on_segment(v, NULL, note_end));
    pthread_t threads[THREADS];
    for (int j = 0; j < THREADS; j++) CHECK(pthread_create(&threads[j], NULL, share, NULL) == 0);
    for (int j = 0; j < THREADS; j++) CHECK(pthread_join(threads[j], NULL) == 0);
    OK(vramlab_close(v));
  }
  if (count > 2) a_lock_over_a_call();
  puts("events came in order");
  return 0;
}
