// The workloads of `experiments bench` for allocators of other projects: the same numbers, drawn beforehand, and the same
// loops (allocators/src/workload.rs). A program names its allocators and calls `run`; each line that it prints is
//     allocator case operations figure
// in ns per operation (one allocation and one free), for `threads` and `shared` in million operations per second in total.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

namespace workload {

using Clock = std::chrono::steady_clock;

constexpr size_t kPairs = 300'000;
constexpr size_t kPass = 300'000;
constexpr size_t kHistoryAllocations = 300'000;
// Some allocators take 30 us an operation at 16,384 live blocks: a pass ends after this time at the latest.
constexpr double kPassSeconds = 1.5;
constexpr size_t kThreadSteps = 16'384;
constexpr size_t kBatch = 128;
constexpr uint32_t kThreadLive = 64;
constexpr auto kWindow = std::chrono::milliseconds(300);
constexpr uint64_t kSeed = 1;

inline void check(cudaError_t code, const char* what) {
  if (code != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
    std::exit(1);
  }
}

// SplitMix64.
struct Random {
  uint64_t state;

  uint64_t next() {
    uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>((static_cast<unsigned __int128>(next()) * bound) >> 64); }
  uint32_t size() {
    uint32_t size = 512u << below(13);
    return size + below(size);
  }
};

struct Step {
  uint32_t slot, bytes;
};

struct Sequence {
  std::vector<uint32_t> fill;
  std::vector<Step> steps;

  Sequence(uint64_t seed, uint32_t slots, size_t count) {
    Random random{seed};
    for (uint32_t at = 0; at < slots; at++) fill.push_back(random.size());
    for (size_t at = 0; at < count; at++) {
      uint32_t slot = random.below(slots);
      steps.push_back({slot, random.size()});
    }
  }
};

// A call of a recorded history; 0 bytes free what lies in the slot.
struct Call {
  uint64_t bytes;
  uint32_t slot, stream;
};

// What `experiments bench` writes: slots and streams, then slot, stream and bytes of each call.
struct Recorded {
  uint32_t slots = 0, streams = 0;
  size_t allocations = 0;
  std::vector<Call> calls;

  explicit Recorded(const std::string& path) {
    std::ifstream in(path);
    in >> slots >> streams;
    for (Call call; in >> call.slot >> call.stream >> call.bytes;) {
      calls.push_back(call);
      allocations += call.bytes > 0;
    }
    if (!in.eof() || allocations == 0 || calls.size() != 2 * allocations) {
      std::fprintf(stderr, "%s: is no list of calls\n", path.c_str());
      std::exit(2);
    }
  }
};

// `A` has `void* allocate(size_t, cudaStream_t)` and `void free(void*, size_t, cudaStream_t)`.
template <class A>
struct Slots {
  A& allocator;
  cudaStream_t stream;
  std::vector<std::pair<void*, uint32_t>> live;

  Slots(A& allocator, cudaStream_t stream, const Sequence& sequence) : allocator(allocator), stream(stream) {
    for (uint32_t bytes : sequence.fill) live.emplace_back(allocator.allocate(bytes, stream), bytes);
  }
  ~Slots() {
    for (auto [block, bytes] : live) allocator.free(block, bytes, stream);
  }
  void run(const Step* step, size_t count) {
    for (const Step* end = step + count; step != end; step++) {
      auto& [block, bytes] = live[step->slot];
      allocator.free(block, bytes, stream);
      block = allocator.allocate(step->bytes, stream);
      bytes = step->bytes;
    }
  }
};

inline double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Sample {
  size_t operations;
  double figure;
};

template <class A>
Sample pair(A& allocator, cudaStream_t stream, size_t bytes) {
  auto pairs = [&](size_t count) {
    for (size_t at = 0; at < count; at++) allocator.free(allocator.allocate(bytes, stream), bytes, stream);
  };
  pairs(kPairs / 10);
  auto start = Clock::now();
  pairs(kPairs);
  return {kPairs, 1e9 * seconds_since(start) / kPairs};
}

template <class A>
Sample alternate(A& allocator, cudaStream_t stream, size_t one, size_t other) {
  auto pairs = [&](size_t count) {
    for (size_t at = 0; at < count; at += 2) {
      for (size_t bytes : {one, other}) allocator.free(allocator.allocate(bytes, stream), bytes, stream);
    }
  };
  pairs(kPairs / 10);
  auto start = Clock::now();
  pairs(kPairs);
  return {kPairs, 1e9 * seconds_since(start) / kPairs};
}

template <class A>
Sample history(A& allocator, const std::vector<cudaStream_t>& streams, const Recorded& recorded) {
  std::vector<std::pair<void*, uint64_t>> live(recorded.slots);
  auto pass = [&] {
    for (const Call& call : recorded.calls) {
      auto& [block, bytes] = live[call.slot];
      if (call.bytes == 0) {
        allocator.free(block, bytes, streams[call.stream]);
      } else {
        block = allocator.allocate(call.bytes, streams[call.stream]);
        bytes = call.bytes;
      }
    }
  };
  pass();
  size_t passes = 0;
  auto start = Clock::now();
  while (passes * recorded.allocations < kHistoryAllocations && seconds_since(start) < kPassSeconds) {
    pass();
    passes++;
  }
  size_t operations = passes * recorded.allocations;
  return {operations, 1e9 * seconds_since(start) / operations};
}

template <class A>
Sample mixed(A& allocator, cudaStream_t stream, const Sequence& sequence) {
  Slots<A> slots(allocator, stream, sequence);
  auto pass = [&](const Step* steps) -> Sample {
    constexpr size_t kPart = 2'500;
    auto start = Clock::now();
    size_t done = 0;
    while (done < kPass && seconds_since(start) < kPassSeconds) {
      slots.run(steps + done, kPart);
      done += kPart;
    }
    return {done, 1e9 * seconds_since(start) / done};
  };
  pass(sequence.steps.data());
  return pass(sequence.steps.data() + kPass);
}

template <class A>
Sample threads(A& allocator, const std::vector<cudaStream_t>& streams, const std::vector<Sequence>& sequences) {
  std::barrier ready(static_cast<std::ptrdiff_t>(streams.size() + 1));
  std::atomic<bool> stop{false};
  struct alignas(128) Count {
    size_t operations = 0;
    Clock::time_point start, end;
  };
  std::vector<Count> counts(streams.size());
  std::vector<std::thread> workers;
  for (size_t at = 0; at < streams.size(); at++) {
    workers.emplace_back([&, at] {
      check(cudaSetDevice(0), "cudaSetDevice");
      const auto& steps = sequences[at].steps;
      Slots<A> slots(allocator, streams[at], sequences[at]);
      slots.run(steps.data(), 1'024);
      ready.arrive_and_wait();
      size_t operations = 0;
      counts[at].start = Clock::now();
      for (size_t next = 0; !stop.load(std::memory_order_relaxed); next = (next + kBatch) % steps.size()) {
        slots.run(steps.data() + next, kBatch);
        operations += kBatch;
      }
      counts[at].end = Clock::now();
      counts[at].operations = operations;
    });
  }
  ready.arrive_and_wait();
  std::this_thread::sleep_for(kWindow);
  stop = true;
  for (auto& worker : workers) worker.join();
  Count total = counts[0];
  for (size_t at = 1; at < counts.size(); at++) {
    total.operations += counts[at].operations;
    total.start = std::min(total.start, counts[at].start);
    total.end = std::max(total.end, counts[at].end);
  }
  double seconds = std::chrono::duration<double>(total.end - total.start).count();
  return {total.operations, total.operations / seconds / 1e6};
}

// An allocator to measure: its name, and a function that makes one afresh and hands it to a case.
class Program {
 public:
  template <class A>
  void add(std::string name) {
    arms_.emplace_back(std::move(name), [this](const std::string& kind, const std::string& rest) -> Sample {
      A allocator;
      if (kind == "history") {
        const Recorded& recorded = histories_.at(rest);
        grow(recorded.streams);
        return history(allocator, streams_, recorded);
      }
      uint64_t number = std::strtoull(rest.c_str(), nullptr, 10);
      if (kind == "alternate") {
        uint64_t other = std::strtoull(rest.c_str() + rest.find('/') + 1, nullptr, 10);
        return alternate(allocator, streams_[0], number, other);
      }
      if (kind == "pair") return pair(allocator, streams_[0], number);
      if (kind == "mixed") return mixed(allocator, streams_[0], sequence(number));
      grow(number);
      if (kind == "shared") return threads(allocator, std::vector<cudaStream_t>(number, streams_[0]), sequences_);
      return threads(allocator, {streams_.begin(), streams_.begin() + number}, sequences_);
    });
  }

  // Arguments: cases separated by commas, repeats, then NAME=FILE of each history. A repeat goes through all cases, and the next one back, so that a
  // phase in which another program uses the machine does not fall on one case alone.
  int run(int argc, char** argv) {
    if (argc < 3) {
      std::fprintf(stderr, "usage: %s CASE,... REPEATS [NAME=FILE ...]\n", argv[0]);
      return 2;
    }
    grow(1);
    for (int at = 3; at < argc; at++) {
      std::string given = argv[at];
      size_t equals = given.find('=');
      histories_.try_emplace(given.substr(0, equals), given.substr(equals + 1));
    }
    std::vector<std::string> cases;
    std::stringstream list(argv[1]);
    for (std::string name; std::getline(list, name, ',');) cases.push_back(name);
    for (int repeat = 0; repeat < std::atoi(argv[2]); repeat++) {
      for (const std::string& name : cases) {
        std::string kind = name.substr(0, name.find('/'));
        std::string rest = name.substr(kind.size() + 1);
        for (auto& [allocator, measure] : arms_) {
          Sample sample = measure(kind, rest);
          std::printf("%s %s %zu %.6f\n", allocator.c_str(), name.c_str(), sample.operations, sample.figure);
          std::fflush(stdout);
          check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        }
      }
      std::reverse(cases.begin(), cases.end());
    }
    return 0;
  }

 private:
  std::vector<std::pair<std::string, std::function<Sample(const std::string&, const std::string&)>>> arms_;
  std::map<std::string, Recorded> histories_;
  std::vector<cudaStream_t> streams_;
  std::vector<Sequence> sequences_;
  std::map<uint64_t, Sequence> mixed_;

  void grow(size_t count) {
    while (streams_.size() < count) {
      cudaStream_t stream;
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
      sequences_.emplace_back(kSeed + streams_.size(), kThreadLive, kThreadSteps);
      streams_.push_back(stream);
    }
  }
  const Sequence& sequence(uint64_t live) {
    return mixed_.try_emplace(live, kSeed, static_cast<uint32_t>(live), 2 * kPass).first->second;
  }
};

}  // namespace workload
