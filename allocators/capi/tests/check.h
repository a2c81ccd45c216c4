// Common code of the C programs here: checks that end the program, and allocators on a simulated device.
#ifndef CHECK_H
#define CHECK_H

#include "vramlab.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                 \
  do {                                                                                                   \
    if (!(condition)) {                                                                                  \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, vramlab_error());               \
      exit(1);                                                                                           \
    }                                                                                                    \
  } while (0)
#define OK(call) CHECK((call) == VRAMLAB_STATUS_OK)
#define FAILS(status, word, call)                                                                        \
  do {                                                                                                   \
    CHECK((call) == VRAMLAB_STATUS_##status);                                                            \
    CHECK(strstr(vramlab_error(), word) != NULL);                                                        \
    CHECK(strchr(vramlab_error(), '\n') == NULL);                                                        \
  } while (0)

static const uint64_t MIB = 1 << 20;

static inline vramlab *open_on(const char *name, const char *device) {
  vramlab *v = NULL;
  OK(vramlab_open(name, device, &v));
  CHECK(v != NULL);
  return v;
}

static inline uint64_t allocate(vramlab *v, uint64_t bytes, uint64_t stream) {
  uint64_t address = 0;
  OK(vramlab_allocate(v, bytes, stream, &address));
  CHECK(address != 0 && address % 256 == 0);
  return address;
}

static inline vramlab_stats stats_of(vramlab *v) {
  vramlab_stats stats;
  OK(vramlab_read_stats(v, &stats));
  return stats;
}

static inline uint32_t can(vramlab *v) {
  uint32_t bits = 0;
  OK(vramlab_can(v, &bits));
  return bits;
}

// A number that depends on the one before and on nothing else.
static inline uint64_t next_random(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return *state >> 33;
}

#endif
