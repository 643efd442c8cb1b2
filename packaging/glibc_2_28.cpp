// Symbols newer than glibc 2.28 that this machine's libstdc++ and our modules use. wheels.sh links these into wheels.

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

extern "C" {

// From glibc 2.30, for waits of std::condition_variable with a time limit. The limit is converted to the clock that glibc 2.28
// waits by; if that clock is set meanwhile, the wait ends early or late.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* end) {
    constexpr int64_t second = 1'000'000'000;
    timespec now, limit;
    clock_gettime(clock, &now);
    clock_gettime(CLOCK_REALTIME, &limit);
    const int64_t left = (end->tv_sec - now.tv_sec) * second + end->tv_nsec - now.tv_nsec;
    const int64_t nanoseconds = limit.tv_nsec + (left > 0 ? left : 0);
    limit.tv_sec += nanoseconds / second;
    limit.tv_nsec = nanoseconds % second;
    return pthread_cond_timedwait(condition, mutex, &limit);
}

// From glibc 2.32: whether reference counts can do without atomic operations. 0: they can't.
extern const char __libc_single_threaded = 0;

// From glibc 2.36, for std::random_device.
uint32_t arc4random() {
    uint32_t number = 0;
    if (getentropy(&number, sizeof number) != 0) abort();
    return number;
}

// The version of glibc 2.29 differs from the first one in errno alone.
#ifdef __x86_64__
__asm__(".symver first_log, log@GLIBC_2.2.5");
#else
__asm__(".symver first_log, log@GLIBC_2.17");
#endif
double first_log(double x);
double log(double x) { return first_log(x); }
}
