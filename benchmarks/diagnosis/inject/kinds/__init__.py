"""The kinds of problems, by family; `KINDS` lists them."""

from .communication import COMMUNICATION
from .decoys import DECOYS
from .devices import DEVICES
from .hosts import HOSTS
from .kind import Kind
from .memory import MEMORY
from .processors import PROCESSORS

KINDS: dict[str, Kind] = {
    kind.name: kind
    for family in (DEVICES, HOSTS, MEMORY, COMMUNICATION, PROCESSORS, DECOYS)
    for kind in family
}
