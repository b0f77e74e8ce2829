// See et_node.hpp.
#include "et_node.hpp"

#include "scalars.hpp"

namespace etloom::et {

void Node::clear() {
    id = name = parent = {};
    sides[0] = sides[1] = {};
    present = 0;
    rest.clear();
}

void Node::keep(std::string_view key, std::string_view token) {
    rest.append("\"").append(key).append("\":").append(token).push_back(',');
}

void Node::odd(std::string_view key, std::string_view token, Troubles& troubles) {
    troubles["unexpected_type"].add(std::string(key) + ": " + std::string(token.substr(0, 200)));
    keep(key, token);
}

Node* NodeReader::read(Cursor& at) {
    node_.clear();
    return at.members([&](std::string_view key) { return member(key, at); }) ? &node_ : nullptr;
}

bool NodeReader::member(std::string_view key, Cursor& at) {
    if (same(key, "attrs")) return attributes(at);
    if (same(key, "inputs")) return side(key, at, node_.sides[0]);
    if (same(key, "outputs")) return side(key, at, node_.sides[1]);
    if (same(key, "input_shapes")) return part(key, at, node_.sides[0].shapes);
    if (same(key, "input_types")) return part(key, at, node_.sides[0].types);
    if (same(key, "output_shapes")) return part(key, at, node_.sides[1].shapes);
    if (same(key, "output_types")) return part(key, at, node_.sides[1].types);
    const std::string_view token = at.value();
    if (token.empty()) return false;
    if (same(key, "id")) {
        node_.id = token;
    } else if (same(key, "ctrl_deps") || same(key, "parent")) {
        node_.parent = token;
    } else if (!same(key, "name")) {
        put(field_of(key), key, token);
    } else if (is_text(token)) {
        node_.name = inside(token);
    } else if (token != "null") {
        node_.odd(key, token, troubles_);
    }
    return true;
}

// `inputs` is an object of lists in newer schemas, the list of values in 1.0.1.
bool NodeReader::side(std::string_view key, Cursor& at, Side& side) {
    if (at.peek() != '{') return part(key, at, side.values);
    return at.members([&](std::string_view name) {
        if (same(name, "values")) return part(name, at, side.values);
        if (same(name, "shapes")) return part(name, at, side.shapes);
        if (same(name, "types")) return part(name, at, side.types);
        if (same(name, "strides")) return part(name, at, side.strides);
        const std::string_view token = at.value();
        if (!token.empty()) node_.keep(name, token);
        return !token.empty();
    });
}

bool NodeReader::part(std::string_view key, Cursor& at, Part& into) {
    const Part part{{}, at};
    const std::string_view text = at.value();
    if (text.empty()) return false;
    if (text.front() == '[') {
        into = {text, part.at};
    } else if (text != "null") {
        node_.odd(key, text, troubles_);
    }
    return true;
}

// `[{"name": "rf_id", "type": "uint64", "value": 7}, ...]`, which is most of the file.
bool NodeReader::attributes(Cursor& at) {
    if (at.peek() == '[') {
        size_t place = 0;
        return at.items([&] {
            const size_t here = place++;
            return (here < learned_.size() && known_attribute(at, learned_[here])) || attribute(at, here);
        });
    }
    const std::string_view token = at.value();
    if (!token.empty() && token != "null") node_.odd("attrs", token, troubles_);
    return !token.empty();
}

// The text in front of the value is what it was in the node before, so that it need not be parsed.
bool NodeReader::known_attribute(Cursor& at, const Learned& learned) {
    if (at.left() <= learned.tokens + 2) return false;
    Cursor value = at;
    value.step(learned.tokens);
    const char* from = at.here();
    const size_t length = learned.front.size();
    if (static_cast<size_t>(value.here() - from) < length || !same({from, length}, learned.front)) return false;
    const std::string_view token = value.value();
    if (token.empty() || value.peek() != '}' || !value.close()) return false;
    put(learned.field, learned.name, token);
    at = value;
    return true;
}

bool NodeReader::attribute(Cursor& at, size_t place) {
    const Cursor begin = at;
    std::string_view name, content;
    Cursor value;
    bool value_last = false;
    if (at.peek() == '{') {
        const bool sound = at.members([&](std::string_view key) {
            value_last = same(key, "value");
            if (value_last) value = at;
            const std::string_view token = at.value();
            if (value_last) content = token;
            if (same(key, "name") && is_text(token)) name = plain_key(inside(token));
            return !token.empty();
        });
        if (!sound) return false;
    }
    if (name.empty() || content.empty()) {
        at = begin;
        const std::string_view token = at.value();
        if (!token.empty()) node_.odd("attrs", token, troubles_);
        return !token.empty();
    }
    const size_t field = field_of(name);
    put(field, name, content);
    if (value_last && place <= learned_.size()) {
        if (place == learned_.size()) learned_.emplace_back();
        const std::string front(begin.here(), value.here());
        learned_[place] = {front, std::string(name), value.since(begin), field};
    }
    return true;
}

// kFieldCount: no column holds it.
size_t NodeReader::field_of(std::string_view key) {
    for (size_t tried = 0; tried < kFieldCount; ++tried) {
        const size_t field = next_field_;
        next_field_ = next_field_ + 1 == kFieldCount ? 0 : next_field_ + 1;
        if (same(kFields[field].key, key)) return field;
    }
    return kFieldCount;
}

void NodeReader::put(size_t field, std::string_view key, std::string_view token) {
    if (field < kFieldCount) {
        node_.tokens[field] = token;
        node_.present |= 1U << field;
    } else if (token != "\"\"") {
        node_.keep(key, token);
    }
}

}  // namespace etloom::et
