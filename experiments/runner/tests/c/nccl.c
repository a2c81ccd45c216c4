// A stand-in for NCCL on the stand-in for the driver. The environment chooses how registration ends: STAND_IN_REGISTER is `hang`,
// `refuse`, `crash` or `wrong`.
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct { char internal[128]; } Id;
struct comm { int size, rank, registered; };
static int is(const char *value) {
  const char *chosen = getenv("STAND_IN_REGISTER");
  return chosen && !strcmp(chosen, value);
}
int ncclGetVersion(int *version) { *version = 22809; return 0; }
int ncclGetUniqueId(Id *id) { memset(id, 7, sizeof *id); return 0; }
int ncclCommInitRank(struct comm **comm, int size, Id id, int rank) {
  *comm = calloc(1, sizeof **comm);
  (*comm)->size = size; (*comm)->rank = rank;
  return id.internal[127] == 7 ? 0 : 4;
}
// The sum of the values that the measurement checks: (index modulo 7) + rank.
int ncclAllReduce(const float *from, float *to, size_t count, int type, int op, struct comm *comm, void *stream) {
  if (count == 4u << 20)
    for (size_t i = 0; i < count; i++)
      to[i] = comm->size * (float)(i % 7) + comm->size * (comm->size - 1) / 2 + (comm->registered && is("wrong"));
  return 0;
}
int ncclAllGather(const float *from, float *to, size_t count, int type, struct comm *comm, void *stream) { return 0; }
int ncclCommAbort(struct comm *comm) { return 0; }
int ncclCommDestroy(struct comm *comm) { free(comm); return 0; }
const char *ncclGetErrorString(int code) { return "invalid usage"; }
const char *ncclGetLastError(struct comm *comm) { return ""; }
int ncclMemAlloc(void **memory, size_t size) { *memory = malloc(size); return 0; }
int ncclMemFree(void *memory) { free(memory); return 0; }
int ncclCommRegister(struct comm *comm, void *memory, size_t size, void **handle) {
  if (is("hang")) pause();
  if (is("crash") && comm->rank == 1) abort();
  comm->registered = 1;
  *handle = memory;
  return is("refuse") ? 5 : 0;
}
int ncclCommDeregister(struct comm *comm, void *handle) { comm->registered = 0; return 0; }
int ncclCommMemStats(struct comm *comm, int which, unsigned long long *bytes) { *bytes = 1 << 20; return 0; }
