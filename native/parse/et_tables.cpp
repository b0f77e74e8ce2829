// See et_tables.hpp.
#include "et_tables.hpp"

#include <algorithm>
#include <array>

#include "ordering.hpp"

namespace etloom::et {

namespace {

// The next item of a list beside the values, stepped over; empty where there is none.
std::string_view beside(List& list) { return list.next() ? list.item().value() : std::string_view(); }

// A list beside the values may be longer, but what follows must follow a comma.
bool is_sound_behind(List& list) {
    list.next();
    return list.sound();
}

}  // namespace

NodeTables::NodeTables(Tables& tables, Troubles& troubles) : tables_(tables), troubles_(troubles) {
    Table& nodes = tables["nodes"];
    et_id_ = nodes.add<Numbers<int64_t>>("et_id");
    name_ = nodes.add<Texts>("name", Finish::kUnescape);
    parent_ = nodes.add<Numbers<int64_t>>("recorded_parent");
    file_order_ = nodes.add<RowNumbers>("file_order", &Shifts::position);
    const char* const sides[2][2] = {{"inputs", "input_types"}, {"outputs", "output_types"}};
    for (size_t io = 0; io < 2; ++io) {
        values_[io] = nodes.add<Texts>(sides[io][0], Finish::kCanonical);
        types_[io] = nodes.add<Texts>(sides[io][1], Finish::kCanonical);
    }
    attrs_ = nodes.add<Texts>("attrs", Finish::kCanonical);
    Table& comms = tables["comms"];
    comm_node_ = comms.add<RowNumbers>("node", &Shifts::row);
    for (size_t i = 0; i < kFieldCount; ++i) {
        Table& in = kFields[i].group == Group::kNode ? nodes : comms;
        if (kFields[i].kind == Kind::kText) {
            columns_[i] = in.add<Texts>(kFields[i].column, Finish::kUnescape);
        } else if (kFields[i].kind == Kind::kScope) {
            columns_[i] = in.add<Numbers<int8_t>>(kFields[i].column);
        } else {
            columns_[i] = in.add<Numbers<int64_t>>(kFields[i].column);
        }
    }
    Table& tensors = tables["tensors"];
    tensor_node_ = tensors.add<RowNumbers>("node", &Shifts::row);
    io_ = tensors.add<Numbers<int8_t>>("io");
    index_ = tensors.add<Numbers<int16_t>>("index");
    item_ = tensors.add<Numbers<int32_t>>("item");
    const char* const numbers[] = {"tensor_id", "storage_id", "offset", "numel"};
    for (size_t i = 0; i < 4; ++i) tensor_numbers_[i] = tensors.add<Numbers<int64_t>>(numbers[i]);
    itemsize_ = tensors.add<Numbers<int32_t>>("itemsize");
    device_ = tensors.add<Texts>("device", Finish::kUnescape);
    dtype_ = tensors.add<Texts>("dtype", Finish::kUnescape);
    shape_ = tensors.add<Texts>("shape", Finish::kCanonical);
    stride_ = tensors.add<Texts>("stride", Finish::kCanonical);
}

bool NodeTables::add(Node& node, uint64_t position) {
    const auto id = whole(node.id);
    if (!id) {
        troubles_["no_id"].add(node.name);
        return true;
    }
    const auto row = static_cast<uint32_t>(file_order_->size());
    et_id_->push(*id);
    name_->push_text_or_null(node.name);
    push_whole(parent_, row, node, "ctrl_deps", node.parent, Kind::kWhole);
    file_order_->push(static_cast<uint32_t>(position));
    for (size_t io = 0; io < 2; ++io) {
        if (!arguments(row, io, node.sides[io])) return false;
    }
    const size_t comm = comm_node_->size();
    if ((node.present & kCommMask) != 0) comm_node_->push(row);
    for (uint32_t left = node.present; left != 0; left &= left - 1) {
        const auto field = static_cast<size_t>(__builtin_ctz(left));
        push_field(kFields[field].group == Group::kNode ? row : comm, node, field);
    }
    if (node.rest.empty()) {
        attrs_->null();
    } else {
        node.rest.insert(0, 1, '{');
        node.rest.back() = '}';
        attrs_->push_text(node.rest);
    }
    return true;
}

void NodeTables::push_field(size_t row, Node& node, size_t field) {
    const auto& [key, name, group, kind] = kFields[field];
    const std::string_view token = node.tokens[field];
    if (kind == Kind::kText) {
        if (is_text(token)) {
            if (token.size() > 2) static_cast<Texts*>(columns_[field])->push_text_at(row, inside(token));
        } else if (token != "null") {
            node.odd(key, token, troubles_);
        }
        return;
    }
    if (kind == Kind::kScope) {
        const auto number = whole(token);
        if (number && *number >= INT8_MIN && *number <= INT8_MAX) {
            static_cast<Numbers<int8_t>*>(columns_[field])->push_at(row, static_cast<int8_t>(*number));
        } else if (token != "null") {
            node.odd(key, token, troubles_);
        }
        return;
    }
    auto* column = static_cast<Numbers<int64_t>*>(columns_[field]);
    if (kind == Kind::kFlag && (token == "true" || token == "false")) {
        column->push_at(row, token == "true");
    } else if (const auto number = kind == Kind::kFlag ? whole(token) : std::nullopt) {
        column->push_at(row, *number != 0);
    } else {
        push_whole(column, row, node, key, token, kind);
    }
}

// 0 or -1 say "none" in some fields; 2^64-1 is -1 written by an unsigned.
void NodeTables::push_whole(Numbers<int64_t>* column, size_t row, Node& node, std::string_view key, std::string_view token, Kind kind) {
    const auto number = whole(token);
    if (!number) {
        if (!token.empty() && token != "null" && token != "18446744073709551615") node.odd(key, token, troubles_);
    } else if (kind == Kind::kWhole || !(*number == -1 || (*number == 0 && kind == Kind::kPositive))) {
        column->push_at(row, *number);
    }
}

const NodeTables::Types& NodeTables::types_of(size_t io, uint32_t code) {
    auto& parsed = parsed_types_[io];
    while (parsed.size() <= code) {
        Types types{types_in(types_[io]->text(static_cast<uint32_t>(parsed.size())))};
        for (auto& type : types.items) {
            types.hold_tensor |= type.holds_tensor;
            number_dtypes(type);
        }
        parsed.push_back(std::move(types));
    }
    return parsed[code];
}

void NodeTables::number_dtypes(Type& type) {
    if (type.is == Type::Is::kTensor) type.dtype_code = dtype_->code(type.dtype);
    for (auto& item : type.items) number_dtypes(item);
}

// Tensors go to their table; what is left of the values, with null in their places, is text that repeats.
bool NodeTables::arguments(uint32_t node, size_t io, const Side& side) {
    if (!side.values.there()) {
        values_[io]->null();
        types_[io]->null();
        return true;
    }
    static const Types kNone;
    const Types* types = &kNone;
    if (side.types.there()) {
        types = &types_of(io, types_[io]->push_text(side.types.text));
    } else {
        types_[io]->null();
    }
    if (!types->hold_tensor) {
        values_[io]->push_text(side.values.text);
        return true;
    }
    left_.assign(1, '[');
    List values = side.values.list(), shapes = side.shapes.list(), strides = side.strides.list();
    for (size_t index = 0; values.next(); ++index) {
        if (index > 0) left_ += ',';
        item_number_ = -1;
        static const Type kScalar;
        const Type& type = index < types->items.size() ? types->items[index] : kScalar;
        if (!argument({node, io, index}, type, values.item(), shapes, strides)) return false;
    }
    left_ += ']';
    values_[io]->push_text(left_);
    return values.sound() && is_sound_behind(shapes) && is_sound_behind(strides);
}

bool NodeTables::argument(const Place& place, const Type& type, Cursor& value, List& shapes, List& strides) {
    if (type.is == Type::Is::kTensor) return tensor(place, type, value, shapes, strides);
    if (type.holds_tensor && value.peek() == '[') return list(place, type, value, shapes, strides);
    beside(shapes);
    beside(strides);
    const std::string_view text = value.value();
    left_ += text;
    return !text.empty();
}

bool NodeTables::list(const Place& place, const Type& type, Cursor& value, List& shapes, List& strides) {
    const auto inner = [](List& outer) { return outer.next() ? List(outer.item()) : List(); };
    List values(value), inner_shapes = inner(shapes), inner_strides = inner(strides);
    left_ += '[';
    for (size_t i = 0; values.next(); ++i) {
        if (i > 0) left_ += ',';
        static const Type kScalar;
        const Type& item = i < type.items.size() ? type.items[i] : kScalar;
        if (item.is == Type::Is::kTensor) ++item_number_;
        if (!argument(place, item, values.item(), inner_shapes, inner_strides)) return false;
    }
    left_ += ']';
    if (shapes.is_open()) shapes.item().value();
    if (strides.is_open()) strides.item().value();
    value = values.item();
    return values.sound() && is_sound_behind(inner_shapes) && is_sound_behind(inner_strides) && value.close();
}

// [tensor_id, storage_id, offset, numel, itemsize, device]
bool NodeTables::tensor(const Place& place, const Type& type, Cursor& value, List& shapes, List& strides) {
    const std::string_view shape = beside(shapes), stride = beside(strides);
    constexpr size_t kItemsize = 4;
    std::array<int64_t, kItemsize + 1> numbers;
    size_t known = 0;
    List parts(value);
    while (known < numbers.size() && parts.next()) {
        const auto number = whole(parts.item().value());
        if (!number || (known == kItemsize && (*number < INT32_MIN || *number > INT32_MAX))) break;
        numbers[known++] = *number;
    }
    if (known < numbers.size()) {
        const std::string_view text = value.value();
        troubles_["invalid_tensor"].add(text);
        left_ += text;
        return !text.empty();
    }
    const std::string_view device = beside(parts);
    while (!beside(parts).empty()) {
    }
    value = parts.item();
    if (!parts.sound() || parts.is_open() || !value.close()) return false;
    left_ += "null";
    tensor_node_->push(place.node);
    io_->push(static_cast<int8_t>(place.io));
    index_->push(static_cast<int16_t>(std::min<size_t>(place.index, INT16_MAX)));
    item_number_ < 0 ? item_->null() : item_->push(item_number_);
    for (size_t i = 0; i < kItemsize; ++i) tensor_numbers_[i]->push(numbers[i]);
    itemsize_->push(static_cast<int32_t>(numbers[kItemsize]));
    device_->push_text_or_null(is_text(device) ? inside(device) : std::string_view());
    dtype_->push(type.dtype_code);
    shape.empty() ? shape_->null() : static_cast<void>(shape_->push_text(shape));
    stride.empty() ? stride_->null() : static_cast<void>(stride_->push_text(stride));
    return true;
}

void NodeTables::order(Worker* worker) {
    const auto& ids = et_id_->values();
    const auto order = sorting_order(ids.size(), [&](uint32_t a, uint32_t b) { return ids[a] < ids[b]; });
    if (order.empty()) return;
    const auto place = places(order);
    tables_["nodes"].take(order, worker);
    follow(tables_["tensors"], tensor_node_->values(), order, place, worker);
    follow(tables_["comms"], comm_node_->values(), order, place);
}

}  // namespace etloom::et
