// A restore of a private pool that fails changes nothing, and no address is handed out twice. Arguments: names of allocators.
#include "check.h"

static int calls;
static void count_freed(void *context, uint64_t address) { (void)context, (void)address, calls++; }
static void count_created(void *context, uint64_t address, uint64_t bytes, uint64_t stream) {
  (void)context, (void)address, (void)bytes, (void)stream, calls++;
}

// A restore that has to fail, and everything as before.
static void fail(vramlab *v, vramlab_checkpoint *checkpoint, vramlab_status status) {
  vramlab_stats before = stats_of(v), after;
  calls = 0;
  CHECK(vramlab_pool_restore(v, checkpoint, NULL, count_freed, count_created) == status);
  after = stats_of(v);
  CHECK(calls == 0 && memcmp(&before, &after, sizeof before) == 0);
}

static void restore(vramlab *v, vramlab_checkpoint *checkpoint, int expected) {
  calls = 0;
  OK(vramlab_pool_restore(v, checkpoint, NULL, count_freed, count_created));
  CHECK(calls == expected);
}

static void of_one(const char *name) {
  vramlab *v = open_on(name, "sim");
  uint64_t pool, held[2], other, next;
  vramlab_checkpoint *checkpoint = NULL;
  if (!(can(v) & VRAMLAB_CAN_POOLS)) {
    OK(vramlab_close(v));
    return;
  }
  OK(vramlab_pool_create(v, &pool));
  OK(vramlab_allocate_in(v, pool, 3 * MIB, 1, &held[0]));
  OK(vramlab_allocate_in(v, pool, 700, 1, &held[1]));
  if (!(can(v) & VRAMLAB_CAN_CHECKPOINT)) {
    FAILS(INCAPABLE, "checkpoints", vramlab_pool_checkpoint(v, pool, &checkpoint));
    CHECK(checkpoint == NULL);
    OK(vramlab_close(v));
    return;
  }
  OK(vramlab_pool_checkpoint(v, pool, &checkpoint));
  restore(v, checkpoint, 4);
  // Another stream uses a block: its memory is not free once it is freed.
  OK(vramlab_record_stream(v, held[0], 2));
  fail(v, checkpoint, VRAMLAB_STATUS_LIVE);
  for (int i = 0; i < 8; i++) {
    OK(vramlab_allocate_in(v, pool, i % 2 ? 3 * MIB : 700, 1, &next));
    CHECK(next != held[0] && next != held[1]);
    OK(vramlab_free(v, next));
  }
  OK(vramlab_stream_gone(v, 2));
  restore(v, checkpoint, 4);
  // It was freed, and its free waits: for a capture here, which nothing is waited for in.
  OK(vramlab_record_stream(v, held[0], 2));
  OK(vramlab_allocate_in(v, pool, 30 * MIB, 1, &other));
  OK(vramlab_record_stream(v, other, 2));
  OK(vramlab_capturing(v, true));
  OK(vramlab_free(v, other));
  // Deferred frees that have completed by now are not compared.
  OK(vramlab_free(v, allocate(v, 700, 1)));
  fail(v, checkpoint, VRAMLAB_STATUS_LIVE);
  OK(vramlab_capturing(v, false));
  OK(vramlab_stream_gone(v, 2));
  // The pool of another allocator, and one that was released.
  vramlab *stranger = open_on(name, "sim");
  fail(stranger, checkpoint, VRAMLAB_STATUS_UNKNOWN);
  OK(vramlab_close(stranger));
  OK(vramlab_pool_release(v, pool));
  fail(v, checkpoint, VRAMLAB_STATUS_LIVE);
  for (int i = 0; i < 2; i++) OK(vramlab_free(v, held[i]));
  OK(vramlab_pool_trim(v, pool, NULL));
  fail(v, checkpoint, VRAMLAB_STATUS_LIVE);
  OK(vramlab_trim(v, 0, NULL));
  CHECK(stats_of(v).allocation.all.current == 0 && stats_of(v).active.all.current == 0);
  CHECK(stats_of(v).reserved_bytes.all.current == 0);
  vramlab_checkpoint_free(checkpoint);
  OK(vramlab_close(v));
}

int main(int count, char **names) {
  for (int i = 1; i < count; i++) of_one(names[i]);
  puts("restores were whole or changed nothing");
  return 0;
}
