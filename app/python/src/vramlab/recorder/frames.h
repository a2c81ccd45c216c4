// The Python frames of the calling thread, read without the GIL and without any call that could run Python.
//
// A thread's chain of frames changes only while that thread runs Python code, so a thread inside the allocator can read
// its own chain. Reading creates, counts and raises nothing: an exception that is being unwound is unaffected, no other
// thread is waited for, and a thread unknown to Python has no frames. The field offsets are measured in the running
// interpreter (`_frames.py`), which also compares the result with Python's own traceback before it is used.
#pragma once

#include <dlfcn.h>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

namespace vramlab_recorder {

// Offsets in bytes; `_frames.py` fills this in the same order.
struct Layout {
    int64_t thread_frame;      // in the thread's state: its current frame or that frame's holder
    int64_t holder_frame;      // in the holder: the current frame; -1 if the state contains it directly
    int64_t frame_code;        // in a frame
    int64_t frame_previous;    // in a frame: the caller's frame
    int64_t frame_instruction; // in a frame: the current instruction
    int64_t entry_code;        // address of the code of frames that represent calls from C, or 0
    int64_t code_filename;     // in a code object
    int64_t code_name;
    int64_t code_first_line;
    int64_t code_instructions;
    int64_t text_length;       // in a string
    int64_t text_state;
    int64_t text_ascii_bit;    // in the state
    int64_t text_kind_shift;   // in the state: position of the bytes per character
    int64_t text_ascii_data;
    int64_t text_other_data;
};

template <typename Field>
Field field(const void* object, int64_t offset) {
    Field out;
    std::memcpy(&out, static_cast<const char*>(object) + offset, sizeof(out));
    return out;
}

struct FrameText {
    std::string filename;
    std::string name;
    int line = 0;
};

// A location in a program. It includes the code's name and first line, because addresses of freed code are reused.
struct Spot {
    const void* code;
    int64_t instruction;
    const void* name;
    int64_t first_line;

    bool operator==(const Spot& other) const {
        return code == other.code && instruction == other.instruction && name == other.name &&
               first_line == other.first_line;
    }
};

struct SpotHash {
    size_t operator()(const Spot& spot) const {
        uint64_t out = reinterpret_cast<uint64_t>(spot.code) * 0x9E3779B97F4A7C15ULL;
        out ^= static_cast<uint64_t>(spot.instruction) * 0xC2B2AE3D27D4EB4FULL;
        return out ^ (out >> 29);
    }
};

class Python {
  public:
    // False if this process has no Python with readable frames.
    bool find() {
        thread_state_ = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState"));
        line_of_ = reinterpret_cast<int (*)(void*, int)>(dlsym(RTLD_DEFAULT, "PyCode_Addr2Line"));
        code_type_ = dlsym(RTLD_DEFAULT, "PyCode_Type");
        return thread_state_ != nullptr && line_of_ != nullptr && code_type_ != nullptr;
    }

    Layout layout{};

    // Writes the thread's locations, innermost first, and returns their number, at most `most`.
    size_t walk(Spot* to, size_t most) const {
        const void* state = thread_state_();
        if (state == nullptr) return 0;
        const void* frame = field<const void*>(state, layout.thread_frame);
        if (layout.holder_frame >= 0 && frame != nullptr) frame = field<const void*>(frame, layout.holder_frame);
        size_t count = 0;
        for (; frame != nullptr && count < most; frame = field<const void*>(frame, layout.frame_previous)) {
            // Python 3.14 tags the lowest bits of references.
            const auto code = reinterpret_cast<const void*>(field<uintptr_t>(frame, layout.frame_code) & ~uintptr_t{7});
            // The interpreter's own frames have no code.
            if (code == nullptr || reinterpret_cast<int64_t>(code) == layout.entry_code) continue;
            if (field<const void*>(code, TYPE) != code_type_) continue;
            const auto at = field<uintptr_t>(frame, layout.frame_instruction);
            const auto first = reinterpret_cast<uintptr_t>(code) + static_cast<uintptr_t>(layout.code_instructions);
            to[count++] = Spot{code, static_cast<int64_t>(at - first), field<const void*>(code, layout.code_name),
                               field<int32_t>(code, layout.code_first_line)};
        }
        return count;
    }

    // The function, file and line of a current location of the thread.
    FrameText describe(const Spot& spot) const {
        // A frame that has just started is before its first instruction.
        const int at = spot.instruction < 0 ? 0 : static_cast<int>(spot.instruction);
        const int line = line_of_(const_cast<void*>(spot.code), at);
        return FrameText{text(field<const void*>(spot.code, layout.code_filename)), text(spot.name),
                         line > 0 ? line : static_cast<int>(spot.first_line)};
    }

  private:
    static constexpr int64_t TYPE = 8;

    std::string text(const void* of) const {
        const auto length = static_cast<size_t>(field<int64_t>(of, layout.text_length));
        const auto state = field<uint32_t>(of, layout.text_state);
        const char* data = static_cast<const char*>(of);
        if ((state & static_cast<uint32_t>(layout.text_ascii_bit)) != 0) {
            return std::string(data + layout.text_ascii_data, length);
        }
        const uint32_t kind = state >> layout.text_kind_shift & 7U;
        std::string out;
        for (size_t at = 0; at < length; ++at) {
            const int64_t offset = layout.text_other_data + static_cast<int64_t>(at * kind);
            append(out, kind == 1   ? field<uint8_t>(data, offset)
                        : kind == 2 ? field<uint16_t>(data, offset)
                                    : field<uint32_t>(data, offset));
        }
        return out;
    }

    // Appends a character in UTF-8; replaces unpaired surrogates, which file names may contain.
    static void append(std::string& to, uint32_t character) {
        if (character >= 0xD800 && character < 0xE000) character = 0xFFFD;
        const auto tail = [&](int shift) { to.push_back(static_cast<char>(0x80 | (character >> shift & 0x3F))); };
        if (character < 0x80) {
            to.push_back(static_cast<char>(character));
        } else if (character < 0x800) {
            to.push_back(static_cast<char>(0xC0 | character >> 6));
            tail(0);
        } else if (character < 0x10000) {
            to.push_back(static_cast<char>(0xE0 | character >> 12));
            tail(6);
            tail(0);
        } else {
            to.push_back(static_cast<char>(0xF0 | character >> 18));
            tail(12);
            tail(6);
            tail(0);
        }
    }

    void* (*thread_state_)() = nullptr;
    int (*line_of_)(void*, int) = nullptr;
    const void* code_type_ = nullptr;
};

// Deduplicated stacks: a stack is a frame and its caller's stack. Numbers start at 1; 0 is the empty stack.
// Needs a lock, except for a thread's last stack.
class Stacks {
  public:
    // Maximum number of innermost frames per stack.
    static constexpr size_t DEEPEST = 256;
    // Maximum number of stacks and frames, which bounds the memory.
    static constexpr size_t MOST = 1 << 20;

    struct Node {
        uint32_t caller;
        uint32_t frame;
    };

    // The number of the calling thread's stack.
    uint32_t here(const Python& python) {
        // Trivially destructible: a thread may allocate while its thread-local objects are being destroyed.
        thread_local Seen last;
        Spot now[DEEPEST];
        const size_t depth = python.walk(now, DEEPEST);
        if (last.era != era_) {
            last.era = era_;
            last.depth = 0;
        }
        // Most stacks differ from the previous one only in their innermost frames.
        size_t at = 0;
        while (at < depth && at < last.depth && last.spots[at] == now[depth - 1 - at]) ++at;
        for (last.depth = at; last.depth < depth; ++last.depth) {
            const Spot& spot = now[depth - 1 - last.depth];
            const uint32_t node = find(last.depth == 0 ? 0 : last.nodes[last.depth - 1], spot, python);
            if (node == 0) return 0;
            last.spots[last.depth] = spot;
            last.nodes[last.depth] = node;
        }
        return depth == 0 ? 0 : last.nodes[depth - 1];
    }

    const Node& node(uint32_t stack) const { return nodes_[stack]; }
    const FrameText& frame(uint32_t number) const { return frames_[number]; }
    size_t size() const { return nodes_.size(); }
    size_t frames() const { return frames_.size(); }

    // Clears everything for the next recording.
    void clear() { *this = Stacks(); }

  private:
    // A thread's last stack, the outermost frame first.
    struct Seen {
        uint64_t era = 0;
        size_t depth = 0;
        Spot spots[DEEPEST];
        uint32_t nodes[DEEPEST] = {};
    };

    // A thread's last stack is valid for one set of stacks only.
    static uint64_t next_era() {
        static std::atomic<uint64_t> next{1};
        return next++;
    }

    struct Key {
        uint32_t caller;
        Spot spot;
        bool operator==(const Key& other) const { return caller == other.caller && spot == other.spot; }
    };
    struct KeyHash {
        size_t operator()(const Key& key) const { return SpotHash{}(key.spot) ^ key.caller * 0x9E3779B97F4A7C15ULL; }
    };

    uint32_t find(uint32_t caller, const Spot& spot, const Python& python) {
        const auto known = numbers_.find(Key{caller, spot});
        if (known != numbers_.end()) return known->second;
        if (nodes_.size() >= MOST) return 0;
        const auto [frame, is_new] = frame_numbers_.emplace(spot, static_cast<uint32_t>(frames_.size()));
        if (is_new) frames_.push_back(python.describe(spot));
        const auto number = static_cast<uint32_t>(nodes_.size());
        nodes_.push_back(Node{caller, frame->second});
        numbers_.emplace(Key{caller, spot}, number);
        return number;
    }

    uint64_t era_ = next_era();
    std::vector<Node> nodes_{Node{0, 0}};
    std::unordered_map<Key, uint32_t, KeyHash> numbers_;
    std::vector<FrameText> frames_;
    std::unordered_map<Spot, uint32_t, SpotHash> frame_numbers_;
};

}  // namespace vramlab_recorder
