// Memory of tensors that are sent to or received from other processes.
//
// The handle's text has PyTorch's format: version, kind, and for memory mapped in pages ('e') the sender's process, the
// page size, the number of pages, and a file descriptor of the sender's for each page. So processes with and without this
// shim can exchange tensors. From 2.13 on PyTorch writes a longer text; pages then have kind 'v', which only this shim
// reads.
//
// The receiver copies the descriptors by pidfd_getfd, as PyTorch does. Containers often refuse that call, and so does Yama
// unless the sender is a child. Then the sender passes them through a socket, to processes of the same user.
#pragma once

#include "background.h"
#include "server.h"

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>
#include <cstring>
#include <fstream>
#include <optional>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif

namespace vramlab_shim {

// PyTorch's header in front of the pages' handles.
struct SharedPages {
    int32_t process = 0;
    int32_t padding = 0;
    uint64_t page_bytes = 0;
    uint64_t pages = 0;
};
static_assert(sizeof(SharedPages) == 24, "PyTorch's header of shared pages");

constexpr size_t FABRIC_BYTES = 64;

// A descriptor that is closed at the end of its scope; -1 for none.
class Descriptor {
  public:
    explicit Descriptor(int number) : number_(number) {}
    ~Descriptor() {
        if (number_ >= 0) ::close(number_);
    }
    Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(number_, other.number_);
        return *this;
    }
    int get() const { return number_; }
    int release() { return std::exchange(number_, -1); }

  private:
    int number_;
};

// The socket on which a process passes its exported descriptors: in the abstract namespace, named by the process id.
inline socklen_t name_socket(int process, sockaddr_un& to) {
    to = {};
    to.sun_family = AF_UNIX;
    const std::string name = "vramlab-ipc-" + std::to_string(process);
    std::memcpy(to.sun_path + 1, name.data(), name.size());
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

// Bounds the waits of both sides.
inline void limit_waits(int socket) {
    constexpr timeval LIMIT{20, 0};
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &LIMIT, sizeof(LIMIT));
    setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &LIMIT, sizeof(LIMIT));
}

// True if the peer process belongs to this user; `process` receives its id.
inline bool is_same_user(int socket, int* process = nullptr) {
    ucred peer{};
    socklen_t size = sizeof(peer);
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != geteuid()) return false;
    if (process != nullptr) *process = peer.pid;
    return true;
}

// A message of one byte, with an optional descriptor.
class Message {
  public:
    Message() {
        part_ = {&byte_, 1};
        header_.msg_iov = &part_;
        header_.msg_iovlen = 1;
        header_.msg_control = room_;
        header_.msg_controllen = sizeof(room_);
    }

    bool send(int socket, int descriptor) {
        if (descriptor < 0) {
            header_.msg_control = nullptr;
            header_.msg_controllen = 0;
        } else {
            cmsghdr* beside = CMSG_FIRSTHDR(&header_);
            beside->cmsg_level = SOL_SOCKET;
            beside->cmsg_type = SCM_RIGHTS;
            beside->cmsg_len = CMSG_LEN(sizeof(int));
            std::memcpy(CMSG_DATA(beside), &descriptor, sizeof(int));
        }
        return sendmsg(socket, &header_, MSG_NOSIGNAL) == 1;
    }

    // -1 if no descriptor was received.
    Descriptor receive(int socket) {
        int descriptor = -1;
        if (recvmsg(socket, &header_, MSG_CMSG_CLOEXEC) == 1) {
            const cmsghdr* beside = CMSG_FIRSTHDR(&header_);
            if (beside != nullptr && beside->cmsg_level == SOL_SOCKET && beside->cmsg_type == SCM_RIGHTS) {
                std::memcpy(&descriptor, CMSG_DATA(beside), sizeof(int));
            }
        }
        return Descriptor(descriptor);
    }

  private:
    char byte_ = 0;
    iovec part_{};
    msghdr header_{};
    alignas(cmsghdr) char room_[CMSG_SPACE(sizeof(int))] = {};
};

// Serves exported descriptors. Its thread lives as long as the process.
class Counter {
  public:
    // Called once per process. Without a socket receivers still have pidfd_getfd.
    static void open() {
        static std::once_flag once;
        std::call_once(once, [] {
            Descriptor listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
            sockaddr_un name{};
            const socklen_t length = name_socket(getpid(), name);
            if (listener.get() < 0 || bind(listener.get(), reinterpret_cast<sockaddr*>(&name), length) != 0 ||
                listen(listener.get(), 64) != 0) {
                return;
            }
            if (start_background([number = listener.get()] { serve(number); })) listener.release();
        });
    }

  private:
    static void serve(int listener) {
        while (true) {
            const Descriptor peer(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
            if (peer.get() >= 0) {
                answer(peer.get());
            } else if (errno == EMFILE || errno == ENFILE) {
                ::usleep(100000);
            } else if (errno != EINTR && errno != ECONNABORTED) {
                return;
            }
        }
    }

    static void answer(int peer) {
        if (!is_same_user(peer)) return;
        limit_waits(peer);
        int32_t number = -1;
        while (recv(peer, &number, sizeof(number), MSG_WAITALL) == sizeof(number)) {
            int copy = -1;
            owners.any([&](Owner& owner) {
                return library.exported_descriptor(owner.handle, number, &copy) == VRAMLAB_STATUS_OK;
            });
            const Descriptor sent(copy);
            if (!Message().send(peer, sent.get())) return;
        }
    }
};

// Access to the descriptors of a tensor's sender.
class Sender {
  public:
    explicit Sender(int process) : process_(process) {}

    // A copy of a descriptor; on failure -1, with the reason in `why`.
    Descriptor take(int number, std::string& why) {
        if (!by_socket_) {
            Descriptor got = by_pidfd(number, why);
            if (got.get() >= 0 || !refused_) return got;
        }
        by_socket_ = true;
        Descriptor got = from_socket(number);
        if (got.get() >= 0) why.clear();
        return got;
    }

  private:
    Descriptor by_pidfd(int number, std::string& why) {
        if (pidfd_.get() < 0) {
            pidfd_ = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, process_, 0)));
            if (pidfd_.get() < 0) return explain("pidfd_open", errno, why);
        }
        Descriptor got(static_cast<int>(syscall(SYS_pidfd_getfd, pidfd_.get(), number, 0)));
        if (got.get() < 0) return explain("pidfd_getfd", errno, why);
        return got;
    }

    Descriptor from_socket(int number) {
        if (socket_.get() < 0) {
            Descriptor made(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
            sockaddr_un name{};
            const socklen_t length = name_socket(process_, name);
            int peer = 0;
            if (made.get() < 0) return Descriptor(-1);
            limit_waits(made.get());
            if (connect(made.get(), reinterpret_cast<sockaddr*>(&name), length) != 0 ||
                !is_same_user(made.get(), &peer) || peer != process_) {
                return Descriptor(-1);
            }
            socket_ = std::move(made);
        }
        const int32_t wanted = number;
        if (::send(socket_.get(), &wanted, sizeof(wanted), MSG_NOSIGNAL) != sizeof(wanted)) return Descriptor(-1);
        return Message().receive(socket_.get());
    }

    Descriptor explain(const char* call, int error, std::string& why) {
        refused_ = error == EPERM || error == EACCES || error == ENOSYS;
        const std::string sender = "process " + std::to_string(process_) + ", which sent it,";
        if (error == ESRCH) {
            why = sender + " is gone, or lies in another PID namespace; keep it alive until the tensor has been received, "
                           "and run both in one container";
        } else if (error == EBADF) {
            why = sender + " has freed the tensor; keep it there until it has been received";
        } else if (error == EMFILE || error == ENFILE) {
            why = "no file descriptor is left here; raise the limit (ulimit -n)";
        } else if (error == ENOSYS) {
            why = std::string("the kernel, or the container's seccomp filter, has no ") + call +
                  "; use Linux 5.6 or newer and allow the call";
        } else if (refused_) {
            why = std::string(call) + " is refused: " + who_refuses();
        } else {
            why = std::string(call) + ": " + std::strerror(error);
        }
        return Descriptor(-1);
    }

    std::string who_refuses() const {
        struct stat about {};
        const std::string folder = "/proc/" + std::to_string(process_);
        if (::stat(folder.c_str(), &about) == 0 && about.st_uid != geteuid()) {
            return "the sender belongs to user " + std::to_string(about.st_uid) + ", this process to " +
                   std::to_string(geteuid()) + "; run both as one user";
        }
        int scope = 0;
        std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
        if (scope > 0) {
            return "kernel.yama.ptrace_scope is " + std::to_string(scope) +
                   "; set it to 0 (sysctl), or run the container with --cap-add=SYS_PTRACE";
        }
        return "a seccomp filter or a security module forbids it; run the container with --cap-add=SYS_PTRACE";
    }

    const int process_;
    Descriptor pidfd_{-1};
    Descriptor socket_{-1};
    bool refused_ = false;
    bool by_socket_ = false;
};

// Memory of tensors shared between processes. Never destroyed.
class Ipc {
  public:
    explicit Ipc(Server& server) : server_(server) {}

    // The handle of a block in mapped pages. Empty, with the reason in `why`, if the memory is not mapped in pages or the
    // device does not support handles.
    std::optional<ShareableHandle> share(void* address, std::string& why) {
        Pages pages;
        vramlab_exported about{};
        vramlab_status status = export_block(address, pages, about);
        if (status == VRAMLAB_STATUS_DRIVER && allow_more_descriptors()) status = export_block(address, pages, about);
        if (status == VRAMLAB_STATUS_INCAPABLE) {
            why = library.error();
            return std::nullopt;
        }
        TORCH_CHECK(status == VRAMLAB_STATUS_OK, "the tensor at ", address, " cannot be shared with another process: ",
                    library.error(), status == VRAMLAB_STATUS_DRIVER ? pages_need_descriptors() : "");
        const SharedPages header{getpid(), 0, about.page_bytes, about.pages};
        std::string text{'\x02', KIND};
        text.append(reinterpret_cast<const char*>(&header), sizeof(header));
        if (pages.fabric.empty()) {
            Counter::open();
            const auto bytes = pages.descriptors.size() * sizeof(int32_t);
            text.append(reinterpret_cast<const char*>(pages.descriptors.data()), bytes);
        } else {
            text.append(pages.fabric);
        }
        return ShareableHandle{static_cast<ptrdiff_t>(number(address) - about.address), std::move(text)};
    }

    // The local address of another process's memory. It is mapped once for all its tensors, and unmapped with the last one.
    std::shared_ptr<void> open(const std::string& handle, DeviceIndex index) {
        const std::optional<SharedPages> header = parse(handle);
        // PyTorch's own allocator opens the handles of cudaMalloc, and keeps them until the last use ends.
        if (!header) return server_.native->getIpcDevPtr(handle);
        std::lock_guard<std::mutex> guard(lock_);
        auto known = opened_.find(handle);
        if (known != opened_.end()) {
            if (std::shared_ptr<void> memory = known->second.memory.lock()) return memory;
        }
        Device& device = server_.device(index);
        const uint64_t address = map(device, *header, handle.data() + FRONT, handle.size() - FRONT);
        const uint64_t bytes = header->page_bytes * header->pages;
        std::shared_ptr<void> memory(pointer(address), [this, handle](void* memory) { close(handle, memory); });
        opened_[handle] = Opened{memory, index, address, bytes};
        ever_ = true;
        device.open_to_peers(address, bytes);
        return memory;
    }

    // True if memory of another process was ever mapped here.
    bool ever_opened() const { return ever_.load(std::memory_order_relaxed); }

    // Gives a device's new peer access to the imported memory on it.
    void open_to_peers(DeviceIndex index) {
        std::lock_guard<std::mutex> guard(lock_);
        for (const auto& [handle, opened] : opened_) {
            if (opened.index == index && !opened.memory.expired()) {
                server_.device(index).open_to_peers(opened.address, opened.bytes);
            }
        }
    }

  private:
#if VRAMLAB_TORCH >= 213
    static constexpr char KIND = 'v';
#else
    static constexpr char KIND = 'e';
#endif
    static constexpr size_t FRONT = 2 + sizeof(SharedPages);

    struct Pages {
        std::vector<int32_t> descriptors;
        std::string fabric;
    };

    struct Opened {
        std::weak_ptr<void> memory;
        DeviceIndex index = 0;
        uint64_t address = 0;
        uint64_t bytes = 0;
    };

    static vramlab_status export_block(const void* address, Pages& pages, vramlab_exported& about) {
        const auto page = [](void* context, int32_t descriptor, const uint8_t* fabric) {
            auto& to = *static_cast<Pages*>(context);
            if (fabric == nullptr) {
                to.descriptors.push_back(descriptor);
            } else {
                to.fabric.append(reinterpret_cast<const char*>(fabric), FABRIC_BYTES);
            }
        };
        vramlab_status status = VRAMLAB_STATUS_FOREIGN;
        owners.any([&](Owner& owner) {
            pages = {};
            status = library.export_block(owner.handle, number(address), &pages, page, &about);
            return status != VRAMLAB_STATUS_FOREIGN;
        });
        return status;
    }

    // Raises the limit on descriptors: each page needs one, and the default limit is low. False if it cannot be raised.
    static bool allow_more_descriptors() {
        rlimit limit{};
        if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return false;
        limit.rlim_cur = limit.rlim_max;
        return setrlimit(RLIMIT_NOFILE, &limit) == 0;
    }

    static std::string pages_need_descriptors() {
        rlimit limit{};
        getrlimit(RLIMIT_NOFILE, &limit);
        return c10::str(". Each page of its memory takes a file descriptor, and ", limit.rlim_cur,
                        " may be open (ulimit -n); raise the limit, or use larger pages (remap:handle=32M)");
    }

    // The header of a handle from this shim, or from PyTorch in a readable version.
    static std::optional<SharedPages> parse(const std::string& handle) {
        if (handle.size() <= FRONT || handle.size() == CUDA_IPC_HANDLE_SIZE) return std::nullopt;
        if (handle[0] > '\x02' || handle[1] != KIND) return std::nullopt;
        SharedPages header;
        std::memcpy(&header, handle.data() + 2, sizeof(header));
        const size_t rest = handle.size() - FRONT;
        const bool whole = header.pages > 0 && rest % header.pages == 0;
        const size_t each = whole ? rest / header.pages : 0;
        TORCH_CHECK(each == sizeof(int32_t) || each == FABRIC_BYTES,
                    "vramlab: a handle of another process's memory is damaged: ", header.pages, " pages in ", rest,
                    " bytes");
        return header;
    }

    static uint64_t map(Device& device, const SharedPages& header, const char* handles, size_t bytes) {
        struct Arriving {
            Sender sender;
            const char* handles;
            bool fabric;
            std::string why;
        } arriving{Sender(header.process), handles, bytes / header.pages == FABRIC_BYTES, {}};
        const auto page = [](void* context, uint64_t number, uint8_t* fabric) -> int32_t {
            auto& from = *static_cast<Arriving*>(context);
            if (from.fabric) {
                std::memcpy(fabric, from.handles + number * FABRIC_BYTES, FABRIC_BYTES);
                return VRAMLAB_FABRIC;
            }
            int32_t descriptor = -1;
            std::memcpy(&descriptor, from.handles + number * sizeof(int32_t), sizeof(int32_t));
            return from.sender.take(descriptor, from.why).release();
        };
        uint64_t address = 0;
        const vramlab_status status = library.import_pages(device.owner->handle, header.page_bytes, header.pages,
                                                           &arriving, page, &address);
        TORCH_CHECK(status == VRAMLAB_STATUS_OK, "a tensor of another process cannot be opened: ",
                    arriving.why.empty() ? library.error() : arriving.why.c_str(),
                    ". Programs whose processes share CUDA tensors also run under 'caching', which shares by other means");
        return address;
    }

    void close(const std::string& handle, void* memory) {
        {
            std::lock_guard<std::mutex> guard(lock_);
            auto at = opened_.find(handle);
            // Another thread may have opened it again.
            if (at != opened_.end() && at->second.memory.expired()) opened_.erase(at);
        }
        // At exit the driver may be unloaded before the last tensor is destroyed, and nothing remains to be closed.
        (void)library.import_close(number(memory));
    }

    Server& server_;
    std::mutex lock_;
    std::unordered_map<std::string, Opened> opened_;
    std::atomic<bool> ever_{false};
};

// Stops PyTorch from registering segments that grow with NCCL. PyTorch disables it for its own expandable segments, because
// nothing would notify NCCL of unmapped memory, but it checks its own settings for that, not the shim's.
inline void keep_pages_from_nccl(const char* spec) {
    constexpr const char* HOOK = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK";
    const char* set = std::getenv(HOOK);
    bool pages = false;
    if (set == nullptr || std::strcmp(set, "0") == 0) return;
    if (library.has_pages(spec, &pages) != VRAMLAB_STATUS_OK || !pages) return;
    setenv(HOOK, "0", 1);
    TORCH_WARN("vramlab: ", HOOK, " is switched off under '", spec,
               "', as PyTorch does under expandable segments: memory that moves cannot be registered as a whole. Register a "
               "torch.cuda.MemPool, or use 'caching'");
}

}  // namespace vramlab_shim
