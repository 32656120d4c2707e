/* Preloaded into a process, makes its wall clock wrong by the nanoseconds in the file WRONG_CLOCK, which may change at any time.
 * Monotonic clocks are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *offset_ns;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void look_up(void) {
    const char *path = getenv("WRONG_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    if (file >= 0) {
        void *page = mmap(NULL, sizeof *offset_ns, PROT_READ, MAP_SHARED, file, 0);
        if (page != MAP_FAILED) offset_ns = page;
        close(file);
    }
}

int clock_gettime(clockid_t id, struct timespec *out) {
    if (!real_clock_gettime) look_up(); /* called by another library's constructor */
    int status = real_clock_gettime(id, out);
    if (status == 0 && offset_ns && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
        long long ns = out->tv_sec * 1000000000LL + out->tv_nsec + *offset_ns;
        out->tv_sec = ns / 1000000000LL;
        out->tv_nsec = ns % 1000000000LL;
    }
    return status;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    (void)zone;
    int status = clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return status;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
