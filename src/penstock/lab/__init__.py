"""The lab: simulation, planning, tuning and benchmarks of servers.

A simulation runs the real scheduler, KV manager and engine core over a modelled executor and a virtual clock.
"""
