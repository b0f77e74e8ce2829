// PyTorch's caching allocator, simulated: where each request of a program is put, and what is taken from the driver.
// tests/support/reference_allocator.py is the same in plain lists; the rules are those of c10/cuda/CUDACachingAllocator.cpp.
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nanobind/stl/array.h>

#include "arrays.hpp"
#include "bindings.hpp"

namespace {

constexpr int64_t BLOCK = 512, SMALL = 1 << 20, SMALL_SEGMENT = 2 << 20, MIN_LARGE = 10 << 20, ROUND_LARGE = 2 << 20;
constexpr int64_t ADDRESS_SPACE = int64_t{1} << 42;  // of an expandable segment on a device without limit
constexpr int64_t LARGEST = int64_t{1} << 50;        // of one request, segment or block
constexpr int64_t UNLIMITED = int64_t{1} << 62;
constexpr int64_t NO_OWNER = -UNLIMITED;
enum Operation : uint8_t { ALLOC, FREE, EMPTY_CACHE, RELEASE_POOL };
enum Event : uint8_t { SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, RETRY, OOM };

int64_t round_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

struct Settings {
    int64_t capacity, max_split_size, max_non_split_rounding, large_segment_size;
    bool expandable;
    double garbage_threshold;
    std::array<int64_t, 16> divisions;

    bool collects_garbage() const { return garbage_threshold > 0 && capacity > 0; }
    int64_t limit() const { return capacity > 0 ? capacity : UNLIMITED / 4; }

    int64_t round_size(int64_t size) const {
        if (size < BLOCK) return BLOCK;
        const int log = 63 - std::countl_zero(static_cast<uint64_t>(size));
        const int64_t parts = divisions[std::clamp(log - 20, 0, 15)];
        if (parts > 1 && size > BLOCK * parts) {
            const int64_t floor = int64_t{1} << log;
            const int64_t step = floor >> (63 - std::countl_zero(static_cast<uint64_t>(parts)));
            return floor == size ? size : step == 0 ? 2 * floor : round_up(size, step);
        }
        return round_up(size, BLOCK);
    }
    int64_t segment_size(int64_t size) const {
        return size <= SMALL ? SMALL_SEGMENT : size < MIN_LARGE ? large_segment_size : round_up(size, ROUND_LARGE);
    }
};

struct Block {
    int64_t address, size;
    int32_t segment;
    int32_t before = -1, after = -1;
    bool mapped = true;
    int64_t owner = NO_OWNER, requested = 0, since = 0;
};

struct Segment {
    int64_t address, size, stream;
    int32_t pool;
    bool expandable;
    int32_t first = -1;
};

struct Pool {
    int32_t id;
    bool is_small;
    std::set<std::tuple<int64_t, int64_t, int64_t, int32_t>> free = {};  // stream, size, address, block
    std::set<std::tuple<int64_t, int64_t, int32_t>> unmapped = {};       // stream, address, block
    int64_t searches = 0;
};

struct Log {
    Paged<int64_t> operation, address, size;
    Paged<uint8_t> kind;
};

class Allocator {
public:
    Allocator(const Settings& chosen) : settings(chosen) {
        pool_of(0, false);
        pool_of(0, true);
    }

    Log log;
    int64_t reserved = 0, allocated = 0, requested = 0, releasable = 0, operation = -1;
    std::vector<int32_t> live, initial;  // blocks of operations, and blocks from before

    // A segment that exists before the program; its blocks follow by add_block in the order of addresses. An expandable
    // one has an address space of `space` bytes, others 0.
    bool add_segment(int64_t address, int64_t size, int64_t stream, int32_t pool_id, bool is_small, int64_t space) {
        const int64_t whole = std::max(size, space);
        if (size <= 0 || size > LARGEST || whole > LARGEST || address < 0 || address > UNLIMITED - 2 * LARGEST ||
            overlaps(address, whole) || reserved > UNLIMITED / 4 - size)
            return false;
        const int32_t segment = new_segment({address, whole, stream, pool_of(pool_id, is_small), space > 0});
        const int32_t block = new_block({address, whole, segment});
        segments[segment].first = block;
        if (whole > size) insert_unmapped(split(block, size, false));
        insert_free(block);
        reserved += size;
        note(address, whole);
        return true;
    }
    bool add_block(int64_t address, int64_t size, int64_t bytes) {
        auto it = by_address.upper_bound(address);
        if (it == by_address.begin() || size <= 0 || size > LARGEST || bytes < 0 || bytes > size) return false;
        int32_t block = segments[std::prev(it)->second].first;
        // The blocks come in the order of addresses: what is free is at the end.
        while (blocks[block].after >= 0 && blocks[blocks[block].after].address <= address) block = blocks[block].after;
        const Block found = blocks[block];
        if (found.owner != NO_OWNER || !found.mapped || address < found.address ||
            size > found.size - (address - found.address))
            return false;
        erase_free(block);
        if (address > found.address) {
            const int32_t rest = split(block, address - found.address, true);
            insert_free(block);
            block = rest;
        }
        if (blocks[block].size > size) insert_free(split(block, size, true));
        blocks[block].owner = -1 - static_cast<int64_t>(initial.size());
        blocks[block].requested = bytes;
        initial.push_back(block);
        allocated += size;
        requested += bytes;
        return true;
    }
    void add_driver_address(int64_t address, int64_t size) {
        if (size <= 0 || size > LARGEST || address < 0 || address > UNLIMITED - 2 * LARGEST) return;
        driver[size].push_back(address);
        note(address, size);
    }

    int64_t alloc(int64_t bytes, int64_t stream, int32_t pool_id) {
        const int64_t size = settings.round_size(bytes);
        const int32_t pool = pool_of(pool_id, size <= SMALL);
        int32_t block = find(size, stream, pool);
        if (block < 0) {
            collect_garbage();
            block = extend(size, stream, pool);
        }
        if (block < 0 && release_oversize(size, stream, pool)) block = extend(size, stream, pool);
        if (block < 0 && pool_id == 0) {
            write(RETRY, 0, size);
            empty_cache();
            block = extend(size, stream, pool);
        }
        if (block < 0) {
            write(OOM, 0, size);
            return -1;
        }
        const int64_t rest = blocks[block].size - size;
        if (pools[pool].is_small || settings.expandable ? rest >= BLOCK
                                                        : size < settings.max_split_size && rest > SMALL)
            insert_free(split(block, size, true));
        blocks[block].owner = operation;
        blocks[block].requested = bytes;
        live[operation] = block;
        allocated += blocks[block].size;
        requested += bytes;
        return blocks[block].address;
    }

    int64_t free(int64_t owner) {
        auto& places = owner >= 0 ? live : initial;
        const uint64_t place = owner >= 0 ? owner : -(owner + 1);
        if (place >= places.size() || places[place] < 0) return -1;
        const int32_t block = std::exchange(places[place], -1);
        const int64_t address = blocks[block].address;
        allocated -= blocks[block].size;
        requested -= blocks[block].requested;
        blocks[block].owner = NO_OWNER;
        blocks[block].requested = 0;
        merge(block);
        insert_free(block);
        return address;
    }

    void empty_cache() {
        release_blocks(pool_of(0, false));
        release_blocks(pool_of(0, true));
        for (int32_t id : released_pools) {
            release_blocks(pool_of(id, true));
            release_blocks(pool_of(id, false));
        }
    }
    void release_pool(int32_t id) { released_pools.insert(id); }

    nb::tuple take_blocks() {
        std::array<Paged<int64_t>, 6> numbers;
        std::array<Paged<int32_t>, 1> ids;
        Paged<uint8_t> small, expandable;
        for (const auto& [start, number] : by_address)
            for (int32_t block = segments[number].first; block >= 0; block = blocks[block].after) {
                const Block& b = blocks[block];
                if (!b.mapped) continue;
                const Segment& segment = segments[number];
                const std::array<int64_t, 6> row{b.address, b.size, b.requested, b.owner, start, segment.stream};
                for (size_t i = 0; i < row.size(); ++i) numbers[i].push_back(row[i]);
                ids[0].push_back(pools[segment.pool].id);
                small.push_back(pools[segment.pool].is_small);
                expandable.push_back(segment.expandable);
            }
        return nb::make_tuple(to_numpy(std::move(numbers[0])), to_numpy(std::move(numbers[1])),
                              to_numpy(std::move(numbers[2])), to_numpy(std::move(numbers[3])),
                              to_numpy(std::move(numbers[4])), to_numpy(std::move(numbers[5])),
                              to_numpy(std::move(ids[0])), to_numpy(std::move(small)), to_numpy(std::move(expandable)));
    }

private:
    Settings settings;
    std::vector<Block> blocks;
    std::vector<int32_t> unused;  // places of blocks that were merged or released
    std::vector<Segment> segments;
    std::map<int64_t, int32_t> by_address;  // address -> segment
    std::vector<Pool> pools;
    std::map<std::pair<int32_t, bool>, int32_t> pool_numbers;
    std::set<int32_t> released_pools;
    std::unordered_map<int64_t, std::deque<int64_t>> driver;  // size -> addresses that the driver returned
    int64_t next_address = SMALL_SEGMENT;

    void write(Event kind, int64_t address, int64_t size) {
        log.operation.push_back(operation);
        log.kind.push_back(kind);
        log.address.push_back(address);
        log.size.push_back(size);
    }

    // Blocks and their lists

    int32_t pool_of(int32_t id, bool is_small) {
        const auto [it, is_new] = pool_numbers.try_emplace({id, is_small}, static_cast<int32_t>(pools.size()));
        if (is_new) pools.push_back({id, is_small});
        return it->second;
    }
    Pool& pool_of(int32_t block) { return pools[segments[blocks[block].segment].pool]; }
    int32_t new_segment(const Segment& segment) {
        segments.push_back(segment);
        by_address[segment.address] = static_cast<int32_t>(segments.size() - 1);
        return static_cast<int32_t>(segments.size() - 1);
    }
    int32_t new_block(const Block& block) {
        if (unused.empty()) {
            blocks.push_back(block);
            return static_cast<int32_t>(blocks.size() - 1);
        }
        const int32_t place = unused.back();
        unused.pop_back();
        blocks[place] = block;
        return place;
    }
    // The bytes of a free block that empty_cache() returns to the driver.
    int64_t releasable_bytes(int32_t block) {
        if (!segments[blocks[block].segment].expandable) return is_whole(block) ? blocks[block].size : 0;
        const auto [start, end] = whole_pages(block);
        return std::max<int64_t>(end - start, 0);
    }
    std::pair<int64_t, int64_t> whole_pages(int32_t block) {
        const int64_t base = segments[blocks[block].segment].address, unit = page(pool_of(block).is_small);
        return {base + round_up(blocks[block].address - base, unit),
                base + (blocks[block].address + blocks[block].size - base) / unit * unit};
    }
    void insert_free(int32_t block) {
        releasable += releasable_bytes(block);
        blocks[block].since = pool_of(block).searches;
        pool_of(block).free.insert({segments[blocks[block].segment].stream, blocks[block].size, blocks[block].address, block});
    }
    void erase_free(int32_t block) {
        releasable -= releasable_bytes(block);
        pool_of(block).free.erase({segments[blocks[block].segment].stream, blocks[block].size, blocks[block].address, block});
    }
    void insert_unmapped(int32_t block) {
        pool_of(block).unmapped.insert({segments[blocks[block].segment].stream, blocks[block].address, block});
    }
    void erase_unmapped(int32_t block) {
        pool_of(block).unmapped.erase({segments[blocks[block].segment].stream, blocks[block].address, block});
    }
    // Cut a block that is in no list: it keeps `size` bytes. Returns the rest, which is in no list either.
    int32_t split(int32_t block, int64_t size, bool mapped) {
        Block rest{blocks[block].address + size, blocks[block].size - size, blocks[block].segment};
        rest.before = block;
        rest.after = blocks[block].after;
        rest.mapped = mapped;
        const int32_t number = new_block(rest);
        if (rest.after >= 0) blocks[rest.after].before = number;
        blocks[block].after = number;
        blocks[block].size = size;
        return number;
    }
    // Join a block that is in no list with its free neighbours, or, if it is not mapped, those that are not.
    void merge(int32_t block) {
        for (const bool is_before : {true, false}) {
            Block& b = blocks[block];
            const int32_t other = is_before ? b.before : b.after;
            if (other < 0 || blocks[other].owner != NO_OWNER || blocks[other].mapped != b.mapped) continue;
            if (b.mapped)
                erase_free(other);
            else
                erase_unmapped(other);
            b.size += blocks[other].size;
            if (is_before) {
                b.address = blocks[other].address;
                b.before = blocks[other].before;
                if (b.before >= 0)
                    blocks[b.before].after = block;
                else
                    segments[b.segment].first = block;
            } else {
                b.after = blocks[other].after;
                if (b.after >= 0) blocks[b.after].before = block;
            }
            unused.push_back(other);
        }
    }
    bool is_whole(int32_t block) const { return blocks[block].before < 0 && blocks[block].after < 0; }

    int32_t find(int64_t size, int64_t stream, int32_t number) {
        Pool& pool = pools[number];
        if (settings.collects_garbage()) ++pool.searches;
        const auto end = pool.free.end();
        const auto is_candidate = [&](auto place) { return place != end && std::get<0>(*place) == stream; };
        const auto is_expandable = [&](auto place) { return segments[blocks[std::get<3>(*place)].segment].expandable; };
        const auto expandable_size = [&](auto place) {
            const Block& block = blocks[std::get<3>(*place)];
            return block.size + (block.after >= 0 && !blocks[block.after].mapped ? blocks[block.after].size : 0);
        };
        auto it = pool.free.lower_bound({stream, size, std::numeric_limits<int64_t>::min(), 0});
        if (!is_candidate(it)) return -1;
        if (is_expandable(it) && settings.expandable) {
            // The best fit is by the size to which a block can grow.
            for (auto next = std::next(it);
                 is_expandable(it) && is_candidate(next) && expandable_size(next) < expandable_size(it);)
                it = next++;
        } else {
            while (is_candidate(it) && is_expandable(it)) ++it;
            if (!is_candidate(it)) return -1;
        }
        const int64_t available = std::get<1>(*it);
        if (size < settings.max_split_size && available >= settings.max_split_size) return -1;
        if (size >= settings.max_split_size && available >= size + settings.max_non_split_rounding) return -1;
        const int32_t block = std::get<3>(*it);
        erase_free(block);
        return block;
    }

    // Segments

    bool overlaps(int64_t address, int64_t size) const {
        const auto after = by_address.lower_bound(address);
        if (after != by_address.end() && after->first - address < size) return true;
        if (after == by_address.begin()) return false;
        const auto& [start, number] = *std::prev(after);
        return address - start < segments[number].size;
    }
    void note(int64_t address, int64_t size) {
        next_address = std::max(next_address, round_up(address + size, ROUND_LARGE));
    }
    // The next address that the driver returned for this size in the recording, else a higher one than all before.
    int64_t new_address(int64_t size) {
        if (const auto it = driver.find(size); it != driver.end())
            while (!it->second.empty()) {
                const int64_t address = it->second.front();
                it->second.pop_front();
                if (!overlaps(address, size)) return address;
            }
        return higher_address(size);
    }
    int64_t higher_address(int64_t size) {
        if (next_address > UNLIMITED - round_up(size, ROUND_LARGE)) return -1;
        return std::exchange(next_address, next_address + round_up(size, ROUND_LARGE));
    }

    // A new free block of at least `size` bytes, in no list; -1 if the device has no room.
    int32_t extend(int64_t size, int64_t stream, int32_t pool) {
        const int64_t total = settings.segment_size(size);
        const bool has_room = total <= settings.limit() - reserved;
        if (settings.collects_garbage() && !has_room) return -1;
        if (settings.expandable) return expand(size, stream, pool);
        const int64_t address = has_room ? new_address(total) : -1;
        if (address < 0) return -1;
        const int32_t segment = new_segment({address, total, stream, pool, false});
        const int32_t block = new_block({address, total, segment});
        segments[segment].first = block;
        reserved += total;
        write(SEGMENT_ALLOC, address, total);
        return block;
    }
    int64_t page(bool is_small) const { return is_small ? SMALL_SEGMENT : settings.large_segment_size; }
    int64_t expandable_size(bool is_small) const {
        const int64_t space = settings.capacity > 0 ? settings.capacity + settings.capacity / 8 : ADDRESS_SPACE;
        return round_up(space, page(is_small));
    }
    int32_t expand(int64_t size, int64_t stream, int32_t pool) {
        int32_t block = find_expandable(size, stream, pool);
        if (block < 0) return -1;
        if (blocks[block].mapped)
            erase_free(block);
        else if (!map(block, std::min(blocks[block].size, size)))
            return -1;
        while (blocks[block].size < size) {
            const int32_t after = blocks[block].after;
            insert_free(block);
            if (!map(after, std::min(size - blocks[block].size, blocks[after].size))) return -1;
            block = after;
        }
        return block;
    }
    // The first block of the lowest run of free and unmapped blocks that is large enough, beginning at an unmapped one
    // or at the free block before it.
    int32_t find_expandable(int64_t size, int64_t stream, int32_t number) {
        Pool& pool = pools[number];
        for (auto it = pool.unmapped.lower_bound({stream, std::numeric_limits<int64_t>::min(), 0});
             it != pool.unmapped.end() && std::get<0>(*it) == stream; ++it) {
            int32_t first = std::get<2>(*it);
            if (const int32_t before = blocks[first].before; before >= 0 && blocks[before].owner == NO_OWNER) first = before;
            int64_t room = 0;
            for (int32_t block = first; block >= 0 && blocks[block].owner == NO_OWNER && room < size;
                 block = blocks[block].after)
                room += blocks[block].size;
            if (room >= size) return first;
        }
        const int64_t total = expandable_size(pool.is_small);
        const int64_t address = total < size ? -1 : higher_address(total);
        if (address < 0) return -1;
        const int32_t segment = new_segment({address, total, stream, number, true});
        Block block{address, total, segment};
        block.mapped = false;
        segments[segment].first = new_block(block);
        insert_unmapped(segments[segment].first);
        return segments[segment].first;
    }
    // Map the beginning of an unmapped block, in whole pages. The mapped block is then in no list.
    bool map(int32_t block, int64_t size) {
        size = round_up(size, page(pool_of(block).is_small));
        if (size > settings.limit() - reserved) return false;
        const int64_t start = blocks[block].address;
        erase_unmapped(block);
        blocks[block].mapped = true;
        if (size < blocks[block].size) insert_unmapped(split(block, size, false));
        merge(block);
        reserved += size;
        write(SEGMENT_MAP, start, size);
        return true;
    }
    // Return the whole pages of a free block to the driver.
    void unmap(int32_t block) {
        const auto [start, end] = whole_pages(block);
        if (start >= end) return;
        erase_free(block);
        if (end < blocks[block].address + blocks[block].size)
            insert_free(split(block, end - blocks[block].address, true));
        if (start > blocks[block].address) {
            const int32_t rest = split(block, start - blocks[block].address, true);
            insert_free(block);
            block = rest;
        }
        blocks[block].mapped = false;
        merge(block);
        insert_unmapped(block);
        reserved -= end - start;
        write(SEGMENT_UNMAP, start, end - start);
        if (is_whole(block)) {
            erase_unmapped(block);
            drop(block);
        }
    }
    void drop(int32_t block) {
        by_address.erase(segments[blocks[block].segment].address);
        unused.push_back(block);
    }
    void release(int32_t block) {
        erase_free(block);
        reserved -= blocks[block].size;
        write(SEGMENT_FREE, blocks[block].address, blocks[block].size);
        drop(block);
    }
    void release_blocks(int32_t number) {
        std::vector<int32_t> whole, expandable;
        for (const auto& entry : pools[number].free) {
            const int32_t block = std::get<3>(entry);
            if (segments[blocks[block].segment].expandable)
                expandable.push_back(block);
            else if (is_whole(block))
                whole.push_back(block);
        }
        for (int32_t block : whole) release(block);
        for (int32_t block : expandable) unmap(block);
    }
    // Release the cached block that is large enough for a request, or the largest ones until they are; only those that
    // max_split_size keeps from being split.
    bool release_oversize(int64_t size, int64_t stream, int32_t number) {
        if (settings.max_split_size == UNLIMITED) return false;
        auto& cached = pools[number].free;
        size = std::max(size, settings.max_split_size);
        // A block that was split under other settings cannot be released.
        const auto can_go = [&](auto place) {
            const int32_t block = std::get<3>(*place);
            return !segments[blocks[block].segment].expandable && is_whole(block);
        };
        auto it = cached.lower_bound({stream, size, std::numeric_limits<int64_t>::min(), 0});
        if (it != cached.end() && std::get<0>(*it) == stream && can_go(it)) {
            release(std::get<3>(*it));
            return true;
        }
        int64_t released = 0;
        std::vector<int32_t> chosen;
        while (it != cached.begin() && released < size) {
            --it;
            if (std::get<1>(*it) < settings.max_split_size || std::get<0>(*it) != stream) break;
            if (!can_go(it)) continue;
            released += std::get<1>(*it);
            chosen.push_back(std::get<3>(*it));
        }
        for (int32_t block : chosen) release(block);
        return released >= size;
    }
    // Release whole large segments that were not used for longer than the average, until the threshold is met.
    void collect_garbage() {
        if (!settings.collects_garbage()) return;
        const auto threshold = static_cast<int64_t>(settings.garbage_threshold * static_cast<double>(settings.capacity));
        if (reserved <= threshold) return;
        const Pool& pool = pools[pool_of(0, false)];
        const int64_t target = reserved - threshold;
        const auto age = [&](int32_t block) { return pool.searches - blocks[block].since; };
        std::vector<int32_t> whole;
        int64_t total_age = 0, reclaimed = 0;
        for (const auto& entry : pool.free)
            if (is_whole(std::get<3>(entry))) {
                whole.push_back(std::get<3>(entry));
                total_age += age(whole.back());
            }
        for (bool freed = true; freed && reclaimed < target && !whole.empty();) {
            const double limit = static_cast<double>(total_age) / static_cast<double>(whole.size());
            std::vector<int32_t> kept;
            for (int32_t block : whole) {
                if (segments[blocks[block].segment].expandable || static_cast<double>(age(block)) < limit) {
                    kept.push_back(block);
                    continue;
                }
                reclaimed += blocks[block].size;
                total_age -= age(block);
                release(block);
            }
            freed = kept.size() < whole.size();
            whole = std::move(kept);
        }
    }
};

// Each segment is (address, bytes, stream, pool, is_small, address space if expandable), each block (address, bytes, requested bytes), of
// the driver (address, bytes). `limits` are capacity, max_split_size, max_non_split_rounding, large_segment_size and
// expandable_segments.
nb::tuple run_allocator(In<uint8_t> action, In<int64_t> value, In<int64_t> stream, In<int32_t> pool,
                        const std::array<In<int64_t>, 6>& segments, const std::array<In<int64_t>, 3>& blocks,
                        const std::array<In<int64_t>, 2>& driver, const std::array<int64_t, 5>& limits,
                        double garbage_threshold, const std::array<int64_t, 16>& divisions, int64_t stop) {
    const size_t all = action.shape(0);
    for (size_t length : {value.shape(0), stream.shape(0), pool.shape(0)})
        if (length != all) throw nb::value_error("the columns of the operations differ in length");
    for (const auto& column : segments)
        if (column.shape(0) != segments[0].shape(0)) throw nb::value_error("the columns of the segments differ in length");
    for (const auto& column : blocks)
        if (column.shape(0) != blocks[0].shape(0)) throw nb::value_error("the columns of the blocks differ in length");
    if (driver[0].shape(0) != driver[1].shape(0)) throw nb::value_error("the columns of the driver differ in length");
    for (int64_t count : divisions)
        if (count < 0 || count > SMALL) throw nb::value_error("a number of divisions is out of range");
    for (size_t i = 0; i < 4; ++i)
        if (limits[i] < (i == 0 || i == 2 ? 0 : 1) || limits[i] > UNLIMITED || (i == 3 && limits[i] > LARGEST))
            throw nb::value_error("a size of the settings is out of range");
    const size_t count = std::min(all, static_cast<size_t>(std::max<int64_t>(stop, 0)));
    std::array<Paged<int64_t>, 5> after;
    Allocator allocator({limits[0], limits[1], std::min(limits[2], LARGEST), limits[3], limits[4] != 0, garbage_threshold, divisions});
    {
        nb::gil_scoped_release release;
        for (size_t i = 0; i < segments[0].shape(0); ++i)
            if (!allocator.add_segment(segments[0](i), segments[1](i), segments[2](i), static_cast<int32_t>(segments[3](i)),
                                       segments[4](i) != 0, segments[5](i))) {
                nb::gil_scoped_acquire acquire;
                throw nb::value_error("the segments overlap");
            }
        for (size_t i = 0; i < blocks[0].shape(0); ++i)
            if (!allocator.add_block(blocks[0](i), blocks[1](i), blocks[2](i))) {
                nb::gil_scoped_acquire acquire;
                throw nb::value_error("the blocks overlap, or are outside of the segments");
            }
        for (size_t i = 0; i < driver[0].shape(0); ++i) allocator.add_driver_address(driver[0](i), driver[1](i));
        for (auto& column : after) column.resize(count);
        allocator.live.assign(count, -1);
        for (size_t i = 0; i < count; ++i) {
            allocator.operation = static_cast<int64_t>(i);
            int64_t address = -1;
            switch (action(i)) {
                case ALLOC:
                    if (value(i) >= 0 && value(i) <= LARGEST) address = allocator.alloc(value(i), stream(i), pool(i));
                    break;
                case FREE: address = allocator.free(value(i)); break;
                case EMPTY_CACHE: allocator.empty_cache(); break;
                case RELEASE_POOL: allocator.release_pool(static_cast<int32_t>(value(i))); break;
                default: break;
            }
            after[0][i] = address;
            after[1][i] = allocator.reserved;
            after[2][i] = allocator.allocated;
            after[3][i] = allocator.requested;
            after[4][i] = allocator.releasable;
        }
    }
    Log& log = allocator.log;
    return nb::make_tuple(
        nb::make_tuple(to_numpy(std::move(after[0])), to_numpy(std::move(after[1])), to_numpy(std::move(after[2])),
                       to_numpy(std::move(after[3])), to_numpy(std::move(after[4]))),
        nb::make_tuple(to_numpy(std::move(log.operation)), to_numpy(std::move(log.kind)),
                       to_numpy(std::move(log.address)), to_numpy(std::move(log.size))),
        allocator.take_blocks());
}

}  // namespace

void bind_allocator(nb::module_& module) {
    module.def("run_allocator", &run_allocator, nb::arg("action"), nb::arg("value"), nb::arg("stream"), nb::arg("pool"),
               nb::arg("segments"), nb::arg("blocks"), nb::arg("driver"), nb::arg("limits"), nb::arg("garbage_threshold"),
               nb::arg("divisions"), nb::arg("stop"),
               "Run requests through PyTorch's caching allocator: of each operation its address and the bytes reserved, "
               "allocated, requested and releasable after it; what the driver did; and the blocks at the end.");
}
