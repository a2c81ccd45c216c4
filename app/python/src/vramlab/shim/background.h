// Threads that live as long as the process.
#pragma once

#include <pthread.h>
#include <csignal>
#include <system_error>
#include <thread>
#include <utility>

namespace vramlab_shim {

// False where the system starts no further thread. Signals stay with the program's own threads: Python's main thread is to
// be woken by them.
template <typename Act>
bool start_background(Act&& act) {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = true;
    try {
        std::thread(std::forward<Act>(act)).detach();
    } catch (const std::system_error&) {
        started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
}

}  // namespace vramlab_shim
