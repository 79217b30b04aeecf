/* Kills its process at the Nth call that changes a file system, counted over all threads from
 * sweep_arm(N) on. Preloaded where strace is not to be had, or too slow for the whole sweep. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_long left = -1;

void sweep_arm(long target) { atomic_store(&left, target); }

static void count(void) {
    if (atomic_load(&left) > 0 && atomic_fetch_sub(&left, 1) == 1) {
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
}

#define WRAP(type, name, parameters, arguments)                          \
    type name parameters {                                               \
        static type (*next) parameters;                                  \
        if (!next) next = (type (*) parameters)dlsym(RTLD_NEXT, #name);  \
        count();                                                         \
        return next arguments;                                           \
    }

#define WRAP_OPEN(name, parameters, arguments)                           \
    int name parameters {                                                \
        static int (*next)();                                            \
        va_list list;                                                    \
        va_start(list, flags);                                           \
        mode_t mode = va_arg(list, mode_t);                              \
        va_end(list);                                                    \
        if (!next) next = (int (*)())dlsym(RTLD_NEXT, #name);            \
        count();                                                         \
        return next arguments;                                           \
    }

WRAP_OPEN(open, (const char *path, int flags, ...), (path, flags, mode))
WRAP_OPEN(open64, (const char *path, int flags, ...), (path, flags, mode))
WRAP_OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode))
WRAP_OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode))
WRAP(ssize_t, write, (int file, const void *data, size_t size), (file, data, size))
WRAP(ssize_t, pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at))
WRAP(int, fsync, (int file), (file))
WRAP(int, fdatasync, (int file), (file))
WRAP(int, ftruncate, (int file, off_t size), (file, size))
WRAP(int, close, (int file), (file))
WRAP(int, rename, (const char *from, const char *to), (from, to))
WRAP(int, renameat, (int a, const char *from, int b, const char *to), (a, from, b, to))
WRAP(int, unlink, (const char *path), (path))
WRAP(int, unlinkat, (int at, const char *path, int flags), (at, path, flags))
WRAP(int, rmdir, (const char *path), (path))
WRAP(int, mkdir, (const char *path, mode_t mode), (path, mode))
WRAP(int, mkdirat, (int at, const char *path, mode_t mode), (at, path, mode))
