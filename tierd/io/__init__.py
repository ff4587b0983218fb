"""Devices, stores, checkpoints and how bytes get from one to the other.

Runs inside engines: the standard library, numpy and the native core, nothing else.
"""
