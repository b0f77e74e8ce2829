"""Lists the live instances of classes while threads of the job run."""

from __future__ import annotations

import gc
from collections.abc import Collection
from itertools import chain, starmap
from typing import Any


def list_subclasses(base: type) -> list[type]:
    """Return the class `base` and all classes derived from it; a class with several bases may be repeated."""
    return [base, *chain.from_iterable(map(list_subclasses, type.__subclasses__(base)))]


def list_instances(classes: Collection[type]) -> list[Any]:
    """Return the live objects whose type is one of `classes`, subclasses not included.

    The collector must not refer to a tuple that another thread is building: `tuple(generator)`, and an import that
    runs it, would end there with a SystemError (https://github.com/python/cpython/issues/39117). `gc.get_objects` lists
    those tuples too, so its list is created, read and freed inside one call, by functions in C, between which the
    interpreter does not switch threads. `id` is not among them: it calls the audit hooks of the job. `gc.get_referrers`
    returns only what refers to the classes, as every instance does to its class; it compares each reference with all of
    them, so those without instances are left out.
    """
    types = list(map(type, chain.from_iterable(starmap(gc.get_objects, [()]))))
    live_types = set(map(id, types))
    live_classes = [cls for cls in classes if id(cls) in live_types]
    identifiers = set(map(id, live_classes))  # hashing a class may run code of its metaclass
    return [instance for instance in gc.get_referrers(*live_classes) if id(type(instance)) in identifiers]
