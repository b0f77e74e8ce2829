// A column on its way to an Arrow library.
#pragma once
#include <nanobind/nanobind.h>

#include "parse/arrow_c.hpp"

namespace nb = nanobind;

// It can be taken once.
struct Outgoing {
    ArrowSchema schema{};
    ArrowArray array{};
    Outgoing() = default;
    Outgoing(const Outgoing&) = delete;
    ~Outgoing() {
        if (schema.release != nullptr) schema.release(&schema);
        if (array.release != nullptr) array.release(&array);
    }
};

template <typename T>
inline void release_capsule(PyObject* capsule, const char* name) {
    auto* held = static_cast<T*>(PyCapsule_GetPointer(capsule, name));
    if (held == nullptr) return;
    if (held->release != nullptr) held->release(held);
    delete held;
}

inline nb::tuple capsules(Outgoing& column, const nb::object&) {
    if (column.array.release == nullptr) throw nb::value_error("the column was taken before");
    auto* schema = new ArrowSchema(column.schema);
    auto* array = new ArrowArray(column.array);
    column.schema.release = nullptr;
    column.array.release = nullptr;
    return nb::make_tuple(
        nb::steal(PyCapsule_New(schema, "arrow_schema", [](PyObject* c) { release_capsule<ArrowSchema>(c, "arrow_schema"); })),
        nb::steal(PyCapsule_New(array, "arrow_array", [](PyObject* c) { release_capsule<ArrowArray>(c, "arrow_array"); })));
}
