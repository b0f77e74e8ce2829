"""Predicts kernel and collective times on another device, from measured tables or from the peaks of both devices.

kernel_ratios      the time of each kernel on another device, relative to the recorded one
collective_ratios  the time of collectives within a node
measured_tables    tables of kernels and collectives measured on several devices
call_shapes        families, sizes and precisions of operator calls, as the tables name them
"""

from __future__ import annotations

from etloom.simulator.devices.collective_ratios import change_collectives
from etloom.simulator.devices.kernel_ratios import change_device, list_kernel_costs

__all__ = ["change_collectives", "change_device", "list_kernel_costs"]
