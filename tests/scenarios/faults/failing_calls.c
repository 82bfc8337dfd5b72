/* Fails or delays chosen calls of a recorder, and shifts its clocks; loaded with LD_PRELOAD.

   FAULT_CALL   write, open, fdatasync, ftruncate, statvfs, mmap, read or close
   FAULT_FIRST  number of the first call that fails, from 1
   FAULT_COUNT  how many calls fail from there
   FAULT_ERRNO  the error; 0 = the calls are made, but late
   FAULT_DELAY_US  how late
   FAULT_HALF   1 = a failing write writes half of its bytes first
   FAULT_UNDER  only calls on files below this path; "" = on all
   FAULT_LOG    a file that gets a byte for every call that failed or was delayed
   CLOCK_SHIFT  a file with one int64: nanoseconds that are added to CLOCK_REALTIME

   It is inert in every process but the recorder, whose command line holds "clusterprof.agent". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int active, error, half, log_fd = -1;
static long first, count, delay_us;
static const char *call = "", *under = "";
static atomic_long calls;
static const volatile int64_t *shift;

static int is_recorder(void)
{
    static char line[65536];
    int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY | O_CLOEXEC, 0);
    long bytes = fd < 0 ? 0 : syscall(SYS_read, fd, line, sizeof line - 1);

    if (fd >= 0)
        syscall(SYS_close, fd);
    return bytes > 0 && memmem(line, (size_t)bytes, "clusterprof.agent", 17) != NULL;
}

static long number(const char *name)
{
    const char *text = getenv(name);

    return text ? atol(text) : 0;
}

__attribute__((constructor)) static void start(void)
{
    const char *path = getenv("CLOCK_SHIFT"), *log = getenv("FAULT_LOG");

    if (!is_recorder())
        return;
    if (path) {
        int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
        void *page = (void *)syscall(SYS_mmap, NULL, 8, PROT_READ, MAP_SHARED, fd, 0);

        if (page != MAP_FAILED)
            shift = page;
        syscall(SYS_close, fd);
    }
    if (!getenv("FAULT_CALL"))
        return;
    call = getenv("FAULT_CALL");
    under = getenv("FAULT_UNDER") ? getenv("FAULT_UNDER") : "";
    first = number("FAULT_FIRST");
    count = number("FAULT_COUNT");
    error = (int)number("FAULT_ERRNO");
    delay_us = number("FAULT_DELAY_US");
    half = (int)number("FAULT_HALF");
    if (log)
        log_fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CLOEXEC, 0);
    active = 1;
}

/* Whether this call is one of those that fail; sets errno, or waits and lets it pass. */
static int fails(const char *name, int fd, const char *path)
{
    char link[64], target[PATH_MAX];

    if (!active || strcmp(name, call))
        return 0;
    if (*under) {
        if (!path || *path != '/') {
            long bytes;

            if (fd < 0)
                return 0;
            snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
            bytes = syscall(SYS_readlinkat, AT_FDCWD, link, target, sizeof target - 1);
            if (bytes < 0)
                return 0;
            target[bytes] = 0;
            path = target;
        }
        if (strncmp(path, under, strlen(under)))
            return 0;
    }
    long place = atomic_fetch_add(&calls, 1) + 1;
    if (place < first || place >= first + count)
        return 0;
    if (log_fd >= 0)
        syscall(SYS_write, log_fd, "x", 1);
    if (delay_us) {
        struct timespec pause = {delay_us / 1000000, delay_us % 1000000 * 1000};

        syscall(SYS_nanosleep, &pause, NULL);
    }
    if (!error)
        return 0;
    errno = error;
    return 1;
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t bytes)
{
    if (fails("write", fd, NULL)) {
        int kept = errno;

        if (half && bytes > 1)
            syscall(SYS_write, fd, data, bytes / 2);
        errno = kept;
        return -1;
    }
    return syscall(SYS_write, fd, data, bytes);
}

ssize_t read(int fd, void *data, size_t bytes)
{
    return fails("read", fd, NULL) ? -1 : syscall(SYS_read, fd, data, bytes);
}

static int open_file(int folder, const char *path, int flags, mode_t mode)
{
    if (fails("open", folder, path))
        return -1;
    return (int)syscall(SYS_openat, folder, path, flags, mode);
}

#define OPEN_MODE(last)                                                                          \
    mode_t mode = 0;                                                                             \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                         \
        va_list rest;                                                                            \
        va_start(rest, last);                                                                    \
        mode = va_arg(rest, mode_t);                                                             \
        va_end(rest);                                                                            \
    }

int open(const char *path, int flags, ...)
{
    OPEN_MODE(flags)
    return open_file(AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    OPEN_MODE(flags)
    return open_file(AT_FDCWD, path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...)
{
    OPEN_MODE(flags)
    return open_file(folder, path, flags, mode);
}

int openat64(int folder, const char *path, int flags, ...)
{
    OPEN_MODE(flags)
    return open_file(folder, path, flags, mode);
}

int fdatasync(int fd)
{
    return fails("fdatasync", fd, NULL) ? -1 : (int)syscall(SYS_fdatasync, fd);
}

int ftruncate(int fd, off_t length)
{
    return fails("ftruncate", fd, NULL) ? -1 : (int)syscall(SYS_ftruncate, fd, length);
}

int ftruncate64(int fd, off64_t length)
{
    return ftruncate(fd, length);
}

int close(int fd)
{
    if (fails("close", fd, NULL)) {
        int kept = errno;

        syscall(SYS_close, fd); /* as NFS does: closed, but a write had failed */
        errno = kept;
        return -1;
    }
    return (int)syscall(SYS_close, fd);
}

int fstatvfs(int fd, struct statvfs *room)
{
    return fails("statvfs", fd, NULL) ? -1 : REAL(int, fstatvfs, int, struct statvfs *)(fd, room);
}

int fstatvfs64(int fd, struct statvfs64 *room)
{
    if (fails("statvfs", fd, NULL))
        return -1;
    return REAL(int, fstatvfs64, int, struct statvfs64 *)(fd, room);
}

void *mmap(void *at, size_t bytes, int rights, int flags, int fd, off_t offset)
{
    if (fails("mmap", fd, NULL))
        return MAP_FAILED;
    return (void *)syscall(SYS_mmap, at, bytes, rights, flags, fd, offset);
}

void *mmap64(void *at, size_t bytes, int rights, int flags, int fd, off64_t offset)
{
    return mmap(at, bytes, rights, flags, fd, offset);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);

    if (!real)
        real = REAL(int, clock_gettime, clockid_t, struct timespec *);
    int status = real(clock, now);
    if (status == 0 && shift && clock == CLOCK_REALTIME) {
        int64_t ns = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + *shift;

        now->tv_sec = ns / 1000000000;
        now->tv_nsec = ns % 1000000000;
    }
    return status;
}
