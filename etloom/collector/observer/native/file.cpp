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

constexpr uint64_t kStep = 32ull * kChunkBytes;  // the file grows by this

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
    const ssize_t wrote =
        pwrite(descriptor, zeros.data(), std::min<uint64_t>(zeros.size(), to - from), static_cast<off_t>(from));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    from += static_cast<uint64_t>(wrote);
  }
  return true;
}

// A hole in a mapped file is a SIGBUS on a full disk: so every page has its block before it is touched.
bool reserve(int descriptor, uint64_t from, uint64_t to) {
#ifdef __linux__
  int failed;
  do {
    failed = fallocate(descriptor, 0, static_cast<off_t>(from), static_cast<off_t>(to - from)) ? errno : 0;
  } while (failed == EINTR);
  if (failed == 0) return true;
  if (failed != EOPNOTSUPP && failed != ENOSYS) return false;
#endif
  return write_zeros(descriptor, from, to);
}

// Not the file that is there: another process may have mapped it, and what is cut off ends who touches it.
int open_anew(const char* path) {
  constexpr int flags = O_RDWR | O_CREAT | O_CLOEXEC;
  struct stat found;
  for (int turn = 0; turn < 10; ++turn) {
    if (lstat(path, &found) == 0 && !S_ISREG(found.st_mode)) return open(path, flags | O_TRUNC, 0644);
    unlink(path);
    const int opened = open(path, flags | O_EXCL, 0644);
    if (opened >= 0 || errno != EEXIST) return opened;
  }
  return -1;
}

// The pages of a chunk, before records are written to it. To touch a page that is not in memory costs a fault of some
// 3 us, two thirds of which are saved where the kernel is given the chunk whole: so it is written once before.
bool bring_in(int descriptor, char* map, uint64_t from) {
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
  descriptor_ = open_anew(path.c_str());
  if (descriptor_ < 0) fail("cannot be opened");
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
  close(descriptor_);
}

bool File::grow(uint64_t bytes) {
  if (bytes <= size_) return true;
  const uint64_t wanted = std::min(mapped_, std::max(bytes, size_ + kStep));
  if (!reserve(descriptor_, size_, wanted)) {
    if (wanted == bytes || !reserve(descriptor_, size_, bytes)) return false;
    size_ = bytes;
    return true;
  }
  size_ = wanted;
  return true;
}

OpenChunk File::take(ChunkKind kind, uint32_t stream, uint64_t os_tid, uint64_t rf_tid, uint64_t window) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t index = header_->chunks.load(std::memory_order_relaxed);
  const uint64_t all = all_chunks();
  // The dictionary is not overwritten, so a ring keeps a quarter of the file for it.
  const bool spent = kind == kEvents && header_->ring && event_chunks_ >= all - all / 4;
  ChunkHeader* chunk = nullptr;
  if (!spent && !full_ && index < all && grow(kHeaderBytes + (index + 1) * kChunkBytes) &&
      bring_in(descriptor_, map_, kHeaderBytes + index * kChunkBytes)) {
    chunk = at(index);
    event_chunks_ += kind == kEvents;
  } else {
    full_ = full_ || !spent;
    if (kind != kEvents || !header_->ring || again_.empty()) return {};
    const OpenChunk lost = again_.front();
    again_.pop_front();
    chunk = lost.header;
    chunk->used.store(0, std::memory_order_release);
    count(kOverwritten);
    count(kOverwrittenOperators, lost.operators);
    header_->overwritten_ns.store(std::max(header_->overwritten_ns.load(), lost.last_ns));
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
    again_.push_back(chunk);
  }
}

void File::finish() {
  const uint64_t end = kHeaderBytes + header_->chunks.load() * kChunkBytes;
  header_->closed.store(1, std::memory_order_release);
  if (end < size_ && ftruncate(descriptor_, static_cast<off_t>(end)) == 0) size_ = end;
}

}  // namespace etloom
