/* Storage that takes its time: fsync of files below SLOW_UNDER sleeps SLOW_MS first.

   cc -shared -fPIC -o slow.so slow.c -ldl; LD_PRELOAD=slow.so SLOW_UNDER=/ckpt SLOW_MS=300 ... */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void wait_for_disk(int fd)
{
    const char *under = getenv("SLOW_UNDER"), *ms = getenv("SLOW_MS");
    char link[64], path[4096];
    if (under == NULL || ms == NULL)
        return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0)
        return;
    path[length] = 0;
    if (strncmp(path, under, strlen(under)) == 0)
        usleep((useconds_t)atoi(ms) * 1000);
}

int fsync(int fd)
{
    static int (*real)(int);
    if (real == NULL)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    wait_for_disk(fd);
    return real(fd);
}

int fdatasync(int fd)
{
    static int (*real)(int);
    if (real == NULL)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    wait_for_disk(fd);
    return real(fd);
}
