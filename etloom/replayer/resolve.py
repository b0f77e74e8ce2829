"""Which operator of torch's registry a recorded schema names, and whether a stranger's trace may run it."""

from __future__ import annotations

from typing import Any

DENIED = frozenset(
    [
        "from_file",
        "save",
        "load",
        "set_",
        "set_data",
        "_set_data",
        "resize_",
        "record_stream",
        "pin_memory",
        "_pin_memory",
        "set_source_Tensor_storage_offset",
        "fill_out",
        "_fw_primal",
        "_make_dual",
        "sparse_resize_",
        "backward",
        "requires_grad_",
        "retain_grad",
        "warn",
        "wait_stream",
        "manual_seed",
        "seed",
        "set_grad_enabled",
        "_resize_output_",
        "resize_as_",
        "cudnn_init_dropout_state",
        "_cudnn_init_dropout_state",
        "data_ptr",
        "put_",
        "_copy_from",
        "_test_ambiguous_defaults",
    ]
)
"""Operators of aten that touch files or global state, or give a tensor memory that is not its own."""


def resolve(schema: str, namespaces: frozenset[str]) -> tuple[Any, Any, str | None]:
    """The operator, its torch schema and null, or (None, None, why not). Only names are looked up: no text is run."""
    import torch

    qualified = schema.split("(", 1)[0].strip()
    namespace, _, rest = qualified.partition("::")
    name, _, overload = rest.partition(".")
    if namespace not in namespaces:
        return None, None, f"namespace {namespace or '?'} is not allowed"
    if name in DENIED or name.startswith("_test_"):
        return None, None, "not allowed for a trace of unknown origin"
    for known in torch._C._jit_get_schemas_for_operator(f"{namespace}::{name}"):
        if known.overload_name == overload:
            break
    else:
        return None, None, "not in this torch"
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except AttributeError:
        return None, None, "not in this torch"
    return found, known, None
