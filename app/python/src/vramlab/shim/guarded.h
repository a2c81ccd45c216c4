// The error of the C functions that Python calls.
#pragma once

#include <c10/util/Exception.h>
#include <string>

namespace {

std::string last_error;

// Runs `act` and stores an exception's text.
template <typename Result, typename Act>
Result guarded(Result failed, Act&& act) {
    try {
        last_error.clear();
        return act();
    } catch (const c10::Error& error) {
        last_error = error.what_without_backtrace();
    } catch (const std::exception& error) {
        last_error = error.what();
    }
    return failed;
}

}  // namespace
