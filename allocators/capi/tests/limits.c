// A limit that is set at run time is held after every call. Arguments: names of allocators.
#include "check.h"

enum { MOST = 256, STEPS = 400 };

static void of_one(const char *name, uint64_t seed) {
  vramlab *v = open_on(name, "sim");
  uint64_t held[MOST], random = seed, refused = 0, before = 0, limit = 0;
  int count = 0;
  for (int step = 0; step < STEPS; step++) {
    if (step % 100 == 0) {
      // No multiple of any granule, now higher and now lower.
      limit = (50 + next_random(&random) % 2000) * MIB + next_random(&random) % MIB;
      OK(vramlab_set_limit(v, limit));
    }
    if (count < MOST && next_random(&random) % 3 > 0) {
      uint64_t bytes = 1 + next_random(&random) % (next_random(&random) % 4 ? 30 * MIB : 5000);
      vramlab_status status = vramlab_allocate(v, bytes, next_random(&random) % 3, &held[count]);
      CHECK(status == VRAMLAB_STATUS_OK || status == VRAMLAB_STATUS_OUT_OF_MEMORY);
      if (status == VRAMLAB_STATUS_OK) {
        count += 1;
      } else {
        refused += 1;
      }
    } else if (count > 0) {
      OK(vramlab_free(v, held[--count]));
    }
    // Memory reserved before the limit was lowered may stay, and does not grow.
    uint64_t reserved = stats_of(v).reserved_bytes.all.current;
    CHECK(reserved <= limit || reserved <= before);
    before = reserved;
  }
  OK(vramlab_set_limit(v, 0));
  FAILS(OUT_OF_MEMORY, "limit", vramlab_allocate(v, 3000 * MIB, 0, &held[0]));
  OK(vramlab_set_limit(v, VRAMLAB_NO_LIMIT));
  // An arena keeps the size that it began with.
  if (strcmp(name, "rmm-arena") != 0) OK(vramlab_free(v, allocate(v, 3000 * MIB, 0)));
  while (count > 0) OK(vramlab_free(v, held[--count]));
  OK(vramlab_close(v));
  CHECK(refused < STEPS);
}

static vramlab *shared;
static void *churn(void *unused) {
  (void)unused;
  uint64_t address;
  for (int i = 0; i < 300; i++) {
    if (vramlab_allocate(shared, 60 * MIB, 0, &address) == VRAMLAB_STATUS_OK) OK(vramlab_free(shared, address));
    CHECK(stats_of(shared).allocated_bytes.all.current <= 100 * MIB);
  }
  return NULL;
}

int main(int count, char **names) {
  for (int i = 1; i < count; i++) {
    for (uint64_t seed = 1; seed <= 4; seed++) of_one(names[i], seed);
    // Two threads that ask at once get one block together.
    if (strcmp(names[i], "rmm-arena") == 0) continue;
    shared = open_on(names[i], "sim");
    OK(vramlab_set_limit(shared, 100 * MIB));
    pthread_t threads[4];
    for (int j = 0; j < 4; j++) CHECK(pthread_create(&threads[j], NULL, churn, NULL) == 0);
    for (int j = 0; j < 4; j++) CHECK(pthread_join(threads[j], NULL) == 0);
    OK(vramlab_close(shared));
  }
  puts("limits were held");
  return 0;
}
