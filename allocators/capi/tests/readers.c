// Statistics, snapshots and records that are read while other threads allocate. Arguments: a folder; names of allocators.
#include "check.h"

#include <stdatomic.h>

enum { THREADS = 3, TURNS = 300000 };

static vramlab *v;
static atomic_bool stopping;
// What the other threads have done.
static atomic_int turns;

// Holds at most one block at any time, on one stream after another.
static void *allocate_in_turn(void *number) {
  for (uint64_t turn = 0; !stopping; turn++, turns++) {
    OK(vramlab_free(v, allocate(v, 4 * MIB, 100 * (uint64_t)(uintptr_t)number + turn % 50)));
  }
  return NULL;
}

static void *restart_sums(void *unused) {
  for (; !stopping; turns++) OK(vramlab_reset_accumulated(v));
  return unused;
}

// Makes the counts grow that have no level: calls of the driver, and refusals.
static void *be_refused(void *unused) {
  uint64_t address;
  while (!stopping) {
    OK(vramlab_free(v, allocate(v, 30 * MIB, 1)));
    CHECK(vramlab_allocate(v, (uint64_t)1 << 50, 1, &address) == VRAMLAB_STATUS_OUT_OF_MEMORY);
    OK(vramlab_trim(v, 0, NULL));
  }
  return unused;
}

static void see_block(void *live, const vramlab_block *block) {
  *(uint64_t *)live += block->state == VRAMLAB_BLOCK_STATE_ALLOCATED;
}

static void with_threads(void *(*const run[THREADS])(void *), void (*read)(void)) {
  pthread_t threads[THREADS];
  stopping = false;
  turns = 0;
  for (uintptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, run[i], (void *)(i + 1)) == 0);
  while (turns < TURNS) read();
  stopping = true;
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

// A sum over streams that are read one after another would find the block of a thread several times.
static void read_one_moment(void) {
  uint64_t live = 0;
  vramlab_stats stats = stats_of(v);
  CHECK(stats.allocation.all.current <= THREADS);
  CHECK(stats.allocated_bytes.all.current == stats.allocation.all.current * 4 * MIB);
  CHECK(stats.allocation.all.allocated - stats.allocation.all.freed == stats.allocation.all.current);
  if (can(v) & VRAMLAB_CAN_SNAPSHOT) OK(vramlab_visit(v, &live, NULL, see_block));
  CHECK(live <= THREADS);
}

static void read_counts(void) {
  vramlab_stats stats = stats_of(v);
  CHECK(stats.num_ooms < 1 << 30 && stats.num_device_alloc < 1 << 30 && stats.num_device_free < 1 << 30);
}

// Number of the lines of a file. Each has an action; `actions` are their first letters in order.
static size_t lines_of(const char *path, char *actions, size_t room) {
  char line[512];
  size_t count = 0;
  FILE *file = fopen(path, "r");
  CHECK(file != NULL);
  for (; fgets(line, sizeof line, file) != NULL; count++) {
    const char *action = strstr(line, "\"action\":\"");
    CHECK(action != NULL && count < room);
    actions[count] = action[strlen("\"action\":\"")];
  }
  fclose(file);
  return count;
}

// A file that cannot be written loses no records, and records keep their order when times are measured meanwhile.
static void records(const char *name, const char *folder) {
  char path[512], actions[8];
  snprintf(path, sizeof path, "%s/%s.jsonl", folder, name);
  v = open_on(name, "sim");
  // The simulated clock stands still from the second one on.
  OK(vramlab_free(v, allocate(v, MIB, 1)));
  OK(vramlab_trace(v, true));
  OK(vramlab_latency(v, true));
  uint64_t address = allocate(v, MIB, 1);
  FAILS(IO, "nowhere", vramlab_trace_write(v, "/nowhere/at/all.jsonl"));
  OK(vramlab_latency(v, false));
  OK(vramlab_free(v, address));
  OK(vramlab_trace_write(v, path));
  CHECK(lines_of(path, actions, sizeof actions) == 2 && actions[0] == 'a' && actions[1] == 'f');
  OK(vramlab_trace_write(v, path));
  CHECK(lines_of(path, actions, sizeof actions) == 0);
  OK(vramlab_close(v));
}

int main(int count, char **arguments) {
  CHECK(count > 2);
  for (int i = 2; i < count; i++) {
    const char *name = arguments[i];
    v = open_on(name, "sim");
    with_threads((void *(*const[THREADS])(void *)){allocate_in_turn, allocate_in_turn, allocate_in_turn}, read_one_moment);
    OK(vramlab_close(v));
    v = open_on(name, "sim");
    with_threads((void *(*const[THREADS])(void *)){be_refused, restart_sums, restart_sums}, read_counts);
    OK(vramlab_close(v));
    records(name, arguments[1]);
  }
  puts("all from one moment");
  return 0;
}
