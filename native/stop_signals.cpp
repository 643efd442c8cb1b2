// Ends the process at the second signal that asks it to stop, in the signal handler itself. A module of its own, for `serve`.
// Signals within a tenth of a second are one: `timeout` sends two at once, to its child and to the group.
//
// Python runs its handlers on the main thread, between two of its instructions: never while that thread is in a long call, nor
// while any thread keeps the interpreter's lock. The default action would not do instead: the kernel spares the first process
// of a container from it.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace {

constexpr int num_numbers = 65;  // Linux has signals up to 64.
constexpr int64_t same_ns = 100'000'000;
std::atomic<int64_t> first_ns{0};  // of the steady clock; 0 before the first signal
static_assert(std::atomic<int64_t>::is_always_lock_free, "used in a signal handler");
void (*handlers[num_numbers])(int);

void on_signal(int number) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);  // POSIX allows it in a signal handler; nobody promises that of <chrono>
    const int64_t now_ns = int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
    int64_t first = 0;
    if (first_ns.compare_exchange_strong(first, now_ns)) {
        handlers[number](number);
    } else if (now_ns - first >= same_ns) {
        _exit(128 + number);
    }
}

PyObject* end_at_second(PyObject*, PyObject* numbers) {
    first_ns = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(numbers); ++i) {
        const int number = static_cast<int>(PyLong_AsLong(PyTuple_GetItem(numbers, i)));
        if (PyErr_Occurred()) {
            return nullptr;
        }
        struct sigaction action;
        if (number < 1 || number >= num_numbers || sigaction(number, nullptr, &action) != 0) {
            return PyErr_Format(PyExc_ValueError, "%d is no signal's number", number);
        }
        if ((action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN) {
            return PyErr_Format(PyExc_ValueError, "signal %d has no handler of Python's", number);
        }
        if (action.sa_handler != on_signal) {
            handlers[number] = action.sa_handler;
            action.sa_handler = on_signal;
            if (sigaction(number, &action, nullptr) != 0) {
                return PyErr_SetFromErrno(PyExc_OSError);
            }
        }
    }
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"end_at_second", end_at_second, METH_VARARGS,
     "The second of these signals ends the process with 128 + its number, if it comes a tenth of a second after the first or\n"
     "later; the first goes to the handler that it has."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_stop_signals", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__stop_signals() {
    PyObject* const module = PyModule_Create(&definition);
#ifdef Py_GIL_DISABLED
    // Only the main thread sets handlers, and what the handler itself reads is set before it is.
    if (module) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
    return module;
}
