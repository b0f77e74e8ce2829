// The layout of an observer file, version 1, described in docs/observer-format.md; src/etloom/formats/observer reads it.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace etloom {

constexpr char kMagic[8] = {'E', 'T', 'L', 'O', 'B', 'S', '\r', '\n'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kHeaderBytes = 4096;
constexpr uint32_t kChunkBytes = 128 << 10;
constexpr uint32_t kChunkMagic = 0x4b4e4843;  // "CHNK"

enum Counter {
  kNoSpace,        // operators not written: the size cap or a full disk
  kNoDictionary,   // names or argument lists that did not fit the dictionary's share
  kArgumentsOmitted,  // argument lists too long for a record
  kListsCut,       // lists cut to kLongestList
  kFailed,         // argument lists whose encoding raised an exception
  kReentrant,      // operators that ran while the observer itself inspected a tensor
  kRaised,         // operators that ended with an exception
  kEndedElsewhere, // scopes that ended on another thread
  kEndedOutside,   // ends, in a window, of operators begun before it
  kUnsized,        // tensors without plain sizes: nested, symbolic
  kThreadExiting,  // operators on a thread that was already exiting
  kOverwritten,    // chunks of the ring that were reused
  kStuck,          // threads that were inside the observer when it stopped, and did not return in time
  kOperators,      // operators that began, in chunks that were closed
  kOverwrittenOperators,  // those of them in chunks that were reused
  kCounters = 24
};

struct FileHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes;
  uint32_t chunk_bytes;
  uint32_t detail;  // 0 time only, 1 with inputs and outputs
  uint32_t ring;    // 0 stops at max_bytes, 1 overwrites the oldest chunks
  uint32_t pid;
  uint64_t max_bytes;
  int64_t wall_ns;  // CLOCK_REALTIME and CLOCK_MONOTONIC at the same moment
  int64_t mono_ns;
  std::atomic<uint64_t> chunks;  // in the file
  std::atomic<uint64_t> closed;  // 1 once the file was finished normally
  std::atomic<uint64_t> counters[kCounters];
  char torch[64];
  char host[64];
  std::atomic<int64_t> first_ns;        // monotonic: begin of the first window; 0 before
  std::atomic<int64_t> overwritten_ns;  // monotonic: time of the last record that the ring overwrote; 0 for none
};
static_assert(sizeof(FileHeader) <= kHeaderBytes);

enum ChunkKind : uint8_t { kEvents = 1, kDictionary = 2 };

struct ChunkHeader {
  uint32_t magic;
  uint8_t kind;
  uint8_t closed;  // 1 once its sums are set
  uint16_t reserved;
  uint64_t order;   // of allocation, from 0
  uint32_t stream;  // of the recording thread, from 0; ids of a dictionary are valid within it
  std::atomic<uint32_t> used;  // bytes of complete records after this header
  uint64_t os_tid;
  uint64_t rf_tid;
  uint64_t sum;       // of the payload's 64-bit words
  uint64_t weighted;  // sum of each word times its position, from 1
  uint64_t window;    // from 1
};
static_assert(sizeof(ChunkHeader) == 64);
constexpr uint64_t kPayloadWords = (kChunkBytes - sizeof(ChunkHeader)) / 8;

enum RecordType : uint8_t { kBegin = 1, kEnd = 2, kDefine = 3, kWindow = 4, kNote = 5 };
enum BeginFlag : uint8_t { kAsync = 1, kWithoutArguments = 2 };
enum EndFlag : uint8_t { kEndRaised = 1, kEndWithoutArguments = 2 };

// `packed` returns a record as the file holds it. It uses shifts: loading a word whose bytes were stored one by one
// stalls the processor.
static_assert(std::endian::native == std::endian::little);

struct Record {  // the head of every record; records are multiples of 64 bits
  uint8_t type;
  uint8_t flags;
  uint16_t words;  // length of the record, including this head
  uint32_t id;     // kBegin, kEnd: form of the arguments; kDefine: id that is defined; kNote: text

  uint64_t packed() const {
    return type | uint64_t{flags} << 8 | uint64_t{words} << 16 | uint64_t{id} << 32;
  }
};

struct Begin {
  Record record;
  int64_t ns;
  uint64_t handle;
  uint64_t parent;  // handle of the enclosing operator of the thread, 0 for none
  int64_t sequence;
  uint32_t name;
  uint16_t forward_tid;
  uint8_t scope;
  uint8_t reserved;

  std::array<uint64_t, 6> packed() const {
    return {record.packed(),
            static_cast<uint64_t>(ns),
            handle,
            parent,
            static_cast<uint64_t>(sequence),
            name | uint64_t{forward_tid} << 32 | uint64_t{scope} << 48};
  }
};
static_assert(sizeof(Begin) == 48);

struct End {
  Record record;
  int64_t ns;
  uint64_t handle;

  std::array<uint64_t, 3> packed() const { return {record.packed(), static_cast<uint64_t>(ns), handle}; }
};

enum Definition : uint8_t { kName = 1, kLayout = 2, kForm = 3, kText = 4 };

struct Define {  // in dictionary chunks; `flags` holds the Definition
  Record record;
  uint32_t bytes;
  uint32_t more;  // 1: the next record of this kind and id continues it
};

struct Window {  // flags: 1 the window opens, 0 it closes
  Record record;
  int64_t wall_ns;
  int64_t mono_ns;

  std::array<uint64_t, 3> packed() const {
    return {record.packed(), static_cast<uint64_t>(wall_ns), static_cast<uint64_t>(mono_ns)};
  }
};

struct Note {  // extra information of an operator, or of the file (handle 0); id is a JSON text
  Record record;
  uint64_t handle;

  std::array<uint64_t, 2> packed() const { return {record.packed(), handle}; }
};

// A form is a list of tags. The value in brackets follows its tag as a little-endian u32; the values after the brackets
// are in the words of the record, in order.
//   T[layout] tensor storage version    O[layout] tensor storage version offset    U an undefined tensor
//   i integer    d double    c real imaginary    t true    f false    N none    s[text] string    v[text] device
//   o[text] another type, by name    G[text] process group: JSON; its sequence number    R[text] reduce operation
//   I[n] n integers    D[n] n doubles    L[n] list of n items    ([n] tuple of n items
constexpr uint32_t kLongestList = 4096;

}  // namespace etloom
