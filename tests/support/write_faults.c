/* Preloaded into a process: lets the n-th write, rename or sync of files below a folder fail. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE, RENAME, SYNC };

static char folder[4096];
static int kind, number, lasting, counts[3];

/* Count operations from now on, of which the n-th of a kind fails; number 0: none; lasting: also all after it. */
void fault_arm(const char *path, int which, int nth, int all) {
    snprintf(folder, sizeof folder, "%s", path);
    kind = which, number = nth, lasting = all;
    memset(counts, 0, sizeof counts);
}

int fault_count(int which) {
    folder[0] = 0;
    return counts[which];
}

static int below(const char *path) {
    size_t length = strlen(folder);
    return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int fails(int which, const char *path) {
    if (!below(path)) return 0;
    int now = __sync_add_and_fetch(&counts[which], 1);
    if (which != kind || !number || now < number || (now > number && !lasting)) return 0;
    errno = which == SYNC ? EIO : ENOSPC;
    return 1;
}

static int fails_of(int which, int file) {
    char link[64], path[4096];
    int before = errno;
    if (!folder[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    return fails(which, path);
}

#define REPLACED(result, name, parameters, arguments, condition)            \
    result name parameters {                                               \
        static result(*original) parameters;                               \
        if (!original) *(void **)&original = dlsym(RTLD_NEXT, #name);      \
        return (condition) ? (result)-1 : original arguments;              \
    }

REPLACED(ssize_t, write, (int f, const void *b, size_t n), (f, b, n), fails_of(WRITE, f))
REPLACED(ssize_t, writev, (int f, const struct iovec *b, int n), (f, b, n), fails_of(WRITE, f))
REPLACED(ssize_t, pwrite, (int f, const void *b, size_t n, off_t o), (f, b, n, o), fails_of(WRITE, f))
REPLACED(ssize_t, pwrite64, (int f, const void *b, size_t n, off64_t o), (f, b, n, o), fails_of(WRITE, f))
REPLACED(ssize_t, sendfile, (int f, int s, off_t *o, size_t n), (f, s, o, n), fails_of(WRITE, f))
REPLACED(ssize_t, sendfile64, (int f, int s, off64_t *o, size_t n), (f, s, o, n), fails_of(WRITE, f))
REPLACED(ssize_t, copy_file_range, (int s, off64_t *p, int f, off64_t *o, size_t n, unsigned g),
         (s, p, f, o, n, g), fails_of(WRITE, f))
REPLACED(int, fsync, (int f), (f), fails_of(SYNC, f))
REPLACED(int, fdatasync, (int f), (f), fails_of(SYNC, f))
REPLACED(int, rename, (const char *a, const char *b), (a, b), fails(RENAME, b))
REPLACED(int, renameat, (int d, const char *a, int e, const char *b), (d, a, e, b), fails(RENAME, b))
REPLACED(int, renameat2, (int d, const char *a, int e, const char *b, unsigned g), (d, a, e, b, g),
         fails(RENAME, b))
