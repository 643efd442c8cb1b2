"""The lab: simulation, planning, tuning and benchmarks.

A simulation runs the real scheduler, KV manager and core over a modelled executor and a virtual clock.
"""
