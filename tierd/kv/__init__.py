"""OasisKV inside an engine: KV beyond HBM, predicted one step ahead (docs/kv.md).

Runs in engine processes: torch, triton, numpy and the standard library only.
"""
