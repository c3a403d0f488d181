// A layer between Python and the C library, which counts operations and lets the n-th one fail.
//
// Loaded by LD_PRELOAD. Operations on files count where their path begins with the armed prefix.
// Memory counts where it is reserved (MAP_NORESERVE, as slots are) or large, threads count always.
// tests/faults/shim.py has the Python side. With a log, changes of files are recorded in order.

#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <atomic>
#include <mutex>
#include <string>

#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

namespace {

// The order is that of OPERATIONS in shim.py.
enum Operation {
    OPEN, CREATE, READ, WRITE, SYNC, RENAME, REMOVE, TRUNCATE, FOLDER, LINK, LOCK, MAP, ALLOCATE,
    THREAD, OPERATIONS
};
enum Effect { FAIL, SHORT, WRONG, SLOW };

constexpr int FILES = 1 << 16;
constexpr size_t LARGE = 64 << 10;  // bytes of an allocation that counts
constexpr size_t BLOCK = 4096;

std::string prefix;
std::string paths[FILES];  // of descriptors below the prefix
std::atomic<bool> is_below[FILES];
std::atomic<uint64_t> counts[OPERATIONS];
std::atomic<int64_t> left{0};  // operations until the fault
std::atomic<int> fired{-1};
std::atomic<bool> armed{false};
uint32_t chosen = 0;  // a bit for each operation
int effect = FAIL, error_code = 0;
double seconds = 0;
bool persistent = false;
int log_file = -1;
std::mutex lock;

template <typename Function>
Function* real(Function*, const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}
#define REAL(name) \
    static auto* const own = real(&name, #name)

std::string absolute(int folder, const char* path) {
    if (path[0] == '/') return path;
    char link[PATH_MAX], at[64];
    if (folder == AT_FDCWD)
        strcpy(at, "/proc/self/cwd");
    else
        snprintf(at, sizeof at, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(at, link, sizeof link);
    return length < 0 ? path : std::string(link, length) + "/" + path;
}

bool below(const std::string& path) {
    return armed && !prefix.empty() && path.compare(0, prefix.size(), prefix) == 0;
}

bool below(int file) { return armed && file >= 0 && file < FILES && is_below[file]; }

// Count an operation; true where it is the one that has to fail, with errno set.
bool fault(Operation operation) {
    ++counts[operation];
    if (!(chosen >> operation & 1)) return false;
    int64_t now = --left;
    if (now > 0 || (now < 0 && !persistent)) return false;
    if (now == 0) fired = operation;
    errno = error_code;
    return true;
}

void wait() {
    timespec time{static_cast<time_t>(seconds), static_cast<long>((seconds - time_t(seconds)) * 1e9)};
    while (nanosleep(&time, &time) && errno == EINTR) {
    }
}

// A record: what, offset, length of both texts or data, then these.
void record(char what, const std::string& path, uint64_t offset, const void* data, uint32_t length) {
    if (log_file < 0) return;
    uint32_t head[2] = {static_cast<uint32_t>(path.size()), length};
    iovec parts[5] = {{&what, 1}, {&offset, 8}, {head, 8}, {const_cast<char*>(path.data()), path.size()},
                      {const_cast<void*>(data), length}};
    if (syscall(SYS_writev, log_file, parts, 5) < 0) abort();
}

template <typename Call>
ssize_t transfer(Operation operation, int file, const iovec* parts, int count, Call call) {
    if (!below(file)) return call(parts, count);
    if (!fault(operation)) return call(parts, count);
    if (effect == FAIL) return -1;
    if (effect == SLOW) wait();
    if (effect == SHORT) {
        iovec first = parts[0];
        size_t half = first.iov_len / 2;
        // A direct transfer ends at a whole block, except at the end of the file.
        if (syscall(SYS_fcntl, file, F_GETFL) & O_DIRECT) half = half / BLOCK * BLOCK;
        if (half) first.iov_len = half;
        return call(&first, 1);
    }
    ssize_t got = call(parts, count);
    if (effect == WRONG && got > 0) {
        size_t at = got / 2;
        for (int i = 0; i < count; at -= parts[i++].iov_len)
            if (at < parts[i].iov_len) {
                static_cast<uint8_t*>(parts[i].iov_base)[at] ^= 0x10;
                break;
            }
    }
    return got;
}

// The same for writes, whose data go to the log in the order in which they reach the file.
template <typename Call>
ssize_t store(int file, const iovec* parts, int count, int64_t offset, Call call) {
    if (!below(file)) return call(parts, count);
    std::lock_guard<std::mutex> guard(lock);
    bool appends = offset < 0 && (syscall(SYS_fcntl, file, F_GETFL) & O_APPEND);
    if (offset < 0) offset = appends ? lseek(file, 0, SEEK_END) : lseek(file, 0, SEEK_CUR);
    ssize_t done = transfer(WRITE, file, parts, count, call);
    ssize_t rest = done;
    for (int i = 0; i < count && rest > 0; ++i) {
        size_t size = std::min<size_t>(rest, parts[i].iov_len);
        record('w', paths[file], offset, parts[i].iov_base, size);
        offset += size;
        rest -= size;
    }
    return done;
}

template <typename Call>
int open_file(int folder, const char* path, int flags, Call call) {
    if (!armed) return call();
    std::string name = absolute(folder, path);
    if (!below(name)) {
        int file = call();
        if (file >= 0 && file < FILES) is_below[file] = false;
        return file;
    }
    std::lock_guard<std::mutex> guard(lock);
    bool creates = flags & O_CREAT, is_new = creates && access(name.c_str(), F_OK) != 0;
    if (fault(is_new ? CREATE : OPEN)) {
        if (effect == FAIL) return -1;
        if (effect == SLOW) wait();
    }
    int file = call();
    if (file < 0) return file;
    if (file < FILES) {
        paths[file] = name;
        is_below[file] = true;
    }
    if (is_new) record('c', name, 0, "", 0);
    if (!is_new && (flags & O_TRUNC)) record('t', name, 0, "", 0);
    return file;
}

// A change of names or sizes: `what` is its letter in the log.
template <typename Call>
int change(Operation operation, char what, const std::string& path, uint64_t size,
           const std::string& other, Call call) {
    if (!below(path) && !below(other)) return call();
    std::lock_guard<std::mutex> guard(lock);
    if (fault(operation)) {
        if (effect == FAIL) return -1;
        if (effect == SLOW) wait();
    }
    int result = call();
    if (result == 0) record(what, path, size, other.data(), other.size());
    return result;
}

std::string path_of(int file) { return below(file) ? paths[file] : std::string(); }

}  // namespace

extern "C" {

// Count what happens below `path`; the `number`-th of the chosen operations gets the effect.
void faults_arm(const char* path, uint32_t operations, int64_t number, int what, int code,
                double wait_seconds, bool goes_on) {
    armed = false;
    prefix = path;
    chosen = operations;
    left = number;
    effect = what;
    error_code = code;
    seconds = wait_seconds;
    persistent = goes_on;
    fired = -1;
    for (auto& each : counts) each = 0;
    armed = true;
}

// The operation that failed, or -1; `into` gets the counts of all.
int faults_disarm(uint64_t* into) {
    armed = false;
    for (int i = 0; i < OPERATIONS; ++i) into[i] = counts[i];
    return fired;
}

void faults_log(int file) { log_file = file; }

int open(const char* path, int flags, ...) {
    REAL(open);
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    return open_file(AT_FDCWD, path, flags, [&] { return own(path, flags, mode); });
}

int open64(const char* path, int flags, ...) {
    REAL(open64);
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    return open_file(AT_FDCWD, path, flags, [&] { return own(path, flags, mode); });
}

int openat64(int folder, const char* path, int flags, ...) {
    REAL(openat64);
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    return open_file(folder, path, flags, [&] { return own(folder, path, flags, mode); });
}

int close(int file) {
    REAL(close);
    if (file >= 0 && file < FILES) is_below[file] = false;
    return own(file);
}

ssize_t read(int file, void* data, size_t size) {
    REAL(read);
    iovec part{data, size};
    return transfer(READ, file, &part, 1, [&](const iovec* p, int) {
        return own(file, p->iov_base, p->iov_len);
    });
}

ssize_t readv(int file, const iovec* parts, int count) {
    REAL(readv);
    return transfer(READ, file, parts, count, [&](const iovec* p, int n) { return own(file, p, n); });
}

ssize_t pread64(int file, void* data, size_t size, off64_t at) {
    REAL(pread64);
    iovec part{data, size};
    return transfer(READ, file, &part, 1, [&](const iovec* p, int) {
        return own(file, p->iov_base, p->iov_len, at);
    });
}

ssize_t preadv64v2(int file, const iovec* parts, int count, off64_t at, int flags) {
    REAL(preadv64v2);
    return transfer(READ, file, parts, count, [&](const iovec* p, int n) {
        return own(file, p, n, at, flags);
    });
}

ssize_t write(int file, const void* data, size_t size) {
    REAL(write);
    iovec part{const_cast<void*>(data), size};
    return store(file, &part, 1, -1, [&](const iovec* p, int) {
        return own(file, p->iov_base, p->iov_len);
    });
}

ssize_t writev(int file, const iovec* parts, int count) {
    REAL(writev);
    return store(file, parts, count, -1, [&](const iovec* p, int n) { return own(file, p, n); });
}

ssize_t pwrite64(int file, const void* data, size_t size, off64_t at) {
    REAL(pwrite64);
    iovec part{const_cast<void*>(data), size};
    return store(file, &part, 1, at, [&](const iovec* p, int) {
        return own(file, p->iov_base, p->iov_len, at);
    });
}

ssize_t pwritev64v2(int file, const iovec* parts, int count, off64_t at, int flags) {
    REAL(pwritev64v2);
    return store(file, parts, count, at, [&](const iovec* p, int n) {
        return own(file, p, n, at, flags);
    });
}

int fsync(int file) {
    REAL(fsync);
    return change(SYNC, 's', path_of(file), 0, "", [&] { return own(file); });
}

int fdatasync(int file) {
    REAL(fdatasync);
    return change(SYNC, 's', path_of(file), 0, "", [&] { return own(file); });
}

int rename(const char* from, const char* to) {
    REAL(rename);
    return change(RENAME, 'r', absolute(AT_FDCWD, from), 0, absolute(AT_FDCWD, to),
                  [&] { return own(from, to); });
}

int unlink(const char* path) {
    REAL(unlink);
    return change(REMOVE, 'u', absolute(AT_FDCWD, path), 0, "", [&] { return own(path); });
}

int unlinkat(int folder, const char* path, int flags) {
    REAL(unlinkat);
    return change(REMOVE, 'u', absolute(folder, path), 0, "", [&] { return own(folder, path, flags); });
}

int rmdir(const char* path) {
    REAL(rmdir);
    return change(REMOVE, 'u', absolute(AT_FDCWD, path), 0, "", [&] { return own(path); });
}

int ftruncate64(int file, off64_t size) {
    REAL(ftruncate64);
    return change(TRUNCATE, 't', path_of(file), size, "", [&] { return own(file, size); });
}

int truncate64(const char* path, off64_t size) {
    REAL(truncate64);
    return change(TRUNCATE, 't', absolute(AT_FDCWD, path), size, "", [&] { return own(path, size); });
}

int mkdir(const char* path, mode_t mode) {
    REAL(mkdir);
    return change(FOLDER, 'd', absolute(AT_FDCWD, path), 0, "", [&] { return own(path, mode); });
}

int link(const char* from, const char* to) {
    REAL(link);
    return change(LINK, 'h', absolute(AT_FDCWD, to), 0, absolute(AT_FDCWD, from),
                  [&] { return own(from, to); });
}

int symlink(const char* target, const char* path) {
    REAL(symlink);
    std::string name = absolute(AT_FDCWD, path);
    return change(LINK, 'l', name, 0, target, [&] { return own(target, path); });
}

int flock(int file, int operation) {
    REAL(flock);
    return change(LOCK, 'f', path_of(file), 0, "", [&] { return own(file, operation); });
}

// Copies inside the kernel are refused, as by file systems that have none: then bytes are read and
// written by the calls above.
ssize_t sendfile64(int to, int from, off64_t* at, size_t size) {
    REAL(sendfile64);
    if (below(to) || below(from)) {
        errno = EINVAL;
        return -1;
    }
    return own(to, from, at, size);
}

ssize_t copy_file_range(int from, off64_t* from_at, int to, off64_t* to_at, size_t size,
                        unsigned flags) {
    REAL(copy_file_range);
    if (below(to) || below(from)) {
        errno = EINVAL;
        return -1;
    }
    return own(from, from_at, to, to_at, size, flags);
}

void* mmap64(void* at, size_t size, int protection, int flags, int file, off64_t offset) {
    REAL(mmap64);
    bool counts_here = flags & MAP_ANONYMOUS ? (flags & MAP_NORESERVE) && armed : below(file);
    if (counts_here && fault(MAP)) {
        if (effect == FAIL) return MAP_FAILED;
        if (effect == SLOW) wait();
    }
    return own(at, size, protection, flags, file, offset);
}

int posix_memalign(void** into, size_t alignment, size_t size) {
    REAL(posix_memalign);
    if (armed && size >= LARGE && fault(ALLOCATE)) {
        if (effect == FAIL) return ENOMEM;
        if (effect == SLOW) wait();
    }
    return own(into, alignment, size);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                   void* argument) {
    REAL(pthread_create);
    if (armed && fault(THREAD)) {
        if (effect == FAIL) return EAGAIN;
        if (effect == SLOW) wait();
    }
    return own(thread, attributes, start, argument);
}

}  // extern "C"
