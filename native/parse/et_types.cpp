// See et_types.hpp.
#include "et_types.hpp"

#include "json_text.hpp"

namespace etloom::et {

namespace {

Type type_of(std::string_view text, int level) {
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

}  // namespace

std::vector<Type> types_in(std::string_view json) {
    std::vector<Type> types;
    if (json.size() < 2 || json.front() != '[') return types;
    const char *p = json.data() + 1, *const end = json.data() + json.size() - 1;
    for (;;) {
        while (p < end && (is_space(*p) || *p == ',')) ++p;
        if (p == end) return types;
        const char* after = value_end(p, end);
        if (after == nullptr) after = end;
        if (after == p) ++after;  // a closing brace too many is no value
        const std::string_view item = trim({p, static_cast<size_t>(after - p)});
        types.push_back(is_text(item) ? type_of(inside(item), 0) : Type{});
        p = after;
    }
}

}  // namespace etloom::et
