// What each source file adds to the module etloom._native.
#pragma once
#include <nanobind/nanobind.h>

void bind_align(nanobind::module_& module);
void bind_allocator(nanobind::module_& module);
void bind_argument_texts(nanobind::module_& module);
void bind_arrow_columns(nanobind::module_& module);
void bind_codes(nanobind::module_& module);
void bind_contraction(nanobind::module_& module);
void bind_graph(nanobind::module_& module);
void bind_intervals(nanobind::module_& module);
void bind_order(nanobind::module_& module);
void bind_quality(nanobind::module_& module);
void bind_row_texts(nanobind::module_& module);
void bind_snapshot(nanobind::module_& module);
void bind_tour(nanobind::module_& module);
void bind_nesting(nanobind::module_& module);
void bind_observer(nanobind::module_& module);
void bind_parsers(nanobind::module_& module);
