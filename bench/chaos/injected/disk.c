/* A slow or full disk for one process, which preloads this library (LD_PRELOAD). bench/chaos/disk.py compiles it.
 *
 * TIDEGATE_CHAOS_DISK names a file with two numbers: the seconds that a sync takes, and 1 if the disk is full, else 0.
 * They hold for the files below the folder TIDEGATE_CHAOS_FOLDER. While a file is being synced, writes wait, as they do
 * in most file systems. There are no locks, because a child that is forked meanwhile would never get them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct disk {
    double sync_s;
    long is_full;
};

static int (*true_fsync)(int);
static int (*true_fdatasync)(int);
static ssize_t (*true_write)(int, const void *, size_t);
static char folder[PATH_MAX], state_file[PATH_MAX]; /* copies, because Valkey moves its environment */
static _Atomic int64_t busy_until_ns;

__attribute__((constructor)) static void prepare(void) {
    true_fsync = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    true_fdatasync = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    const char *folder_name = getenv("TIDEGATE_CHAOS_FOLDER"), *file_name = getenv("TIDEGATE_CHAOS_DISK");
    if (folder_name && file_name) {
        snprintf(folder, sizeof folder, "%s/", folder_name);
        snprintf(state_file, sizeof state_file, "%s", file_name);
    }
    true_write = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
}

static int is_on_disk(int fd) {
    char name[64], path[PATH_MAX];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = folder[0] ? readlink(name, path, sizeof path) : -1;
    return length >= (ssize_t)strlen(folder) && strncmp(path, folder, strlen(folder)) == 0;
}

static struct disk state(void) {
    struct disk found = {0.0, 0};
    char text[64], *rest = text;
    int fd = open(state_file, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return found;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    text[length > 0 ? length : 0] = 0;
    found.sync_s = strtod(text, &rest);
    found.is_full = strtol(rest, NULL, 10);
    return found;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void wait_until(int64_t end_ns) {
    int64_t left_ns;
    while ((left_ns = end_ns - now_ns()) > 0) {
        struct timespec left = {left_ns / 1000000000, left_ns % 1000000000};
        syscall(SYS_nanosleep, &left, NULL); /* the function is libfaketime's, if that is preloaded as well */
    }
}

static void wait_for_disk(int fd) {
    int before = errno;
    if (is_on_disk(fd)) {
        int64_t end_ns = now_ns() + (int64_t)(state().sync_s * 1e9);
        atomic_store(&busy_until_ns, end_ns);
        wait_until(end_ns);
    }
    errno = before;
}

int fsync(int fd) {
    wait_for_disk(fd);
    return true_fsync(fd);
}

int fdatasync(int fd) {
    wait_for_disk(fd);
    return true_fdatasync(fd);
}

ssize_t write(int fd, const void *data, size_t size) {
    int before = errno;
    if (!true_write)
        prepare();
    if (is_on_disk(fd)) {
        wait_until(atomic_load(&busy_until_ns));
        if (state().is_full) {
            errno = ENOSPC;
            return -1;
        }
    }
    errno = before;
    return true_write(fd, data, size);
}
