// The requests of pinned host memory as lines of JSON, for `vramlab replay --host`: what PyTorch's snapshots do not have, the
// requested sizes, and what every release has.
//
// Completions are those of events of its own, asked for before each request. PyTorch asks its own events shortly afterwards, so it
// may know of one more: a block that is allocated again shows that. PyTorch's queue is first in, first out, so everything before
// that block has completed, too.
#pragma once

#include "../shim/pinned.h"

#include "frames.h"

#include <c10/core/Event.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <fcntl.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace vramlab_recorder {

using vramlab_shim::HostStream;

// Appends text as JSON has it, without quotation marks.
inline void append_escaped(std::string& to, const std::string& text) {
    for (const char letter : text) {
        if (letter == '"' || letter == '\\') {
            to += '\\';
            to += letter;
        } else if (static_cast<unsigned char>(letter) < 0x20) {
            char code[8];
            std::snprintf(code, sizeof(code), "\\u%04x", static_cast<unsigned>(letter));
            to += code;
        } else {
            to += letter;
        }
    }
}

class PinnedLog final : public vramlab_shim::PinnedListener {
  public:
    struct Settings {
        std::string path;
        // A JSON object: PyTorch's settings of its allocator.
        std::string allocator;
        // Whether each segment of the allocator is one block, which its statistics count.
        bool has_segments;
        bool frames;
        uint64_t frames_from;
    };

    // The file is made at the first request.
    void begin(Settings settings, const Python& python) {
        std::lock_guard<std::mutex> guard(lock_);
        settings_ = std::move(settings);
        python_ = &python;
        stacks_.clear();
        stacks_in_file_.clear();
        live_.clear();
        waiting_.clear();
        ranges_.clear();
        segments_.clear();
        pinned_ = 0;
        has_base_ = false;
        is_first_ = true;
        failure_ = 0;
        buffer_.clear();
        close_file();
        active_ = true;
    }

    void flush() {
        if (!is_heard()) return;
        std::lock_guard<std::mutex> guard(lock_);
        write();
    }

    // The last completions, and the end of the file.
    void end() {
        if (!is_heard()) return;
        std::lock_guard<std::mutex> guard(lock_);
        guarded([&] { drain(); });
        write();
        close_file();
        active_ = false;
    }

    // Whether there is a file.
    bool is_begun() const { return !is_first_; }

    void before(at::HostAllocator* of) noexcept override {
        hear([&] {
            if (of != nullptr && !has_base_) {
                base_ = pinned_by(*of);
                has_base_ = true;
            }
            drain();
        });
    }

    void allocated(uint64_t address, size_t bytes, at::HostAllocator* of) noexcept override {
        hear([&] {
            complete_overlapping(address, bytes, of != nullptr);
            if (of != nullptr && settings_.has_segments && segments_.count(address) == 0) {
                // Above what is known: the new segment.
                const uint64_t known = base_ + pinned_;
                const uint64_t now = pinned_by(*of);
                if (now >= known + bytes) {
                    line("segment_alloc", address, now - known);
                    end_line();
                    segments_[address] = now - known;
                    pinned_ += now - known;
                }
            }
            line("alloc", address, bytes);
            if (settings_.frames && bytes >= settings_.frames_from) stack();
            end_line();
            live_[address] = Block{bytes, {}, false};
        });
    }

    void used(uint64_t address, HostStream stream) noexcept override {
        hear([&] {
            const auto at = live_.find(address);
            if (at == live_.end()) return;
            Block& block = at->second;
            const c10::cuda::CUDAStream of(c10::cuda::CUDAStream::UNCHECKED, stream);
            block.is_in_graph |= is_capturing(of.stream());
            if (std::find(block.streams.begin(), block.streams.end(), stream) != block.streams.end()) return;
            block.streams.push_back(stream);
            line("record_use", address, block.bytes, reinterpret_cast<uint64_t>(of.stream()));
            end_line();
        });
    }

    uint64_t freeing(uint64_t address) noexcept override {
        uint64_t number = 0;
        hear([&] {
            const auto at = live_.find(address);
            if (at == live_.end()) return;
            Block block = std::move(at->second);
            live_.erase(at);
            const bool is_deferred = !block.streams.empty() || block.is_in_graph;
            line("free_requested", address, block.bytes);
            if (is_deferred) buffer_ += ",\"deferred\":true";
            end_line();
            if (!is_deferred) return;
            number = ++last_number_;
            ranges_[address] = block.bytes;
            waiting_.push_back(Waiting{number, address, std::move(block), {}, false});
        });
        return number;
    }

    void freed(uint64_t number) noexcept override {
        if (number == 0) return;
        hear([&] {
            const auto at = std::find_if(waiting_.rbegin(), waiting_.rend(),
                                         [&](const Waiting& waiting) { return waiting.number == number; });
            // Allocated again meanwhile.
            if (at == waiting_.rend() || at->block.is_in_graph) return;
            const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
            for (const HostStream& stream : at->block.streams) {
                const c10::cuda::CUDAStream of(c10::cuda::CUDAStream::UNCHECKED, stream);
                // An event of a capture never completes.
                if (is_capturing(of.stream())) return;
                at->events.emplace_back(c10::DeviceType::CUDA);
                at->events.back().record(stream);
            }
            at->has_events = true;
        });
    }

    void emptied(at::HostAllocator* of) noexcept override {
        hear([&] {
            if (is_first_) return;
            drain();
            if (of == nullptr || !settings_.has_segments) {
                line("segment_free", 0, 0);
                end_line();
                return;
            }
            const uint64_t now = pinned_by(*of);
            release_until(now);
            // PyTorch had drained more than is known here.
            while (base_ + pinned_ > now) {
                const auto next = std::find_if(waiting_.begin(), waiting_.end(),
                                               [](const Waiting& waiting) { return waiting.has_events; });
                if (next == waiting_.end()) return;
                complete(next);
                release_until(now);
            }
        });
    }

  private:
    struct Block {
        size_t bytes;
        std::vector<HostStream> streams;
        bool is_in_graph;
    };

    struct Waiting {
        uint64_t number;
        uint64_t address;
        Block block;
        std::vector<c10::Event> events;
        bool has_events;
    };

    static constexpr size_t CHUNK = 1 << 16;
    // Frees that are asked for at once while none of them has completed: a program may have thousands that wait.
    static constexpr size_t MOST_ASKED = 8;

    static uint64_t pinned_by(at::HostAllocator& allocator) {
#if VRAMLAB_TORCH >= 210
        return static_cast<uint64_t>(allocator.get_stats().allocated_bytes.current);
#else
        return static_cast<uint64_t>(allocator.get_stats().reserved_bytes.current);
#endif
    }

    static bool is_capturing(cudaStream_t stream) {
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
        // The legacy stream cannot be asked during a capture of another one. PyTorch takes the last error for one of its own.
        (void)cudaGetLastError();
        return false;
    }

    bool is_heard() const { return active_.load(std::memory_order_relaxed) && !vramlab_shim::is_forked; }

    template <typename Act>
    void hear(Act&& act) noexcept {
        if (!is_heard()) return;
        std::lock_guard<std::mutex> guard(lock_);
        if (active_) guarded(act);
        if (buffer_.size() >= CHUNK) write();
    }

    // The program continues after a failure: it cannot fix it, and its allocator is not affected.
    template <typename Act>
    void guarded(Act&& act) noexcept {
        try {
            act();
        } catch (const std::exception& error) {
            std::fprintf(stderr, "vramlab: the recording of pinned memory ends here: %s\n", error.what());
            active_ = false;
        }
    }

    static bool has_completed(const Waiting& waiting) {
        return waiting.has_events && std::all_of(waiting.events.begin(), waiting.events.end(),
                                                 [](const c10::Event& event) { return event.query(); });
    }

    // Writes which frees have completed.
    void drain() {
        if (waiting_.empty()) return;
        const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
        size_t asked = 0;
        for (auto at = waiting_.begin(); at != waiting_.end() && asked < MOST_ASKED;) {
            if (has_completed(*at)) {
                at = complete(at);
            } else {
                asked += at->has_events ? 1 : 0;
                ++at;
            }
        }
    }

    std::deque<Waiting>::iterator complete(std::deque<Waiting>::iterator at) {
        line("free_completed", at->address, at->block.bytes);
        end_line();
        ranges_.erase(at->address);
        return waiting_.erase(at);
    }

    // Completes freed blocks that overlap one which was allocated, and with `is_queue` all before them.
    void complete_overlapping(uint64_t address, size_t bytes, bool is_queue) {
        const auto overlaps = [&](uint64_t first, size_t size) {
            return first < address + std::max<size_t>(bytes, 1) && address < first + std::max<size_t>(size, 1);
        };
        auto next = ranges_.lower_bound(address);
        if (next != ranges_.begin()) --next;
        while (next != ranges_.end() && next->first < address && !overlaps(next->first, next->second)) ++next;
        if (next == ranges_.end() || !overlaps(next->first, next->second)) return;
        size_t last = 0;
        for (size_t at = 0; at < waiting_.size(); ++at) {
            if (overlaps(waiting_[at].address, waiting_[at].block.bytes)) last = at + 1;
        }
        size_t at = 0;
        for (size_t count = 0; count < last; ++count) {
            const Waiting& waiting = waiting_[at];
            const bool is_over = overlaps(waiting.address, waiting.block.bytes) || (is_queue && waiting.has_events);
            if (is_over) {
                complete(waiting_.begin() + static_cast<std::ptrdiff_t>(at));
            } else {
                ++at;
            }
        }
    }

    // Releases unused segments until no more than these bytes are pinned.
    void release_until(uint64_t bytes) {
        for (auto at = segments_.begin(); at != segments_.end() && base_ + pinned_ > bytes;) {
            if (live_.count(at->first) > 0 || ranges_.count(at->first) > 0) {
                ++at;
                continue;
            }
            line("segment_free", at->first, at->second);
            end_line();
            pinned_ -= at->second;
            at = segments_.erase(at);
        }
    }

    void line(const char* action, uint64_t address, uint64_t bytes, uint64_t stream = 0) {
        timespec now{};
        clock_gettime(CLOCK_REALTIME, &now);
        // Monotonic, although the time of day may be changed.
        last_ns_ = std::max(last_ns_, static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec));
        buffer_ += "{\"time_ns\":" + std::to_string(last_ns_) + ",\"action\":\"" + action +
                   "\",\"addr\":" + std::to_string(address) + ",\"size\":" + std::to_string(bytes) +
                   ",\"stream\":" + std::to_string(stream);
        if (is_first_) buffer_ += ",\"allocator_settings\":" + settings_.allocator;
        is_first_ = false;
    }

    // The number of the thread's stack, and with the first such line its frames.
    void stack() {
        const uint32_t number = stacks_.here(*python_);
        if (number == 0) return;
        buffer_ += ",\"stack\":" + std::to_string(number);
        if (number >= stacks_in_file_.size()) stacks_in_file_.resize(stacks_.size());
        if (stacks_in_file_[number]) return;
        stacks_in_file_[number] = true;
        const char* separator = ",\"frames\":[";
        for (uint32_t at = number; at != 0; at = stacks_.node(at).caller) {
            const FrameText& frame = stacks_.frame(stacks_.node(at).frame);
            buffer_ += std::string(separator) + "{\"name\":\"";
            append_escaped(buffer_, frame.name);
            buffer_ += "\",\"filename\":\"";
            append_escaped(buffer_, frame.filename);
            buffer_ += "\",\"line\":" + std::to_string(std::max(frame.line, 0)) + "}";
            separator = ",";
        }
        buffer_ += ']';
    }

    void end_line() { buffer_ += "}\n"; }

    // Does not follow links. After a failure the file ends, possibly with half a line.
    void write() noexcept {
        if (buffer_.empty() || failure_ != 0) return buffer_.clear();
        if (file_ < 0) {
            file_ = ::open(settings_.path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
            if (file_ < 0) return fail();
        }
        for (size_t done = 0; done < buffer_.size();) {
            const ssize_t wrote = ::write(file_, buffer_.data() + done, buffer_.size() - done);
            if (wrote < 0 && errno == EINTR) continue;
            if (wrote <= 0) return fail();
            done += static_cast<size_t>(wrote);
        }
        buffer_.clear();
    }

    void fail() noexcept {
        failure_ = errno != 0 ? errno : EIO;
        std::fprintf(stderr, "vramlab: %s is not written: %s\n", settings_.path.c_str(), std::strerror(failure_));
        close_file();
        buffer_.clear();
        active_ = false;
    }

    void close_file() noexcept {
        if (file_ >= 0) ::close(file_);
        file_ = -1;
    }

    std::atomic<bool> active_{false};
    std::mutex lock_;
    Settings settings_{};
    const Python* python_ = nullptr;
    Stacks stacks_;
    std::vector<bool> stacks_in_file_;
    // Blocks that the program holds, by address.
    std::unordered_map<uint64_t, Block> live_;
    // Freed blocks that streams use, the oldest first, and their ranges.
    std::deque<Waiting> waiting_;
    std::map<uint64_t, size_t> ranges_;
    uint64_t last_number_ = 0;
    // Segments by address, and their bytes; `base_` was pinned before.
    std::map<uint64_t, uint64_t> segments_;
    uint64_t pinned_ = 0;
    uint64_t base_ = 0;
    bool has_base_ = false;
    std::string buffer_;
    uint64_t last_ns_ = 0;
    std::atomic<bool> is_first_{true};
    int file_ = -1;
    int failure_ = 0;
};

}  // namespace vramlab_recorder
