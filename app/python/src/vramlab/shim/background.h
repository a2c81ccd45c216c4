// Threads that live as long as the process.
#pragma once

#include <pthread.h>
#include <csignal>
#include <system_error>
#include <thread>
#include <utility>

namespace vramlab_shim {

// False if the system cannot start another thread. The thread blocks signals, because Python's main thread must receive
// them.
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
