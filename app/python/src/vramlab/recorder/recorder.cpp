// Records the events of PyTorch's CUDA allocator, PyTorch's own or VramLab's, as they happen.
//
// It listens to the allocator's events (`attachAllocatorTraceTracker`) and does not change the allocator. PyTorch's own
// history keeps a ring buffer of events and gathers frames under the GIL, also on frees, where an exception that is being
// unwound can be lost. Here each event is written to a file, frames are read without the GIL (frames.h), and frees have
// none. Events of a device arrive under its allocator's lock, in its order.
//
// Compiled on the user's machine against the installed PyTorch (`_build.py`). It is never unloaded, because PyTorch keeps
// its listeners.

#include "../shim/background.h"
#include "../shim/pinned.h"
#include "../shim/torch_versions.h"

#include "pickle.h"
#include "pinned_log.h"

#include <ATen/record_function.h>
#include <pthread.h>
#include <array>
#include <atomic>
#include <chrono>
#include <ctime>
#include <deque>
#include <mutex>

namespace vramlab_recorder {
namespace {

using vramlab_shim::DeviceIndex;
using vramlab_shim::TraceEntry;

// Converts the processor counter that PyTorch reads for each event to microseconds since 1970; the system clock is read
// once a second. Needs a lock.
class Clock {
  public:
    void begin() {
        start_us_ = static_cast<double>(now_ns(CLOCK_REALTIME)) / 1'000.0;
        first_ = read();
        last_us_ = 0;
        // The counter's rate over a short initial interval; later it is measured over longer ones.
        timespec pause{0, 2'000'000};
        while (nanosleep(&pause, &pause) != 0 && errno == EINTR) {}
        adjust();
    }

    // Monotonic.
    uint64_t us(c10::approx_time_t count) {
        const double since = static_cast<double>(static_cast<int64_t>(count) - anchor_.count) * rate_;
        // A thread may have been delayed since before the start.
        const double passed = std::max(0.0, static_cast<double>(anchor_.ns - first_.ns) + since);
        last_us_ = std::max(last_us_, static_cast<uint64_t>(start_us_ + passed / 1'000.0));
        if (since > ADJUST_NS) adjust();
        return last_us_;
    }

  private:
    static constexpr double ADJUST_NS = 1e9;

    struct Reading {
        int64_t count;
        int64_t ns;
    };

    static int64_t now_ns(clockid_t clock) {
        timespec now{};
        clock_gettime(clock, &now);
        return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
    }

    // CLOCK_MONOTONIC, because the time of day may be changed.
    static Reading read() { return {static_cast<int64_t>(c10::getApproximateTime()), now_ns(CLOCK_MONOTONIC)}; }

    void adjust() {
        anchor_ = read();
        if (anchor_.count > first_.count) {
            rate_ = static_cast<double>(anchor_.ns - first_.ns) / static_cast<double>(anchor_.count - first_.count);
        }
    }

    double start_us_ = 0;
    Reading first_{};
    Reading anchor_{};
    double rate_ = 1.0;
    uint64_t last_us_ = 0;
};

struct Annotation {
    std::string name;
    int device;
    bool start;
    uint64_t time_us;
};

class Recorder {
  public:
    // Maximum number of annotations; the newest are retained.
    static constexpr size_t MOST_ANNOTATIONS = 500'000;

    Python python;

    // File names start with `stem` and end with `ending`; all but the first used GPU's contain the GPU's number.
    void begin(const std::string& stem, const std::string& ending, bool frames, uint64_t frames_from) {
        listen();
        std::lock_guard<std::mutex> guard(lock_);
        for (auto& file : files_) file.reset();
        stacks_.clear();
        annotations_.clear();
        stem_ = stem;
        ending_of_files_ = ending;
        first_used_ = NONE;
        frames_ = frames;
        frames_from_ = frames_from;
        ending_ = false;
        clock_.begin();
        active_.store(true);
        // A killed process loses its buffer, so it is also flushed while there are no events.
        if (!writes_) writes_ = vramlab_shim::start_background([this] { write_each_second(); });
    }

    // Announces a copy of the segments. If it is the last, later events are not recorded.
    void expect_snapshot(bool last) {
        std::lock_guard<std::mutex> guard(lock_);
        ending_ = last;
        snapshots_ = 0;
    }

    void end() {
        active_.store(false);
        std::lock_guard<std::mutex> guard(lock_);
        for (auto& file : files_) {
            if (file == nullptr) continue;
            file->write();
            file->close();
        }
    }

    // In a child after fork(): the files are the parent's, and the lock may be held by a thread that does not exist here.
    void forget() { active_.store(false); }

    void flush() {
        std::lock_guard<std::mutex> guard(lock_);
        for (auto& file : files_) {
            if (file == nullptr || !file->is_open()) continue;
            file->write();
            say_failure(*file);
        }
    }

    // A line per file: device, events, bytes up to the mark, errno, and whether its name contains the device.
    std::string describe() {
        std::lock_guard<std::mutex> guard(lock_);
        std::string out;
        for (size_t device = 0; device < files_.size(); ++device) {
            const EventFile* file = files_[device].get();
            if (file == nullptr) continue;
            for (const uint64_t number : {uint64_t{device}, file->events(), file->mark(), uint64_t(file->failure())}) {
                out += std::to_string(number) + ' ';
            }
            out += device == first_used_ ? "0\n" : "1\n";
        }
        return out;
    }

    // The remainder of a device's file: the ends of the event lists, and the annotations.
    std::string tail(int device) {
        std::lock_guard<std::mutex> guard(lock_);
        Pickle to;
        to.code('e');
        to.text("external_annotations");
        to.code(']');
        for (const Annotation& annotation : annotations_) {
            if (annotation.device != device) continue;
            to.codes('}', '(');
            to.text("device");
            to.integer(static_cast<uint64_t>(annotation.device));
            to.text("time_us");
            to.integer(annotation.time_us);
            to.text("name");
            to.text(annotation.name);
            to.text("stage");
            to.text(annotation.start ? "START" : "END");
            to.codes('u', 'a');
        }
        return std::string(to.data(), to.size());
    }

    // The calling thread's stack, one frame per line, innermost first, for the comparison with Python's own.
    std::string stack_here() const {
        std::string out;
        Stacks stacks;
        for (uint32_t at = stacks.here(python); at != 0; at = stacks.node(at).caller) {
            const FrameText& frame = stacks.frame(stacks.node(at).frame);
            out += std::to_string(frame.line) + '\t' + frame.name + '\t' + frame.filename + '\n';
        }
        return out;
    }

    void annotate(const std::string& name, bool start) {
        if (!active_.load(std::memory_order_relaxed)) return;
        DeviceIndex device = 0;
        if (c10::cuda::GetDevice(&device) != cudaSuccess) return;
        std::lock_guard<std::mutex> guard(lock_);
        if (annotations_.size() == MOST_ANNOTATIONS) annotations_.pop_front();
        annotations_.push_back(Annotation{name, device, start, clock_.us(c10::getApproximateTime())});
    }

  private:
    // PyTorch keeps its listeners, so this runs once per allocator.
    void listen() {
        auto* allocator = c10::cuda::CUDACachingAllocator::allocator.load();
        if (listens_to_ == allocator) return;
        allocator->attachAllocatorTraceTracker([this](const TraceEntry& entry) { hear(entry); });
        if (listens_to_ == nullptr) {
            at::addGlobalCallback(at::RecordFunctionCallback(&on_range_begin, &on_range_end)
                                      .scopes({at::RecordScope::USER_SCOPE}));
            pthread_atfork(nullptr, nullptr, &on_fork);
        }
        listens_to_ = allocator;
    }

    [[noreturn]] void write_each_second() {
        for (;;) {
            std::this_thread::sleep_for(std::chrono::seconds(1));
            if (active_.load()) flush();
            flush_pinned();
        }
    }

    void hear(const TraceEntry& entry) noexcept {
        if (!active_.load(std::memory_order_relaxed)) return;
        try {
            std::lock_guard<std::mutex> guard(lock_);
            if (active_.load(std::memory_order_relaxed)) take(entry);
        } catch (const std::exception& error) {
            // The program continues: it cannot fix the error, and its allocator is unaffected.
            active_.store(false);
            std::fprintf(stderr, "vramlab: the recording ends here: %s\n", error.what());
        }
    }

    void take(const TraceEntry& entry) {
        Event event{};
        bool allocates = true;
        switch (entry.action_) {
            case TraceEntry::ALLOC: event.action = Word::ALLOC; break;
            case TraceEntry::SEGMENT_ALLOC: event.action = Word::SEGMENT_ALLOC; break;
            case TraceEntry::SEGMENT_FREE: event.action = Word::SEGMENT_FREE; break;
            case TraceEntry::SEGMENT_MAP: event.action = Word::SEGMENT_MAP; break;
            case TraceEntry::SEGMENT_UNMAP: event.action = Word::SEGMENT_UNMAP; break;
            case TraceEntry::OOM: event.action = Word::OOM; break;
            case TraceEntry::FREE_REQUESTED: event.action = Word::FREE_REQUESTED, allocates = false; break;
            case TraceEntry::FREE_COMPLETED: event.action = Word::FREE_COMPLETED, allocates = false; break;
            case TraceEntry::SNAPSHOT: mark(entry.device_); return;
            default: return;
        }
        EventFile* file = file_of(entry.device_);
        if (file == nullptr || !file->is_open()) return;
        event.address = entry.addr_;
        event.bytes = entry.size_;
        event.stream = reinterpret_cast<uint64_t>(entry.stream_);
        event.time_us = clock_.us(entry.time_.approx_t_);
        // Segment events have frames whatever their size: they show who released the segment.
        const bool is_small = entry.action_ == TraceEntry::ALLOC && entry.size_ < frames_from_;
        if (allocates && frames_ && !is_small) event.stack = stacks_.here(python);
#if VRAMLAB_TORCH >= 210
        event.note = &entry.user_metadata_;
#endif
        file->add(event, stacks_);
        // The program may exit after this event.
        if (entry.action_ == TraceEntry::OOM) file->write();
        say_failure(*file);
    }

    // PyTorch's own allocator copies the segments device by device and passes 0 for each.
    void mark(DeviceIndex told) {
        const auto device = told == 0 ? snapshots_++ : static_cast<size_t>(told);
        EventFile* file = device < files_.size() ? files_[device].get() : nullptr;
        if (file == nullptr || !file->is_open()) return;
        file->set_mark();
        if (ending_) file->close();
    }

    // The first device's file has the requested name; the other names contain the device.
    EventFile* file_of(DeviceIndex index) {
        const auto device = static_cast<size_t>(index);
        if (device >= files_.size()) return nullptr;
        if (files_[device] != nullptr) return files_[device].get();
        if (first_used_ == NONE) first_used_ = device;
        const std::string gpu = device == first_used_ ? "" : ".gpu" + std::to_string(device);
        const std::string path = stem_ + gpu + ending_of_files_;
        files_[device] = std::make_unique<EventFile>();
        if (!files_[device]->open(path, index)) {
            std::fprintf(stderr, "vramlab: %s is not written: %s\n", path.c_str(), std::strerror(errno));
        }
        return files_[device].get();
    }

    static void say_failure(EventFile& file) {
        if (file.failure() == 0 || file.is_open()) return;
        std::fprintf(stderr, "vramlab: %s ends after %llu events: %s\n", file.path().c_str(),
                     static_cast<unsigned long long>(file.events()), std::strerror(file.failure()));
    }

    static std::unique_ptr<at::ObserverContext> on_range_begin(const at::RecordFunction& range);
    static void on_range_end(const at::RecordFunction& range, at::ObserverContext*);
    static void on_fork();
    static void flush_pinned();

    std::atomic<bool> active_{false};
    // The innermost lock: no other lock is acquired while it is held.
    std::mutex lock_;
    std::string stem_;
    std::string ending_of_files_;
    static constexpr size_t NONE = SIZE_MAX;
    size_t first_used_ = NONE;
    bool frames_ = false;
    bool writes_ = false;
    bool ending_ = false;
    size_t snapshots_ = 0;  // since the last announcement
    uint64_t frames_from_ = 0;
    std::array<std::unique_ptr<EventFile>, C10_COMPILE_TIME_MAX_GPUS> files_{};
    Clock clock_;
    Stacks stacks_;
    std::deque<Annotation> annotations_;
    vramlab_shim::CUDAAllocator* listens_to_ = nullptr;
};

// Never destroyed: threads may still free memory when the process exits.
Recorder& recorder() {
    static auto* out = new Recorder();
    return *out;
}

std::unique_ptr<at::ObserverContext> Recorder::on_range_begin(const at::RecordFunction& range) {
    recorder().annotate(range.name(), true);
    return nullptr;
}

void Recorder::on_range_end(const at::RecordFunction& range, at::ObserverContext*) {
    recorder().annotate(range.name(), false);
}

void Recorder::on_fork() { recorder().forget(); }

// Counts the pinned memory that is requested of PyTorch's own allocator: its statistics and snapshots have rounded sizes.
vramlab_shim::Watch* pinned = nullptr;

// Never destroyed, as the recorder.
PinnedLog& pinned_log() {
    static auto* out = new PinnedLog();
    return *out;
}

void Recorder::flush_pinned() { pinned_log().flush(); }

std::string last_text;
std::string last_error;

template <typename Act>
int guarded(Act&& act) {
    try {
        last_error.clear();
        act();
        return 0;
    } catch (const c10::Error& error) {
        last_error = error.what_without_backtrace();
    } catch (const std::exception& error) {
        last_error = error.what();
    }
    return 1;
}

}  // namespace
}  // namespace vramlab_recorder

#define VRAMLAB_EXPORT extern "C" __attribute__((visibility("default")))

#ifdef VRAMLAB_SHIM_SOURCE
// The digest of the sources: `_build.py` searches the file for it.
VRAMLAB_EXPORT const char vramlab_recorder_source[];
const char vramlab_recorder_source[] = VRAMLAB_SHIM_SOURCE;
#endif

// The error of the last failed call.
VRAMLAB_EXPORT const char* vramlab_recorder_error() { return vramlab_recorder::last_error.c_str(); }

// Sets the frame layout, `count` numbers in the order of `Layout`. Returns 1 if the
// count is that of another version or Python is not found.
VRAMLAB_EXPORT int vramlab_recorder_layout(const int64_t* offsets, size_t count) {
    using namespace vramlab_recorder;
    if (count * sizeof(int64_t) != sizeof(Layout) || !recorder().python.find()) return 1;
    std::memcpy(&recorder().python.layout, offsets, sizeof(Layout));
    return 0;
}

// The calling thread's frames, a line each: line, function, file.
VRAMLAB_EXPORT const char* vramlab_recorder_stack() {
    using namespace vramlab_recorder;
    guarded([] { last_text = recorder().stack_here(); });
    return last_text.c_str();
}

// Starts recording to the file `stem` + `ending`; CUDA is initialised. Blocks of at least `frames_from` bytes have frames
// if `frames` is set and a layout is known.
VRAMLAB_EXPORT int vramlab_recorder_begin(const char* stem, const char* ending, int frames, uint64_t frames_from) {
    using namespace vramlab_recorder;
    return guarded([&] { recorder().begin(stem, ending, frames != 0, frames_from); });
}

// Starts writing the requests of pinned memory to a file, which is made at the first one. `settings` is a JSON object: PyTorch's
// settings of its allocator.
VRAMLAB_EXPORT int vramlab_recorder_log_pinned(const char* path, const char* settings, int has_segments, int frames,
                                               uint64_t frames_from) {
    using namespace vramlab_recorder;
    return guarded([&] {
        static const bool watches = (vramlab_shim::watch_forks(), true);
        (void)watches;
        pinned_log().begin({path, settings, has_segments != 0, frames != 0, frames_from}, recorder().python);
    });
}

// Whether there was a request since.
VRAMLAB_EXPORT int vramlab_recorder_has_pinned_log() { return vramlab_recorder::pinned_log().is_begun() ? 1 : 0; }

// What hears of requests, for an allocator of VramLab's.
VRAMLAB_EXPORT void* vramlab_recorder_pinned_listener() {
    return static_cast<vramlab_shim::PinnedListener*>(&vramlab_recorder::pinned_log());
}

// Counts requests of pinned memory from now on.
VRAMLAB_EXPORT int vramlab_recorder_watch_pinned() {
    using namespace vramlab_recorder;
    return guarded([] {
        if (pinned != nullptr) return;
        auto* native = at::getHostAllocator(at::kCUDA);
        TORCH_CHECK(native != nullptr, "PyTorch has no allocator of pinned memory");
        pinned = new vramlab_shim::Watch(native, &pinned_log());
        at::setHostAllocator(at::kCUDA, pinned);
    });
}

// The most bytes of it that the program held, before rounding; 0 where nothing counts them.
VRAMLAB_EXPORT uint64_t vramlab_recorder_pinned() {
    using namespace vramlab_recorder;
    return pinned == nullptr ? 0 : pinned->requested.peak();
}

// Announces a copy of the allocator's segments; `last`: that copy ends the recording.
VRAMLAB_EXPORT void vramlab_recorder_expect_snapshot(int last) {
    vramlab_recorder::recorder().expect_snapshot(last != 0);
}

VRAMLAB_EXPORT void vramlab_recorder_end() {
    vramlab_recorder::recorder().end();
    vramlab_recorder::pinned_log().end();
}

// The files, a line each: device, events, bytes before the newest copy of the segments, errno, and whether the name
// contains the device.
VRAMLAB_EXPORT const char* vramlab_recorder_files() {
    using namespace vramlab_recorder;
    guarded([] { last_text = recorder().describe(); });
    return last_text.c_str();
}

// The remainder of a device's complete file after its events; `size` receives its length.
VRAMLAB_EXPORT const char* vramlab_recorder_tail(int device, size_t* size) {
    using namespace vramlab_recorder;
    guarded([&] { last_text = recorder().tail(device); });
    *size = last_text.size();
    return last_text.data();
}
