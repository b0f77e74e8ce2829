// Pickles of torch.cuda.memory._snapshot(), read without running anything and without building an object per entry.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace etloom {

// Reads a pickle of plain values in pieces. Dicts with a key "action" become rows of columns when they are appended to a
// list, lists under the key "frames" become numbers of distinct stacks: both take most of a snapshot.
class SnapshotParser {
  public:
    enum Type : uint64_t { NONE, BOOL, INT, BIG, REAL, TEXT, DICT, LIST, TUPLE, STACK, ROW };
    // Eight bytes, since a snapshot has millions: an integer of 60 bits (BIG if it is larger), or the number of a text, ...
    struct Value {
        Type type : 4 = NONE;
        int64_t number : 60 = 0;
    };
    static_assert(sizeof(Value) == 8);
    using Pairs = std::vector<std::pair<Value, Value>>;
    using Items = std::vector<Value>;
    // What an integer of a row is where it is absent, negative, beyond 64 bits, or not an integer.
    static constexpr int64_t ABSENT = -1;
    static constexpr size_t MAX_FRAMES = 256;

    SnapshotParser();
    SnapshotParser(const SnapshotParser&) = delete;

    void feed(const char* data, size_t size);
    // The value of the whole pickle. As feed, throws std::runtime_error if the pickle is damaged, or has more than values.
    Value finish() const;

    const Pairs* pairs(const Value& dict) const;  // null for a dict that became a row
    const Items* items(const Value& list) const;  // null for a list that became a stack
    const Value* find(const Pairs& pairs, std::string_view key) const;
    Value resolve(const Value& value) const;  // a dict that became a row, or a list that became a stack, as such
    const std::string& text(const Value& value) const { return *texts_[static_cast<size_t>(value.number)]; }
    double real(const Value& value) const { return reals_[static_cast<size_t>(value.number)]; }
    void forget() { std::vector<Value>().swap(memo_); }  // what is not needed after the pickle's end
    void clear();   // everything, and give the memory back to the system
    size_t consumed() const { return consumed_; }

    // The columns of rows, and the distinct stacks: of each its frames (dicts).
    std::vector<int64_t> time, address, size, stream, device_free;
    std::vector<int32_t> action, stack, annotation, pool;  // numbers of texts and stacks, -1 for none
    std::vector<std::vector<int32_t>> stacks;
    const std::vector<const std::string*>& texts() const { return texts_; }

  private:
    // The texts with the first numbers: keys of entries.
    enum Key : int64_t { ACTION, TIME, ADDRESS, SIZE, STREAM, DEVICE_FREE, METADATA, POOL, FRAMES };
    struct HashOfFrames {
        size_t operator()(const std::vector<int32_t>& frames) const;
    };

    std::string pending_;  // the beginning of an opcode that is not complete
    size_t consumed_ = 0;
    bool is_done_ = false;
    std::vector<Value> values_;
    std::vector<size_t> marks_;
    std::vector<Value> memo_;
    std::vector<std::unique_ptr<Pairs>> dicts_;
    std::vector<std::unique_ptr<Items>> lists_;
    std::vector<int32_t> row_of_dict_, stack_of_list_;  // -1 for none
    std::vector<double> reals_;
    std::unordered_map<std::string, int32_t> number_of_text_;
    std::vector<const std::string*> texts_;
    std::unordered_map<std::vector<int32_t>, int32_t, HashOfFrames> number_of_stack_;

    size_t step(const char* data, size_t size);  // runs one opcode; its length, 0 if it is not complete
    [[noreturn]] void fail(const std::string& what) const;
    Value pop();
    Items pop_to_mark();
    void memoize(size_t place);
    Value remembered(size_t place) const;
    Value make_text(std::string_view text);
    Value make_list(Items items, Type type);
    Value make_dict();
    void append(const Value& list, Items added);
    void set(const Value& dict, const Items& keys_and_values);
    Value to_row(const Value& dict);
    Value to_stack(const Value& list);
    int32_t to_pool(const Value& value);
};

}  // namespace etloom
