// See buffer.hpp.
#include "buffer.hpp"

#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace etloom {

#ifdef __linux__
namespace {

constexpr size_t kPage = 1 << 21;
constexpr size_t kSmallPage = 1 << 12;
constexpr size_t kSmall = 1 << 20;  // what is not larger comes from malloc: a large page would be cleared for half of it or less

}  // namespace

void Room::grow(size_t wanted) {
    const bool was_small = bytes <= kSmall;
    size_t more = std::max({wanted, 2 * bytes, size_t{512}});
    void* moved = nullptr;
    if (more <= kSmall) {
        moved = std::realloc(data, more);
    } else {
        more = (more + kPage - 1) / kPage * kPage;
        moved = was_small ? mmap(nullptr, more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                          : mremap(data, bytes, more, MREMAP_MAYMOVE);
        if (moved == MAP_FAILED) {
            moved = nullptr;
        } else if (was_small) {
            static_cast<void>(madvise(moved, more, MADV_HUGEPAGE));
            if (bytes != 0) std::memcpy(moved, data, bytes);
            std::free(data);
        }
    }
    if (moved == nullptr) throw std::bad_alloc();
    data = moved;
    bytes = more;
}

void Room::fit(size_t used) {
    if (bytes <= kSmall || bytes - used < kSmall) return;
    const size_t small = std::max((used + kSmallPage - 1) / kSmallPage * kSmallPage, kSmallPage);
    if (small >= kPage) {
        // Where it is: the rest of the last large page is free as soon as the system needs it.
        if (mremap(data, bytes, small, 0) == data) bytes = small;
        return;
    }
    Room fitting;
    fitting.bytes = small;
    if (small <= kSmall) {
        fitting.data = std::malloc(small);
    } else {
        fitting.data = mmap(nullptr, small, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (fitting.data == MAP_FAILED) fitting.data = nullptr;
    }
    if (fitting.data == nullptr) return;  // it stays as roomy as it is
    if (used != 0) std::memcpy(fitting.data, data, used);
    release();
    *this = fitting;
}

void Room::release() {
    if (bytes <= kSmall) {
        std::free(data);
    } else {
        munmap(data, bytes);
    }
}
#else
void Room::grow(size_t wanted) {
    const size_t more = std::max({wanted, 2 * bytes, size_t{512}});
    void* moved = std::realloc(data, more);
    if (moved == nullptr) throw std::bad_alloc();
    data = moved;
    bytes = more;
}

void Room::fit(size_t used) {
    if (bytes - used <= used / 4) return;
    void* moved = std::realloc(data, std::max(used, size_t{1}));
    if (moved == nullptr) return;
    data = moved;
    bytes = used;
}

void Room::release() { std::free(data); }
#endif

}  // namespace etloom
