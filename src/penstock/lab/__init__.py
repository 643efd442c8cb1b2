"""The lab: what would happen if. Runs the real scheduler, KV manager and core over a modelled executor and a virtual clock."""
