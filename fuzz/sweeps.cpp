// The parts of etloom._native that work on arrays of times: tests/core/test_native_sanitized.py builds them with sanitizers.
#include "bindings.hpp"

NB_MODULE(_native, module) {
    bind_allocator(module);
    bind_codes(module);
    bind_contraction(module);
    bind_graph(module);
    bind_nesting(module);
    bind_order(module);
    bind_quality(module);
    bind_snapshot(module);
    bind_tour(module);
}
