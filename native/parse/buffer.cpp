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
constexpr size_t kSmall = 1 << 18;  // what is not larger comes from malloc

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

void Room::release() { std::free(data); }
#endif

}  // namespace etloom
