// PyTorch execution traces (Chakra host traces) to columns: schemas 1.0.1 (flat) and 1.0.2 to 1.1.1 (inputs, outputs and
// attrs). The names of the tables and columns are those of etloom/schema.py.
#include <array>
#include <memory>

#include "columns.hpp"
#include "parser.hpp"
#include "scalars.hpp"

namespace etloom {

namespace {

// A type text such as GenericList[Tensor(float),Int], taken apart. Parsed once a distinct list of types.
struct Type {
    enum class Is : uint8_t { kScalar, kTensor, kList } is = Is::kScalar;
    std::string_view dtype;
    std::vector<Type> items;
    bool holds_tensor = false;
};

Type type_of(std::string_view text, int level = 0) {
    constexpr int kDeepest = 64;  // what is nested deeper is no argument of an operator
    Type type;
    if (level > kDeepest) return type;
    const auto named = [&](std::string_view name, char open, char close) {
        return text.size() > name.size() + 1 && text.substr(0, name.size()) == name && text[name.size()] == open && text.back() == close;
    };
    if (named("Tensor", '(', ')')) {
        type.is = Type::Is::kTensor;
        type.holds_tensor = true;
        type.dtype = text.substr(7, text.size() - 8);
        return type;
    }
    for (std::string_view list : {"GenericList", "Tuple"}) {
        if (!named(list, '[', ']')) continue;
        type.is = Type::Is::kList;
        size_t depth = 0, start = list.size() + 1;
        for (size_t i = start; i < text.size(); ++i) {
            const char c = text[i];
            const bool last = i + 1 == text.size();
            if (depth == 0 && (c == ',' || last)) {
                if (i > start) {
                    type.items.push_back(type_of(text.substr(start, i - start), level + 1));
                    type.holds_tensor |= type.items.back().holds_tensor;
                }
                start = i + 1;
            } else if (c == '(' || c == '[' || c == '<') {
                ++depth;
            } else if (c == ')' || c == ']' || c == '>') {
                --depth;
            }
        }
    }
    return type;
}

// Walks the parts of a JSON array text. Only its structure is followed: the values were checked before.
class Items {
  public:
    explicit Items(std::string_view json) : text_(json) {
        good_ = text_.size() >= 2 && text_.front() == '[' && text_.back() == ']';
        at_ = 1;
    }
    bool good() const { return good_; }
    bool next(std::string_view& item) {
        const char* end = text_.data() + text_.size() - 1;
        const char* p = skip_space(text_.data() + at_, end);
        if (p < end && *p == ',') p = skip_space(p + 1, end);
        if (p >= end) return false;
        const char* after = value_end(p, end);
        if (after == nullptr) after = end;
        if (after == p) ++after;  // a closing brace too many is no value
        item = trim({p, static_cast<size_t>(after - p)});
        at_ = static_cast<size_t>(after - text_.data());
        return true;
    }

  private:
    std::string_view text_;
    size_t at_;
    bool good_;
};

enum class Kind : uint8_t { kWhole, kNatural, kPositive, kText, kFlag };
enum class Group : uint8_t { kNode, kComm };

struct Field {
    std::string_view key;
    const char* column;
    Group group;
    Kind kind;
};

// In the order in which PyTorch writes them, which is where `attribute` looks first.
constexpr Field kFields[] = {
    {"rf_id", "rf_id", Group::kNode, Kind::kPositive},
    {"fw_parent", "fw_parent", Group::kNode, Kind::kPositive},
    {"seq_id", "seq_id", Group::kNode, Kind::kNatural},
    {"scope", "scope", Group::kNode, Kind::kWhole},
    {"tid", "tid", Group::kNode, Kind::kWhole},
    {"fw_tid", "fw_tid", Group::kNode, Kind::kPositive},
    {"op_schema", "op_schema", Group::kNode, Kind::kText},
    {"kernel_backend", "kernel_backend", Group::kNode, Kind::kText},
    {"kernel_file", "kernel_file", Group::kNode, Kind::kText},
    {"collective_name", "collective", Group::kComm, Kind::kText},
    {"dtype", "dtype", Group::kComm, Kind::kText},
    {"in_msg_nelems", "in_nelems", Group::kComm, Kind::kWhole},
    {"out_msg_nelems", "out_nelems", Group::kComm, Kind::kWhole},
    {"in_split_size", "in_split", Group::kComm, Kind::kText},
    {"out_split_size", "out_split", Group::kComm, Kind::kText},
    {"pg_name", "pg_name", Group::kComm, Kind::kText},
    {"pg_desc", "pg_desc", Group::kComm, Kind::kText},
    {"pg_size", "group_size", Group::kComm, Kind::kWhole},
    {"global_rank_start", "rank_start", Group::kComm, Kind::kWhole},
    {"global_rank_stride", "rank_stride", Group::kComm, Kind::kWhole},
    {"is_asynchronized_op", "is_async", Group::kComm, Kind::kFlag},
};
constexpr size_t kFieldCount = std::size(kFields);

constexpr uint32_t group_mask(Group group) {
    uint32_t mask = 0;
    for (size_t i = 0; i < kFieldCount; ++i) mask |= kFields[i].group == group ? 1U << i : 0;
    return mask;
}
constexpr uint32_t kComms = group_mask(Group::kComm);

// Values, shapes, types and strides of the arguments or of the results, as JSON text.
struct Side {
    std::string_view values, shapes, types, strides;
};

}  // namespace

class ExecutionTraceParser : public Parser {
  public:
    ExecutionTraceParser() : Parser("nodes", false, true, {"id\"", "name\""}) {
        Table& nodes = table("nodes");
        et_id_ = nodes.add<Numbers<int64_t>>("et_id");
        name_ = nodes.add<Texts>("name", Finish::kUnescape);
        parent_ = nodes.add<Numbers<int64_t>>("recorded_parent");
        file_order_ = nodes.add<Numbers<uint32_t>>("file_order");
        const char* const sides[2][2] = {{"inputs", "input_types"}, {"outputs", "output_types"}};
        for (size_t io = 0; io < 2; ++io) {
            values_[io] = nodes.add<Texts>(sides[io][0], Finish::kCanonical);
            types_[io] = nodes.add<Texts>(sides[io][1], Finish::kCanonical);
        }
        attrs_ = nodes.add<Texts>("attrs", Finish::kCanonical);
        Table& comms = table("comms");
        comm_node_ = comms.add<Numbers<uint32_t>>("node");
        for (size_t i = 0; i < kFieldCount; ++i) {
            Table& in = kFields[i].group == Group::kNode ? nodes : comms;
            if (kFields[i].kind == Kind::kText) {
                columns_[i] = in.add<Texts>(kFields[i].column, Finish::kUnescape);
            } else {
                columns_[i] = in.add<Numbers<int64_t>>(kFields[i].column);
            }
        }
        Table& tensors = table("tensors");
        tensor_node_ = tensors.add<Numbers<uint32_t>>("node");
        io_ = tensors.add<Numbers<int8_t>>("io");
        index_ = tensors.add<Numbers<int16_t>>("index");
        item_ = tensors.add<Numbers<int32_t>>("item");
        const char* const numbers[] = {"tensor_id", "storage_id", "offset", "numel", "itemsize"};
        for (size_t i = 0; i < 5; ++i) tensor_numbers_[i] = tensors.add<Numbers<int64_t>>(numbers[i]);
        device_ = tensors.add<Texts>("device", Finish::kUnescape);
        dtype_ = tensors.add<Texts>("dtype", Finish::kUnescape);
        shape_ = tensors.add<Texts>("shape", Finish::kCanonical);
        stride_ = tensors.add<Texts>("stride", Finish::kCanonical);
    }

    // Nodes by id, the order in which operators began; what hangs on them follows.
    void sort() override {
        const auto& ids = et_id_->values();
        const auto order = sorting_order(ids.size(), [&](uint32_t a, uint32_t b) { return ids[a] < ids[b]; });
        if (order.empty()) return;
        std::vector<uint32_t> place(order.size());
        for (size_t i = 0; i < order.size(); ++i) place[order[i]] = static_cast<uint32_t>(i);
        table("nodes").take(order);
        for (auto* node : {tensor_node_, comm_node_}) {
            for (auto& row : node->values()) row = place[row];
        }
        for (const char* name : {"tensors", "comms"}) {
            const auto& node = (name[0] == 't' ? tensor_node_ : comm_node_)->values();
            const auto by_node = sorting_order(node.size(), [&](uint32_t a, uint32_t b) { return node[a] < node[b]; });
            if (!by_node.empty()) table(name).take(by_node);
        }
    }

  protected:
    // simdjson checks the piece as text (encoding, strings closed, no control characters). Its structure is followed here,
    // since most of it is passed over: attributes that stand as they stood in the node before, lists without tensors.
    bool rows(std::string_view json, uint64_t& position) override {
        od::document document;
        if (parser_.iterate(padded(json)).get(document)) return false;
        const char *p = json.data() + 1, *const end = json.data() + json.size() - 1;
        for (;;) {
            p = node(skip_space(p, end), end, position);
            if (p == nullptr) return false;
            ++position;
            p = skip_space(p, end);
            if (p == end) return true;
            if (*p++ != ',') return false;
        }
    }

  private:
    // Calls take(key, value), which returns the end of the value or nullptr, for each member of the object at `p`. Returns
    // the end of the object; nullptr for damage.
    template <typename Take>
    static const char* members(const char* p, const char* end, Take take) {
        if (p == end || *p != '{') return nullptr;
        p = skip_space(p + 1, end);
        if (p < end && *p == '}') return p + 1;
        for (;;) {
            const char* key = p + 1;
            const char* after = p < end && *p == '"' ? value_end(p, end) : nullptr;
            if (after == nullptr) return nullptr;
            p = skip_space(after, end);
            if (p == end || *p != ':') return nullptr;
            p = skip_space(p + 1, end);
            p = take(std::string_view(key, static_cast<size_t>(after - 1 - key)), p);
            if (p == nullptr) return nullptr;
            p = skip_space(p, end);
            if (p == end || (*p != ',' && *p != '}')) return nullptr;
            if (*p == '}') return p + 1;
            p = skip_space(p + 1, end);
        }
    }

    const char* node(const char* from, const char* end, uint64_t position) {
        id_ = name_text_ = parent_text_ = {};
        sides_ = {};
        present_ = 0;
        rest_.clear();
        const char* after = members(from, end, [&](std::string_view key, const char* value) -> const char* {
            if (same(key, "attrs")) return attributes(value, end);
            const bool in = same(key, "inputs");
            if (in || same(key, "outputs")) return side(value, end, sides_[in ? 0 : 1]);
            const char* behind = value_end(value, end);
            if (behind == nullptr) return nullptr;
            const std::string_view token(value, static_cast<size_t>(behind - value));
            if (same(key, "id")) {
                id_ = token;
            } else if (same(key, "name")) {
                if (is_text(token)) name_text_ = inside(token);
            } else if (same(key, "ctrl_deps") || same(key, "parent")) {
                parent_text_ = token;
            } else if (same(key, "input_shapes")) {
                sides_[0].shapes = token;
            } else if (same(key, "input_types")) {
                sides_[0].types = token;
            } else if (same(key, "output_shapes")) {
                sides_[1].shapes = token;
            } else if (same(key, "output_types")) {
                sides_[1].types = token;
            } else {
                attribute(key, token);
            }
            return behind;
        });
        if (after != nullptr) emit(position);
        return after;
    }

    // `inputs` is an object of lists in newer schemas, the list of values in 1.0.1.
    static const char* side(const char* value, const char* end, Side& side) {
        const auto list = [&](const char* from, std::string_view& into) {
            const char* behind = value_end(from, end);
            if (behind != nullptr) into = {from, static_cast<size_t>(behind - from)};
            return behind;
        };
        if (value < end && *value != '{') return list(value, side.values);
        return members(value, end, [&](std::string_view key, const char* from) {
            std::string_view other;
            return list(from, same(key, "values")    ? side.values
                              : same(key, "shapes")  ? side.shapes
                              : same(key, "types")   ? side.types
                              : same(key, "strides") ? side.strides
                                                     : other);
        });
    }

    // The attributes, `[{"name": "rf_id", "type": "uint64", "value": 7}, ...]`, are most of the file and nearly the same
    // in every node: where the text in front of a value is what it was in the node before, it need not be parsed.
    const char* attributes(const char* p, const char* end) {
        if (p == end || *p != '[') return nullptr;
        p = skip_space(p + 1, end);
        if (p < end && *p == ']') return p + 1;
        for (size_t place = 0;; ++place) {
            bool known = false;
            if (place < learned_.size() && starts_with(p, end, learned_[place].front)) {
                const Learned& learned = learned_[place];
                const char* value = p + learned.front.size();
                const char* after = value_end(value, end);
                const char* close = after == nullptr || after == value ? end : skip_space(after, end);
                if (close < end && *close == '}') {
                    attribute(learned.name, {value, static_cast<size_t>(after - value)});
                    p = close + 1;
                    known = true;
                }
            }
            if (!known) p = attribute_object(p, end, place);
            if (p == nullptr) return nullptr;
            p = skip_space(p, end);
            if (p == end || (*p != ',' && *p != ']')) return nullptr;
            if (*p == ']') return p + 1;
            p = skip_space(p + 1, end);
        }
    }

    static bool starts_with(const char* p, const char* end, std::string_view front) {
        return static_cast<size_t>(end - p) > front.size() && same({p, front.size()}, front);
    }

    const char* attribute_object(const char* from, const char* end, size_t place) {
        std::string_view name, content;
        bool value_last = false;
        const char* after = members(from, end, [&](std::string_view key, const char* value) {
            const char* behind = value_end(value, end);
            if (behind == nullptr) return behind;
            const std::string_view token(value, static_cast<size_t>(behind - value));
            if (same(key, "name") && is_text(token)) name = inside(token);
            value_last = same(key, "value");
            if (value_last) content = token;
            return behind;
        });
        if (after == nullptr || name.empty() || content.empty()) return after;
        attribute(name, content);
        if (value_last && place <= learned_.size()) {
            learned_.resize(std::max(learned_.size(), place + 1));
            learned_[place].front.assign(from, content.data());
            learned_[place].name.assign(name);
        }
        return after;
    }

    void attribute(std::string_view key, std::string_view token) {
        for (size_t tried = 0; tried < kFieldCount; ++tried) {
            const size_t i = next_field_;
            next_field_ = next_field_ + 1 == kFieldCount ? 0 : next_field_ + 1;
            if (!same(kFields[i].key, key)) continue;
            tokens_[i] = token;
            present_ |= 1U << i;
            return;
        }
        if (token != "\"\"") rest_.append("\"").append(key).append("\":").append(token).push_back(',');
    }

    void emit(uint64_t position) {
        const auto id = whole(id_);
        if (!id) {
            trouble("no_id").add(name_text_);
            return;
        }
        const auto node = static_cast<uint32_t>(file_order_->size());
        et_id_->push(*id);
        name_->push_text(name_text_);
        push_whole(parent_, parent_text_, Kind::kWhole);
        file_order_->push(static_cast<uint32_t>(position));
        for (size_t io = 0; io < 2; ++io) arguments(node, io, sides_[io]);
        if (rest_.empty()) {
            attrs_->null();
        } else {
            rest_.insert(0, 1, '{');
            rest_.back() = '}';
            push_json(attrs_, rest_);
        }
        const bool comm = (present_ & kComms) != 0;
        if (comm) comm_node_->push(node);
        for (size_t i = 0; i < kFieldCount; ++i) {
            if (kFields[i].group == Group::kComm && !comm) continue;
            const bool there = (present_ >> i) & 1;
            if (kFields[i].kind == Kind::kText) {
                auto* column = static_cast<Texts*>(columns_[i]);
                there && is_text(tokens_[i]) && tokens_[i].size() > 2 ? static_cast<void>(column->push_text(inside(tokens_[i]))) : column->null();
            } else if (kFields[i].kind == Kind::kFlag) {
                auto* column = static_cast<Numbers<int64_t>*>(columns_[i]);
                there ? column->push(tokens_[i] == "true" || whole(tokens_[i]).value_or(0) != 0) : column->null();
            } else {
                push_whole(static_cast<Numbers<int64_t>*>(columns_[i]), there ? tokens_[i] : std::string_view{}, kFields[i].kind);
            }
        }
    }

    // 0 or -1 say "none" in some fields; 2^64-1 is -1 written by an unsigned.
    void push_whole(Numbers<int64_t>* column, std::string_view token, Kind kind) {
        if (token.empty() || token == "null") return column->null();
        const auto number = whole(token);
        if (!number) {
            if (token != "18446744073709551615") trouble("odd_value").add(token);
            return column->null();
        }
        if (kind != Kind::kWhole && (*number == -1 || (*number == 0 && kind == Kind::kPositive))) return column->null();
        column->push(*number);
    }

    // The types of a list of arguments.
    struct Types {
        std::vector<Type> items;
        bool hold_tensor = false;
    };

    const Types& types_of(std::string_view types) {
        const uint32_t code = type_texts_.code(types);
        if (code == parsed_types_.size()) {
            Types parsed;
            Items items(type_texts_.texts()[code]);
            std::string_view item;
            while (items.good() && items.next(item)) {
                parsed.items.push_back(is_text(item) ? type_of(inside(item)) : Type{});
                parsed.hold_tensor |= parsed.items.back().holds_tensor;
            }
            parsed_types_.push_back(std::move(parsed));
        }
        return parsed_types_[code];
    }

    // Tensors go to their table; what is left of the values, with null in their places, is text that repeats.
    void arguments(uint32_t node, size_t io, const Side& side) {
        if (side.values.empty()) {
            values_[io]->null();
            types_[io]->null();
            return;
        }
        side.types.empty() ? types_[io]->null() : push_json(types_[io], side.types);
        const auto& types = types_of(side.types.empty() ? "[]" : side.types);
        if (!types.hold_tensor) {
            push_json(values_[io], side.values);
            return;
        }
        left_.clear();
        left_ += '[';
        Items values(side.values), shapes(side.shapes), strides(side.strides);
        std::string_view value, shape, stride;
        for (size_t i = 0; values.good() && values.next(value); ++i) {
            if (!shapes.good() || !shapes.next(shape)) shape = {};
            if (!strides.good() || !strides.next(stride)) stride = {};
            if (i > 0) left_ += ',';
            item_number_ = -1;
            if (i < types.items.size() && types.items[i].holds_tensor) {
                argument(node, io, i, types.items[i], value, shape, stride);
            } else {
                left_ += value;
            }
        }
        left_ += ']';
        push_json(values_[io], left_);
    }

    void argument(uint32_t node, size_t io, size_t index, const Type& type, std::string_view value, std::string_view shape, std::string_view stride) {
        if (type.is == Type::Is::kTensor) {
            if (!tensor(node, io, index, type, value, shape, stride)) {
                trouble("odd_tensor").add(value);
                left_ += value;
            } else {
                left_ += "null";
            }
            return;
        }
        Items values(value), shapes(shape), strides(stride);
        if (type.is != Type::Is::kList || !values.good()) {
            left_ += value;
            return;
        }
        left_ += '[';
        std::string_view part;
        for (size_t i = 0; values.next(part); ++i) {
            std::string_view part_shape, part_stride;
            if (shapes.good()) shapes.next(part_shape);
            if (strides.good()) strides.next(part_stride);
            if (i > 0) left_ += ',';
            if (i < type.items.size() && type.items[i].holds_tensor) {
                if (type.items[i].is == Type::Is::kTensor) ++item_number_;
                argument(node, io, index, type.items[i], part, part_shape, part_stride);
            } else {
                left_ += part;
            }
        }
        left_ += ']';
    }

    // [tensor_id, storage_id, offset, numel, itemsize, device]
    bool tensor(uint32_t node, size_t io, size_t index, const Type& type, std::string_view value, std::string_view shape, std::string_view stride) {
        Items parts(value);
        std::string_view part;
        std::array<std::optional<int64_t>, 5> numbers;
        if (!parts.good()) return false;
        for (auto& number : numbers) {
            if (!parts.next(part)) return false;
            number = whole(part);
            if (!number) return false;
        }
        if (!parts.next(part)) part = {};
        tensor_node_->push(node);
        io_->push(static_cast<int8_t>(io));
        index_->push(static_cast<int16_t>(std::min<size_t>(index, INT16_MAX)));
        item_number_ < 0 ? item_->null() : item_->push(item_number_);
        for (size_t i = 0; i < 5; ++i) tensor_numbers_[i]->push(*numbers[i]);
        is_text(part) && part.size() > 2 ? static_cast<void>(device_->push_text(inside(part))) : device_->null();
        dtype_->push_text(type.dtype);
        shape.empty() ? shape_->null() : push_json(shape_, shape);
        stride.empty() ? stride_->null() : push_json(stride_, stride);
        return true;
    }

    struct Learned {
        std::string front, name;
    };
    od::parser parser_;
    std::vector<Learned> learned_;  // by place in the list of attributes
    std::string_view id_, name_text_, parent_text_;
    std::array<Side, 2> sides_;
    std::array<std::string_view, kFieldCount> tokens_;
    uint32_t present_ = 0;
    size_t next_field_ = 0;
    std::string rest_, left_;
    int32_t item_number_ = -1;
    Dictionary type_texts_;
    std::vector<Types> parsed_types_;

    Numbers<int64_t> *et_id_, *parent_;
    Numbers<uint32_t>* file_order_;
    Texts *name_, *values_[2], *types_[2], *attrs_;
    Column* columns_[kFieldCount] = {};
    Numbers<uint32_t>* comm_node_;
    Numbers<uint32_t>* tensor_node_;
    Numbers<int8_t>* io_;
    Numbers<int16_t>* index_;
    Numbers<int32_t>* item_;
    Numbers<int64_t>* tensor_numbers_[5];
    Texts *device_, *dtype_, *shape_, *stride_;
};

std::unique_ptr<Parser> execution_trace_parser() { return std::make_unique<ExecutionTraceParser>(); }

}  // namespace etloom
