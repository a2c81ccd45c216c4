// Frees beside a stream that goes never fail, also of blocks of that stream and of other allocators on the device. Arguments: names
// of allocators.
#include "check.h"

enum { ROUNDS = 40, BLOCKS = 100 };

static vramlab *both[2];
static pthread_barrier_t barrier;
static uint64_t gone;

static void *destroy(void *unused) {
  (void)unused;
  uint64_t random = 1;
  for (int round = 0; round < ROUNDS; round++) {
    pthread_barrier_wait(&barrier);
    for (volatile uint64_t i = next_random(&random) % 4000; i > 0; i--) continue;
    OK(vramlab_stream_gone(both[round % 2], gone));
    pthread_barrier_wait(&barrier);
  }
  return NULL;
}

static void of_one(const char *name, int own) {
  uint64_t held[2][BLOCKS];
  pthread_t thread;
  for (int i = 0; i < 2; i++) both[i] = open_on(name, "sim");
  CHECK(pthread_create(&thread, NULL, destroy, NULL) == 0);
  for (int round = 0; round < ROUNDS; round++) {
    gone = 1000 + round % 3;
    for (int i = 0; i < 2 * BLOCKS; i++) {
      uint64_t *block = &held[i % 2][i / 2];
      *block = allocate(both[i % 2], 700, own ? gone : 1);
      OK(vramlab_record_stream(both[i % 2], *block, own ? 1 : gone));
    }
    pthread_barrier_wait(&barrier);
    for (int i = 0; i < 2 * BLOCKS; i++) OK(vramlab_free(both[i % 2], held[i % 2][i / 2]));
    pthread_barrier_wait(&barrier);
  }
  CHECK(pthread_join(thread, NULL) == 0);
  for (int i = 0; i < 2; i++) {
    OK(vramlab_trim(both[i], 0, NULL));
    vramlab_stats stats = stats_of(both[i]);
    CHECK(stats.active.all.current == 0 && stats.requested_bytes.all.current == 0);
    CHECK(stats.reserved_bytes.all.current == 0);
    OK(vramlab_close(both[i]));
  }
}

int main(int count, char **names) {
  CHECK(pthread_barrier_init(&barrier, NULL, 2) == 0);
  for (int i = 1; i < count; i++) {
    of_one(names[i], 0);
    of_one(names[i], 1);
  }
  puts("no free failed");
  return 0;
}
