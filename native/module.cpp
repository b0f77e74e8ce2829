// etloom._native: the parts of etloom where Python with polars and numpy misses the speed asked for.
#include "bindings.hpp"

NB_MODULE(_native, module) {
    // An exception whose traceback holds a parser may live until the interpreter ends, which is no fault of the caller.
    nanobind::set_leak_warnings(false);
    module.doc() = "Native parts of etloom: trace files to columns, stack nesting.";
    bind_align(module);
    bind_allocator(module);
    bind_argument_texts(module);
    bind_arrow_columns(module);
    bind_codes(module);
    bind_contraction(module);
    bind_graph(module);
    bind_intervals(module);
    bind_nesting(module);
    bind_observer(module);
    bind_order(module);
    bind_parsers(module);
    bind_quality(module);
    bind_row_texts(module);
    bind_snapshot(module);
    bind_tour(module);
}
