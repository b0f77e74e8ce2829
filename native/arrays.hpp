// Columns as numpy hands them over, and back.
#pragma once

#include <nanobind/ndarray.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstddef>
#include <new>
#include <utility>
#include <vector>

namespace nb = nanobind;

template <typename T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Memory of large columns in large pages, as numpy takes it: touching a column for the first time is half of the cost of
// making it. What a resize adds is not set: who asks for it fills it.
template <typename T>
struct LargePages {
    using value_type = T;
    static constexpr std::size_t PAGE = std::size_t{1} << 21;

    LargePages() = default;
    template <typename U>
    LargePages(const LargePages<U>&) noexcept {}

    T* allocate(std::size_t count) {
        const std::size_t bytes = count * sizeof(T);
        if (bytes < 2 * PAGE) return static_cast<T*>(::operator new(bytes));
        void* const start = ::operator new(bytes, std::align_val_t{PAGE});
#ifdef MADV_HUGEPAGE
        madvise(start, bytes, MADV_HUGEPAGE);  // advice: without it there are small pages
#endif
        return static_cast<T*>(start);
    }
    void deallocate(T* start, std::size_t count) noexcept {
        if (count * sizeof(T) < 2 * PAGE)
            ::operator delete(start);
        else
            ::operator delete(start, std::align_val_t{PAGE});
    }
    template <typename U>
    void construct(U* at) noexcept {
        ::new (static_cast<void*>(at)) U;
    }
    template <typename U, typename... Args>
    void construct(U* at, Args&&... args) {
        ::new (static_cast<void*>(at)) U(std::forward<Args>(args)...);
    }
    friend bool operator==(const LargePages&, const LargePages&) noexcept { return true; }
};

template <typename T>
using Paged = std::vector<T, LargePages<T>>;

template <typename T, typename Memory>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(std::vector<T, Memory>&& values) {
    auto* owner = new std::vector<T, Memory>(std::move(values));
    nb::capsule free_it(owner, [](void* p) noexcept { delete static_cast<std::vector<T, Memory>*>(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(owner->data(), {owner->size()}, free_it);
}
