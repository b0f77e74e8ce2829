// Numbers in a row, as many as come.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>

namespace etloom {

// Room for numbers. Where the system can, much room is got in large pages, of which fewer have to be got one by one, and
// grows by moving the pages and not what is in them.
struct Room {
    void* data = nullptr;
    size_t bytes = 0;
    // Makes it larger, by half or more. Throws std::bad_alloc.
    void grow(size_t wanted);
    // Gives back what is beyond the ``used`` bytes, where that is a good part of it.
    void fit(size_t used);
    void release();
};

template <typename T>
class Buffer {
    static_assert(std::is_trivially_copyable_v<T>);

  public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept { swap(other); }
    ~Buffer() { room_.release(); }

    T* data() { return static_cast<T*>(room_.data); }
    const T* data() const { return static_cast<const T*>(room_.data); }
    T* begin() { return data(); }
    T* end() { return data() + size_; }
    const T* begin() const { return data(); }
    const T* end() const { return data() + size_; }
    size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }
    T& operator[](size_t i) { return data()[i]; }
    const T& operator[](size_t i) const { return data()[i]; }

    void push_back(T value) {
        if ((size_ + 1) * sizeof(T) > room_.bytes) room_.grow((size_ + 1) * sizeof(T));
        data()[size_++] = value;
    }
    // What is added is zero.
    void resize(size_t size) {
        const size_t before = size_;
        resize_unset(size);
        if (size > before) std::memset(data() + before, 0, (size - before) * sizeof(T));
    }
    // What is added is to be written before it is read.
    void resize_unset(size_t size) {
        if (size * sizeof(T) > room_.bytes) room_.grow(size * sizeof(T));
        size_ = size;
    }
    // Nothing is added afterwards.
    void fit() { room_.fit(size_ * sizeof(T)); }
    void swap(Buffer& other) {
        std::swap(room_, other.room_);
        std::swap(size_, other.size_);
    }

  private:
    Room room_;
    size_t size_ = 0;
};

}  // namespace etloom
