#include "file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <vector>

namespace etloom {

namespace {

constexpr uint64_t kGrowBytes = 32ull * kChunkBytes;  // growth increment of the file

uint64_t next_serial() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

int64_t clock_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

bool write_zeros(int descriptor, uint64_t from, uint64_t to) {
  static const std::vector<char> zeros(kChunkBytes);
  while (from < to) {
    const ssize_t written =
        pwrite(descriptor, zeros.data(), std::min<uint64_t>(zeros.size(), to - from), static_cast<off_t>(from));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    from += static_cast<uint64_t>(written);
  }
  return true;
}

// Writing to a hole of a mapped file on a full disk raises SIGBUS, so disk space is allocated before a page is touched.
bool reserve(int descriptor, uint64_t from, uint64_t to) {
#ifdef __linux__
  int error;
  do {
    error = fallocate(descriptor, 0, static_cast<off_t>(from), static_cast<off_t>(to - from)) ? errno : 0;
  } while (error == EINTR);
  if (error == 0) return true;
  if (error != EOPNOTSUPP && error != ENOSYS) return false;
#endif
  return write_zeros(descriptor, from, to);
}

// Replaces an existing file instead of truncating it: another process may have mapped it, and would get SIGBUS.
int create_file(const char* path) {
  constexpr int flags = O_RDWR | O_CREAT | O_CLOEXEC;
  struct stat existing;
  for (int attempt = 0; attempt < 10; ++attempt) {
    if (lstat(path, &existing) == 0 && !S_ISREG(existing.st_mode)) return open(path, flags | O_TRUNC, 0644);
    unlink(path);
    const int opened = open(path, flags | O_EXCL, 0644);
    if (opened >= 0 || errno != EEXIST) return opened;
  }
  return -1;
}

// Brings the pages of a chunk into memory before records are written to it. A page fault costs some 3 us; writing the
// chunk once as a whole beforehand saves two thirds of that.
bool populate(int descriptor, char* map, uint64_t from) {
  if (!write_zeros(descriptor, from, from + kChunkBytes)) return false;
#ifdef MADV_POPULATE_WRITE
  madvise(map + from, kChunkBytes, MADV_POPULATE_WRITE);
#endif
  return true;
}

}  // namespace

int64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }
int64_t wall_ns() { return clock_ns(CLOCK_REALTIME); }

File::File(const std::string& path, const std::string& torch, uint64_t max_bytes, bool ring, bool detail)
    : serial(next_serial()) {
  const auto fail = [&](const char* what) {
    const std::string reason = std::string(what) + ": " + std::strerror(errno);
    if (descriptor_ >= 0) close(descriptor_);
    throw std::runtime_error(reason);
  };
  mapped_ = kHeaderBytes + std::max<uint64_t>(max_bytes / kChunkBytes, 8) * kChunkBytes;
  descriptor_ = create_file(path.c_str());
  if (descriptor_ < 0) fail("cannot be opened");
  struct stat state;
  if (fstat(descriptor_, &state) != 0) fail("cannot be opened");
  device_ = state.st_dev;
  inode_ = state.st_ino;
  if (!reserve(descriptor_, 0, kHeaderBytes)) fail("cannot be written");
  size_ = kHeaderBytes;
  void* map = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor_, 0);
  if (map == MAP_FAILED) fail("cannot be mapped");
  map_ = static_cast<char*>(map);
  header_ = reinterpret_cast<FileHeader*>(map_);
  header_->version = kVersion;
  header_->header_bytes = kHeaderBytes;
  header_->chunk_bytes = kChunkBytes;
  header_->detail = detail;
  header_->ring = ring;
  header_->pid = static_cast<uint32_t>(getpid());
  header_->max_bytes = mapped_;
  header_->wall_ns = wall_ns();
  header_->mono_ns = monotonic_ns();
  torch.copy(header_->torch, sizeof header_->torch - 1);
  gethostname(header_->host, sizeof header_->host - 1);
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(header_->magic, kMagic, sizeof kMagic);
}

File::~File() {
  munmap(map_, mapped_);
  if (owns_descriptor()) close(descriptor_);
}

// Returns false if the program has closed the descriptor, as daemons close all: it may be that of another file by now.
bool File::owns_descriptor() const {
  struct stat state;
  return fstat(descriptor_, &state) == 0 && state.st_dev == device_ && state.st_ino == inode_;
}

bool File::grow(uint64_t bytes) {
  if (bytes <= size_) return true;
  const uint64_t target = std::min(mapped_, std::max(bytes, size_ + kGrowBytes));
  if (!reserve(descriptor_, size_, target)) {
    if (target == bytes || !reserve(descriptor_, size_, bytes)) return false;
    size_ = bytes;
    return true;
  }
  size_ = target;
  return true;
}

OpenChunk File::allocate_chunk(ChunkKind kind, uint32_t stream, uint64_t os_tid, uint64_t rf_tid, uint64_t window) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t index = header_->chunks.load(std::memory_order_relaxed);
  const uint64_t all = all_chunks();
  // The dictionary is not overwritten, so a ring keeps a quarter of the file for it.
  const bool ring_is_full = kind == kEvents && header_->ring && event_chunks_ >= all - all / 4;
  ChunkHeader* chunk = nullptr;
  if (!ring_is_full && !full_ && index < all && owns_descriptor() && grow(kHeaderBytes + (index + 1) * kChunkBytes) &&
      populate(descriptor_, map_, kHeaderBytes + index * kChunkBytes)) {
    chunk = at(index);
    event_chunks_ += kind == kEvents;
  } else {
    full_ = full_ || !ring_is_full;
    if (kind != kEvents || !header_->ring || reusable_.empty()) return {};
    const OpenChunk oldest = reusable_.front();
    reusable_.pop_front();
    chunk = oldest.header;
    chunk->used.store(0, std::memory_order_release);
    count(kOverwritten);
    count(kOverwrittenOperators, oldest.operators);
    header_->overwritten_ns.store(std::max(header_->overwritten_ns.load(), oldest.last_ns));
  }
  chunk->closed = 0;
  chunk->kind = kind;
  chunk->order = order_++;
  chunk->stream = stream;
  chunk->os_tid = os_tid;
  chunk->rf_tid = rf_tid;
  chunk->window = window;
  chunk->sum = chunk->weighted = 0;
  chunk->magic = kChunkMagic;
  chunk->used.store(0, std::memory_order_release);
  if (chunk == at(index)) header_->chunks.store(index + 1, std::memory_order_release);
  return {chunk};
}

void File::close_chunk(const OpenChunk& chunk) {
  ChunkHeader& header = *chunk.header;
  header.sum = chunk.sum;
  header.weighted = chunk.weighted;
  std::atomic_thread_fence(std::memory_order_release);
  header.closed = 1;
  if (header.kind != kEvents) return;
  count(kOperators, chunk.operators);
  if (header_->ring) {
    const std::lock_guard<std::mutex> lock(mutex_);
    reusable_.push_back(chunk);
  }
}

void File::release() {
  mmap(map_, mapped_, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (owns_descriptor()) close(descriptor_);
  descriptor_ = -1;
}

void File::finish() {
  const uint64_t end = kHeaderBytes + header_->chunks.load() * kChunkBytes;
  header_->closed.store(1, std::memory_order_release);
  if (end < size_ && owns_descriptor() && ftruncate(descriptor_, static_cast<off_t>(end)) == 0) size_ = end;
}

}  // namespace etloom
