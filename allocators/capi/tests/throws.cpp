// A callback may throw: the exception reaches the caller of the library, and what the call did is done. Arguments: names of allocators.
extern "C" {
#include "vramlab.h"
}

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#define CHECK(condition)                                                                                 \
  do {                                                                                                   \
    if (!(condition)) {                                                                                  \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, vramlab_error());          \
      std::exit(1);                                                                                      \
    }                                                                                                    \
  } while (0)

static void refuse(void*, const vramlab_segment_event* event) { throw std::runtime_error(std::to_string(event->stream)); }

int main(int count, char** names) {
  for (int i = 1; i < count; i++) {
    vramlab* v = nullptr;
    CHECK(vramlab_open(names[i], "sim", &v) == VRAMLAB_STATUS_OK);
    for (int round = 0; round < 50; round++) {
      uint64_t block = 0;
      int caught = 0;
      CHECK(vramlab_on_segment(v, nullptr, refuse) == VRAMLAB_STATUS_OK);
      try {
        CHECK(vramlab_allocate(v, uint64_t{30} << 20, 3, &block) == VRAMLAB_STATUS_OK);
      } catch (const std::runtime_error& error) {
        CHECK(std::string(error.what()) == "3");
        caught = 1;
      }
      CHECK(block != 0 && (caught || std::string(names[i]) == "stream-ordered" || round > 0));
      CHECK(vramlab_on_segment(v, nullptr, nullptr) == VRAMLAB_STATUS_OK);
      CHECK(vramlab_free(v, block) == VRAMLAB_STATUS_OK);
      // Another thread is not held up.
      std::thread([&] {
        uint64_t other = 0;
        CHECK(vramlab_allocate(v, uint64_t{40} << 20, 2, &other) == VRAMLAB_STATUS_OK);
        CHECK(vramlab_free(v, other) == VRAMLAB_STATUS_OK);
      }).join();
      CHECK(vramlab_trim(v, 0, nullptr) == VRAMLAB_STATUS_OK);
    }
    CHECK(vramlab_close(v) == VRAMLAB_STATUS_OK);
  }
  std::puts("exceptions reached their callers");
  return 0;
}
