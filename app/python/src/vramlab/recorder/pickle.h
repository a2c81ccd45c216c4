// PyTorch's memory snapshot, written while the program runs: a pickle with a growing list of events, followed by the other
// keys. If the program is killed, the file is a truncated snapshot.
#pragma once

#include "frames.h"

#include <fcntl.h>
#include <unistd.h>
#include <cerrno>
#include <utility>

namespace vramlab_recorder {

// The repeated strings: each is written once and then referenced by its number.
enum class Word : uint8_t {
    ACTION, ADDR, DEVICE_FREE, SIZE, STREAM, TIME_US, FRAMES, FILENAME, NAME, LINE, COMPILE_CONTEXT, NOT_COMPILED,
    USER_METADATA, NOTHING, FORWARD_FRAMES, ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE,
    SEGMENT_MAP, SEGMENT_UNMAP, OOM, DEVICE, STAGE, START, END, COUNT
};

inline const char* spelling(Word word) {
    constexpr const char* WORDS[] = {
        "action", "addr", "device_free", "size", "stream", "time_us", "frames", "filename", "name", "line",
        "compile_context", "N/A", "user_metadata", "", "forward_frames", "alloc", "free_requested", "free_completed",
        "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom", "device", "stage", "START", "END"};
    static_assert(sizeof(WORDS) / sizeof(*WORDS) == static_cast<size_t>(Word::COUNT), "each word has a spelling");
    return WORDS[static_cast<size_t>(word)];
}

// Pickle protocol 2 opcodes, in memory.
class Pickle {
  public:
    Pickle() = default;
    Pickle(const Pickle&) = delete;
    Pickle& operator=(const Pickle&) = delete;

    void code(char instruction) {
        make_room(1);
        *end_++ = instruction;
    }

    template <typename... Chars>
    void codes(Chars... instructions) {
        make_room(sizeof...(instructions));
        ((*end_++ = static_cast<char>(instructions)), ...);
    }

    void word(Word which) {
        const auto number = static_cast<uint8_t>(which);
        if (known_[number]) {
            codes('h', number);
            return;
        }
        known_[number] = true;
        text(spelling(which));
        codes('q', number);
    }

    void text(const std::string& of) {
        code('X');
        little<4>(of.size());
        make_room(of.size());
        std::memcpy(end_, of.data(), of.size());
        end_ += of.size();
    }

    void integer(uint64_t value) {
        if (value < 256) {
            codes('K', value);
        } else if (value < uint64_t{1} << 31) {
            code('J');
            little<4>(value);
        } else {
            // Eight bytes with a sign bit.
            const bool is_signed = value >> 63 != 0;
            codes('\x8a', is_signed ? 9 : 8);
            little<8>(value);
            if (is_signed) code('\0');
        }
    }

    void put(uint32_t number) {
        code('r');
        little<4>(number);
    }

    void get(uint32_t number) {
        code('j');
        little<4>(number);
    }

    const char* data() const { return bytes_.data(); }
    size_t size() const { return static_cast<size_t>(end_ - bytes_.data()); }
    void clear() { end_ = bytes_.data(); }

  private:
    void make_room(size_t count) {
        if (static_cast<size_t>(bytes_.data() + bytes_.size() - end_) < count) grow(count);
    }

    [[gnu::noinline]] void grow(size_t count) {
        const size_t used = size();
        bytes_.resize(2 * (used + count) + 4096);
        end_ = bytes_.data() + used;
    }

    // Little-endian like the pickle format: all machines with CUDA are.
    template <size_t SIZE>
    void little(uint64_t value) {
        make_room(SIZE);
        std::memcpy(end_, &value, SIZE);
        end_ += SIZE;
    }

    std::vector<char> bytes_ = std::vector<char>(4096);
    char* end_ = bytes_.data();
    bool known_[static_cast<size_t>(Word::COUNT)] = {};
};

struct Event {
    Word action;
    uint64_t address;  // for an out-of-memory event: the free bytes
    uint64_t bytes;
    uint64_t stream;
    uint64_t time_us;
    uint32_t stack;
    const std::string* note;
};

// The events of one device. Needs a lock.
class EventFile {
  public:
    // Sets `errno` on failure. Does not follow links.
    bool open(const std::string& path, int device) {
        path_ = path;
        file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
        if (file_ < 0) return false;
        // The dictionary, the writer's name, the list of devices, and the empty lists of the preceding devices.
        pickle_.codes('\x80', '\x02', '}', '(');
        pickle_.text("recorder");
        pickle_.text("vramlab");
        pickle_.text("device_traces");
        pickle_.codes(']', '(');
        for (int before = 0; before < device; ++before) pickle_.code(']');
        pickle_.code(']');
        return true;
    }

    void add(const Event& event, const Stacks& stacks) {
        Pickle& to = pickle_;
        if (batch_ == 0) to.code('(');
        to.codes('}', '(');
        const auto number = [&](Word key, uint64_t value) {
            to.word(key);
            to.integer(value);
        };
        to.word(Word::ACTION);
        to.word(event.action);
        number(event.action == Word::OOM ? Word::DEVICE_FREE : Word::ADDR, event.address);
        number(Word::SIZE, event.bytes);
        number(Word::STREAM, event.stream);
        number(Word::TIME_US, event.time_us);
        if (events_ == 0) tell_version();
        if (event.note != nullptr && !event.note->empty()) {
            to.word(Word::USER_METADATA);
            to.text(*event.note);
        }
        if (event.stack != 0) {
            to.word(Word::FRAMES);
            stack(event.stack, stacks);
        }
        to.code('u');
        ++events_;
        if (++batch_ == BATCH) end_batch();
        if (to.size() >= CHUNK) write();
    }

    // Flushes the buffer to the file. After a failure the file ends with the last complete event.
    void write() {
        const Pickle& bytes = pickle_;
        size_t done = 0;
        while (file_ >= 0 && done < bytes.size()) {
            const ssize_t wrote = ::write(file_, bytes.data() + done, bytes.size() - done);
            if (wrote < 0 && errno == EINTR) continue;
            if (wrote <= 0) {
                failure_ = wrote < 0 ? errno : EIO;
                // A character device cannot be truncated.
                [[maybe_unused]] const int cut = ::ftruncate(file_, static_cast<off_t>(size_));
                close();
                break;
            }
            done += static_cast<size_t>(wrote);
        }
        if (failure_ == 0) size_ += bytes.size();
        pickle_.clear();
    }

    void close() {
        if (file_ >= 0) ::close(file_);
        file_ = -1;
    }

    // Marks the position of the events that precede the newest copy of the allocator's segments.
    void set_mark() {
        end_batch();
        write();
        mark_ = size_;
    }

    bool is_open() const { return file_ >= 0; }
    const std::string& path() const { return path_; }
    uint64_t events() const { return events_; }
    uint64_t mark() const { return mark_; }
    int failure() const { return failure_; }

  private:
    static constexpr size_t CHUNK = 1 << 18;
    // Number of events per append opcode, as in Python's pickler: readers hold one batch in memory.
    static constexpr size_t BATCH = 1000;

    void end_batch() {
        if (std::exchange(batch_, 0) != 0) pickle_.code('e');
    }

    // Readers infer PyTorch's version from the keys of the first event.
    void tell_version() {
#if VRAMLAB_TORCH >= 208
        pickle_.word(Word::COMPILE_CONTEXT);
        pickle_.word(Word::NOT_COMPILED);
#endif
#if VRAMLAB_TORCH >= 210
        pickle_.word(Word::USER_METADATA);
        pickle_.word(Word::NOTHING);
#endif
#if VRAMLAB_TORCH >= 212
        pickle_.text("pool_id");
        pickle_.codes('K', 0, 'K', 0, '\x86');
#endif
    }

    void stack(uint32_t number, const Stacks& stacks) {
        if (stack_places_.size() < stacks.size()) stack_places_.resize(stacks.size());
        uint32_t& place = stack_places_[number];
        if (place != 0) {
            pickle_.get(place);
            return;
        }
        pickle_.code(']');
        pickle_.put(place = next_place_++);
        pickle_.code('(');
        for (uint32_t at = number; at != 0; at = stacks.node(at).caller) frame(stacks.node(at).frame, stacks);
        pickle_.code('e');
    }

    void frame(uint32_t number, const Stacks& stacks) {
        if (frame_places_.size() < stacks.frames()) frame_places_.resize(stacks.frames());
        uint32_t& place = frame_places_[number];
        if (place != 0) {
            pickle_.get(place);
            return;
        }
        const FrameText& text = stacks.frame(number);
        pickle_.code('}');
        pickle_.put(place = next_place_++);
        pickle_.code('(');
        pickle_.word(Word::FILENAME);
        pickle_.text(text.filename);
        pickle_.word(Word::LINE);
        pickle_.integer(static_cast<uint64_t>(text.line));
        pickle_.word(Word::NAME);
        pickle_.text(text.name);
        pickle_.code('u');
    }

    std::string path_;
    int file_ = -1;
    int failure_ = 0;
    uint64_t size_ = 0;  // bytes written to the file
    uint64_t mark_ = 0;
    uint64_t events_ = 0;
    size_t batch_ = 0;
    Pickle pickle_;
    uint32_t next_place_ = 256;
    std::vector<uint32_t> stack_places_;
    std::vector<uint32_t> frame_places_;
};

}  // namespace vramlab_recorder
